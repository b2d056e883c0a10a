"""Small real objects for ledger tests: specs, workers, chunks and scores."""

from __future__ import annotations

import msgspec
import numpy as np

from pipeline.ledger.types import LedgerSpec, Unit, WriteStatus
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
from protocol.trajectory import (
    FinishReason,
    GuidanceScore,
    Prompt,
    ReferenceScore,
    RewardScore,
    Score,
    Segment,
    TrajectoryChunk,
    Turn,
    TurnRequest,
    ValueScore,
)

GENERATOR = Incarnation(Role.GENERATOR, "generator-0", 1)
OTHER_GENERATOR = Incarnation(Role.GENERATOR, "generator-1", 1)
SCORER = Incarnation(Role.REWARD, "reward-0", 1)
ENVIRONMENT = Incarnation(Role.ENVIRONMENT, "environment-0", 1)
LEARNER = Incarnation(Role.LEARNER, "learner-0", 1)


def make_spec(unit: Unit = Unit.GROUP, **changes) -> LedgerSpec:
    settings = {
        "run": "test",
        "unit": unit,
        "group_size": 2,
        "units_per_update": 4,
        "eta": 1,
        "lease_s": 10.0,
        "scoring_deadline_s": 5.0,
        "max_attempts": 2,
    }
    return LedgerSpec(**(settings | changes))


def make_chunk(
    trajectory: TrajectoryId, index: int = 0, *, tokens: int = 3, final: bool = True, version: int = 0, context: int = 0
) -> TrajectoryChunk:
    return TrajectoryChunk(
        id=ChunkId(trajectory, index),
        prompt=Prompt(
            prompt_id=f"train:{trajectory.group}",
            tokens=np.array([1, 2], np.int32),
            text="1+1=",
            answer="2",
            verifier="arithmetic",
        ),
        context_tokens=np.arange(context, dtype=np.int32),
        tokens=np.arange(tokens, dtype=np.int32),
        behavior_logprobs=np.zeros(tokens, np.float32),
        segments=(Segment(version, tokens),),
        finish_reason=FinishReason.STOP if final else FinishReason.WINDOW,
        response_text="2" if final else None,
    )


def make_turn_chunk(trajectory: TrajectoryId, index: int = 0, *, version: int = 0, context: int = 0) -> TrajectoryChunk:
    """Return a chunk that ends a turn: the opening chunk, or one of three tokens."""
    chunk = make_chunk(trajectory, index, tokens=3 if index else 0, final=False, version=version, context=context)
    return msgspec.structs.replace(chunk, finish_reason=FinishReason.TURN)


def turn(*, is_done: bool = False, tokens: int = 2) -> Turn:
    return Turn(
        tokens=np.arange(0 if is_done else tokens, dtype=np.int32), asks=TurnRequest(state=b"s"), is_done=is_done
    )


def reward(accuracy: float = 1.0) -> RewardScore:
    return RewardScore(reward=2 * accuracy - 1, accuracy=accuracy)


def reference(tokens: int = 3) -> Score:
    return ReferenceScore(logprobs=np.zeros(tokens, np.float32))


def value(tokens: int = 3) -> Score:
    return ValueScore(values=np.zeros(tokens, np.float32), value_version=0)


def guidance(tokens: int = 3) -> Score:
    logprobs = np.zeros(tokens, np.float32)
    return GuidanceScore(standard_logprobs=logprobs, judge_logprobs=logprobs[:0], guide_version="v")


async def finish(ledger, lease, *, version=0, accuracy=1.0, who=GENERATOR):
    """Write a leased trajectory's final chunk and its reward."""
    chunk = make_chunk(lease.trajectory, lease.next_index, version=version)
    assert (await ledger.write_chunk(who, chunk)).status is WriteStatus.STORED
    assert await ledger.write_score(SCORER, chunk.id, reward(accuracy)) is WriteStatus.STORED
    return chunk


async def write_response(
    ledger, trajectory: TrajectoryId, *, accuracy: float = 1.0, tokens: int = 3, version: int = 0
) -> None:
    """Write a whole response and its reward."""
    await ledger.write_chunk(GENERATOR, make_chunk(trajectory, tokens=tokens, version=version))
    await ledger.write_score(SCORER, ChunkId(trajectory, 0), reward(accuracy))
