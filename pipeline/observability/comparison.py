"""Runs side by side: what differs, accuracy at equal cost, and which differences are significant.

Runs with the same settings but for their seed form one configuration. Several runs give a mean with a
t-interval, or with the widest interval of a single run (over its prompts) if that is wider. A difference
is called significant only if the 95 % intervals do not overlap, at the same update and on the same
held-out prompts; otherwise the comparison says that none is. Only ``read_runs`` does I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.files.records import skipped_words
from pipeline.observability.estimates import Estimate, difference_of, mean_of, overlap, paired_difference
from pipeline.observability.fleet_history import RoleUse
from pipeline.observability.history import EvaluationRow
from pipeline.observability.prompt_accuracies import (
    EVALUATIONS_NAME,
    PromptAccuracies,
    newest_of,
    prompt_accuracies,
)
from pipeline.observability.report_data import RunRecords, read_records

_RUN_KEYS = frozenset({"run.name", "run.dir", "run.seed", "ledger.url", "supervisor.metrics_port"})
"""Settings in which runs of one configuration may differ."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One evaluation of the main set, and when in training it was made."""

    update: int
    num_tokens: int
    """Tokens trained up to then."""
    train_s: float
    """Learner time up to then, in seconds, without the time between starts."""
    accuracy: Estimate
    """Low and high equal the value if there is no interval, as in older versions."""
    has_interval: bool
    num_responses: int
    prompts: PromptAccuracies | None
    """Accuracy of each prompt, if recorded."""
    digest: str
    """Digest of the held-out prompts: its own, else the newest recorded; empty if there is none."""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run of a comparison."""

    folder: Path
    name: str
    settings: Mapping[str, Any]
    """Settings by ``section.key``, without those of the individual run."""
    seed: int | None
    algorithm: str
    records: RunRecords
    curve: Sequence[CurvePoint]
    num_tokens: int
    train_s: float

    @property
    def num_updates(self) -> int:
        return len(self.records.updates)

    @property
    def tokens_per_s(self) -> float | None:
        """Trained tokens per second of learner time."""
        return self.num_tokens / self.train_s if self.train_s else None

    @property
    def staleness_mean(self) -> float | None:
        """Mean over the updates, in versions."""
        updates = self.records.updates
        return sum(row.staleness_mean for row in updates) / len(updates) if updates else None

    @property
    def staleness_max(self) -> int | None:
        """Maximum over the updates, in versions."""
        return max((row.staleness_max for row in self.records.updates), default=None)

    @property
    def wait_share(self) -> float | None:
        """Share of the learner's time spent waiting for units."""
        return sum(row.wait_s for row in self.records.updates) / self.train_s if self.train_s else None

    @property
    def dropped(self) -> Mapping[str, float]:
        """Share of admitted groups that was dropped, by reason; empty if not recorded."""
        last = self.records.fleet[-1] if self.records.fleet else None
        if last is None or not last.num_groups_admitted:
            return {}
        return {reason: number / last.num_groups_admitted for reason, number in last.num_groups_dropped.items()}

    @property
    def uses(self) -> list[RoleUse]:
        return self.records.uses

    def notes(self) -> Iterator[str]:
        """Yield what the comparison lacks for this run."""
        if not self.curve:
            yield "no evaluation of held-out prompts"
        elif self.records.num_wanted is not None and self.num_updates < self.records.num_wanted:
            yield f"{self.num_updates:,} of {self.records.num_wanted:,} updates"
        if self.curve and not self.curve[-1].has_interval:
            yield "its accuracies have no interval (older version), so it alone cannot show a significant difference"
        if not self.records.fleet:
            yield "no record of drops, or of how each role used its time"
        if self.curve and all(point.prompts is None for point in self.curve):
            yield "no accuracy per prompt is recorded, so its differences cannot be paired"
        for name, number in self.records.skipped.items():
            yield skipped_words(number, name)


def read_run(folder: Path, name: str) -> RunFigures:
    """Read a run's folder; ``name`` is what it is called in the comparison."""
    records = read_records(folder)
    prompts, num_skipped = prompt_accuracies(folder).read()
    if num_skipped:
        records = replace(records, skipped={**records.skipped, EVALUATIONS_NAME: num_skipped})
    times = list(accumulate(row.seconds for row in records.updates))
    tokens = list(accumulate(row.num_trained_tokens for row in records.updates))
    return RunFigures(
        folder=folder,
        name=name,
        settings={key: value for key, value in flat(records.settings) if key not in _RUN_KEYS},
        seed=records.seed,
        algorithm=str(records.setting("algorithm", "name") or ""),
        records=records,
        curve=_curve(records, tokens, times, prompts),
        num_tokens=tokens[-1] if tokens else 0,
        train_s=times[-1] if times else 0.0,
    )


def _curve(
    records: RunRecords, tokens: Sequence[int], times: Sequence[float], prompts: Sequence[PromptAccuracies]
) -> list[CurvePoint]:
    places = {row.policy_version: place for place, row in enumerate(records.updates)}
    found: list[CurvePoint] = []
    rows = [(row, newest_of(prompts, row.number, row.policy_version)) for row in records.main_evaluations]
    digest = next((each.digest for _, each in reversed(rows) if each is not None), "")
    for row, of_prompts in rows:
        place = places.get(row.policy_version)
        if place is None and row.policy_version > min(places, default=0):
            # Its update is missing from the history because of a damaged line.
            continue
        found.append(
            CurvePoint(
                update=0 if place is None else records.updates[place].update,
                num_tokens=0 if place is None else tokens[place],
                train_s=0.0 if place is None else times[place],
                accuracy=_estimate(row),
                has_interval=row.low is not None and row.high is not None,
                num_responses=row.num_responses,
                prompts=of_prompts,
                digest=digest if of_prompts is None else of_prompts.digest,
            )
        )
    return found


def _estimate(row: EvaluationRow) -> Estimate:
    low, high = row.low, row.high
    return Estimate(row.accuracy, row.accuracy if low is None else low, row.accuracy if high is None else high)


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested settings as ``section.key``."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}.")
        else:
            yield name, value


_MOST_PAIRS = 20
_ABSENT = "(not set)"
_NOT_TRAINING = ("sinks.", "tracing.", "samples.")
"""Sections that do not affect training."""


@dataclass(frozen=True, slots=True)
class Basis:
    """One measure of cost at which the runs are compared, and their accuracy there."""

    name: str
    """``updates``, ``tokens`` or ``seconds``."""
    limit: float
    """The largest cost that every run with an evaluation has reached; for updates, the newest update
    that all of them have evaluated, if there is one."""
    points: tuple[CurvePoint | None, ...]
    """Each run's newest evaluation up to the limit, or None."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Runs with the same settings, except for the seed and what does not affect training. A setting
    missing from a run's file counts as its default."""

    name: str
    """``A``, ``B`` ..."""
    runs: tuple[int, ...]
    """Indices among the compared runs."""
    accuracy: Estimate | None
    """Accuracy at equal updates: for one run with its own interval, for several the mean with its
    t-interval, or with the widest interval of a single run if that is wider, because a few seeds may
    agree by chance. None if there is no interval of either kind."""
    is_of_seeds: bool
    """Whether the interval is over runs rather than over the prompts of one run."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Accuracy of the second configuration minus that of the first, at equal updates."""

    first: str
    second: str
    value: float
    interval: Estimate | None
    """Welch's interval, if both configurations' intervals are over runs."""
    paired: Estimate | None
    """Estimate paired by held-out prompt; None if the data do not allow it."""
    num_prompts: int
    """Number of paired prompts."""
    is_called: bool
    """Whether it is significant: the intervals do not overlap, at one update and on equal prompts."""
    words: str


@dataclass(frozen=True, slots=True)
class Comparison:
    runs: Sequence[RunFigures]
    differing: Mapping[str, tuple[str, ...]]
    """Settings that differ, by key: each run's value in words."""
    lacking: Mapping[str, tuple[str, ...]]
    """Settings that some runs lack and that are equal in the others, in the same form."""
    bases: Sequence[Basis]
    configurations: Sequence[Configuration]
    differences: Sequence[Difference]
    notes: Sequence[str]
    """Sentences about missing records."""


def read_runs(folders: Sequence[Path]) -> list[RunFigures]:
    """Read the runs; runs with the same name are called by their folders."""
    names = [folder.resolve().name for folder in folders]
    return [
        read_run(folder, name if names.count(name) == 1 else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]


def compare_runs(runs: Sequence[RunFigures]) -> Comparison:
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
    """Return the newest update that every run with evaluations has evaluated, or None."""
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
    for place, settings in enumerate(_training_settings(runs)):
        same = next((group for first, group in groups if first == settings), None)
        groups.append((settings, [place])) if same is None else same.append(place)
    return [_configuration(chr(ord("A") + number), tuple(group), at) for number, (_, group) in enumerate(groups)]


def _training_settings(runs: Sequence[RunFigures]) -> list[dict[str, Any]]:
    """Return each run's settings that affect training. A key that only other runs have gets its default,
    since a newer version's settings do not change an older run."""
    keys = {key for run in runs for key in run.settings if not key.startswith(_NOT_TRAINING)}
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
    found = of_seeds if is_of_seeds else widest and _moved_to(fmean(values), widest)
    if found is not None:
        found = Estimate(found.value, max(0.0, found.low), min(1.0, found.high))
    return Configuration(name, runs, found, is_of_seeds)


def _width(found: Estimate) -> float:
    return found.high - found.low


def _moved_to(value: float, found: Estimate) -> Estimate:
    """Shift an interval to be around another value."""
    return Estimate(value, found.low + value - found.value, found.high + value - found.value)


def _points(runs: Sequence[int], at: Basis) -> list[CurvePoint]:
    return [point for place in runs if (point := at.points[place]) is not None]


def _difference(one: Configuration, other: Configuration, at: Basis) -> Difference:
    assert one.accuracy is not None and other.accuracy is not None
    ones, others = _points(one.runs, at), _points(other.runs, at)
    value = other.accuracy.value - one.accuracy.value
    hindrance = _why_incomparable(ones, others)
    if hindrance is not None:
        words = f"{one.name} and {other.name} cannot be compared: {hindrance}."
        return Difference(one.name, other.name, value, None, None, 0, False, words)
    values = [[point.accuracy.value for point in points] for points in (ones, others)]
    interval = difference_of(*values) if one.is_of_seeds and other.is_of_seeds else None
    paired = _paired(ones, others)
    is_called = not overlap(one.accuracy, other.accuracy)
    words = _verdict(one, other, value, is_called=is_called)
    words += f" Both accuracies are from update {ones[0].update:,}."
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


def _why_incomparable(ones: Sequence[CurvePoint], others: Sequence[CurvePoint]) -> str | None:
    """Return why accuracies cannot be compared, or None."""
    if len({point.digest for point in (*ones, *others)} - {""}) > 1:
        return "their held-out prompts differ"
    if len({point.update for point in (*ones, *others)}) > 1:
        first, second = (
            ", ".join(f"{update:,}" for update in sorted({point.update for point in points}))
            for points in (ones, others)
        )
        return f"no update was evaluated in all runs, and these accuracies are from updates {first} and {second}"
    return None


def _verdict(one: Configuration, other: Configuration, value: float, *, is_called: bool) -> str:
    assert one.accuracy is not None and other.accuracy is not None
    spans = f"{_span(one.accuracy)} and {_span(other.accuracy)}"
    if is_called:
        way = "higher" if value > 0 else "lower"
        by = f"{abs(100 * value):.1f} points {way} than {one.name}"
        return f"{other.name} is {by}: the 95 % intervals {spans} do not overlap."
    return f"No significant difference between {one.name} and {other.name}: the 95 % intervals {spans} overlap."


def _span(found: Estimate) -> str:
    return f"{100 * found.low:.1f} to {100 * found.high:.1f}"


def _points_in_words(found: Estimate) -> str:
    return f"{100 * found.value:+.1f} points, 95 % {100 * found.low:+.1f} to {100 * found.high:+.1f}"


def _paired(ones: Sequence[CurvePoint], others: Sequence[CurvePoint]) -> tuple[Estimate, int] | None:
    """Return the paired difference, where a prompt's accuracy is the mean over the runs."""
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
