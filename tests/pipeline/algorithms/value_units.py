"""Units with values, as the ledger hands them to rules with a critic."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipeline.ledger.types import ClaimedUnit, ScoredChunk
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import (
    Field,
    FinishReason,
    GuidanceScore,
    Prompt,
    ReferenceScore,
    RewardScore,
    Score,
    Segment,
    TrajectoryChunk,
    ValueScore,
)


@dataclass(frozen=True, slots=True)
class Response:
    """A sampled response, whole, before it is cut."""

    group: int
    member: int
    tokens: np.ndarray
    behavior_logprobs: np.ndarray
    values: np.ndarray
    score: RewardScore
    is_finished: bool = True
    guidance: GuidanceScore | None = None
    ends_by: FinishReason = FinishReason.STOP
    """Of a finished one; LENGTH: cut at the cap."""

    def chunks(self, window: int) -> tuple[ScoredChunk, ...]:
        """Cut the response into windows; version 3 samples the first, 4 the second and so on."""
        name = TrajectoryId("t", self.group, self.member)
        prompt = Prompt(
            prompt_id=f"train:{self.group}",
            tokens=np.arange(2, 5 + self.group % 3, dtype=np.int32),
            text="",
            answer="",
            verifier="arithmetic",
        )
        made: list[ScoredChunk] = []
        for index, start in enumerate(range(0, self.tokens.size, window)):
            end = min(start + window, self.tokens.size)
            is_final = self.is_finished and end == self.tokens.size
            scores: dict[Field, Score] = {
                Field.VALUE: ValueScore(values=self.values[start:end], value_version=index),
                Field.REFERENCE: ReferenceScore(logprobs=self.behavior_logprobs[start:end] - np.float32(0.1)),
            }
            if is_final:
                scores[Field.REWARD] = self.score
                if self.guidance is not None:
                    scores[Field.GUIDANCE] = self.guidance
            chunk = TrajectoryChunk(
                id=ChunkId(name, index),
                prompt=prompt,
                context_tokens=self.tokens[:start],
                tokens=self.tokens[start:end],
                behavior_logprobs=self.behavior_logprobs[start:end],
                segments=(Segment(3 + index, end - start),),
                finish_reason=self.ends_by if is_final else FinishReason.WINDOW,
                response_text="" if is_final else None,
            )
            made.append(ScoredChunk(chunk, scores))
        return tuple(made)


def responses(seed: int, *, num_groups: int = 3, group_size: int = 4, longest: int = 20) -> list[Response]:
    """Draw responses of 1 to ``longest`` tokens with their values; every other one is right."""
    draw = np.random.default_rng(seed)
    drawn: list[Response] = []
    for group in range(num_groups):
        for member in range(group_size):
            length = int(draw.integers(1, longest + 1))
            right = member % 2 == 0
            drawn.append(
                Response(
                    group=group,
                    member=member,
                    tokens=draw.integers(2, 60, length).astype(np.int32),
                    behavior_logprobs=draw.normal(-4.0, 0.3, length).astype(np.float32),
                    values=draw.normal(0.0, 0.5, length).astype(np.float32),
                    score=RewardScore(reward=(1.0 if right else -1.0) + 0.01 * member, accuracy=float(right)),
                )
            )
    return drawn


def with_guidance(drawn: list[Response], seed: int = 0) -> list[Response]:
    """Give all but every fifth response guidance: judge log-probs to wrong ones alone."""
    draw = np.random.default_rng(seed)
    guided: list[Response] = []
    for number, response in enumerate(drawn):
        standard, judge = -draw.exponential(scale=(1.0, 0.3), size=(response.tokens.size, 2)).T.astype(np.float32)
        if number % 5 == 4:
            standard = judge = standard[:0]
        elif response.score.accuracy > 0.5:
            judge = judge[:0]
        score = GuidanceScore(standard_logprobs=standard, judge_logprobs=judge, guide_version="v")
        guided.append(replace(response, guidance=score))
    return guided


def chunk_units(drawn: list[Response], window: int) -> list[ClaimedUnit]:
    """Make every window a unit."""
    return [
        ClaimedUnit(name=str(scored.chunk.id), trajectories=((scored,),))
        for response in drawn
        for scored in response.chunks(window)
    ]


def trajectory_units(drawn: list[Response], window: int) -> list[ClaimedUnit]:
    """Make every response a unit."""
    return [
        ClaimedUnit(name=str(TrajectoryId("t", r.group, r.member)), trajectories=(r.chunks(window),)) for r in drawn
    ]


def group_units(drawn: list[Response], window: int) -> list[ClaimedUnit]:
    """Make every group a unit."""
    groups = sorted({response.group for response in drawn})
    return [
        ClaimedUnit(name=str(group), trajectories=tuple(r.chunks(window) for r in drawn if r.group == group))
        for group in groups
    ]


def with_values(drawn: list[Response], value: float) -> list[Response]:
    """Give every state the same value: a constant critic."""
    return [replace(r, values=np.full(r.tokens.size, value, dtype=np.float32)) for r in drawn]


def unfinished(drawn: list[Response]) -> list[Response]:
    """Cut every response before its end."""
    return [replace(r, is_finished=False) for r in drawn]
