"""Finds the order that repeats in the least time, and says what of it is proven.

The period is minimised first, then the latency with that period. Unrolling lets several micro-batches repeat together,
which is shorter where memory is tight."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from pipeline.schedule.blocks import Placement
from pipeline.schedule.bounds import Bounds, critical_path, period_bounds
from pipeline.schedule.repetend import Repetend, unrolled
from pipeline.schedule.solver import Answer, Model, Solution, load_solver
from pipeline.schedule.timetable import Step, Timetable
from protocol.errors import ConfigError

_LATENCY_SHARE = 0.2
"""Of the time limit, kept for the latency."""


class Proof(StrEnum):
    """How much is known of a number that should be least."""

    OPTIMAL = "optimal"
    """It is the least."""
    BOUNDED = "bounded"
    """The least is between the bound and it."""
    UNKNOWN = "unknown"
    """Nothing was found, or nothing is known about less."""


@dataclass(frozen=True)
class Found:
    """What a search found."""

    repetend: Repetend | None
    """None if not even a slow one was found in time."""
    bounds: Bounds
    """Of one micro-batch."""
    period_bound: Fraction
    """Per micro-batch: what no order that repeats after as many micro-batches as were allowed can beat."""
    period_proof: Proof
    latency_bound: int
    """With the repetend's period and micro-batches."""
    latency_proof: Proof
    seconds: float
    num_solves: int

    @property
    def period(self) -> Fraction | None:
        """Per micro-batch."""
        return Fraction(self.repetend.period, self.repetend.unroll) if self.repetend else None


def search(placement: Placement, memory: Sequence[int], *, unroll: int = 1, time_limit_s: float = 60.0) -> Found:
    """Return the order with the least period within the memory limits by device. At most ``unroll`` micro-batches
    repeat together.

    Raises ConfigError for a placement that is wrong, and for limits that no order keeps."""
    load_solver()
    began_s = time.monotonic()
    period_s = time_limit_s * (1 - _LATENCY_SHARE)
    bounds = period_bounds(placement.check(), memory)
    solves = _Solves(memory)
    best = solves.one_at_a_time(placement, began_s + period_s)
    if best is None:
        seconds = time.monotonic() - began_s
        return Found(None, bounds, Fraction(bounds.least), Proof.UNKNOWN, 0, Proof.UNKNOWN, seconds, solves.num)
    least = []
    for num in range(1, unroll + 1):
        now_s = time.monotonic()
        until_s = now_s + (began_s + period_s - now_s) / (unroll - num + 1)
        best, bound = solves.improve(best, unrolled(placement, num), num, until_s)
        least.append(Fraction(bound, num))
    period, least_period = Fraction(best.period, best.unroll), min(least)
    last = solves.lower_latency(best, began_s + time_limit_s)
    repetend = Repetend(placement, best.unroll, best.period, _as_steps(best.work, best.unroll, last.starts))
    return Found(
        repetend,
        bounds,
        least_period,
        Proof.OPTIMAL if least_period == period else Proof.BOUNDED,
        last.bound,
        Proof.OPTIMAL if last.bound == repetend.latency else Proof.BOUNDED,
        time.monotonic() - began_s,
        solves.num,
    )


def _as_steps(work: Placement, unroll: int, starts: Sequence[int]) -> dict[Step, int]:
    size = len(work.blocks) // unroll
    names = [block.name.rpartition("#")[0] if unroll > 1 else block.name for block in work.blocks]
    return {Step(name, place // size): start for place, (name, start) in enumerate(zip(names, starts, strict=True))}


@dataclass(frozen=True)
class _Best:
    """The best order so far, of the work of ``unroll`` micro-batches."""

    work: Placement
    unroll: int
    period: int
    starts: tuple[int, ...]


class _Solves:
    """Models within the memory limits, counted."""

    def __init__(self, memory: Sequence[int]) -> None:
        self._memory = memory
        self.num = 0

    def try_period(self, work: Placement, period: int, seconds: float, memory: Sequence[int] | None = None) -> Solution:
        self.num += 1
        return Model(work, period, memory or self._memory).solve(seconds)

    def one_at_a_time(self, placement: Placement, end_s: float) -> _Best | None:
        """Return an order in which each micro-batch ends before the next begins; None if there was no time.

        If no such order keeps the memory limits, none does, since what other micro-batches hold is never less than
        nothing. Raises ConfigError then."""
        period = sum(block.span for block in placement.blocks)
        solution = self.try_period(placement, period, end_s - time.monotonic())
        if solution.answer is Answer.NONE:
            raise ConfigError(self._too_little(placement, period, end_s))
        return _Best(placement, 1, period, solution.starts) if solution.starts else None

    def improve(self, best: _Best, work: Placement, unroll: int, end_s: float) -> tuple[_Best, int]:
        """Return the best order of ``work`` or the one so far, and what no period of ``work`` is less than."""
        low = period_bounds(work, self._memory).least
        high = -(-best.period * unroll // best.unroll)
        if low >= high:
            return best, high
        self.num += 1
        shorter = Model(work, low, self._memory, most=high - 1).solve(end_s - time.monotonic())
        if shorter.answer is Answer.NONE:
            return best, high
        if shorter.answer is Answer.FOUND:
            best = _Best(work, unroll, shorter.period, shorter.starts)
        return best, max(low, shorter.bound)

    def lower_latency(self, best: _Best, end_s: float) -> Solution:
        """Return the order with the least latency that is found in time, or the same one, with a bound of it."""
        self.num += 1
        model = Model(best.work, best.period, self._memory)
        lower = model.solve(end_s - time.monotonic(), least_latency_from=best.starts)
        return lower if lower.starts else Solution(Answer.FOUND, best.starts, best.period, critical_path(best.work))

    def _too_little(self, placement: Placement, period: int, end_s: float) -> str:
        """Say which block needs more memory than there is, how much more, and the least that works."""

        def more(extra: int) -> Solution:
            return self.try_period(
                placement, period, end_s - time.monotonic(), [limit + extra for limit in self._memory]
            )

        low, high = 1, sum(max(block.memory, 0) for block in placement.blocks)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if more(middle).answer is Answer.FOUND else (middle + 1, high)
        enough = more(high)
        if not enough.starts:
            return f"{placement.name}: no order keeps the memory limits; how much would do was not found in time"
        timetable = Timetable(placement, 1, _as_steps(placement, 1, enough.starts))
        for device, (order, held) in enumerate(zip(timetable.orders, timetable.held, strict=True)):
            for step, most in zip(order, held, strict=True):
                if (over := most - self._memory[device]) > 0:
                    return (
                        f"{placement.name}: block {step.block!r} needs {most} of memory on device {device}, {over} more than "
                        f"the limit of {self._memory[device]}; the least limit that works is {self._memory[device] + high}"
                    )
        raise AssertionError("nothing is over the limits")
