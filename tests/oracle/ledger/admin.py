"""An operator's side of the in-memory ledger: ``waits.lua``, ``stored.lua``, ``requeue.lua``,
``retry.lua``, ``pause.lua`` and ``resume.lua`` in Python."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.ledger.admin import (
    Holder,
    Requeued,
    RequeueRequest,
    Retried,
    StoredChunk,
    WaitedUnit,
    Waits,
)
from pipeline.ledger.rules import UnitName
from pipeline.ledger.types import DeadLetter, LatePolicy, Pause
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import Field
from tests.oracle.ledger.lacking import waited_trajectory
from tests.oracle.ledger.ledger import MemoryLedger
from tests.oracle.ledger.state import LedgerState


class MemoryAdmin:
    """``pipeline.ledger.admin.LedgerAdmin`` in this process. ``epoch_of`` is the ledger's."""

    def __init__(self, ledger: MemoryLedger, epoch_of: Callable[[str], int]) -> None:
        self._ledger = ledger
        self._epoch_of = epoch_of

    async def waits(self, *, max_units: int = 64) -> Waits:
        """Return what the next update waits for."""
        s, now = self._ledger.state, self._ledger.clock()
        needed = s.spec.units_per_update // s.weight
        if len(s.ready) >= needed and s.spec.late is LatePolicy.WAIT:
            names = sorted(s.running_age, key=lambda name: (s.running_age[name], str(name)))
        else:
            names = list(s.running)
        unscored, waiting = (
            sum(chunk.trajectory.is_evaluation for chunk in s.due[field]) for field in (Field.REWARD, Field.TURN)
        )
        holders = sorted(s.holders.items(), key=lambda item: (item[1], item[0]))
        return Waits(
            unit=s.spec.unit,
            group_size=s.spec.group_size,
            eta=s.spec.eta,
            late=s.spec.late,
            policy_version=s.version,
            num_needed=needed,
            num_ready=len(s.ready),
            num_running=len(s.running),
            num_parked=len(s.parked),
            num_claimed=sum(len(claim.units) for claim in s.claims.values()),
            units=tuple(_unit(s, name, now) for name in names[:max_units]),
            holders=tuple(
                Holder(who, len(held), sum(one.is_evaluation for one in held), until - now)
                for who, until in holders
                if (held := s.held.get(who))
            ),
            num_evaluation_open=len(s.evaluation_open),
            num_evaluation_unscored=unscored,
            num_evaluation_waiting=waiting,
            value_training=s.spec.value_training,
        )

    async def stored(self, *, max_trajectories: int = 20) -> tuple[StoredChunk, ...]:
        """Return the newest chunks of trajectories."""
        s, now = self._ledger.state, self._ledger.clock()
        found: list[StoredChunk] = []
        for number in sorted(s.groups, reverse=True)[:max_trajectories]:
            for member in range(s.spec.group_size):
                name = TrajectoryId("t", number, member)
                trajectory = s.trajectories.get(name)
                chunk = s.chunks.get(ChunkId(name, trajectory.next - 1)) if trajectory and trajectory.next else None
                if trajectory is None or chunk is None:
                    continue
                fields = tuple(one for one in Field if one in chunk.scores)
                last = ChunkId(name, trajectory.next - 1)
                found.append(StoredChunk(str(last), trajectory.num_tokens, now - chunk.written_s, chunk.final, fields))
        return tuple(found[:max_trajectories])

    async def requeue(self, request: RequeueRequest) -> Requeued:
        """Put work back."""
        s, now = self._ledger.state, self._ledger.clock()
        unknown = tuple(str(name) for name in request.trajectories if name not in s.trajectories)
        if request.worker and not self._epoch_of(request.worker):
            unknown = (request.worker,)
        if unknown:
            return Requeued(unknown=unknown)
        if request.worker:
            holders = [who for who in s.holders if who.rpartition("#")[0] == request.worker]
            return Requeued(sum(s.reopen_all(who, now) for who in holders))
        if request.field is not None:
            return Requeued(0, sum(_make_due(s, request.field, chunk, now) for chunk in list(s.due[request.field])))
        num_opened = num_due = 0
        for trajectory in request.trajectories:
            record = s.trajectories[trajectory]
            if record.holder is not None:
                s.reopen(trajectory, record.holder, now)
                num_opened += 1
            chunks = [ChunkId(trajectory, index) for index in range(record.next)]
            num_due += sum(_make_due(s, field, chunk, now) for chunk in chunks for field in Field)
        return Requeued(num_opened, num_due)

    async def retry(self, chunks: tuple[str, ...] | None) -> Retried:
        """Admit the prompts of dead letters again."""
        s = self._ledger.state
        if chunks == ():
            return Retried()
        if s.closed:
            return Retried(is_closed=True)
        letters = [(letter, name) for letter in s.dead if not (name := _trajectory_of(letter)).is_evaluation]
        named = {letter.chunk: name.group for letter, name in letters}
        unknown = tuple(chunk for chunk in chunks or () if chunk not in named)
        if unknown:
            return Retried(unknown=unknown)
        wanted = set(named.values()) if chunks is None else {named[chunk] for chunk in chunks}
        answered = [letter for letter, name in letters if name.group in wanted]
        for letter in answered:
            s.dead.remove(letter)
            s.again.add(letter.prompt)
        return Retried(tuple(dict.fromkeys(letter.prompt for letter in answered)), len(answered))

    async def pause(self, *, by: str, reason: str = "") -> Pause:
        """Admit no new group from now on."""
        s, now = self._ledger.state, self._ledger.clock()
        s.paused = s.paused or Pause(now, by, reason)
        return s.paused

    async def resume(self) -> Pause | None:
        """Admit groups again."""
        s = self._ledger.state
        ended, s.paused = s.paused, None
        return ended


def _trajectory_of(letter: DeadLetter) -> TrajectoryId:
    return ChunkId.parse(letter.chunk).trajectory


def _make_due(s: LedgerState, field: Field, chunk: ChunkId, now: float) -> int:
    """Make a chunk that lacks the field due now; return how many that are, 0 or 1."""
    if chunk not in s.due[field]:
        return 0
    s.due[field][chunk] = min(now, s.due[field][chunk])
    return 1


def _unit(s: LedgerState, name: UnitName, now: float) -> WaitedUnit:
    if isinstance(name, ChunkId):
        rows = [waited_trajectory(s, name.trajectory, name.index, now)]
    else:
        names = s.members(name) if isinstance(name, int) else iter((name,))
        rows = [waited_trajectory(s, trajectory, None, now) for trajectory in names]
    waited = tuple(row for row in rows if row is not None)
    return WaitedUnit(str(name), s.running_age.get(name), len(rows) - len(waited), waited)
