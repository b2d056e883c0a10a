"""The in-memory ledger's records and indexes, and the steps that several transitions share.

The counterpart, step by step, of ``redis/scripts/parts``: every index agrees with the records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from pipeline.ledger.life import DROPPED, MAX_LEASES, TRAINED
from pipeline.ledger.rules import LedgerRules, UnitName
from pipeline.ledger.types import (
    MAX_SHOWN,
    MAX_SHOWN_BYTES,
    DeadLetter,
    DropReason,
    LedgerSpec,
    Unit,
)
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import Field
from tests.oracle.ledger.finished import FinishedLane
from tests.oracle.ledger.lives import KeptLives, chunk_row, ended, event, is_shown, pack_life
from tests.oracle.ledger.records import (
    CHUNK_OVERHEAD_BYTES,
    ChunkRecord,
    ClaimRecord,
    EvaluationRecord,
    GroupRecord,
    TrajectoryRecord,
)
from tests.oracle.ledger.tallies import tally_response, tally_unit

MAX_MILESTONES = 1000
"""Checkpoints whose books are kept, to go back to; far more than are ever stored."""

_SPOILING = frozenset({DropReason.DEAD_LETTER, DropReason.NON_FINITE, DropReason.CANCELLED})
"""Reasons that also keep a unit's trajectories from the critic. All others leave them to it."""


class LedgerState(LedgerRules[GroupRecord, TrajectoryRecord, ChunkRecord]):
    """One run's whole ledger: the rules, with the data."""

    def __init__(self, spec: LedgerSpec, clock: Callable[[], float]) -> None:
        super().__init__(spec)
        self.clock = clock
        self.milestones: dict[int, Counter[str]] = {}
        """By number of settled updates: the counts trained by then."""
        self.admitted: Counter[str] = Counter()
        self.trained: Counter[str] = Counter()
        self.stored_by: Counter[str] = Counter()
        self.spent: Counter[str] = Counter()
        self.lives = KeptLives()
        self.tallies: Counter[str] = Counter()
        """Of all that left, by the names of ``redis/scripts/parts/tallies.lua``."""
        self.dropped: dict[str, Counter[str]] = {"groups": Counter(), "trajectories": Counter(), "tokens": Counter()}
        self.shown: dict[str, list[tuple[bytes, bytes]]] = {"evaluation": [], "no_signal": []}
        self.holders: dict[str, float] = {}
        self.held: dict[str, set[TrajectoryId]] = {}
        self.due: dict[Field, dict[ChunkId, float]] = {field: {} for field in Field}
        self.claims: dict[str, ClaimRecord] = {}
        self.dead: list[DeadLetter] = []
        self.evaluations: dict[int, EvaluationRecord] = {}
        self.finished = FinishedLane()

    def new_group(self, prompt: int) -> GroupRecord:
        """Count a group, and make its record."""
        self.admitted.update(groups=1, trajectories=self.spec.group_size)
        return GroupRecord(live=self.spec.group_size, prompt=prompt, admitted_s=self.clock())

    def new_trajectory(self) -> TrajectoryRecord:
        """Make a trajectory's record."""
        return TrajectoryRecord(since_s=self.clock())

    # -- names -----------------------------------------------------------------------------------

    def name(self, text: str) -> UnitName:
        """Return the unit that a text names. Raises ValueError for other texts."""
        if self.spec.unit is Unit.GROUP:
            return int(text)
        return TrajectoryId.parse(text) if self.spec.unit is Unit.TRAJECTORY else ChunkId.parse(text)

    # -- credit ----------------------------------------------------------------------------------

    def mark(self, num_updates: int) -> None:
        """Remember the counts trained, at so many settled updates."""
        self.milestones[num_updates] = Counter(self.trained)
        while len(self.milestones) > MAX_MILESTONES:
            del self.milestones[min(self.milestones)]

    def go_back(self, num_updates: int) -> int:
        """Count all that later updates trained as given up; return its credit."""
        lost: Counter[str] = Counter()
        if any(updates > num_updates for updates in self.milestones):
            lost = self.trained - self.milestones.get(num_updates, Counter())
            self.trained -= lost
            self.milestones = {n: totals for n, totals in self.milestones.items() if n <= num_updates}
        for currency, dropped in self.dropped.items():
            dropped[DropReason.ROLLED_BACK.value] += lost[currency]
        self.used -= lost["credit"]
        self.mark(num_updates)
        return lost["credit"]

    @property
    def num_bytes(self) -> int:
        """Stored bytes, for units and for the value worker, as the watermark counts them."""
        return self.stored_bytes + self.finished.num_bytes

    def is_untrained(self, number: int) -> bool:
        """Whether no unit of a group has been trained on."""
        there = (self.trajectories.get(trajectory) for trajectory in self.members(number))
        return not self.groups[number].trained and not any(record.trained for record in there if record)

    def prompt_of(self, trajectory: TrajectoryId) -> int:
        """Return the place of a trajectory's prompt in its stream."""
        return trajectory.group if trajectory.is_evaluation else self.groups[trajectory.group].prompt

    # -- holding ---------------------------------------------------------------------------------

    def hold(self, trajectory: TrajectoryId, who: str, now: float) -> None:
        """Give a trajectory to an incarnation; its unit may now get tokens of this version."""
        record = self.trajectories[trajectory]
        record.holder, record.since_s = who, now
        record.num_leases += 1
        record.leases = [*record.leases[1 - MAX_LEASES :], event(who, now)]
        self.held.setdefault(who, set()).add(trajectory)
        if not trajectory.is_evaluation:
            self.begin_age(trajectory, record.next)

    def let_go(self, trajectory: TrajectoryId, who: str) -> None:
        """Take a trajectory from its holder."""
        self.held[who].discard(trajectory)
        self.trajectories[trajectory].holder = None

    def reopen(self, trajectory: TrajectoryId, who: str, now: float) -> None:
        """Open a held trajectory for others. A unit that has not begun does not age."""
        self.let_go(trajectory, who)
        record = self.trajectories[trajectory]
        record.since_s = now
        if trajectory.is_evaluation:
            self.open_evaluation(trajectory)
            return
        self.open.add(trajectory)
        if self.spec.unit is Unit.CHUNK or (self.spec.unit is Unit.TRAJECTORY and record.oldest is None):
            self.running_age.discard(self.unit_of(ChunkId(trajectory, record.next)))

    def open_evaluation(self, trajectory: TrajectoryId) -> None:
        """Queue an evaluation trajectory."""
        self.evaluation_open.add((int(trajectory.lane[1:]), trajectory))

    def reopen_all(self, who: str, now: float) -> int:
        """Open all that an incarnation holds; return their number."""
        held = sorted(self.held.get(who, ()))
        for trajectory in held:
            self.reopen(trajectory, who, now)
        return len(held)

    # -- becoming ready --------------------------------------------------------------------------

    def make_ready(self, name: UnitName) -> None:
        """Make a unit claimable."""
        super().make_ready(name)
        self.record(name).ready_s = self.clock()

    # -- leaving the ledger ----------------------------------------------------------------------

    def end_unit(self, name: UnitName, reason: DropReason | None, made: int | None = None) -> None:
        """Remove a unit: trained (no reason), or dropped, which returns its credit.

        ``made``: updates in the version that its staleness counts from; None for the published
        one."""
        made = self.published_updates if made is None else made
        if reason is DropReason.NO_SIGNAL:
            whole = name.trajectory if isinstance(name, ChunkId) else name
            first = list(self.members(whole))[:2] if isinstance(whole, int) else [whole]
            for trajectory in first:
                self.show_end(reason.value, trajectory)
        tally_unit(self.tallies, reason, self.record(name).oldest, made)
        self.leave(name, reason)
        if reason is None:
            self.trained["credit"] += self.weight
        if reason is not None and reason in _SPOILING:
            self._spoil(name, reason)
        if isinstance(name, int):
            for trajectory in self.members(name):
                own = DropReason.DEAD_LETTER if reason is None and self.is_unjudged(trajectory) else reason
                self._end_whole_trajectory(trajectory, own, made)
        elif isinstance(name, TrajectoryId):
            self._end_whole_trajectory(name, reason, made)
        else:
            self._end_chunk_unit(name, reason, made)

    def show_end(self, kind: str, trajectory: TrajectoryId) -> None:
        """Keep the end of a trajectory for people to read, if it has one with a reward."""
        record = self.trajectories.get(trajectory)
        chunk = self.chunks.get(ChunkId(trajectory, record.next - 1)) if record is not None and record.next else None
        if chunk is not None and Field.REWARD in chunk.scores:
            self.show(kind, chunk.blob, chunk.scores[Field.REWARD])

    def show(self, kind: str, blob: bytes, reward: bytes) -> None:
        """Keep a response for people to read, while there is room."""
        if len(blob) <= MAX_SHOWN_BYTES and len(self.shown[kind]) < MAX_SHOWN:
            self.shown[kind].append((blob, reward))

    def _spoil(self, name: UnitName, reason: DropReason) -> None:
        if isinstance(name, ChunkId):
            self.spoil_trajectory(name.trajectory, reason)
            return
        for trajectory in self.members(name) if isinstance(name, int) else (name,):
            self.finished.discard(trajectory, reason)

    def spoil_trajectory(self, trajectory: TrajectoryId, reason: DropReason) -> None:
        """Keep a trajectory that stays in the ledger from the critic."""
        self.trajectories[trajectory].spoiled = True
        self.finished.discard(trajectory, reason)

    def is_unjudged(self, trajectory: TrajectoryId) -> bool:
        """Return whether a member of a group goes without a verdict, for good."""
        return trajectory in self.groups[trajectory.group].unjudged

    def end_trajectory(
        self,
        trajectory: TrajectoryId,
        reason: DropReason | None,
        made: int | None = None,
        rows: Sequence[str] | None = None,
    ) -> None:
        """Settle a trajectory, and its group with the last member. ``rows``: of its chunks; None:
        those of chunks that have left."""
        record = self.trajectories[trajectory]
        if record.holder is not None:
            self.let_go(trajectory, record.holder)
        self.open.discard(trajectory)
        self.parked.discard(trajectory)
        self.stored_bytes -= len(record.last) + len(record.last_turn)
        del self.trajectories[trajectory]
        self._count("trajectories", 1, reason)
        group = self.groups[trajectory.group]
        shown = [record.past[i] for i in range(record.next) if is_shown(i, record.next) and i in record.past]
        end = ended(self.clock(), reason, self.published_updates if made is None else made, record.oldest)
        unit = group if self.spec.unit is Unit.GROUP else record
        state = TRAINED if reason is None else DROPPED
        name = str(trajectory)
        self.lives.keep(name, pack_life(name, state, record, group, shown if rows is None else rows, unit, end))
        if record.final:
            tally_response(self.tallies, reason, record.num_tokens, group)
        group.trained |= reason is None
        group.live -= 1
        if group.live == 0:
            self._count("groups", 1, None if group.trained else reason)
            del self.groups[trajectory.group]

    def forget_chunk(self, chunk: ChunkId) -> ChunkRecord:
        """Forget a chunk's data and all indexes of it."""
        record = self.chunks.pop(chunk)
        self.stored_bytes -= record.num_bytes
        for waiting in self.due.values():
            waiting.pop(chunk, None)
        return record

    def store_chunk(self, chunk: ChunkId, record: ChunkRecord) -> None:
        """Store a chunk."""
        self.chunks[chunk] = record
        self.stored_bytes += CHUNK_OVERHEAD_BYTES + len(record.blob)

    def _end_whole_trajectory(self, trajectory: TrajectoryId, reason: DropReason | None, made: int) -> None:
        num_chunks = self.trajectories[trajectory].next
        chunks = [self._end_chunk(ChunkId(trajectory, index), reason) for index in range(num_chunks)]
        rows = [chunk_row(index, chunk) for index, chunk in enumerate(chunks) if is_shown(index, num_chunks)]
        self.end_trajectory(trajectory, reason, made, rows)

    def _end_chunk(self, chunk: ChunkId, reason: DropReason | None) -> ChunkRecord:
        record = self.forget_chunk(chunk)
        self._count("tokens", record.num_tokens, reason)
        return record

    def _end_chunk_unit(self, chunk: ChunkId, reason: DropReason | None, made: int) -> None:
        record = self._end_chunk(chunk, reason)
        trajectory = self.trajectories[chunk.trajectory]
        end = ended(self.clock(), reason, made, record.oldest)
        trajectory.past[chunk.index] = chunk_row(chunk.index, record, end)
        if trajectory.waits and trajectory.next == chunk.index + 1:
            # nobody can answer it any more
            trajectory.waits, trajectory.final = False, True
        elif not trajectory.final and trajectory.next == chunk.index + 1:
            # the next window continues from it
            trajectory.last, trajectory.last_turn = record.blob, record.scores.get(Field.TURN, b"")
            self.stored_bytes += len(trajectory.last) + len(trajectory.last_turn)
        trajectory.trained |= reason is None
        trajectory.live -= 1
        if trajectory.live == 0 and trajectory.final:
            self.end_trajectory(chunk.trajectory, None if trajectory.trained else reason, made)

    def _count(self, currency: str, by: int, reason: DropReason | None) -> None:
        if reason is None:
            self.trained[currency] += by
        else:
            self.dropped[currency][reason.value] += by
