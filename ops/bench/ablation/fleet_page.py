"""The parts of a page whose rows fleets made: accuracy after as many updates, the effects of two
factors, what the critic knew, and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ops.bench.ablation.compare import interval, late_accuracy_of, paired, rows_of
from ops.bench.ablation.runs import Outcome
from ops.bench.ablation.summary import JUDGED, compared, figures, marked
from ops.bench.ablation.window_ends import WindowEnds
from ops.bench.table import prose
from pipeline.config.load import load_config

if TYPE_CHECKING:
    from ops.bench.ablation.tables import Table

_ACCURACY = (
    "Held-out accuracy in per cent, sampled at temperature 1. *At the end* is the mean of the last three evaluations "
    "of {updates} updates; *on the way* is the mean of all, and shows how soon accuracy rises. Figures are means over "
    "seeds with 95 % intervals (Student's t). Tokens trained are those of the whole run, median; entropy is that at its "
    "end. Differences from the first row are paired by seed: a seed has the same prompts in the same order in every "
    f"row. {JUDGED}"
)
_EFFECTS = (
    "Each factor's effect in points, paired by seed: the mean of its two rows minus that of the two without it. "
    "*Together* is their interaction: what the fourth row has beyond the sum of both. Holm's correction is over the "
    "lines of a column."
)
_RACE = (
    "Seconds until the mean of three consecutive evaluations reaches an accuracy, and updates by then; medians over "
    "seeds."
)
_PER_UPDATE = (
    "Per update, medians over seeds. Decode steps, prefill and sampled tokens are those of all generators over the whole "
    "run, divided by its updates."
)
_ENDS = (
    "Measured on the units that rows trained on, at each multiple of {window} tokens after which the response continues, "
    "also within whole responses. The value is that before the window's last token, as the advantages use it, computed "
    "when the chunk was sampled; the return is the response's reward. Lengths are tokens of finished responses. Medians "
    "over seeds, with the range of explained variance."
)
_AT_START = (
    "Before any row the critic explained {explained:.2f} of the variance of returns at {ends} window ends of "
    "{responses:,} fresh responses of the start policy (p50 {p50:.0f} tokens, p99 {p99:.0f}: {ratio:.1f} times)."
)
_ROOT = Path(__file__).parents[3]


def accuracies(table: Table, outcomes: Sequence[Outcome]) -> str:
    """Return each row's accuracy at the end and on the way, and its differences from the first row."""
    rows = rows_of(table, outcomes)
    updates = " to ".join(map(str, sorted({o.curve[-1].update for o in outcomes})))
    kinds = sorted({kind for o in outcomes for point in o.curve for kind in point.accuracy_by_kind}, reverse=True)
    names = ["", "seeds", "tokens trained", "at the end", "difference", "on the way", "difference"]
    names += [f"{kind}: difference at the end" for kind in kinds] + ["entropy", "at the end, each seed"]
    lines = [
        prose(_ACCURACY.format(updates=updates)),
        "",
        "| " + " | ".join(names) + " |",
        "|---|" + "---:|" * (len(names) - 2) + "---|",
    ]
    shown: list[Callable[[Outcome], float]] = [Outcome.late_accuracy, Outcome.mean_accuracy]
    late, mean, *by_kind = (
        ["", *map(marked, compared([paired(of, rows[0][2], reading) for _, _, of in rows[1:]]))]
        for reading in [*shown, *(partial(late_accuracy_of, kind) for kind in kinds)]
    )
    for number, (name, _, of) in enumerate(rows):
        cells = [name, str(len(of)), f"{median(o.trained_tokens for o in of):,.0f}"]
        for reading, column in zip(shown, (late, mean), strict=True):
            cells += [interval(figures([100 * reading(o) for o in of])), column[number]]
        cells += [column[number] for column in by_kind]
        cells.append(f"{figures([o.entropy_last for o in of]).mean:.3f}")
        cells.append(", ".join(f"{100 * o.late_accuracy():.1f}" for o in of))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def effects(table: Table, outcomes: Sequence[Outcome]) -> str:
    """Return the effects of both factors and of their combination, of the seeds that all four rows
    have."""
    found = [{o.seed: o for o in outcomes if o.variant == variant.name} for variant in table.variants]
    seeds = sorted(set.intersection(*map(set, found)))
    if not seeds:
        return "No seed has all four rows."
    one, other = table.factors
    signs = {one: (-0.5, 0.5, -0.5, 0.5), other: (-0.5, -0.5, 0.5, 0.5), "together": (1.0, -1.0, -1.0, 1.0)}
    readings = (Outcome.late_accuracy, Outcome.mean_accuracy)
    columns = [
        compared(
            [
                figures([sum(s * 100 * reading(of[seed]) for s, of in zip(sign, found, strict=True)) for seed in seeds])
                for sign in signs.values()
            ]
        )
        for reading in readings
    ]
    lines = [prose(_EFFECTS), "", "| | seeds | at the end | on the way |", "|---|---:|---:|---:|"]
    for name, *cells in zip(signs, *columns, strict=True):
        lines.append("| " + " | ".join([name, str(len(seeds)), *map(marked, cells)]) + " |")
    return "\n".join(lines)


def window_ends(table: Table, outcomes: Sequence[Outcome], at_start: Mapping[str, Any] | None) -> str:
    """Return what the critic explained before the rows and in each, with the lengths of responses."""
    window = min(load_config([_ROOT / v.config], v.overrides).generation.window_tokens for v in table.variants)
    lines: list[str] = []
    if at_start:
        before = WindowEnds(**at_start)
        told = _AT_START.format(
            explained=before.explained_variance,
            ends=before.num_ends,
            responses=before.num_responses,
            p50=before.length_p50,
            p99=before.length_p99,
            ratio=before.length_p99 / before.length_p50,
        )
        lines += [prose(told), ""]
    lines += [
        prose(_ENDS.format(window=window)),
        "",
        "| | explained variance | window ends | p50 | p99 | p99 / p50 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, _, of in rows_of(table, outcomes):
        ends = [o.window_ends for o in of if o.window_ends is not None]
        if not ends:
            lines.append(f"| {name} | not recorded | | | | |")
            continue
        explained = [one.explained_variance for one in ends if one.num_ends]
        middle = [
            median(values) for values in zip(*((e.num_ends, e.length_p50, e.length_p99) for e in ends), strict=True)
        ]
        ratio = median(e.length_p99 / e.length_p50 for e in ends)
        shown = f"{median(explained):.2f} ({min(explained):.2f} to {max(explained):.2f})" if explained else "no end"
        if 0 < len(explained) < len(ends):
            shown += f", no end in {len(ends) - len(explained)} of {len(ends)} seeds"
        lines.append(f"| {name} | {shown} | {middle[0]:.0f} | {middle[1]:.0f} | {middle[2]:.0f} | {ratio:.1f} |")
    return "\n".join(lines)


def race(table: Table, outcomes: Sequence[Outcome]) -> str:
    """Return how soon each variant reached each target, and its ratio to the first row, seed by
    seed."""
    rows = rows_of(table, outcomes)
    lines = [
        prose(_RACE),
        "",
        "| | " + " | ".join(f"{100 * target:.0f} %" for target in table.targets) + " |",
        "|---|" + "---:|" * len(table.targets),
    ]
    for name, _, of in rows:
        cells = [_reached(of, target) for target in table.targets]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    first, *others = rows
    for name, _, of in others:
        cells = [_speed_up(first[2], of, target) for target in table.targets]
        lines.append(f"| *times sooner than the first row:* {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _reached(of: Sequence[Outcome], target: float) -> str:
    points = [point for o in of if (point := o.reached(target)) is not None]
    never = [inf] * (len(of) - len(points))
    at_s, updates = median([p.at_s for p in points] + never), median([p.update for p in points] + never)
    shown = [f"{at_s:.1f} s ({updates:.0f})"] if isfinite(at_s) else []
    return "; ".join(shown + ([f"{len(points)} of {len(of)} reach it"] if never else []))


def _speed_up(slow: Sequence[Outcome], fast: Sequence[Outcome], target: float) -> str:
    """Return how much sooner ``fast`` reached a target: the median, and each seed.

    Where ``slow`` never reached it, it needed its whole run at least: the ratio is a bound from
    below. Where ``fast`` never reached it, the ratio counts as 0."""
    rivals = {o.seed: o for o in fast}
    ratios: list[tuple[float, bool]] = []
    for o in slow:
        theirs, ours = o.reached(target), rivals[o.seed].reached(target) if o.seed in rivals else None
        if ours is not None:
            ratios.append(((o.train_s if theirs is None else theirs.at_s) / ours.at_s, theirs is None))
        elif theirs is not None:
            ratios.append((0.0, False))
    if not ratios:
        return "–"
    middle = median(ratio for ratio, _ in ratios)
    is_bound = any(ratio <= middle for ratio, bound in ratios if bound)
    return f"**{_ratio(middle, is_bound)}** ({', '.join(_ratio(*ratio) for ratio in ratios)})"


def _ratio(ratio: float, is_bound: bool) -> str:
    return f"{'≥ ' if is_bound else ''}{ratio:.2f}" if ratio else "never"


def phases(table: Table, outcomes: Sequence[Outcome]) -> str:
    """Return where each row's time and tokens went."""
    columns: tuple[tuple[str, Callable[[Outcome], float]], ...] = (
        ("s an update", lambda o: o.train_s / o.curve[-1].update),
        ("learner waits", lambda o: o.phases_s["wait"] / o.curve[-1].update),
        ("learner steps", lambda o: (o.phases_s["step"] + o.phases_s["logprob"]) / o.curve[-1].update),
        ("decode steps", lambda o: o.decode_steps / o.curve[-1].update),
        ("mean live batch", lambda o: o.mean_live),
        ("prefill tokens", lambda o: o.prefill_tokens / o.curve[-1].update),
        ("sampled tokens", lambda o: o.sampled_tokens / o.curve[-1].update),
        ("trained tokens", lambda o: o.trained_tokens / o.curve[-1].update),
        ("staleness", lambda o: o.staleness_mean),
    )
    lines = [
        prose(_PER_UPDATE),
        "",
        "| | " + " | ".join(name for name, _ in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for name, _, of in rows_of(table, outcomes):
        values = [median(figure(o) for o in of) for _, figure in columns]
        lines.append(f"| {name} | " + " | ".join(_number(value) for value in values) + " |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"
