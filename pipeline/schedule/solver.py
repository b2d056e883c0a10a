"""Modulo scheduling by constraint programming, solved by OR-tools.

In a period of length T every block runs once: it starts at ``s`` within the period, ``k`` periods after its
micro-batch's first one, so at ``S = s + T * k``. What a device does in a period is a circle, and a boolean for each
pair of its blocks says which comes first. All that the memory at a block's start depends on is the lags and these
booleans, so a model knows the memory of the endless schedule exactly. What a block waits for is a difference of lags,
one more where it crosses the end of a period; so T is never multiplied by a variable, and can be one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pipeline.schedule.blocks import Placement
from pipeline.schedule.bounds import least_delays
from protocol.errors import ConfigError

_SEED = 7


class Answer(StrEnum):
    """What solving a model found."""

    FOUND = "found"
    NONE = "none"
    """Proven: no schedule has such a period."""
    OUT_OF_TIME = "out of time"


@dataclass(frozen=True, slots=True)
class Solution:
    """Of a model."""

    answer: Answer
    starts: tuple[int, ...] = ()
    """``S`` of each block, the earliest at 0."""
    period: int = 0
    bound: int = 0
    """Of what was sought: no latency, or no period, is less."""


def load_solver() -> Any:
    """Return OR-tools' module, which takes a second or more to import. Raises ConfigError if it is not installed."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ConfigError("the search needs ortools, which is not installed: pip install 'headrace[plan]'") from None
    return cp_model


class Model:
    """All schedules of one placement with one period, within limits of the memory by device; with ``most``, with any
    period from this one to that, of which the least is sought."""

    def __init__(self, placement: Placement, period: int, memory: Sequence[int], *, most: int = 0) -> None:
        self._placement, self._most = placement, most
        cp = self._model = load_solver().CpModel()
        self._period: Any = cp.new_int_var(period, most, "period") if most else period
        blocks, delays = placement.blocks, least_delays(placement)
        is_sole_source = all(delay is not None for delay in delays[placement.order[0]])
        # a gap in which nothing runs for a period can be shortened by it without more memory; no block is longer than one
        most_lag = 2 * len(blocks)
        self._s = [cp.new_int_var(0, (most or period) - 1, f"s{i}") for i in range(len(blocks))]
        self._k = [cp.new_int_var(0, most_lag * (1 if is_sole_source else 2), f"k{i}") for i in range(len(blocks))]
        # a schedule can be turned on its circle
        first = placement.order[0]
        cp.add(self._s[first] == 0)
        self._first_lag = 0 if is_sole_source else most_lag
        cp.add(self._k[first] == self._first_lag)
        if most:
            for s in self._s:
                cp.add(s < self._period)
            cp.minimize(self._period)
        self._precedes: dict[tuple[int, int], Any] = {}
        for device, places in enumerate(placement.on_device):
            self._take_turns(places)
            self._limit(places, memory[device])
        for before, after, distance in placement.edges:
            if before != after:
                self._wait(before, after, distance)

    def _start(self, place: int) -> Any:
        return self._s[place] + self._period * self._k[place]

    def _wait(self, before: int, after: int, distance: int) -> None:
        """``after`` starts when ``before`` has ended: its lag grows by one for each period boundary that this crosses.

        Said with booleans of what crosses, not with times of up to many periods, which takes ten times as long to refute."""
        cp, period, span = self._model, self._period, self._placement.blocks[before].span
        if (after, before) in self._precedes:
            late = [self._precedes[after, before]]
        else:
            late = [cp.new_bool_var(f"l{before},{after},{n}") for n in range(2)]
            for n, is_late in enumerate(late):
                cp.add(self._s[after] + period * n < self._s[before] + span).only_enforce_if(is_late)
                cp.add(self._s[after] + period * n >= self._s[before] + span).only_enforce_if(is_late.negated())
        cp.add(self._k[after] + distance >= self._k[before] + sum(late))

    def _take_turns(self, places: tuple[int, ...]) -> None:
        """One block at a time on a device's circle."""
        cp, period, blocks = self._model, self._period, self._placement.blocks
        for position, i in enumerate(places):
            for j in places[position + 1 :]:
                if (i, j) in self._precedes:
                    continue
                first = cp.new_bool_var(f"o{i},{j}")
                self._precedes[i, j], self._precedes[j, i] = first, first.negated()
                for a, b, holds in ((i, j, first), (j, i, first.negated())):
                    cp.add(self._s[b] >= self._s[a] + blocks[a].span).only_enforce_if(holds)
                    cp.add(self._s[a] + period >= self._s[b] + blocks[b].span).only_enforce_if(holds)
        spans = [
            cp.new_fixed_size_interval_var(self._s[place] + shift, blocks[place].span, "")
            for place in places
            for shift in ((0,) if self._most else (0, period))
        ]
        cp.add_no_overlap(spans)

    def _limit(self, places: tuple[int, ...], limit: int) -> None:
        """Limit what is held when each block starts: all of what was taken so far less what was given back."""
        blocks = self._placement.blocks
        changes = {place: change for place in places if (change := blocks[place].memory)}
        if not self._most:
            # implied: what is held on average is within the limit
            ends = [self._start(place) + (blocks[place].span if change < 0 else 0) for place, change in changes.items()]
            held = sum(-change * end for end, change in zip(ends, changes.values(), strict=True))
            self._model.add(held <= limit * self._period)
        at_first = -sum(change * self._k[place] for place, change in changes.items())
        for place, change in changes.items():
            if change > 0:
                earlier = [other * self._precedes[first, place] for first, other in changes.items() if first != place]
                self._model.add(at_first + change + sum(earlier) <= limit)

    def solve(self, seconds: float, *, least_latency_from: Sequence[int] = ()) -> Solution:
        """Find a schedule, with the least period of several; or, given the starts of one, that with the least time from
        first start to last end."""
        cp_model = load_solver()
        if least_latency_from:
            self._lower_latency(least_latency_from)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = _SEED
        # these models have little to gain from linear relaxation
        solver.parameters.linearization_level = 0
        solver.parameters.max_time_in_seconds = max(seconds, 0.01)
        status = solver.solve(self._model)
        if status == cp_model.INFEASIBLE:
            return Solution(Answer.NONE)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Solution(Answer.OUT_OF_TIME, bound=round(solver.best_objective_bound) if self._most else 0)
        period = solver.value(self._period)
        starts = [solver.value(s) + period * solver.value(k) for s, k in zip(self._s, self._k, strict=True)]
        bound = round(solver.best_objective_bound) if least_latency_from or self._most else 0
        return Solution(Answer.FOUND, tuple(start - min(starts) for start in starts), period, bound)

    def _lower_latency(self, known: Sequence[int]) -> None:
        cp, period, blocks = self._model, self._period, self._placement.blocks
        turn = self._first_lag * period - known[self._placement.order[0]]
        for s, k, start in zip(self._s, self._k, known, strict=True):
            cp.add_hint(s, (start + turn) % period)
            cp.add_hint(k, (start + turn) // period)
        most = max(start + block.span for start, block in zip(known, blocks, strict=True))
        first = cp.new_int_var(0, period * self._first_lag, "first")
        span = cp.new_int_var(0, most, "span")
        for place, block in enumerate(blocks):
            cp.add(first <= self._start(place))
            cp.add(first + span >= self._start(place) + block.span)
        cp.minimize(span)
