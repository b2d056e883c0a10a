"""A comparison as a page: what was compared, with which command and seeds, means and intervals, and
the accuracy of each seed. Markdown for people, and JSON with all raw data for programs."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ops.bench.ablation.compare import interval, late_accuracy_of, paired, rows_of
from ops.bench.ablation.fleet_page import accuracies, effects, phases, race, window_ends
from ops.bench.ablation.runs import Outcome
from ops.bench.ablation.summary import JUDGED, Compared, compared, figures, marked
from ops.bench.table import prose
from pipeline.config.load import load_config

if TYPE_CHECKING:
    from ops.bench.ablation.tables import Table

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
_BY_HAND = (
    "To repeat a row by hand: `headrace up CONFIG --fleet configs/fleets/demo.toml` with these settings by `--set`, the "
    "prompts and critic that the command above makes below `--work`, and the start model "
    "`ops/bench/ablation/tailed_policy`."
)
_ALONE = "`--only ROW` trains one row: its run file in one process, with the table's prompts and start model."
_RUNS = (
    "Staleness is the mean over updates, in policy versions; explained variance is the critic's at the last update. "
    "Medians over seeds."
)
_ROOT = Path(__file__).parents[3]
_LIBRARIES = ("torch", "transformers", "redis", "pyzmq")


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    import os

    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
    }


def how_made(outcomes: Sequence[Outcome], command: str, committed_in: str = "") -> str:
    """Return a page's first line: how its rows were made, by which command, of which commit."""
    here = {o.is_in_one_process for o in outcomes}
    words = {
        frozenset([True]): "in one process, synchronously, without a fleet",
        frozenset([False]): "by fleets on one machine",
    }
    who = words.get(frozenset(here), "partly in one process and partly by fleets")
    return (
        f"**How the rows were made:** {who}, by `{command}`. {of_commits([o.commit for o in outcomes], committed_in)}"
    )


def of_commits(commits: Sequence[str], committed_in: str = "") -> str:
    """Return in a sentence which commits of the code made the rows; an empty one was not recorded."""
    shown = [f"`{commit}`" for commit in sorted(set(commits)) if commit]
    if "" in commits:
        shown.append("not recorded" + (f" (the raw data were committed in `{committed_in}`)" if committed_in else ""))
    return f"Commit of the code: {', '.join(shown)}."


def as_json(table: Table, outcomes: Sequence[Outcome], command: str) -> dict[str, Any]:
    """Return everything that the page holds, and every curve."""
    return {
        "table": table.name,
        "command": command,
        "machine": machine(),
        "outcomes": [asdict(outcome) | {"mean_live": outcome.mean_live} for outcome in outcomes],
    }


def as_markdown(
    table: Table,
    outcomes: Sequence[Outcome],
    command: str,
    *,
    kept: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Write the page. ``kept``: raw data written before, with the machine, ``committed_in`` and
    ``findings``, what people wrote about these rows in Markdown, line by line."""
    measured_on = kept.get("machine") or machine()
    on = prose("Machine: " + ", ".join(f"{name} {value}" for name, value in measured_on.items()) + ".")
    parts = [f"# {table.title}"]
    if outcomes:
        parts.append(prose(how_made(outcomes, command, kept.get("committed_in", ""))))
    if findings := kept.get("findings"):
        parts.append("\n".join(findings))
    parts.append(prose(table.about))
    if table.is_timed:
        parts += [on, "## After as many updates", accuracies(table, outcomes)]
        if table.factors:
            parts.append(effects(table, outcomes))
        parts += ["## Window ends", window_ends(table, outcomes, kept.get("critic_at_start"))]
        parts += ["## Time", race(table, outcomes), phases(table, outcomes)]
    else:
        parts += [_verdicts(table, outcomes), on, *_learning(table, outcomes)] if outcomes else [_NOT_RUN, on]
    if outcomes:
        parts += ["## The runs", prose(_RUNS), _runs(table, outcomes)]
    parts += ["## Settings", _differences(table)]
    return "\n\n".join(parts) + "\n"


def _runs(table: Table, outcomes: Sequence[Outcome]) -> str:
    lines = ["| | made | staleness | critic's steps before | explained variance |", "|---|---|---:|---:|---:|"]
    for variant in table.variants:
        of = [o for o in outcomes if o.variant == variant.name]
        if not of:
            continue
        staleness = median(o.staleness_mean for o in of)
        is_here = all(o.is_in_one_process for o in of)
        made = f"{'one process' if is_here else 'fleet'}, {'asynchronous' if staleness else 'synchronous'}"
        steps, explained = "", "no critic"
        if load_config([_ROOT / variant.config], variant.overrides).has_critic:
            ends = [o.explained_variance[-1] for o in of if any(o.explained_variance)]
            is_told = is_here or all(o.explained_variance for o in of)
            steps = f"{median(o.value_steps for o in of):.0f}" if is_told else "not recorded"
            explained = f"{median(ends):.2f}" if ends else "not recorded"
        lines.append(f"| {variant.name} | {made} | {staleness:.2f} | {steps} | {explained} |")
    return "\n".join(lines)


def _learning(table: Table, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the same curves twice: after as many updates, and after as many sampled tokens."""
    curves = f"![Accuracy by update and by sampled tokens: the mean, each seed faint]({table.name}.svg)"
    tokens = equal_tokens(outcomes)
    updates = max(point.update for o in outcomes for point in o.curve)
    return [
        "## After as many updates",
        prose(_END.format(updates=updates)),
        _readings(table, outcomes),
        "## After as many sampled tokens",
        prose(_EQUAL_TOKENS.format(tokens=tokens)),
        _readings(table, [o.within(tokens) for o in outcomes]),
        "## Curves",
        curves,
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
        for reading in [*readings, *(partial(late_accuracy_of, kind) for kind in kinds)]
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
    """Return in words what a difference from the first row shows among those of all rows. A row that lacks a part of a
    method ends below the method in the papers."""
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
    """List what each row overrides, so that it can be repeated by hand."""
    # of a key set twice, the last counts
    rows = [dict(text.split("=", 1) for text in variant.overrides) for variant in table.variants]
    shared = {key: value for key, value in rows[0].items() if all(row.get(key) == value for row in rows)}
    lines = [prose(_BY_HAND if table.is_timed else _ALONE), "", prose(f"- **All rows**: {_listed(shared)}")]
    for variant, row in zip(table.variants, rows, strict=True):
        own = {key: value for key, value in row.items() if key not in shared}
        lines.append(prose(f"- **{variant.name}**: `{variant.config}` {_listed(own)}"))
    return "\n".join(lines)


def _listed(settings: Mapping[str, str]) -> str:
    return " ".join(f"`{key}={value}`" for key, value in settings.items())
