"""The ledger's decisions, apart from the data that it stores and the server that it runs on: what is leased next, when
a unit is ready or has no signal, and which units an update gets.

The Lua scripts do the same step by step. The oracle of the tests is this with the data, compared with Redis in random
histories; ``pipeline.plan.simulate`` is this with times. A restart, a lost worker and a failed scorer are their
matter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pipeline.ledger.sorted_set import SortedSet
from pipeline.ledger.staleness import Ages, ReadyUnit, choose, credit_limit, is_stale, unit_weight, urgent
from pipeline.ledger.types import ClaimWait, DropReason, LedgerSpec, Pause, Refusal, Unit
from pipeline.ledger.validation import surplus
from pipeline.ledger.version_history import VersionHistory
from protocol.ids import TRAIN_LANE, ChunkId, TrajectoryId
from protocol.trajectory import Field

UnitName = int | TrajectoryId | ChunkId
"""A unit's name by the run's unit. All names of one run compare by order of admission."""


@dataclass(slots=True)
class UnitRecord:
    """The common part of all units: readiness, and the oldest version of its tokens."""

    missing: int = 0
    """Needed fields that are not yet written."""
    oldest: int | None = None
    state: str = ""
    """Empty while running, then ``ready``, then ``claimed``."""
    ready_s: float = 0.0
    claimed_s: float = 0.0
    num_masked: int = 0
    """Its responses that are masked (``RewardScore.masked``)."""

    def lower_oldest(self, version: int) -> None:
        """Include a token of ``version``."""
        self.oldest = version if self.oldest is None else min(self.oldest, version)


@dataclass(slots=True)
class GroupUnit(UnitRecord):
    """A group that is not settled."""

    live: int = 0
    """Members that are not settled."""
    prompt: int = 0
    """Place of its prompt in the stream."""
    finals: int = 0
    """Members whose final chunk is written."""
    accuracies: list[float] = field(default_factory=list[float])
    unjudged: set[TrajectoryId] = field(default_factory=set[TrajectoryId])
    """Members that never got a verdict: dead letters, without which the group goes on."""

    def is_alike(self, group_size: int) -> bool:
        """Return whether no member waits for a verdict, and those that have one are of one accuracy."""
        return len(self.accuracies) + len(self.unjudged) == group_size and len(set(self.accuracies)) == 1


@dataclass(slots=True)
class TrajectoryUnit(UnitRecord):
    """A trajectory that is not settled."""

    next: int = 0
    """Index of its next chunk."""
    final: bool = False


G = TypeVar("G", bound=GroupUnit)
T = TypeVar("T", bound=TrajectoryUnit)
C = TypeVar("C", bound=UnitRecord)


class LedgerRules(ABC, Generic[G, T, C]):
    """Queues, credit and units of one run."""

    def __init__(self, spec: LedgerSpec) -> None:
        self.spec = spec
        self.weight = unit_weight(spec)
        self.version = 0
        self.version_history = VersionHistory()
        self.used: int = 0
        """Credit in use."""
        self.stored_bytes: int = 0
        self.closed = False
        self.paused: Pause | None = None
        self.num_admitted = 0
        """Groups."""
        self.num_again = 0
        self.groups: dict[int, G] = {}
        self.trajectories: dict[TrajectoryId, T] = {}
        self.chunks: dict[ChunkId, C] = {}
        self.open: SortedSet[TrajectoryId] = SortedSet()
        self.parked: SortedSet[TrajectoryId] = SortedSet()
        self.again: SortedSet[int] = SortedSet()
        self.evaluation_open: SortedSet[tuple[int, TrajectoryId]] = SortedSet()
        self.running: SortedSet[UnitName] = SortedSet()
        self.running_age: Ages[UnitName] = Ages()
        self.ready: SortedSet[UnitName] = SortedSet()
        self.ready_age: Ages[UnitName] = Ages()

    @abstractmethod
    def new_group(self, prompt: int) -> G:
        """Make the record of a group that is admitted now."""

    @abstractmethod
    def new_trajectory(self) -> T:
        """Make the record of a trajectory that is admitted now."""

    @abstractmethod
    def end_unit(self, name: UnitName, reason: DropReason | None, made: int | None = None) -> None:
        """Remove a unit: trained (no reason), or dropped, which returns its credit. Calls ``leave``.

        ``made``: updates in the version that its staleness counts from; None for the published one."""

    # -- names -----------------------------------------------------------------------------------

    def members(self, group: int) -> Iterator[TrajectoryId]:
        """Yield a group's trajectories."""
        return (TrajectoryId(TRAIN_LANE, group, member) for member in range(self.spec.group_size))

    def unit_of(self, chunk: ChunkId) -> UnitName:
        """Return the name of a chunk's unit."""
        if self.spec.unit is Unit.GROUP:
            return chunk.trajectory.group
        return chunk.trajectory if self.spec.unit is Unit.TRAJECTORY else chunk

    def record(self, name: UnitName) -> G | T | C:
        """Return an existing unit's record."""
        if isinstance(name, int):
            return self.groups[name]
        return self.trajectories[name] if isinstance(name, TrajectoryId) else self.chunks[name]

    def needed_fields(
        self, trajectory: TrajectoryId, *, final: bool, ends_turn: bool, num_tokens: int
    ) -> frozenset[Field]:
        """Return the fields of a complete chunk."""
        turn = frozenset({Field.TURN}) if ends_turn else frozenset[Field]()
        if trajectory.is_evaluation:
            return frozenset({Field.REWARD}) if final else turn
        without = frozenset({Field.TURN}) if final else frozenset({Field.TURN, Field.REWARD, Field.GUIDANCE})
        return (self.spec.fields - without if num_tokens else frozenset[Field]()) | turn

    # -- credit ----------------------------------------------------------------------------------

    def refusal(self, wanted: int) -> Refusal | None:
        """Return why ``wanted`` more credits cannot be given, or None when they can."""
        if self.closed:
            return Refusal.CLOSED
        if self.spec.max_bytes is not None and self.num_bytes > self.spec.max_bytes:
            return Refusal.MEMORY
        if self.used + wanted > self.credit_limit:
            return Refusal.NO_CREDIT
        return None

    @property
    def credit_limit(self) -> int:
        """Largest credit in use while the present version is published."""
        return credit_limit(self.spec, self.published_updates)

    @property
    def published_updates(self) -> int:
        """Updates in the published version."""
        return self.version_history.updates(self.version)

    @property
    def num_bytes(self) -> int:
        """Stored bytes, as the watermark counts them."""
        return self.stored_bytes

    @property
    def is_exhausted(self) -> bool:
        """Whether every prompt is admitted, and none waits to be admitted again."""
        following = self.num_admitted - self.num_again
        return self.spec.num_prompts is not None and following >= self.spec.num_prompts and not len(self.again)

    # -- leasing ---------------------------------------------------------------------------------

    def take(self, *, is_behind: bool) -> TrajectoryId | Refusal:
        """Take the next trajectory to lease out of its queue; or return why there is none.

        A caller behind the published version gets evaluation only."""
        evaluation = self.evaluation_open.first
        if evaluation is not None:
            self.evaluation_open.discard(evaluation)
            return evaluation[1]
        if is_behind:
            return Refusal.BEHIND
        oldest, parked = self._first_open(), self.parked.first
        if parked is not None and (oldest is None or parked < oldest):
            why = self.refusal(1)
            if why is None:
                self.parked.discard(parked)
                self.running.add(ChunkId(parked, self.trajectories[parked].next))
                self.used += 1
                return parked
            if oldest is None:
                return why
        if oldest is None:
            why = self._admit_group()
            if why is not None:
                return why
            oldest = self.open.first
            assert oldest is not None
        self.open.discard(oldest)
        return oldest

    def _first_open(self) -> TrajectoryId | None:
        """Return the first open trajectory.

        While the learner repeats lost updates, new samples would be too old at their turn. Then only a
        trajectory whose unit does not age by it is leased, since the learner may wait for that unit.
        If the learner has no batch ready, any trajectory is leased."""
        if self.used <= self.credit_limit or len(self.ready) * self.weight < self.spec.units_per_update:
            return self.open.first
        updates = self.published_updates
        for trajectory in self.open:
            age = self.running_age.get(self.unit_of(ChunkId(trajectory, self.trajectories[trajectory].next)))
            if age is not None and age <= updates:
                return trajectory
        return None

    def _admit_group(self) -> Refusal | None:
        size = self.spec.group_size
        why = self.refusal(size)
        if why is not Refusal.CLOSED and (self.is_exhausted or self.paused is not None):
            why = Refusal.EXHAUSTED if self.is_exhausted else Refusal.PAUSED
        if why is not None:
            return why
        number = self.num_admitted
        again = self.again.first
        self.groups[number] = self.new_group(number - self.num_again if again is None else again)
        if again is not None:
            self.again.discard(again)
            self.num_again += 1
        for trajectory in self.members(number):
            self.trajectories[trajectory] = self.new_trajectory()
            self.open.add(trajectory)
            self.running.add(self.unit_of(ChunkId(trajectory, 0)))
        self.num_admitted += 1
        self.used += size
        return None

    def begin_age(self, trajectory: TrajectoryId, index: int) -> None:
        """Set the age of the unit of the trajectory's next tokens: the version's updates."""
        unit, now = self.unit_of(ChunkId(trajectory, index)), self.published_updates
        if self.spec.unit is Unit.GROUP:
            self.running_age[unit] = min(now, self.running_age.get(unit, now))
        elif self.spec.unit is Unit.CHUNK or self.trajectories[trajectory].oldest is None:
            self.running_age[unit] = now

    # -- becoming ready --------------------------------------------------------------------------

    def add_to_unit(self, chunk: ChunkId, oldest: int | None, missing: int, *, final: bool) -> None:
        """Count a written chunk in its unit.

        Args:
            chunk: The chunk.
            oldest: Updates in its oldest version; None if it has no tokens that could grow old.
            missing: Fields that it needs.
            final: Whether it ends its trajectory."""
        name = self.unit_of(chunk)
        unit = self.record(name)
        unit.missing += missing
        if oldest is None:
            if self.spec.unit is not Unit.GROUP:
                self.running_age.discard(name)
            return
        unit.lower_oldest(oldest)
        if isinstance(unit, GroupUnit):
            unit.finals += final
            self.running_age[name] = min(self.running_age.get(name, oldest), oldest)
        else:
            assert unit.oldest is not None
            self.running_age[name] = unit.oldest
        self.ready_if_complete(chunk)

    def continue_or_park(self, chunk: ChunkId, newest_version: int) -> bool:
        """Unit chunk: give the next window its credit, or park the trajectory; return whether it continues."""
        if newest_version < self.version or self.refusal(1) is not None:
            self.parked.add(chunk.trajectory)
            return False
        self.running.add(ChunkId(chunk.trajectory, chunk.index + 1))
        self.begin_age(chunk.trajectory, chunk.index + 1)
        self.used += 1
        return True

    def judge(self, chunk: ChunkId, accuracy: float, masked: bool) -> bool:
        """Count a response's verdict; return whether that ended its unit for lack of signal."""
        self.groups[chunk.trajectory.group].accuracies.append(accuracy)
        unit = self.unit_of(chunk)
        self.record(unit).num_masked += masked
        # a critic also learns from units without signal: their drop then waits for all values
        if self.spec.value_training or not self.is_without_signal(unit):
            return False
        self.end_unit(unit, DropReason.NO_SIGNAL)
        return True

    def ready_if_complete(self, chunk: ChunkId) -> None:
        """Make a chunk's unit ready once nothing is missing."""
        name = self.unit_of(chunk)
        record = self.record(name)
        if record.missing:
            return
        if isinstance(record, GroupUnit) and record.finals < self.spec.group_size:
            return
        if isinstance(record, TrajectoryUnit) and not record.final:
            return
        if record.oldest is None or self.is_without_signal(name):
            self.end_unit(name, DropReason.NO_SIGNAL)
            return
        self.make_ready(name)

    def is_without_signal(self, name: UnitName) -> bool:
        """Return whether a unit has nothing to learn from: no response waits for a verdict,
        and all that have one are masked, or the signal filter drops it."""
        record = self.record(name)
        size = self.spec.group_size if isinstance(record, GroupUnit) else 1
        num_unjudged = len(record.unjudged) if isinstance(record, GroupUnit) else 0
        if record.num_masked + num_unjudged == size:
            return True
        return self.spec.signal_filter and isinstance(record, GroupUnit) and record.is_alike(size)

    def make_ready(self, name: UnitName) -> None:
        """Make a unit claimable."""
        self.running.discard(name)
        self.running_age.discard(name)
        record = self.record(name)
        record.state = "ready"
        self.ready.add(name)
        self.ready_age[name] = record.oldest or 0

    # -- claims ----------------------------------------------------------------------------------

    def claim(self, policy_version: int) -> list[UnitName] | ClaimWait:
        """Drop too stale ready units, the oldest first; take one update's units, or return why not."""
        updates, eta = self.version_history.updates(policy_version), self.spec.eta
        ages = self.ready_age
        if any(is_stale(updates, age, eta) for age in ages.counts):
            stale = [name for name, age in ages.items() if is_stale(updates, age, eta)]
            for name in sorted(stale, key=lambda name: (ages[name], str(name))):
                self.end_unit(name, DropReason.STALE, updates)
        if len(self.ready) < self.num_needed:
            ended = self.closed or self.is_exhausted
            moving = len(self.running) > 0 or (not self.closed and len(self.parked) > 0)
            return ClaimWait.STARVED if ended and not moving else ClaimWait.NOT_ENOUGH
        first = urgent(
            ages.counts,
            self.running_age.counts,
            policy_version=updates,
            eta=eta,
            needed=self.num_needed,
            surplus_units=surplus(self.spec.oversampling, self.spec.units_per_update) // self.weight,
            late=self.spec.late,
        )
        if first is None:
            return ClaimWait.LATE_WORK
        ready = [ReadyUnit(name, ages[name]) for name in self.ready]
        chosen = choose(ready, first, edge=updates - eta, needed=self.num_needed)
        for name in chosen:
            self._leave_ready(name)
            self.record(name).state = "claimed"
        return chosen

    def _leave_ready(self, name: UnitName) -> None:
        self.ready.discard(name)
        self.ready_age.discard(name)

    @property
    def num_needed(self) -> int:
        """Units of an update."""
        return self.spec.units_per_update // self.weight

    def leave(self, name: UnitName, reason: DropReason | None) -> None:
        """Take a unit out of all queues; a drop returns its credit."""
        self.running.discard(name)
        self.running_age.discard(name)
        self._leave_ready(name)
        if reason is not None:
            self.used -= self.weight
