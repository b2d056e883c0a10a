"""Steps of the in-memory ledger on whole units: the next lease, a claim's chunks, cancelling."""

from __future__ import annotations

from pipeline.ledger.stored import read_scored
from pipeline.ledger.types import DropReason, EvaluationSample, Refusal, ScoredChunk, Unit
from protocol.codec import to_blob
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import RewardScore, TrajectoryChunk
from tests.oracle.ledger.records import GroupRecord, TrajectoryRecord
from tests.oracle.ledger.state import LedgerState


def take(s: LedgerState, now: float, *, is_behind: bool) -> TrajectoryId | Refusal:
    """Take the next trajectory to lease out of its queue; or return why there is none.

    A caller behind the published version gets evaluation only."""
    evaluation = s.evaluation_open.first
    if evaluation is not None:
        s.evaluation_open.discard(evaluation)
        return evaluation[1]
    if is_behind:
        return Refusal.BEHIND
    oldest, parked = _first_open(s), s.parked.first
    if parked is not None and (oldest is None or parked < oldest):
        why = s.refusal(1)
        if why is None:
            s.parked.discard(parked)
            s.running.add(ChunkId(parked, s.trajectories[parked].next))
            s.used += 1
            return parked
        if oldest is None:
            return why
    if oldest is None:
        why = _admit_group(s, now)
        if why is not None:
            return why
        oldest = s.open.first
        assert oldest is not None
    s.open.discard(oldest)
    return oldest


def _first_open(s: LedgerState) -> TrajectoryId | None:
    """Return the first open trajectory.

    While the learner repeats lost updates, new samples would be too old at their turn. Then only a
    trajectory whose unit does not age by it is leased, since the learner may wait for that unit.
    If the learner has no batch ready, any trajectory is leased."""
    if s.used <= s.credit_limit or len(s.ready) * s.weight < s.spec.units_per_update:
        return s.open.first
    updates = s.version_history.updates(s.version)
    for trajectory in s.open:
        age = s.running_age.get(s.unit_of(ChunkId(trajectory, s.trajectories[trajectory].next)))
        if age is not None and age <= updates:
            return trajectory
    return None


def _admit_group(s: LedgerState, now: float) -> Refusal | None:
    size = s.spec.group_size
    why = s.refusal(size)
    if why is not Refusal.CLOSED and (s.is_exhausted or s.paused is not None):
        why = Refusal.EXHAUSTED if s.is_exhausted else Refusal.PAUSED
    if why is not None:
        return why
    number = s.admitted["groups"]
    again = s.again.first
    fresh = s.admitted["groups"] - s.num_again
    s.groups[number] = GroupRecord(live=size, prompt=fresh if again is None else again, admitted_s=now)
    if again is not None:
        s.again.discard(again)
        s.num_again += 1
    for trajectory in s.members(number):
        s.trajectories[trajectory] = TrajectoryRecord(since_s=now)
        s.open.add(trajectory)
        s.running.add(s.unit_of(ChunkId(trajectory, 0)))
    s.admitted.update(groups=1, trajectories=size)
    s.used += size
    return None


def add_to_unit(s: LedgerState, chunk: TrajectoryChunk, oldest: int, missing: int, now: float) -> None:
    """Count a written chunk in its unit; ``missing``: fields that it needs."""
    name = s.unit_of(chunk.id)
    unit = s.record(name)
    unit.missing += missing
    if s.spec.unit is Unit.CHUNK:
        t = s.trajectories[chunk.trajectory]
        t.live += 1
        s.stored_bytes -= len(t.last) + len(t.last_turn)
        t.last = t.last_turn = b""
    if chunk.is_opening:
        # it has no tokens that could grow old
        if s.spec.unit is not Unit.GROUP:
            s.running_age.pop(name, None)
        return
    unit.lower_oldest(oldest)
    if isinstance(unit, GroupRecord):
        unit.finals += chunk.finish_reason.is_final
        s.running_age[name] = min(s.running_age.get(name, oldest), oldest)
    else:
        assert unit.oldest is not None
        s.running_age[name] = unit.oldest
    s.ready_if_complete(chunk.id, now)


def continue_or_park(s: LedgerState, chunk: TrajectoryChunk, who: str) -> None:
    """Unit chunk: give the next window its credit, or park the trajectory."""
    if chunk.newest_version < s.version or s.refusal(1) is not None:
        s.let_go(chunk.trajectory, who)
        s.parked.add(chunk.trajectory)
        return
    s.running.add(ChunkId(chunk.trajectory, chunk.id.index + 1))
    s.begin_age(chunk.trajectory, chunk.id.index + 1)
    s.used += 1


def cancel_windows(s: LedgerState, trajectory: TrajectoryId, reason: DropReason) -> None:
    """Drop an unfinished trajectory's chunks, its next window's credit, and itself (unit chunk)."""
    t = s.trajectories[trajectory]
    granted = ChunkId(trajectory, t.next)
    for chunk in [ChunkId(trajectory, index) for index in range(t.next)]:
        if chunk in s.chunks:
            s.end_unit(chunk, reason)
    if s.running.discard(granted):
        s.running_age.pop(granted, None)
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
