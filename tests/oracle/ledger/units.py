"""Steps of the in-memory ledger on whole units: the next lease, a claim's chunks, cancelling."""

from __future__ import annotations

from pipeline.ledger.stored import read_scored
from pipeline.ledger.types import DropReason, EvaluationSample, ScoredChunk, Unit
from protocol.codec import to_blob
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import RewardScore, TrajectoryChunk
from tests.oracle.ledger.state import LedgerState


def add_to_unit(s: LedgerState, chunk: TrajectoryChunk, oldest: int, missing: int) -> None:
    """Count a written chunk in its unit; ``missing``: fields that it needs."""
    if s.spec.unit is Unit.CHUNK:
        t = s.trajectories[chunk.trajectory]
        t.live += 1
        s.stored_bytes -= len(t.last) + len(t.last_turn)
        t.last = t.last_turn = b""
    age = None if chunk.is_opening else oldest
    s.add_to_unit(chunk.id, age, missing, final=chunk.finish_reason.is_final)


def continue_or_park(s: LedgerState, chunk: TrajectoryChunk, who: str) -> None:
    """Unit chunk: give the next window its credit, or park the trajectory."""
    if not s.continue_or_park(chunk.id, chunk.newest_version):
        s.let_go(chunk.trajectory, who)


def cancel_windows(s: LedgerState, trajectory: TrajectoryId, reason: DropReason) -> None:
    """Drop an unfinished trajectory's chunks, its next window's credit, and itself (unit chunk)."""
    t = s.trajectories[trajectory]
    granted = ChunkId(trajectory, t.next)
    for chunk in [ChunkId(trajectory, index) for index in range(t.next)]:
        if chunk in s.chunks:
            s.end_unit(chunk, reason)
    if s.running.discard(granted):
        s.running_age.discard(granted)
        s.used -= 1
    if trajectory in s.trajectories:
        s.end_trajectory(trajectory, None if t.trained else reason)


def chunks_of(s: LedgerState, name: int | TrajectoryId | ChunkId) -> list[list[ScoredChunk]]:
    """Return a unit's chunks with their scores, by member, then by index."""
    if isinstance(name, ChunkId):
        chunks = [[name]]
    else:
        trajectories = s.members(name) if isinstance(name, int) else iter((name,))
        chunks = [[ChunkId(one, index) for index in range(s.trajectories[one].next)] for one in trajectories]
    return [[read_scored(s.chunks[chunk].blob, s.chunks[chunk].scores) for chunk in one] for one in chunks]


def record_sample(s: LedgerState, chunk: ChunkId, score: RewardScore) -> None:
    """Record an evaluation response's sample and forget the response."""
    name = chunk.trajectory
    if name.member == 0:
        s.show("evaluation", s.chunks[chunk].blob, to_blob(score))
    t = s.trajectories.pop(name)
    versions = (t.oldest or 0, t.newest)
    sample = EvaluationSample(name.group, name.member, score.accuracy, score.reward, t.num_tokens, *versions)
    s.evaluations[int(name.lane[1:])].samples.append(sample)
    s.forget_chunk(chunk)
