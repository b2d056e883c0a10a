"""Standbys as configured, against cold starts and against an oracle: one weighted time each. Pure.

k of a role's N workers are killed at one moment, and T(k) is the mean time until all are back. A
fleet's time is

    sum over k of w(k) T(k).

w(k) is the probability that exactly k workers fail within a time, given that at least one does. The
largest k is the number of standbys that suffices with 0.99 (``supervisor.standbys.number``). These
weights are scaled to add up to 0.99. The rest, 0.01, is a catastrophe: a fourth of the role, or one
worker more than there are standbys. A role of one worker has k = 1 alone.

The oracle knows each fault in advance: it has as many standbys ready as are about to be killed.

Source: Wan et al., ByteRobust, SOSP 2025 (arXiv 2509.16293): its weighted average, with a
catastrophe of 32 machines at 1 %, of jobs from 128 machines on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil, fsum, inf, isfinite
from operator import itemgetter
from statistics import fmean
from typing import Final

from ops.bench.recover.trials import BASE, RunRecord, Trial
from pipeline.supervisor.standbys.number import chances, num_standbys
from protocol.errors import ConfigError

COLD: Final = "cold"
ORACLE: Final = "oracle"
FLEETS: Final = (COLD, BASE, ORACLE)
SOONER, LONGER = 15.0, 0.05
"""Bars: times sooner than cold, at least; share of time longer than the oracle, at most."""
_CATASTROPHE_WEIGHT = 0.01
_CATASTROPHE_PART = 4
_ROUNDS = 2000
"""Of resampling."""

Weights = Sequence[tuple[int, float]]
Times = Mapping[int, Sequence[float]]
"""Seconds until all were back, by the number of workers struck together."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        words = [f"{each:.3g}" if isfinite(each) else "not seen" for each in (self.value, self.low, self.high)]
        return f"{words[0]} ({words[1]} to {words[2]})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The fleets of one role."""

    role: str
    weighted_s: Mapping[str, Figure]
    """By the fleet's label."""
    sooner: Figure
    """Times that the configured fleet is back sooner than a cold one."""
    longer: Figure
    """Share of the oracle's time by which it takes longer."""


def sufficient(num_workers: int, rate_per_day: float, window_s: float) -> int:
    """Return how many standbys suffice with 0.99, at least one."""
    return max(1, num_standbys(num_workers, rate_per_day, window_s))


def weighted_cases(
    num_workers: int, rate_per_day: float, window_s: float, catastrophe: int | None = None
) -> tuple[tuple[int, float], ...]:
    """Return numbers of workers that are lost together, each with its weight.

    Args:
        num_workers: Of the role.
        rate_per_day: Failures of one worker a day.
        window_s: Time within which failures count as one moment's.
        catastrophe: Workers that a catastrophe strikes; None: the usual number.

    Raises ConfigError for a catastrophe that is none, or strikes more workers than there are."""
    enough = sufficient(num_workers, rate_per_day, window_s)
    several = list(islice(chances(num_workers, rate_per_day, window_s), 1, enough + 1))
    whole = fsum(several)
    if not whole:
        raise ConfigError(f"a worker fails {rate_per_day:g} times a day; expected a rate above 0: set --rate")
    if enough >= num_workers:
        return tuple((k, chance / whole) for k, chance in enumerate(several, start=1))
    struck = max(enough + 1, ceil(num_workers / _CATASTROPHE_PART)) if catastrophe is None else catastrophe
    if not enough < struck <= num_workers:
        raise ConfigError(
            f"--catastrophe is {struck}, where {enough} standbys suffice for {num_workers} workers; expected a number from "
            f"{enough + 1} to {num_workers}"
        )
    scale = (1.0 - _CATASTROPHE_WEIGHT) / whole
    cases = [(k, chance * scale) for k, chance in enumerate(several, start=1)]
    return (*cases, (struck, _CATASTROPHE_WEIGHT))


def strike_times(runs: Iterable[RunRecord]) -> dict[int, list[float]]:
    """Return the seconds from each strike's first onset until all of its workers were back, by
    their number. They are infinite where one was not seen to be."""
    found: dict[int, list[float]] = {}
    for run in runs:
        strikes: dict[int | None, list[Trial]] = {}
        for trial in run.trials:
            strikes.setdefault(trial.strike, []).append(trial)
        for trials in strikes.values():
            first_s = min(trial.onset_s for trial in trials)
            back_s = max(trial.onset_s + _back_s(trial) for trial in trials) - first_s
            found.setdefault(len(trials), []).append(back_s)
    return found


def _back_s(trial: Trial) -> float:
    """Return when a worker was back: a learner by its update, others by their own logs. The
    supervisor's view may be 1.5 s old, which is much of a standby's time."""
    back_s = trial.committed_s if trial.role == "learner" else trial.worked_s
    return inf if back_s is None else back_s


def weighted_s(times: Times, weights: Weights) -> float:
    """Return the weighted time. It is infinite where a case was not struck, or not seen to end."""
    return fsum(weight * (fmean(times[size]) if times.get(size) else inf) for size, weight in weights)


def compared_with_oracle(runs: Sequence[RunRecord]) -> list[Comparison]:
    """Return the comparison of each role that has all three fleets."""
    found = list[Comparison]()
    for role in dict.fromkeys(run.role for run in runs if run.weights):
        own = [run for run in runs if run.role == role and run.weights]
        times = {label: strike_times(run for run in own if run.label == label) for label in FLEETS}
        weights = own[0].weights
        if not all(times.values()):
            continue
        found.append(
            Comparison(
                role,
                {label: _figure(itemgetter(label), times, weights) for label in FLEETS},
                _figure(lambda by: _ratio(by[COLD], by[BASE]), times, weights),
                _figure(lambda by: _ratio(by[BASE], by[ORACLE]) - 1.0, times, weights),
            )
        )
    return found


def _ratio(one: float, other: float) -> float:
    return one / other if isfinite(one) and isfinite(other) else inf


def _figure(of: Callable[[Mapping[str, float]], float], times: Mapping[str, Times], weights: Weights) -> Figure:
    """Return a figure of the fleets' weighted times; strikes are drawn again for its interval."""
    rng = random.Random("oracle")
    value = of({label: weighted_s(own, weights) for label, own in times.items()})
    drawn = list[float]()
    for _ in range(_ROUNDS):
        again = {
            label: {size: rng.choices(strikes, k=len(strikes)) for size, strikes in own.items()}
            for label, own in times.items()
        }
        drawn.append(of({label: weighted_s(own, weights) for label, own in again.items()}))
    drawn.sort()
    return Figure(value, drawn[ceil(0.025 * _ROUNDS) - 1], drawn[ceil(0.975 * _ROUNDS) - 1])


def oracle_tables(runs: Sequence[RunRecord]) -> str:
    """Return each fleet's times by the number of workers struck together, and the comparison, as
    Markdown; "" without a comparison."""
    comparisons = compared_with_oracle(runs)
    if not comparisons:
        return ""
    lines = [
        "| role | fleet | struck together | weight | strikes | all back, mean (s) | least to most (s) |",
        f"|---|---|{'---:|' * 5}",
    ]
    for comparison in comparisons:
        own = [run for run in runs if run.role == comparison.role and run.weights]
        for label in FLEETS:
            times = strike_times(run for run in own if run.label == label)
            for size, weight in own[0].weights:
                strikes = times.get(size, [inf])
                cells = [comparison.role, label, size, f"{weight:.4f}", len(times.get(size, []))]
                cells += [_seconds(fmean(strikes)), f"{_seconds(min(strikes))} to {_seconds(max(strikes))}"]
                lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [
        "",
        "| role | cold, weighted (s) | as configured (s) | oracle (s) | times sooner than cold | longer than the oracle |",
        f"|---|{'---:|' * 5}",
    ]
    for one in comparisons:
        percent = Figure(100.0 * one.longer.value, 100.0 * one.longer.low, 100.0 * one.longer.high)
        cells = [one.role, *(one.weighted_s[label] for label in FLEETS), one.sooner, f"{percent} %"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def oracle_bars(runs: Sequence[RunRecord]) -> dict[str, bool]:
    """Return the bars of each comparison, and whether they hold."""
    found = dict[str, bool]()
    for one in compared_with_oracle(runs):
        found[f"{one.role}: at least {SOONER:g} times sooner than cold"] = SOONER <= one.sooner.value < inf
        found[f"{one.role}: at most {LONGER:.0%} longer than the oracle"] = one.longer.value <= LONGER
    return found


def _seconds(value: float) -> str:
    return f"{value:.2f}" if isfinite(value) else "not seen"
