"""Runs side by side: what differs, accuracy at equal cost, and which differences can be called.

Runs whose settings are the same but for their seed are one configuration. Several of them give a
mean with a t-interval. A difference is called only where the 95 % intervals do not overlap: else
the comparison states that none is called. Pure, but for ``read_runs``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.observability.compared_run import CurvePoint, RunFigures, read_run
from pipeline.observability.estimates import Estimate
from pipeline.observability.intervals import difference_of, mean_of, overlap, paired_difference

_MOST_PAIRS = 20
_ABSENT = "(not set)"


@dataclass(frozen=True, slots=True)
class Basis:
    """One cost that is equal between the runs, and their accuracy there."""

    name: str
    """``updates``, ``tokens`` or ``seconds``."""
    limit: float
    """The largest that all runs with an evaluation have reached."""
    points: tuple[CurvePoint | None, ...]
    """Of each run, its newest evaluation up to the limit; None without one."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Runs with the same settings, but for the seed."""

    name: str
    """``A``, ``B`` ..."""
    runs: tuple[int, ...]
    """Their places among the compared runs."""
    accuracy: Estimate | None
    """At equal updates: of one run its own interval, of several the mean's t-interval. None without
    an evaluation."""
    is_of_seeds: bool
    """Whether the interval is over runs; else over the prompts of one run."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The second configuration less the first, in accuracy at equal updates."""

    first: str
    second: str
    value: float
    interval: Estimate | None
    """Welch's, where both have several runs."""
    paired: Estimate | None
    """By the same held-out prompts; None where the data do not allow it."""
    num_prompts: int
    """That are paired."""
    is_called: bool
    """Whether the intervals of both do not overlap."""
    words: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side."""

    runs: Sequence[RunFigures]
    differing: Mapping[str, tuple[str, ...]]
    """Settings that differ, by key: the value of each run, in words."""
    lacking: Mapping[str, tuple[str, ...]]
    """The same of settings that some runs do not have, and that are equal in the others."""
    bases: Sequence[Basis]
    configurations: Sequence[Configuration]
    differences: Sequence[Difference]
    notes: Sequence[str]
    """Sentences on absent records."""


def read_runs(folders: Sequence[Path]) -> list[RunFigures]:
    """Read the runs; those of one name are shown by their folders."""
    names = [folder.resolve().name for folder in folders]
    return [
        read_run(folder, name if names.count(name) == 1 else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]


def compare_runs(runs: Sequence[RunFigures]) -> Comparison:
    """Compare runs, the first with each other, and all configurations in pairs."""
    bases = [
        _basis("updates", runs, lambda point: point.update),
        _basis("tokens", runs, lambda point: point.num_tokens),
        _basis("seconds", runs, lambda point: point.train_s),
    ]
    configurations = _configurations(runs, bases[0])
    pairs = list(combinations([one for one in configurations if one.accuracy is not None], 2))
    differences = [_difference(one, other, bases[0]) for one, other in pairs[:_MOST_PAIRS]]
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes()]
    if len(pairs) > _MOST_PAIRS:
        notes.append(f"{len(pairs)} pairs of configurations: the first {_MOST_PAIRS} are compared")
    found = _differing(runs)
    lacking = {key: values for key, values in found.items() if len({*values} - {_ABSENT}) == 1}
    differing = {key: values for key, values in found.items() if key not in lacking}
    return Comparison(runs, differing, lacking, bases, configurations, differences, notes)


def _differing(runs: Sequence[RunFigures]) -> dict[str, tuple[str, ...]]:
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    found = {key: tuple(_in_words(run.settings.get(key, _ABSENT)) for run in runs) for key in sorted(keys)}
    return {key: values for key, values in found.items() if len({*values}) > 1}


def _in_words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"  # pyright: ignore[reportUnknownArgumentType]
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def _basis(name: str, runs: Sequence[RunFigures], place: Callable[[CurvePoint], float]) -> Basis:
    ends = [place(run.curve[-1]) for run in runs if run.curve]
    limit = min(ends, default=0.0)
    points = [[point for point in run.curve if place(point) <= limit] for run in runs]
    return Basis(name, limit, tuple(found[-1] if found else None for found in points))


def _configurations(runs: Sequence[RunFigures], at: Basis) -> list[Configuration]:
    groups: list[list[int]] = []
    for place, run in enumerate(runs):
        same = next((group for group in groups if runs[group[0]].settings == run.settings), None)
        groups.append([place]) if same is None else same.append(place)
    return [_configuration(_letter(number), tuple(group), at) for number, group in enumerate(groups)]


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"A{number}"


def _configuration(name: str, runs: tuple[int, ...], at: Basis) -> Configuration:
    points = _points(runs, at)
    of_seeds = mean_of([point.accuracy.value for point in points])
    if of_seeds is not None:
        of_seeds = Estimate(of_seeds.value, max(0.0, of_seeds.low), min(1.0, of_seeds.high))
    alone = points[0].accuracy if points and points[0].has_interval else None
    return Configuration(name, runs, of_seeds or alone, of_seeds is not None)


def _points(runs: Sequence[int], at: Basis) -> list[CurvePoint]:
    return [point for place in runs if (point := at.points[place]) is not None]


def _difference(one: Configuration, other: Configuration, at: Basis) -> Difference:
    assert one.accuracy is not None and other.accuracy is not None
    ones, others = _points(one.runs, at), _points(other.runs, at)
    value = other.accuracy.value - one.accuracy.value
    interval = difference_of(*([point.accuracy.value for point in points] for points in (ones, others)))
    paired = _paired(ones, others)
    is_called = not overlap(one.accuracy, other.accuracy)
    words = _verdict(one, other, value, is_called=is_called)
    if interval is not None:
        words += f" Over the runs it is {_points_in_words(interval)} (Welch)."
    if paired is not None:
        found, number = paired
        holds = "which includes 0" if found.low <= 0.0 <= found.high else "which does not include 0"
        words += f" By the same {number:,} held-out prompts, paired, it is {_points_in_words(found)}, {holds}."
    if not (one.is_of_seeds and other.is_of_seeds):
        words += " An interval of one run is over its prompts: another seed may move it further."
    return Difference(
        one.name, other.name, value, interval, paired and paired[0], paired[1] if paired else 0, is_called, words
    )


def _verdict(one: Configuration, other: Configuration, value: float, *, is_called: bool) -> str:
    assert one.accuracy is not None and other.accuracy is not None
    spans = f"{_span(one.accuracy)} and {_span(other.accuracy)}"
    if is_called:
        way = "higher" if value > 0 else "lower"
        by = f"{abs(100 * value):.1f} points {way} than {one.name}"
        return f"{other.name} is {by}: the 95 % intervals {spans} do not overlap."
    return f"No difference between {one.name} and {other.name} is called: the 95 % intervals {spans} overlap."


def _span(found: Estimate) -> str:
    return f"{100 * found.low:.1f} to {100 * found.high:.1f}"


def _points_in_words(found: Estimate) -> str:
    return f"{100 * found.value:+.1f} points, 95 % {100 * found.low:+.1f} to {100 * found.high:+.1f}"


def _paired(ones: Sequence[CurvePoint], others: Sequence[CurvePoint]) -> tuple[Estimate, int] | None:
    """Return the difference by prompts, each prompt's accuracy being the mean of the runs."""
    rows = [point.prompts for point in (*ones, *others)]
    digests = {"" if row is None else row.digest for row in rows}
    if len(digests) != 1 or "" in digests:
        return None
    return paired_difference(_of_prompts(ones), _of_prompts(others))


def _of_prompts(points: Sequence[CurvePoint]) -> list[float | None]:
    columns = [point.prompts.accuracies for point in points if point.prompts is not None]
    return [
        None if any(value is None for value in row) else fmean(value for value in row if value is not None)
        for row in zip(*columns, strict=False)
    ]
