"""Plans how to replay logged updates: pure functions.

A plan is a list of legs; each loads a state and replays consecutive updates. A run's updates form a
tree: each learner started at the start model or at an earlier learner's checkpoint, and what the
earlier learner did after that checkpoint is another branch. A state is identified by its number of
updates and the digests of its weights, so a leg may start at a checkpoint or at a state that an
earlier leg passes through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from xxhash import xxh3_128_digest

from pipeline.training.update_log.folder import LoggedUpdate, LogSegment
from pipeline.training.update_log.records import Digests, Origin, Start

Checkpoints = Mapping[tuple[int, int], str]
"""(policy version, number of updates) -> name of the checkpoint's folder."""


@dataclass(frozen=True, slots=True)
class StateId:
    """Identifies the weights at one point of a run."""

    num_updates: int
    fingerprint: bytes

    @classmethod
    def of(cls, num_updates: int, digests: Digests) -> StateId:
        return cls(num_updates, xxh3_128_digest(b"".join(name.encode() + digests[name] for name in sorted(digests))))


@dataclass(frozen=True, slots=True)
class UpdateSpan:
    """Consecutive updates of one learner. Position i is the state after i of them."""

    start: Start
    updates: tuple[LoggedUpdate, ...]

    @property
    def states(self) -> list[StateId]:
        """States by position; there may be none after the last update."""
        made = [StateId.of(u.num_updates, u.outcome.digests) for u in self.updates if u.outcome is not None]
        return [StateId.of(self.start.num_updates, self.start.digests), *made]

    def version(self, position: int) -> int:
        """Return the policy version at a position."""
        return version_of(self.updates[position - 1]) if position else self.start.policy_version

    def checkpoints(self, at_hand: Checkpoints) -> dict[int, str]:
        """Return the names of available checkpoints by position."""
        found: dict[int, str] = {}
        numbers = [self.start.num_updates, *(update.num_updates for update in self.updates)]
        for position, number in enumerate(numbers):
            versions = {self.version(position)} | ({self.start.state_version} if position == 0 else set())
            for version in versions:
                if name := at_hand.get((version, number)):
                    found[position] = name
        return found


class Source(Enum):
    """Where a leg's first state comes from."""

    START_MODEL = "start model"
    CHECKPOINT = "checkpoint"
    REPLAYED = "replayed"
    """An earlier leg passes through it and keeps it."""


@dataclass(frozen=True, slots=True)
class Leg:
    """Updates ``begin`` to ``end`` (exclusive) of one learner, replayed from an available state."""

    span: UpdateSpan
    begin: int
    end: int
    source: Source
    checkpoint: str | None
    """The checkpoint's name if it is the source."""
    kept: frozenset[int]
    """Positions whose states later legs start from."""

    @property
    def state(self) -> StateId:
        return self.span.states[self.begin]


@dataclass(frozen=True, slots=True)
class Plan:
    """Legs in order, and the updates that cannot be replayed."""

    legs: tuple[Leg, ...]
    unreachable: tuple[LoggedUpdate, ...]
    """Requested updates with no available state before them."""


def version_of(update: LoggedUpdate) -> int:
    """Return the version that an update produced, or would have produced."""
    return update.outcome.policy_version if update.outcome else update.batch.policy_version + 1


def update_spans(segments: Sequence[LogSegment]) -> list[UpdateSpan]:
    """Join each segment with the one that it continues."""
    joined: list[UpdateSpan] = []
    epoch = -1
    for segment in segments:
        start = segment.start
        here = StateId.of(start.num_updates, start.digests)
        is_next = start.origin is Origin.CONTINUED and segment.epoch == epoch
        if joined and is_next and joined[-1].states[-1] == here:
            joined[-1] = UpdateSpan(joined[-1].start, (*joined[-1].updates, *segment.updates))
        else:
            joined.append(UpdateSpan(start, segment.updates))
        epoch = segment.epoch
    return joined


def make_plan(
    found: Sequence[UpdateSpan], at_hand: Checkpoints, *, after: int | None = None, until: int | None = None
) -> Plan:
    """Plan the updates that produced versions above ``after``, up to ``until``: from the newest
    checkpoint before ``after``, else from as early as possible."""
    return _Planner(found, at_hand, after, until).plan()


class _Planner:
    def __init__(self, found: Sequence[UpdateSpan], at_hand: Checkpoints, after: int | None, until: int | None) -> None:
        self._found = found
        self._states = [span.states for span in found]
        self._checkpoints = [span.checkpoints(at_hand) for span in found]
        self._late = after is not None
        self._wanted = [
            [
                place
                for place, update in enumerate(span.updates)
                if (after is None or version_of(update) > after) and (until is None or version_of(update) <= until)
            ]
            for span in found
        ]
        self._kept: list[set[int]] = [set() for _ in found]

    def plan(self) -> Plan:
        legs: list[Leg] = []
        for number in reversed(range(len(self._found))):
            wanted, kept = self._wanted[number], self._kept[number]
            if not wanted and not kept:
                continue
            first = min([*wanted[:1], *kept])
            end = max([*(place + 1 for place in wanted[-1:]), *kept])
            begun = self._begin(number, first, end)
            if begun is None:
                continue
            begin, source, earlier = begun
            if earlier is not None:
                self._kept[earlier[0]].add(earlier[1])
            checkpoint = self._checkpoints[number][begin] if source is Source.CHECKPOINT else None
            legs.append(Leg(self._found[number], begin, end, source, checkpoint, frozenset(kept)))
        reached = {id(u) for leg in legs for u in leg.span.updates[leg.begin : leg.end]}
        lost = tuple(u for u in self._all_wanted() if id(u) not in reached)
        return Plan(tuple(reversed(legs)), lost)

    def _all_wanted(self) -> Iterator[LoggedUpdate]:
        for span, places in zip(self._found, self._wanted, strict=True):
            for place in places:
                yield span.updates[place]

    def _begin(self, number: int, first: int, end: int) -> tuple[int, Source, tuple[int, int] | None] | None:
        """Return the position to start from (at or before ``first`` if possible), its source, and
        the earlier span and position to build on."""
        positions = sorted(self._checkpoints[number])
        before = [position for position in positions if position <= first]
        if self._late and before:
            return before[-1], Source.CHECKPOINT, None
        start = self._found[number].start
        if start.origin is Origin.START_MODEL:
            return 0, Source.START_MODEL, None
        if earlier := self._earlier(number):
            return 0, Source.REPLAYED, earlier
        usable = before[:1] or [position for position in positions if position < end]
        return (usable[0], Source.CHECKPOINT, None) if usable else None

    def _earlier(self, number: int) -> tuple[int, int] | None:
        """Return a reachable earlier span and position that has the first state of span ``number``."""
        for other in reversed(range(number)):
            for position, state in enumerate(self._states[other]):
                if state == self._states[number][0] and self._can_pass(other, position):
                    return other, position
        return None

    def _can_pass(self, number: int, position: int) -> bool:
        begun = self._begin(number, position, position + 1)
        return begun is not None and begun[0] <= position
