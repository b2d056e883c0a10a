"""Decides how many generators a run needs. Pure; time is an argument.

Its input is the learner's state, what the generators do, and the time. Time is divided into the
learner's cycles, from one policy version to the next. Over the newest whole cycles

    need = arrived * busy / (1 - waited)

is the number of generators that would keep the learner busy. ``arrived`` are generators with
weights, jobs in a place's queue not among them. ``busy`` is the share of their time, and of their
slots, that samples. ``waited`` is the learner's share of time at input. The need does not depend on
the present number. So the number settles, and jobs on their way are not requested again.

    need > 1.1 arrived               grow to the need, at most to twice the arrived
    need < 0.9 (wanted - 1)          shrink to need / 0.9
    else                             as it is

Growth takes ``grow_after_s`` and two cycles, the second of which needs it too, or a wait of four
computations. Shrinking takes ``shrink_after_s`` and two cycles. Each change restarts the
measurement, and so does its last arrival. A growth that follows a shrink doubles ``shrink_after_s``. A
growth after which no more is sampled is taken back, and makes ``grow_after_s`` eight times as long.
The number stays while scorers or weights hold generators up, and while admission is paused.
Waits in a pause have nothing to do with the need."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import structlog

from pipeline.config.schema import RunConfig
from pipeline.runtime.liveness import is_silent
from pipeline.runtime.registry.contract import Fleet, Heartbeat, Registry, WaitingFor
from pipeline.supervisor.fleet_edits import resized
from protocol.ids import Role

_GROW_ABOVE = 1.1
_SHRINK_BELOW = 0.9
_MOST_GROWTH = 2.0
_DEEP = 4.0
"""A wait of so many of the learner's computations needs no whole cycle to be judged."""
_HELD_UP = 0.2
"""Share of generators' time at scorers' mailboxes or weights, from which more would not help."""
_LEAST_GAIN = 0.25
"""Share of the expected rise of tokens/s, below which a growth was for nothing."""
_MAX_STEP_S = 10.0
"""Most time that counts between two readings: a longer gap is unknown time."""

_CAUTION = 8.0
"""Factor of ``grow_after_s`` after each growth that was for nothing."""
_MAX_SPANS = 64
"""Several quick updates are measured as one."""

_AWAY = frozenset({WaitingFor.STARTING, WaitingFor.DRAINING, WaitingFor.STOPPED})
_HOLDING_UP = frozenset({WaitingFor.ROOM, WaitingFor.WEIGHTS, WaitingFor.QUARANTINE, WaitingFor.ENDPOINT})
_IDLE = frozenset({WaitingFor.CREDIT, WaitingFor.INPUT})


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least and largest number of generators, and how long a need lasts before it counts."""

    least: int
    most: int
    grow_after_s: float
    shrink_after_s: float


@dataclass(frozen=True, slots=True)
class Reading:
    """A run at one moment, as its heartbeats show it."""

    version: int
    """The learner's policy version; -1 without a working learner."""
    is_waiting: bool
    """Whether the learner waits for units."""
    num_arrived: int
    """Generators with weights, those of other hosts too."""
    num_busy: float
    """Of those, how many sample, each by its share of used slots."""
    num_held_up: int
    """Of those, how many wait for scorers or for weights."""
    sampled: Mapping[str, float]
    """Sampled tokens so far, by generator."""
    num_guests: int = 0
    """Of the arrived, those that the plan does not have."""


class DemandOutcome(StrEnum):
    """Result of a look at the demand for generators."""

    GROW = "grow"
    SHRINK = "shrink"
    ENOUGH = "enough"
    AT_MOST = "at the most"
    MEASURING = "measuring"
    NOT_ARRIVED = "not arrived"
    HELD_UP = "held up"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class Decision:
    """The wanted number of generators, and why."""

    wanted: int
    outcome: DemandOutcome
    reason: str
    """In words."""


@dataclass(frozen=True, slots=True)
class _MeasuredTime:
    """Times of whole cycles of the learner, in seconds and generator-seconds."""

    length_s: float = 0.0
    waited_s: float = 0.0
    arrived_s: float = 0.0
    busy_s: float = 0.0
    held_up_s: float = 0.0
    tokens: float = 0.0
    num_cycles: int = 0

    def __add__(self, other: _MeasuredTime) -> _MeasuredTime:
        return _MeasuredTime(
            self.length_s + other.length_s,
            self.waited_s + other.waited_s,
            self.arrived_s + other.arrived_s,
            self.busy_s + other.busy_s,
            self.held_up_s + other.held_up_s,
            self.tokens + other.tokens,
            self.num_cycles + other.num_cycles,
        )

    @property
    def waited(self) -> float:
        """The learner's share of time at input."""
        return self.waited_s / self.length_s

    @property
    def arrived(self) -> float:
        """Arrived generators, on average."""
        return self.arrived_s / self.length_s

    @property
    def busy(self) -> float:
        """Their share of time that samples."""
        return self.busy_s / self.arrived_s if self.arrived_s else 0.0

    @property
    def need(self) -> float:
        """The number of generators that would keep the learner busy."""
        return self.arrived * self.busy / max(1.0 - self.waited, 1e-3)

    @property
    def is_held_up(self) -> bool:
        """Whether generators wait for scorers or weights."""
        return self.held_up_s > _HELD_UP * self.arrived_s

    @property
    def rate(self) -> float:
        """Sampled tokens per second, of all."""
        return self.tokens / self.length_s

    def in_words(self) -> str:
        """Return the shares as a phrase."""
        return f"the learner waits {self.waited:.0%} of its time, and {self.arrived:.3g} generators are {self.busy:.0%} busy"


@dataclass(slots=True)
class Autoscaler:
    """The measurement since the last change, and the patience."""

    bounds: Bounds
    _spans: deque[_MeasuredTime] = field(default_factory=deque[_MeasuredTime])
    """Whole cycles, the newest last."""
    _now: _MeasuredTime | None = None
    """The present cycle; None until a version begins one."""
    _stretch: _MeasuredTime = field(default_factory=_MeasuredTime)
    """The learner's present wait, without a break."""
    _version: int = -1
    _computed_s: float | None = None
    """The learner's computation of one cycle, as last seen."""
    _seen_s: float | None = None
    _sampled: Mapping[str, float] = field(default_factory=dict[str, float])
    _wanted: int | None = None
    _most_arrived: int = 0
    _patience: float = 1.0
    """Factor of ``shrink_after_s``."""
    _caution: float = 1.0
    """Factor of ``grow_after_s``."""
    _has_shrunk: bool = False
    _before: tuple[float, float] | None = None
    """Arrived generators, and tokens/s, before the last growth."""

    def evaluate(self, reading: Reading, wanted: int, now_s: float, *, is_paused: bool = False) -> Decision:
        """Return the number that is wanted from now on. ``wanted``: the plan's present number;
        ``now_s``: monotonic; ``is_paused``: whether an operator has paused admission."""
        bounds = self.bounds
        if wanted != self._wanted:
            self._begin_anew(reading, wanted)
        arrived = reading.num_arrived - reading.num_guests
        if arrived > self._most_arrived:
            self._most_arrived = arrived
            self._forget()
        self._measure(reading, now_s)
        if is_paused:
            self._forget()
            # As at a run's start: the first update after it may begin late.
            self._before = self._computed_s = None
        if not bounds.least <= wanted <= bounds.most:
            inside = min(max(wanted, bounds.least), bounds.most)
            outcome = DemandOutcome.GROW if inside > wanted else DemandOutcome.SHRINK
            return Decision(inside, outcome, f"{wanted} is outside of {bounds.least} to {bounds.most}")
        if is_paused:
            return Decision(wanted, DemandOutcome.PAUSED, "an operator has paused admission")
        return self._judge(reading, wanted)

    # -- measurement -------------------------------------------------------------------------------

    @property
    def _grow_after_s(self) -> float:
        return self.bounds.grow_after_s * self._caution

    @property
    def _shrink_after_s(self) -> float:
        return self.bounds.shrink_after_s * self._patience

    def _begin_anew(self, reading: Reading, wanted: int) -> None:
        self._wanted, self._most_arrived = wanted, reading.num_arrived - reading.num_guests
        self._forget()

    def _forget(self) -> None:
        self._spans.clear()
        self._now, self._stretch = None, _MeasuredTime()

    def _measure(self, reading: Reading, now_s: float) -> None:
        before, self._seen_s = self._seen_s, now_s
        tokens = math.fsum(max(0.0, many - self._sampled.get(name, many)) for name, many in reading.sampled.items())
        self._sampled = reading.sampled
        if reading.version < 0:
            self._version, self._now, self._stretch = -1, None, _MeasuredTime()
            return
        if before is not None:
            length_s = min(now_s - before, _MAX_STEP_S)
            step = _MeasuredTime(
                length_s=length_s,
                waited_s=length_s * reading.is_waiting,
                arrived_s=length_s * reading.num_arrived,
                busy_s=length_s * reading.num_busy,
                held_up_s=length_s * reading.num_held_up,
                tokens=tokens,
            )
            if self._now is not None:
                self._now += step
            self._stretch = self._stretch + step if reading.is_waiting else _MeasuredTime()
        if reading.version != self._version:
            self._end_cycle()
            self._version = reading.version

    def _end_cycle(self) -> None:
        if self._now is None or self._version < 0:
            # It began before the measurement.
            self._now = _MeasuredTime()
            return
        self._now += _MeasuredTime(num_cycles=1)
        self._computed_s = (self._now.length_s - self._now.waited_s) / self._now.num_cycles
        longest_s = max(self._grow_after_s, self._shrink_after_s)
        if self._now.length_s < longest_s / _MAX_SPANS:
            return
        self._spans.append(self._now)
        self._now = _MeasuredTime()
        while len(self._spans) > 2 and sum(span.length_s for span in self._spans) - self._spans[0].length_s > longest_s:
            self._spans.popleft()

    def _newest(self, length_s: float, num_cycles: int) -> _MeasuredTime | None:
        """Return the sum of the newest whole cycles of a length; None while there are fewer."""
        total = _MeasuredTime()
        for span in reversed(self._spans):
            total += span
            if total.length_s >= length_s and total.num_cycles >= num_cycles:
                return total
        return None

    def _starved(self) -> _MeasuredTime | None:
        """Return the present wait with one computation, if it is long enough to be judged."""
        waited = self._stretch
        if self._computed_s is None:
            # The first update may begin late for many reasons.
            return waited if waited.length_s >= _DEEP * self._grow_after_s else None
        if waited.length_s < max(self._grow_after_s, _DEEP * self._computed_s):
            return None
        longer = 1.0 + self._computed_s / waited.length_s
        return _MeasuredTime(
            length_s=longer * waited.length_s,
            waited_s=waited.waited_s,
            arrived_s=longer * waited.arrived_s,
            busy_s=longer * waited.busy_s,
            held_up_s=longer * waited.held_up_s,
            tokens=longer * waited.tokens,
        )

    # -- decisions ---------------------------------------------------------------------------------

    def _judge(self, reading: Reading, wanted: int) -> Decision:
        span = self._starved() or self._newest(self._grow_after_s, 2)
        if span is None or reading.version < 0:
            return Decision(wanted, DemandOutcome.MEASURING, "over the next updates")
        arrived, in_all = span.arrived, wanted + reading.num_guests
        # A first cycle fills what generators may be ahead, and is over.
        needs_more = span.num_cycles == 0 or self._spans[-1].need > _GROW_ABOVE * self._spans[-1].arrived
        if (needs_more and span.need > _GROW_ABOVE * arrived) or arrived == 0.0:
            target = math.ceil(max(1.0, min(span.need, max(_MOST_GROWTH * arrived, arrived + 1.0))))
            if target > in_all:
                return self._grow(reading, wanted, span, target)
            if reading.num_arrived < in_all:
                waits = f"{in_all - reading.num_arrived} of {in_all} generators have not arrived"
                return Decision(wanted, DemandOutcome.NOT_ARRIVED, f"{span.in_words()}; {waits}")
        return self._shrink_or_stay(reading, wanted, span)

    def _grow(self, reading: Reading, wanted: int, span: _MeasuredTime, target: int) -> Decision:
        if span.is_held_up:
            return Decision(wanted, DemandOutcome.HELD_UP, f"{span.in_words()}, and they wait for scorers or weights")
        if (taken_back := self._taken_back(reading, wanted, span)) is not None:
            return taken_back
        more = min(target - reading.num_guests, self.bounds.most)
        if more <= wanted:
            return Decision(
                wanted, DemandOutcome.AT_MOST, f"{span.in_words()}; fleet.max_generators is {self.bounds.most}"
            )
        if self._has_shrunk:
            self._patience, self._has_shrunk = 2.0 * self._patience, False
        self._before = (span.arrived, span.rate)
        return Decision(more, DemandOutcome.GROW, span.in_words())

    def _taken_back(self, reading: Reading, wanted: int, span: _MeasuredTime) -> Decision | None:
        """Return the end of a growth that was for nothing; None if it was not."""
        (arrived, rate), self._before = self._before or (0.0, 0.0), None
        if not 0.0 < arrived < span.arrived or span.rate >= rate * (1.0 + _LEAST_GAIN * (span.arrived / arrived - 1.0)):
            return None
        fewer = max(self.bounds.least, round(arrived) - reading.num_guests)
        if fewer >= wanted:
            return None
        self._caution *= _CAUTION
        slower = (
            f"{span.arrived:.3g} generators sample {span.rate:,.0f} tokens/s, and {arrived:.3g} sampled {rate:,.0f}"
        )
        return Decision(fewer, DemandOutcome.SHRINK, slower)

    def _shrink_or_stay(self, reading: Reading, wanted: int, span: _MeasuredTime) -> Decision:
        self._before = None
        longer = self._newest(self._shrink_after_s, 2)
        if longer is None or longer.is_held_up:
            return Decision(wanted, DemandOutcome.ENOUGH, span.in_words())
        if longer.need < _SHRINK_BELOW * (wanted + reading.num_guests - 1):
            fewer = max(self.bounds.least, math.ceil(longer.need / _SHRINK_BELOW) - reading.num_guests)
            if fewer < wanted:
                self._has_shrunk = True
                return Decision(fewer, DemandOutcome.SHRINK, longer.in_words())
        return Decision(wanted, DemandOutcome.ENOUGH, span.in_words())


def reading_of(beats: Iterable[Heartbeat], own: Iterable[str]) -> Reading:
    """Return the reading of a fleet's heartbeats. ``own``: the names that the plan has."""
    live = [beat for beat in beats if not is_silent(beat.silent_s) and beat.waiting_for not in _AWAY]
    learner = next((beat for beat in live if beat.who.role is Role.LEARNER), None)
    arrived = [beat for beat in live if beat.who.role is Role.GENERATOR and beat.policy_version >= 0]
    names = frozenset(own)
    return Reading(
        version=-1 if learner is None else max(0, learner.policy_version),
        is_waiting=learner is not None and learner.waiting_for is WaitingFor.INPUT,
        num_arrived=len(arrived),
        num_busy=math.fsum(_used(beat) for beat in arrived),
        num_held_up=sum(beat.waiting_for in _HOLDING_UP for beat in arrived),
        sampled={beat.who.worker: beat.counters.get("sampled_tokens", 0.0) for beat in arrived},
        num_guests=sum(beat.who.worker not in names for beat in arrived),
    )


def _used(generator: Heartbeat) -> float:
    """Return the share of a generator's slots that sample."""
    if generator.waiting_for in _IDLE | _HOLDING_UP:
        return 0.0
    slots = generator.counters.get("slots", 0.0)
    return min(1.0, generator.counters.get("live", 0.0) / slots) if slots else 1.0


# Keeps a run's desired number of generators at what its learner needs (``autoscaler``).
#
# Heartbeats and the desired fleet lead to the next desired fleet in the registry, as by `headrace
# scale`, with the reason. A number that was set by hand stays, until `headrace scale
# generator=auto`.

_TOLD_EVERY_S = 10.0

log = structlog.get_logger(__name__)


class GeneratorDemand:
    """The generators of one run, by demand, if ``fleet.max_generators`` is given."""

    def __init__(self, config: RunConfig) -> None:
        fleet = config.fleet
        self._bounds = None
        if fleet.max_generators is not None:
            limits = (fleet.min_generators, fleet.max_generators)
            self._bounds = Bounds(*limits, fleet.grow_after_s, fleet.shrink_after_s)
        self._autoscaler: Autoscaler | None = None
        self._outcome: DemandOutcome | None = None
        self._next_told_s = 0.0
        self._last = ""
        """The last change, in words."""

    async def follow(
        self,
        registry: Registry,
        fleet: Fleet,
        beats: Sequence[Heartbeat],
        own: Iterable[str],
        now_s: float,
        *,
        is_paused: bool = False,
    ) -> Fleet:
        """Return the fleet that is wanted from now on. ``own``: the workers of the plan.
        ``is_paused``: whether an operator has paused admission."""
        if self._bounds is None or fleet.is_by_hand:
            self._autoscaler = None
            return fleet
        if self._autoscaler is None:
            self._autoscaler = Autoscaler(self._bounds)
        present = fleet.counts.get(Role.GENERATOR, 0)
        decision = self._autoscaler.evaluate(reading_of(beats, own), present, now_s, is_paused=is_paused)
        is_change = decision.wanted != present
        is_news = decision.outcome is not self._outcome
        if not (is_change or is_news or now_s >= self._next_told_s):
            return fleet
        last = f"; changed from {present}, since {decision.reason}" if is_change else self._last
        words = self._in_words(decision, last)
        wanted = replace(resized(fleet, {Role.GENERATOR: decision.wanted}), demand=words)
        # Another command may have changed the fleet; then the next poll decides.
        if wanted == fleet or not await registry.replace_fleet(fleet, wanted):
            return fleet
        self._outcome, self._next_told_s, self._last = decision.outcome, now_s + _TOLD_EVERY_S, last
        if is_change:
            log.warning("generators_scaled", before=present, wanted=decision.wanted, reason=decision.reason)
        elif is_news and decision.outcome not in (DemandOutcome.ENOUGH, DemandOutcome.MEASURING, DemandOutcome.PAUSED):
            log.info("generators_not_scaled", wanted=present, outcome=decision.outcome, reason=decision.reason)
        return wanted

    def _in_words(self, decision: Decision, last: str) -> str:
        bounds = self._bounds
        limits = "" if bounds is None else f" ({bounds.least} to {bounds.most})"
        now = (
            ""
            if decision.outcome in (DemandOutcome.GROW, DemandOutcome.SHRINK)
            else f", {decision.outcome}; {decision.reason}"
        )
        return f"generators by demand{limits}: {decision.wanted} wanted{now}{last}"
