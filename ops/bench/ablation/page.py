"""A comparison as a page: command, seeds, means with intervals, and the accuracy of each seed.

Markdown for people, and JSON with all raw data for programs."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from ops.bench.ablation.runs import Outcome
from ops.bench.ablation.summary import JUDGED, Compared, Figures, compared, figures, interval, marked
from ops.bench.ablation.tables import Table
from ops.bench.table import prose
from pipeline.config.load import load_config

_END = (
    "Accuracy is in per cent on held-out prompts, sampled at temperature 1. *At the end* is the mean of the last three "
    "evaluations of {updates} updates; *on the way* is the mean of all, and shows how soon accuracy rises. Figures are "
    "means over seeds with 95 % intervals (Student's t). Differences from the first row are paired by seed: a seed has "
    f"the same prompts in the same order in every row. {JUDGED}"
)
_EQUAL_TOKENS = (
    "As above, over the evaluations within the first {tokens:,} sampled tokens, the fewest of any run. Tokens of dropped "
    "groups and of value pretraining count."
)
_NOT_RUN = "No row of this table has been trained yet, so there are no accuracies."
_CRITIC = "Explained variance is the critic's at the last update. Medians over seeds."
_SETTINGS = "`--only ROW` trains one row: its run file in one process, with the table's prompts and start model."
_ROOT = Path(__file__).parents[3]
_LIBRARIES = ("torch", "transformers", "redis", "pyzmq")


def as_json(table: Table, outcomes: Sequence[Outcome], command: str) -> dict[str, Any]:
    """Return everything that the page shows, and every curve."""
    return {
        "table": table.name,
        "command": command,
        "machine": _machine(),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def _machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
    }


def as_markdown(table: Table, outcomes: Sequence[Outcome], command: str) -> str:
    machine = prose("Machine: " + ", ".join(f"{name} {value}" for name, value in _machine().items()) + ".")
    parts = [f"# {table.title}", prose(table.about), f"    {command}", machine]
    if outcomes:
        commits = ", ".join(f"`{commit}`" for commit in sorted({o.commit or "unknown" for o in outcomes}))
        parts += [f"Commit of the code: {commits}.", _verdicts(table, outcomes), *_accuracies(table, outcomes)]
        if any(o.value_steps or any(o.explained_variance) for o in outcomes):
            parts += ["## The critic", prose(_CRITIC), _critics(table, outcomes)]
    else:
        parts.append(_NOT_RUN)
    parts += ["## Settings", _differences(table)]
    return "\n\n".join(parts) + "\n"


def rows_of(table: Table, outcomes: Sequence[Outcome]) -> list[tuple[str, str, list[Outcome]]]:
    """Return each row that was trained: its name, the paper's figure, its outcomes."""
    found = [(v.name, v.paper, [o for o in outcomes if o.variant == v.name]) for v in table.variants]
    return [row for row in found if row[2]]


def paired(of: Sequence[Outcome], against: Sequence[Outcome], reading: Callable[[Outcome], float]) -> Figures | None:
    """Return the differences, in points, of the seeds that both rows have; None if they share none."""
    base = {o.seed: reading(o) for o in against}
    found = [100 * (reading(o) - base[o.seed]) for o in of if o.seed in base]
    return figures(found) if found else None


def _critics(table: Table, outcomes: Sequence[Outcome]) -> str:
    lines = ["| | critic's steps before | explained variance |", "|---|---:|---:|"]
    configs = {v.name: load_config([_ROOT / v.config], v.overrides) for v in table.variants}
    for name, _, of in rows_of(table, outcomes):
        if configs[name].has_critic:
            steps, explained = median(o.value_steps for o in of), median(o.explained_variance[-1] for o in of)
            lines.append(f"| {name} | {steps:.0f} | {explained:.2f} |")
    return "\n".join(lines)


def _accuracies(table: Table, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the tables of accuracies after equal numbers of updates, and after equal numbers of sampled tokens."""
    tokens = equal_tokens(outcomes)
    updates = max(point.update for o in outcomes for point in o.curve)
    return [
        "## After as many updates",
        prose(_END.format(updates=updates)),
        _readings(table, outcomes),
        "## After as many sampled tokens",
        prose(_EQUAL_TOKENS.format(tokens=tokens)),
        _readings(table, [o.within(tokens) for o in outcomes]),
    ]


def equal_tokens(outcomes: Sequence[Outcome]) -> int:
    """Return the number of sampled tokens that every run reached."""
    return min(o.curve[-1].tokens for o in outcomes)


def _readings(table: Table, outcomes: Sequence[Outcome]) -> str:
    kinds = sorted({kind for o in outcomes for point in o.curve for kind in point.accuracy_by_kind}, reverse=True)
    columns = ["", "seeds", "updates", "tokens, millions", "at the end", "difference", "on the way", "difference"]
    columns += [f"{kind}: difference at the end" for kind in kinds] + ["at the end, each seed", "paper"]
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 3) + "---|---:|"]
    rows = rows_of(table, outcomes)
    first = rows[0][2]
    readings: list[Callable[[Outcome], float]] = [Outcome.late_accuracy, Outcome.mean_accuracy]
    apart = [
        ["", *map(marked, compared([paired(of, first, reading) for _, _, of in rows[1:]]))]
        for reading in [*readings, *(partial(Outcome.late_accuracy, kind=kind) for kind in kinds)]
    ]
    for number, (name, paper, of) in enumerate(rows):
        late, mean, *by_kind = (column[number] for column in apart)
        cells = [name, str(len(of)), f"{median(o.curve[-1].update for o in of):.0f}"]
        cells.append(f"{median(o.curve[-1].tokens for o in of) / 1e6:.2f}")
        for reading, difference in zip(readings, (late, mean), strict=True):
            cells += [interval(figures([100 * reading(o) for o in of])), difference]
        cells += by_kind
        cells += [", ".join(f"{100 * o.late_accuracy():.1f}" for o in of), paper]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict(difference: Compared | None, *, lacks_a_part: bool = True) -> str:
    """Return whether a difference from the first row is significant, and in which direction. In the papers a row
    that lacks a part of a method ends below the method."""
    if difference is None or difference.half_width is None:
        return "too few seeds"
    is_below = difference.difference.mean < 0
    if not difference.separates:
        return "does not separate" + (" (below)" if is_below else " (above)")
    if not lacks_a_part:
        return "**separates (below)**" if is_below else "**separates (above)**"
    return "**separates, as in the paper**" if is_below else "**separates, against the paper**"


def _verdicts(table: Table, outcomes: Sequence[Outcome]) -> str:
    lines = [
        "| | end, equal updates | on the way, equal updates | end, equal tokens | on the way, equal tokens |",
        "|---|---|---|---|---|",
    ]
    tokens = equal_tokens(outcomes)
    rows = rows_of(table, outcomes)
    columns: list[list[Compared | None]] = []
    for most in (sys.maxsize, tokens):
        first, *others = [[o.within(most) for o in of] for _, _, of in rows]
        columns += [
            compared([paired(of, first, reading) for of in others])
            for reading in (Outcome.late_accuracy, Outcome.mean_accuracy)
        ]
    for number, (name, _, _) in enumerate(rows[1:]):
        cells = [verdict(column[number], lacks_a_part=table.rows_lack_a_part) for column in columns]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def _differences(table: Table) -> str:
    """Return the settings that all rows share, and the run file and other settings of each row."""
    # of a key set twice, the last counts
    rows = [dict(text.split("=", 1) for text in variant.overrides) for variant in table.variants]
    shared = {key: value for key, value in rows[0].items() if all(row.get(key) == value for row in rows)}
    lines = [_SETTINGS, "", prose(f"- **All rows**: {_listed(shared)}")]
    for variant, row in zip(table.variants, rows, strict=True):
        own = {key: value for key, value in row.items() if key not in shared}
        lines.append(prose(f"- **{variant.name}**: `{variant.config}` {_listed(own)}"))
    return "\n".join(lines)


def _listed(settings: Mapping[str, str]) -> str:
    return " ".join(f"`{key}={value}`" for key, value in settings.items())
