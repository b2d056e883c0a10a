"""Steps of the in-memory ledger around scorers: scores, overdue chunks, whole groups, failures; and
drops out of claims."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pipeline.ledger.stored import BESIDE, read_overdue, read_scored, with_turn
from pipeline.ledger.types import Claim, DeadLetter, DropReason, ScoredChunk, Unit, UnitLetter
from pipeline.ledger.validation import fewest_judged
from protocol.codec import to_blob
from protocol.ids import ChunkId, Incarnation, TrajectoryId
from protocol.trajectory import Field, RewardScore, Score, TrajectoryChunk, Turn, field_of
from tests.oracle.ledger.lives import event
from tests.oracle.ledger.records import GroupRecord
from tests.oracle.ledger.state import LedgerState

_MAX_DEAD_LETTERS = 1000


def may_fill(s: LedgerState, chunk: ChunkId, field: Field) -> bool:
    """Return whether a stored chunk needs a field that may be written now."""
    # what is needed and not due has no verdict, for good; or is guidance before its reward
    return chunk in s.due[field]


def take_turn(s: LedgerState, chunk: ChunkId, turn: Turn, now: float) -> None:
    """Open a trajectory again after its environment's turn, or end it; count what its last chunk then needs."""
    name, t, c = chunk.trajectory, s.trajectories[chunk.trajectory], s.chunks[chunk]
    group = None if name.is_evaluation else s.groups[name.group]
    t.waits, t.since_s = False, now
    if turn.is_done:
        t.final = c.final = True
        c.turned_s = now
        if group is not None and s.spec.unit is Unit.GROUP:
            group.finals += 1
        if c.num_tokens or group is None or s.spec.unit is Unit.GROUP:
            s.due[Field.REWARD][chunk] = now
            if group is not None:
                s.record(s.unit_of(chunk)).missing += len(s.spec.fields & {Field.REWARD, Field.GUIDANCE})
    elif group is None:
        s.open_evaluation(name)
    else:
        (s.parked if s.spec.unit is Unit.CHUNK else s.open).add(name)


def fill(s: LedgerState, who: Incarnation, chunk: ChunkId, score: Score, now: float) -> bytes:
    """Write a field that a chunk lacks, and make due what follows it; return the stored bytes."""
    field, c, blob = field_of(score), s.chunks[chunk], to_blob(score)
    c.scores[field] = blob
    values = (score.accuracy + 0.0, score.reward) if isinstance(score, RewardScore) else ()
    c.events[field] = event(who, now, *values)
    s.stored_bytes += len(blob)
    del s.due[field][chunk]
    if field is Field.REWARD and Field.GUIDANCE in s.spec.fields:
        s.due[Field.GUIDANCE][chunk] = c.rewarded_s = now
    if not chunk.trajectory.is_evaluation:
        s.record(s.unit_of(chunk)).missing -= 1
    return blob


def overdue(s: LedgerState, field: Field, max_chunks: int, now: float) -> list[ScoredChunk]:
    """Return overdue chunks, oldest first, guidance with its reward; extend their deadlines."""
    due = s.due[field]
    late = sorted((at, str(chunk), chunk) for chunk, at in due.items() if at <= now)[:max_chunks]
    for _, _, chunk in late:
        due[chunk] = now + s.spec.scoring_deadline_s
    records = [s.chunks[chunk] for _, _, chunk in late]
    beside = BESIDE.get(field)
    fields = () if beside is None else (beside,)
    return read_overdue([blob for c in records for blob in (c.blob, *map(c.scores.get, fields))], beside)


def finished_group(
    s: LedgerState, who: Incarnation, group: int, num_members: int, now: float, epoch_of: Callable[[str], int]
) -> list[TrajectoryChunk]:
    """Give a group that has ended to one scorer; return its final chunks, or nothing. ``epoch_of``
    returns a worker's newest epoch."""
    names = (TrajectoryId("t", group, member) for member in range(num_members))
    there = {name: s.trajectories[name] for name in names if name in s.trajectories}
    last = [ChunkId(name, record.next - 1) for name, record in there.items() if not s.is_unjudged(name)]
    lacking = [chunk for chunk in last if chunk in s.due[Field.REWARD]]
    if not lacking or not all(record.final for record in there.values()):
        return []
    judge, _, epoch = s.groups[group].judged_by.rpartition("#")
    if s.groups[group].judged_until > now and epoch_of(judge) <= int(epoch):
        return []
    until_s = now + s.spec.scoring_deadline_s
    s.groups[group].judged_by, s.groups[group].judged_until = str(who), until_s
    s.due[Field.REWARD].update(dict.fromkeys(lacking, until_s))
    stored = (s.chunks.get(chunk) for chunk in last)
    return [with_turn(read_scored(chunk.blob, chunk.scores)) for chunk in stored if chunk is not None]


def extend(s: LedgerState, who: Incarnation, field: Field, chunks: Iterable[ChunkId], now: float) -> None:
    """Extend the deadlines of chunks that ``who`` scores, and of groups that it was given."""
    until_s = now + s.spec.scoring_deadline_s
    for chunk in chunks:
        if chunk in s.due[field]:
            s.due[field][chunk] = until_s
        group = None if chunk.trajectory.is_evaluation else s.groups.get(chunk.trajectory.group)
        if field is Field.REWARD and group is not None and group.judged_by == str(who):
            group.judged_until = until_s


def expire(s: LedgerState, field: Field, chunks: Iterable[ChunkId], now: float) -> int:
    """Make chunks that lack a field due at once; return how many were not."""
    due = s.due[field]
    later = [chunk for chunk in dict.fromkeys(chunks) if due.get(chunk, now) > now]
    due.update(dict.fromkeys(later, now))
    return len(later)


def spend(s: LedgerState, name: str, limit: int) -> bool:
    """Take one of ``limit``; return whether one was left."""
    is_left = s.spent[name] < limit
    s.spent[name] += is_left
    return is_left


def fail(s: LedgerState, who: Incarnation, chunk: ChunkId, field: Field, error: str, now: float) -> bool:
    """Count a failure; after ``max_attempts`` the chunk is a dead letter. Its unit is dropped, but
    for a reward or a turn of a group that has enough other members."""
    if chunk not in s.due[field]:
        return False
    c = s.chunks[chunk]
    c.attempts[field] += 1
    group = None if chunk.trajectory.is_evaluation else s.groups.get(chunk.trajectory.group)
    if group is not None and group.judged_by == str(who):
        group.judged_by, group.judged_until = "", 0.0
    if c.attempts[field] < s.spec.max_attempts:
        s.due[field][chunk] = now
        return False
    _bury(s, chunk, field.value, who, error, c.attempts[field], now)
    if chunk.trajectory.is_evaluation:
        s.evaluations[int(chunk.trajectory.lane[1:])].num_failed += 1
        s.forget_chunk(chunk)
        del s.trajectories[chunk.trajectory]
    elif group is not None and field in (Field.REWARD, Field.TURN) and s.spec.unit is Unit.GROUP:
        _go_on_without(s, chunk, field, group)
    else:
        s.end_unit(s.unit_of(chunk), DropReason.DEAD_LETTER)
    return True


def _go_on_without(s: LedgerState, chunk: ChunkId, field: Field, group: GroupRecord) -> None:
    """Leave a member that has no verdict out of its group, or drop a group with too few others."""
    number, trajectory = chunk.trajectory.group, chunk.trajectory
    group.unjudged.add(trajectory)
    if s.spec.group_size - len(group.unjudged) < fewest_judged(s.spec.group_size):
        s.end_unit(number, DropReason.DEAD_LETTER)
        return
    del s.due[field][chunk]
    s.spoil_trajectory(trajectory, DropReason.DEAD_LETTER)
    group.missing -= 1
    if field is Field.TURN:
        s.trajectories[trajectory].waits, s.trajectories[trajectory].final = False, True
        group.finals += 1
    elif Field.GUIDANCE in s.spec.fields:
        group.missing -= 1
    if not s.spec.value_training and s.is_without_signal(number):
        s.end_unit(number, DropReason.NO_SIGNAL)
        return
    s.ready_if_complete(chunk)


def drop(
    s: LedgerState, who: Incarnation, claim: Claim, unit: str, reason: DropReason, letter: UnitLetter | None, now: float
) -> None:
    """Drop one unit out of a claim."""
    record, name = s.claims.get(claim.claim_id), s.name(unit)
    if record is None or name not in record.units:
        return
    record.units.remove(name)
    if letter is not None:
        _bury(s, letter.chunk, str(who.role), who, letter.error, 1, now)
    s.end_unit(name, reason, s.version_history.updates(record.policy_version))


def _bury(
    s: LedgerState, chunk: ChunkId, role: str, who: Incarnation, error: str, num_attempts: int, now: float
) -> None:
    """Keep a dead letter of work that is still there."""
    text = error.encode("utf-8", "replace").decode("utf-8")
    s.dead.insert(0, DeadLetter(str(chunk), role, str(who), text, num_attempts, now, s.prompt_of(chunk.trajectory)))
    del s.dead[_MAX_DEAD_LETTERS:]
