"""The chunks that every contender moves: finished responses of one window.

The arrays are drawn once, because drawing random numbers is not what is measured."""

from __future__ import annotations

import numpy as np

from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import FinishReason, Prompt, ReferenceScore, RewardScore, Score, Segment, TrajectoryChunk

_PROMPT_TOKENS = 64
_VOCABULARY = 150_000


class Payload:
    def __init__(self, num_tokens: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self._prompt = Prompt(
            prompt_id="train:17",
            tokens=rng.integers(0, _VOCABULARY, _PROMPT_TOKENS, dtype=np.int32),
            text="2+3=",
            answer="5",
            verifier="arithmetic",
        )
        self._nothing = np.empty(0, np.int32)
        self._tokens = rng.integers(0, _VOCABULARY, num_tokens, dtype=np.int32)
        self._logprobs = -rng.random(num_tokens, dtype=np.float32)
        # about three letters a token, as of English text
        self._text = "so 2+3 is 5. " * (num_tokens // 4)

    def chunk(self, trajectory: TrajectoryId, policy_version: int) -> TrajectoryChunk:
        """Return the only chunk of a trajectory."""
        return TrajectoryChunk(
            id=ChunkId(trajectory, 0),
            prompt=self._prompt,
            context_tokens=self._nothing,
            tokens=self._tokens,
            behavior_logprobs=self._logprobs,
            segments=(Segment(policy_version, self._tokens.size),),
            finish_reason=FinishReason.STOP,
            response_text=self._text,
            worker="generator-0#1",
            created_s=1.75e9,
        )


def reward_of(chunk: TrajectoryChunk) -> Score:
    return RewardScore(reward=1.0, accuracy=float(chunk.trajectory.member % 2))


def reference_of(chunk: TrajectoryChunk) -> Score:
    return ReferenceScore(logprobs=chunk.behavior_logprobs)
