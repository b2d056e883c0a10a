"""Small complete units, as the ledger hands them out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.ledger.types import ClaimedUnit, ScoredChunk
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import (
    Field,
    FinishReason,
    Prompt,
    ReferenceScore,
    RewardScore,
    Score,
    Segment,
    TrajectoryChunk,
)

PROMPT = Prompt(
    prompt_id="train:1",
    tokens=np.array([7, 8], dtype=np.int32),
    text="2+3=",
    answer="5",
    verifier="arithmetic",
)


def trajectory(
    member: int,
    windows: Sequence[Sequence[int]],
    score: RewardScore,
    *,
    group: int = 4,
    first_version: int = 3,
    with_reference: bool = False,
) -> tuple[ScoredChunk, ...]:
    """Make the chunks of a trajectory: one a window, each sampled by the next policy version."""
    name = TrajectoryId("t", group, member)
    chunks: list[ScoredChunk] = []
    before: list[int] = []
    for index, tokens in enumerate(windows):
        is_last = index == len(windows) - 1
        logprobs = -np.asarray(tokens, dtype=np.float32) / np.float32(10)
        scores: dict[Field, Score] = {}
        if with_reference:
            scores[Field.REFERENCE] = ReferenceScore(logprobs=logprobs - np.float32(0.5))
        if is_last:
            scores[Field.REWARD] = score
        chunk = TrajectoryChunk(
            id=ChunkId(name, index),
            prompt=PROMPT,
            context_tokens=np.array(before, dtype=np.int32),
            tokens=np.array(tokens, dtype=np.int32),
            behavior_logprobs=logprobs,
            segments=(Segment(first_version + index, len(tokens)),),
            finish_reason=FinishReason.STOP if is_last else FinishReason.WINDOW,
            response_text="5" if is_last else None,
        )
        chunks.append(ScoredChunk(chunk, scores))
        before.extend(tokens)
    return tuple(chunks)


def reward(value: float, *, masked: bool = False) -> RewardScore:
    """Score a response: positive is right."""
    return RewardScore(reward=value, accuracy=float(value > 0), masked=masked)


def group_unit(rewards: Sequence[float], *, with_reference: bool = False, number: int = 4) -> ClaimedUnit:
    """Make a group of two-window responses with these rewards; member m ends after m + 1 tokens
    more."""
    members = tuple(
        trajectory(m, [[10, 11], list(range(20, 21 + m))], reward(value), group=number, with_reference=with_reference)
        for m, value in enumerate(rewards)
    )
    return ClaimedUnit(name=str(number), trajectories=members)
