"""Decides how many generators a run needs. Pure; time is an argument.

Time is divided into the learner's cycles, from one policy version to the next. Over the newest
whole cycles

    need = arrived * busy / (1 - waited)

is the number of generators that would keep the learner busy. ``arrived`` counts generators that
hold weights, which excludes jobs still queued elsewhere. ``busy`` is the share of their time and
slots spent sampling. ``waited`` is the share of time that the learner waits for input. The need
does not depend on the current number, so the number converges, and jobs already requested are not
requested again.

    need > 1.1 arrived               grow to the need, at most to twice the arrived
    need < 0.9 (wanted - 1)          shrink to need / 0.9
    else                             keep the number

Growth takes ``grow_after_s`` and two cycles, the second of which must also need it, or a wait four
times as long as the learner's computation. Shrinking takes ``shrink_after_s`` and two cycles. Each
change restarts the measurement, and so does the arrival of its last generator. A growth that
follows a shrink doubles ``shrink_after_s``. A growth that does not raise the sampling rate is
undone, and makes ``grow_after_s`` eight times as long. The number stays while generators wait for
scorers or weights, and while admission is paused."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import structlog

from pipeline.config.runtime import FleetSection
from pipeline.fleet.state import Worker
from pipeline.runtime.registry.contract import Fleet, WaitingFor
from pipeline.runtime.registry.waits import Stage
from pipeline.supervisor.fleet_edits import resized
from protocol.ids import Role

_GROW_ABOVE = 1.1
_SHRINK_BELOW = 0.9
_MOST_GROWTH = 2.0
_DEEP = 4.0
"""A wait this many times the learner's computation is judged before its cycle ends."""
_HELD_UP = 0.2
"""If generators wait for scorers or weights for more than this share of their time, more generators
would not help."""
_LEAST_GAIN = 0.25
"""A growth is undone if it yields less than this share of the expected rise in tokens/s."""
_MAX_STEP_S = 10.0
"""Longest time counted between two readings; beyond that nothing is known."""

_CAUTION = 8.0
"""Factor on ``grow_after_s`` after each growth that was undone."""
_MAX_SPANS = 64
"""Quick updates are merged into spans of at least 1/64 of the longest measured period."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A run at one moment, according to its heartbeats."""

    version: int
    """The learner's policy version; -1 if no learner works."""
    is_waiting: bool
    """Whether the learner waits for input."""
    num_arrived: int
    """Generators that hold weights, including those of joined hosts."""
    num_busy: float
    """Sum over them of the share of slots in use."""
    num_held_up: int
    """How many of them wait for scorers or weights."""
    sampled: Mapping[str, float]
    """Tokens sampled so far, by generator."""
    num_guests: int = 0
    """How many of them belong to joined hosts rather than to the plan."""


class DemandOutcome(StrEnum):
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
    wanted: int
    outcome: DemandOutcome
    reason: str


@dataclass(frozen=True, slots=True)
class _MeasuredTime:
    """Sums over whole cycles of the learner, in seconds and generator-seconds."""

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
        """Share of time that the learner waited for input."""
        return self.waited_s / self.length_s

    @property
    def arrived(self) -> float:
        return self.arrived_s / self.length_s

    @property
    def busy(self) -> float:
        """Share of their time spent sampling."""
        return self.busy_s / self.arrived_s if self.arrived_s else 0.0

    @property
    def need(self) -> float:
        """Number of generators that would keep the learner busy."""
        return self.arrived * self.busy / max(1.0 - self.waited, 1e-3)

    @property
    def is_held_up(self) -> bool:
        return self.held_up_s > _HELD_UP * self.arrived_s

    @property
    def rate(self) -> float:
        return self.tokens / self.length_s

    def in_words(self) -> str:
        return f"the learner waits {self.waited:.0%} of its time, and {self.arrived:.3g} generators are {self.busy:.0%} busy"


@dataclass(slots=True)
class Autoscaler:
    """Decides the number of generators from what it has measured since the last change."""

    limits: FleetSection
    _spans: deque[_MeasuredTime] = field(default_factory=deque[_MeasuredTime])
    """Whole cycles, newest last."""
    _now: _MeasuredTime | None = None
    """The current cycle; None until a version starts one."""
    _stretch: _MeasuredTime = field(default_factory=_MeasuredTime)
    """The learner's current uninterrupted wait."""
    _version: int = -1
    _computed_s: float | None = None
    """The learner's last known computation time per cycle."""
    _seen_s: float | None = None
    _sampled: Mapping[str, float] = field(default_factory=dict[str, float])
    _wanted: int | None = None
    _most_arrived: int = 0
    _patience: float = 1.0
    """Factor on ``shrink_after_s``."""
    _caution: float = 1.0
    """Factor on ``grow_after_s``."""
    _has_shrunk: bool = False
    _before: tuple[float, float] | None = None
    """Mean arrived generators and tokens/s before the last growth."""

    def evaluate(self, reading: Reading, wanted: int, now_s: float, *, is_paused: bool = False) -> Decision:
        """Take a reading and decide the number of generators.

        ``wanted``: the current number in the plan. ``now_s``: monotonic. ``is_paused``: whether an
        operator has paused admission, when waits say nothing about the need."""
        least, most = self._bounds
        arrived = reading.num_arrived - reading.num_guests
        if wanted != self._wanted or arrived > self._most_arrived:
            self._wanted, self._most_arrived = wanted, arrived
            self._forget()
        self._measure(reading, now_s)
        if is_paused:
            self._forget()
            # as at a run's start: the first update after a pause may begin late
            self._before = self._computed_s = None
        if not least <= wanted <= most:
            inside = min(max(wanted, least), most)
            outcome = DemandOutcome.GROW if inside > wanted else DemandOutcome.SHRINK
            return Decision(inside, outcome, f"{wanted} is outside of {least} to {most}")
        if is_paused:
            return Decision(wanted, DemandOutcome.PAUSED, "an operator has paused admission")
        return self._judge(reading, wanted)

    # -- measurement -------------------------------------------------------------------------------

    @property
    def _bounds(self) -> tuple[int, int]:
        most = self.limits.max_generators
        assert most is not None, "a fleet without a largest number is not scaled by demand"
        return self.limits.min_generators, most

    @property
    def _grow_after_s(self) -> float:
        return self.limits.grow_after_s * self._caution

    @property
    def _shrink_after_s(self) -> float:
        return self.limits.shrink_after_s * self._patience

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
            # the cycle began before the measurement did
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
        """Sum the newest whole cycles up to this length; None if there are not enough yet."""
        total = _MeasuredTime()
        for span in reversed(self._spans):
            total += span
            if total.length_s >= length_s and total.num_cycles >= num_cycles:
                return total
        return None

    def _starved(self) -> _MeasuredTime | None:
        """Return the current wait plus one computation, if it is long enough to judge."""
        waited = self._stretch
        if self._computed_s is None:
            # the first update may begin late for many reasons
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
        # A first cycle may only fill the queue that generators may run ahead by; the newest must agree.
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
        more = min(target - reading.num_guests, self._bounds[1])
        if more <= wanted:
            at_most = f"{span.in_words()}; fleet.max_generators is {self.limits.max_generators}"
            return Decision(wanted, DemandOutcome.AT_MOST, at_most)
        if self._has_shrunk:
            self._patience, self._has_shrunk = 2.0 * self._patience, False
        self._before = (span.arrived, span.rate)
        return Decision(more, DemandOutcome.GROW, span.in_words())

    def _taken_back(self, reading: Reading, wanted: int, span: _MeasuredTime) -> Decision | None:
        """Return the decision that undoes a useless growth; None if it was useful."""
        (arrived, rate), self._before = self._before or (0.0, 0.0), None
        if not 0.0 < arrived < span.arrived or span.rate >= rate * (1.0 + _LEAST_GAIN * (span.arrived / arrived - 1.0)):
            return None
        fewer = max(self._bounds[0], round(arrived) - reading.num_guests)
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
            fewer = max(self._bounds[0], math.ceil(longer.need / _SHRINK_BELOW) - reading.num_guests)
            if fewer < wanted:
                self._has_shrunk = True
                return Decision(fewer, DemandOutcome.SHRINK, longer.in_words())
        return Decision(wanted, DemandOutcome.ENOUGH, span.in_words())


def reading_of(beats: Iterable[Worker], own: Iterable[str]) -> Reading:
    """Build a reading from the fleet's heartbeats. ``own``: names of the plan's workers."""
    live = [beat for beat in beats if not beat.is_silent and beat.waiting_for.is_in_service]
    learner = next((beat for beat in live if beat.who.role is Role.LEARNER), None)
    arrived = [beat for beat in live if beat.who.role is Role.GENERATOR and beat.policy_version >= 0]
    names = frozenset(own)
    return Reading(
        version=-1 if learner is None else max(0, learner.policy_version),
        is_waiting=learner is not None and learner.waiting_for is WaitingFor.INPUT,
        num_arrived=len(arrived),
        num_busy=math.fsum(_used(beat) for beat in arrived),
        num_held_up=sum(beat.waiting_for.stage is Stage.HELD_UP for beat in arrived),
        sampled={beat.who.worker: beat.counters.get("sampled_tokens", 0.0) for beat in arrived},
        num_guests=sum(beat.who.worker not in names for beat in arrived),
    )


def _used(generator: Worker) -> float:
    if generator.waiting_for.stage in (Stage.IDLE, Stage.HELD_UP):
        return 0.0
    slots = generator.counters.get("slots", 0.0)
    return min(1.0, generator.counters.get("live", 0.0) / slots) if slots else 1.0


_TOLD_EVERY_S = 10.0

log = structlog.get_logger(__name__)


class GeneratorDemand:
    """The desired fleet by demand. A number set by hand stays until `headrace scale generator=auto`."""

    def __init__(self, limits: FleetSection) -> None:
        self._limits = limits
        self._autoscaler: Autoscaler | None = None
        self._outcome: DemandOutcome | None = None
        self._next_told_s = 0.0
        self._last = ""

    def decide(
        self, fleet: Fleet, beats: Sequence[Worker], own: Iterable[str], now_s: float, *, is_paused: bool = False
    ) -> Callable[[Fleet], Fleet] | None:
        """Return an edit of the desired fleet: another number, or other words about it; None for none.

        ``own``: names of the plan's workers. ``is_paused``: whether an operator has paused
        admission."""
        if fleet.is_by_hand:
            self._autoscaler = None
            return None
        if self._autoscaler is None:
            self._autoscaler = Autoscaler(self._limits)
        present = fleet.counts.get(Role.GENERATOR, 0)
        decision = self._autoscaler.evaluate(reading_of(beats, own), present, now_s, is_paused=is_paused)
        is_change, is_news = decision.wanted != present, decision.outcome is not self._outcome
        if not (is_change or is_news or now_s >= self._next_told_s):
            return None
        if is_change:
            self._last = f"; changed from {present}, since {decision.reason}"
            log.warning("generators_scaled", before=present, wanted=decision.wanted, reason=decision.reason)
        elif is_news and decision.outcome not in (DemandOutcome.ENOUGH, DemandOutcome.MEASURING, DemandOutcome.PAUSED):
            log.info("generators_not_scaled", wanted=present, outcome=decision.outcome, reason=decision.reason)
        self._outcome, self._next_told_s = decision.outcome, now_s + _TOLD_EVERY_S
        now = "" if is_change else f", {decision.outcome}; {decision.reason}"
        bounds = f"{self._limits.min_generators} to {self._limits.max_generators}"
        words = f"generators by demand ({bounds}): {decision.wanted} wanted{now}{self._last}"

        def change(found: Fleet) -> Fleet:
            # a command has changed it meanwhile: the next poll decides
            if found.is_by_hand or found.counts.get(Role.GENERATOR, 0) != present:
                return found
            return replace(resized(found, {Role.GENERATOR: decision.wanted}), demand=words)

        return change
