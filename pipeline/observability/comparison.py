"""Runs side by side: what differs, accuracy at equal cost, and which differences can be called.

Runs whose settings are the same but for their seed are one configuration. Several of them give a
mean with a t-interval, or the widest interval of one over its prompts where that is wider. A
difference is called only where the 95 % intervals do not overlap, at one update and on the same
held-out prompts. Else the comparison states that none is called. Pure, but for ``read_runs``."""

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
_BESIDE_TRAINING = ("sinks.", "tracing.", "samples.")
"""Sections that change nothing of what is trained."""


@dataclass(frozen=True, slots=True)
class Basis:
    """One cost that is equal between the runs, and their accuracy there."""

    name: str
    """``updates``, ``tokens`` or ``seconds``."""
    limit: float
    """The largest that all runs with an evaluation have reached; of updates, the newest that all of
    them have evaluated, where there is one."""
    points: tuple[CurvePoint | None, ...]
    """Of each run, its newest evaluation up to the limit; None without one."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Runs with the same settings, but for the seed and what changes nothing of the training. A
    setting that a run's file lacks counts as its default."""

    name: str
    """``A``, ``B`` ..."""
    runs: tuple[int, ...]
    """Their places among the compared runs."""
    accuracy: Estimate | None
    """At equal updates: of one run its own interval, of several the mean's t-interval. Where the
    widest own interval of the runs is wider, the mean has that: few seeds may agree by chance. None
    without an interval of either kind."""
    is_of_seeds: bool
    """Whether the interval is over runs; else over the prompts of one run."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The second configuration less the first, in accuracy at equal updates."""

    first: str
    second: str
    value: float
    interval: Estimate | None
    """Welch's, where the intervals of both are over runs."""
    paired: Estimate | None
    """By the same held-out prompts; None where the data do not allow it."""
    num_prompts: int
    """That are paired."""
    is_called: bool
    """Whether the intervals of both do not overlap, at one update, on the same held-out prompts."""
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
        _basis("updates", runs, lambda point: point.update, limit=_common_update(runs)),
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


def _common_update(runs: Sequence[RunFigures]) -> int | None:
    """Return the newest update that all runs with evaluations have evaluated; None without one."""
    evaluated = [{point.update for point in run.curve} for run in runs if run.curve]
    return max(set[int].intersection(*evaluated), default=None) if evaluated else None


def _basis(
    name: str, runs: Sequence[RunFigures], place: Callable[[CurvePoint], float], *, limit: float | None = None
) -> Basis:
    if limit is None:
        limit = min((place(run.curve[-1]) for run in runs if run.curve), default=0.0)
    points = [[point for point in run.curve if place(point) <= limit] for run in runs]
    return Basis(name, limit, tuple(found[-1] if found else None for found in points))


def _configurations(runs: Sequence[RunFigures], at: Basis) -> list[Configuration]:
    groups: list[tuple[dict[str, Any], list[int]]] = []
    for place, settings in enumerate(_of_training(runs)):
        same = next((group for first, group in groups if first == settings), None)
        groups.append((settings, [place])) if same is None else same.append(place)
    return [_configuration(chr(ord("A") + number), tuple(group), at) for number, (_, group) in enumerate(groups)]


def _of_training(runs: Sequence[RunFigures]) -> list[dict[str, Any]]:
    """Return each run's settings of the training. A key that only other runs have is the default: a
    newer version's settings change nothing of an older run."""
    keys = {key for run in runs for key in run.settings if not key.startswith(_BESIDE_TRAINING)}
    return [_filled(run, keys) for run in runs]


def _filled(run: RunFigures, keys: set[str]) -> dict[str, Any]:
    defaults: Mapping[str, Any] = {}
    if not keys <= run.settings.keys():
        # the schema's import takes 0.2 s, and most comparisons do not need it
        from pipeline.config.describe import defaults_of

        defaults = defaults_of(run.algorithm)
    return {key: run.settings.get(key, defaults.get(key, _ABSENT)) for key in keys}


def _configuration(name: str, runs: tuple[int, ...], at: Basis) -> Configuration:
    points = _points(runs, at)
    values = [point.accuracy.value for point in points]
    of_seeds = mean_of(values)
    own = [point.accuracy for point in points if point.has_interval]
    widest = max(own, key=_width, default=None)
    is_of_seeds = of_seeds is not None and (widest is None or _width(of_seeds) >= _width(widest))
    found = of_seeds if is_of_seeds else widest and _around(fmean(values), widest)
    if found is not None:
        found = Estimate(found.value, max(0.0, found.low), min(1.0, found.high))
    return Configuration(name, runs, found, is_of_seeds)


def _width(found: Estimate) -> float:
    return found.high - found.low


def _around(value: float, found: Estimate) -> Estimate:
    """Return the interval, moved to another value."""
    return Estimate(value, found.low + value - found.value, found.high + value - found.value)


def _points(runs: Sequence[int], at: Basis) -> list[CurvePoint]:
    return [point for place in runs if (point := at.points[place]) is not None]


def _difference(one: Configuration, other: Configuration, at: Basis) -> Difference:
    assert one.accuracy is not None and other.accuracy is not None
    ones, others = _points(one.runs, at), _points(other.runs, at)
    value = other.accuracy.value - one.accuracy.value
    hindrance = _hindrance(ones, others)
    if hindrance is not None:
        words = f"No difference between {one.name} and {other.name} is called: {hindrance}."
        return Difference(one.name, other.name, value, None, None, 0, False, words)
    values = [[point.accuracy.value for point in points] for points in (ones, others)]
    interval = difference_of(*values) if one.is_of_seeds and other.is_of_seeds else None
    paired = _paired(ones, others)
    is_called = not overlap(one.accuracy, other.accuracy)
    words = _verdict(one, other, value, is_called=is_called)
    words += f" Both accuracies are of update {ones[0].update:,}."
    if interval is not None:
        words += f" Over the runs it is {_points_in_words(interval)} (Welch)."
    if paired is not None:
        found, number = paired
        holds = "which includes 0" if found.low <= 0.0 <= found.high else "which does not include 0"
        words += f" By the same {number:,} held-out prompts, paired, it is {_points_in_words(found)}, {holds}."
        if len(ones) > 1 or len(others) > 1:
            words += " That interval does not include what another seed changes."
    if len(ones) == 1 or len(others) == 1:
        words += " An interval of one run is over its prompts: another seed may move it further."
    return Difference(
        one.name, other.name, value, interval, paired and paired[0], paired[1] if paired else 0, is_called, words
    )


def _hindrance(ones: Sequence[CurvePoint], others: Sequence[CurvePoint]) -> str | None:
    """Return why accuracies cannot be compared; None where they can."""
    if len({point.digest for point in (*ones, *others)} - {""}) > 1:
        return "their held-out prompts differ"
    if len({point.update for point in (*ones, *others)}) > 1:
        first, second = (
            ", ".join(f"{update:,}" for update in sorted({point.update for point in points}))
            for points in (ones, others)
        )
        return f"no update was evaluated in all runs, and these accuracies are of update {first} and of update {second}"
    return None


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
