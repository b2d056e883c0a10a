"""A found schedule as a record: what ``headrace schedule --json`` writes and a learner reads."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import msgspec

from pipeline.schedule.baselines import known_orders, measured_period
from pipeline.schedule.blocks import Placement
from pipeline.schedule.bounds import critical_path, least_delays
from pipeline.schedule.play import play
from pipeline.schedule.repetend import Repetend
from pipeline.schedule.search import Found, Proof
from pipeline.schedule.timetable import Step, Timetable
from protocol.errors import ConfigError


class Proven(msgspec.Struct, frozen=True):
    """A number that should be small."""

    value: float
    bound: float
    """It cannot be less than this."""
    proof: Proof


class Start(msgspec.Struct, frozen=True):
    """A step of the first repetition. ``start`` is also its priority, where plans are no fixed order: smaller is first."""

    block: str
    micro_batch: int
    start: int


class Measured(msgspec.Struct, frozen=True):
    """An order of ``micro_batches``, measured."""

    name: str
    period: float
    """By which each further micro-batch makes it longer."""
    makespan: int
    bubble: float
    peaks: tuple[int, ...]
    """Most memory held, by device."""
    fits: bool
    """Whether that is within the limits."""


class Plan(msgspec.Struct, frozen=True):
    """A schedule of ``micro_batches``, and what is known of it."""

    placement: Placement
    memory: tuple[int, ...] | None
    """Limits by device; None: there are none."""
    micro_batches: int
    unroll: int
    """Micro-batches that repeat together."""
    repeats_every: int
    starts: tuple[Start, ...]
    """Of the first repetition."""
    period: Proven
    """Per micro-batch."""
    latency: Proven
    """From a repetition's first start to its last end."""
    bounds: dict[str, int]
    """Least periods of one micro-batch: by work, recurrence and memory."""
    found: Measured
    makespan_bound: int
    """No order of so many micro-batches is shorter."""
    seconds: float
    num_solves: int
    orders: tuple[tuple[Step, ...], ...]
    """What each device runs: block and micro-batch."""
    baselines: tuple[Measured, ...] = ()

    @property
    def repetend(self) -> Repetend:
        starts = {Step(each.block, each.micro_batch): each.start for each in self.starts}
        return Repetend(self.placement, self.unroll, self.repeats_every, starts)


def make_plan(found: Found, num: int, memory: Sequence[int] | None, *, against: bool = False) -> Plan:
    """Return the plan of so many micro-batches, checked by the judge; with ``against``, with the known orders measured.

    Raises ConfigError if nothing was found in time, or there is no micro-batch."""
    if num < 1:
        raise ConfigError(f"{num} micro-batches; expected 1 or more")
    repetend = found.repetend
    if repetend is None:
        raise ConfigError("no order was found in time; give it more with --time-limit")
    placement = repetend.placement
    timetable = repetend.timetable(num)
    timetable.check(memory)
    period = float(Fraction(repetend.period, repetend.unroll))
    by_start = sorted(repetend.starts.items(), key=lambda item: item[1])
    return Plan(
        placement,
        tuple(memory) if memory else None,
        num,
        repetend.unroll,
        repetend.period,
        tuple(Start(step.block, step.micro_batch, start) for step, start in by_start),
        Proven(period, float(found.period_bound), found.period_proof),
        Proven(repetend.latency, found.latency_bound, found.latency_proof),
        {"work": found.bounds.work, "recurrence": found.bounds.recurrence, "memory": found.bounds.memory},
        _measured("found", period, timetable, memory),
        least_makespan(placement, num),
        found.seconds,
        found.num_solves,
        timetable.orders,
        _baselines(placement, num, memory) if against else (),
    )


def read_plan(path: Path) -> Plan:
    """Return what ``headrace schedule --json`` wrote. Raises ConfigError."""
    try:
        plan = msgspec.json.decode(path.read_bytes(), type=Plan)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no plan of headrace schedule --json: {error}") from error
    plan.placement.check()
    return plan


def least_makespan(placement: Placement, num: int) -> int:
    """Return a time that no order of so many micro-batches beats: a device's work, with what must come before its first
    block and after its last one."""
    delays, blocks = least_delays(placement), placement.blocks
    heads = [max(row[place] or 0 for row in delays) for place in range(len(blocks))]
    tails = [max((delay or 0) + blocks[j].span for j, delay in enumerate(row) if delay is not None) for row in delays]
    by_device = [
        min(heads[place] for place in places)
        + num * placement.work(device)
        + min(tails[place] - blocks[place].span for place in places)
        for device, places in enumerate(placement.on_device)
        if places
    ]
    return max(critical_path(placement), *by_device)


def _measured(name: str, period: float, timetable: Timetable, memory: Sequence[int] | None) -> Measured:
    fits = memory is None or all(peak <= limit for peak, limit in zip(timetable.peaks, memory, strict=True))
    return Measured(name, period, timetable.makespan, timetable.bubble, timetable.peaks, fits)


def _baselines(placement: Placement, num: int, memory: Sequence[int] | None) -> tuple[Measured, ...]:
    """Measure the known orders that can do so many micro-batches."""
    rows = []
    for name, order in known_orders(placement).items():
        try:
            timetable = play(placement, order(num))
        except ConfigError:
            continue
        timetable.check()
        rows.append(_measured(name, float(measured_period(placement, order)), timetable, memory))
    return tuple(rows)
