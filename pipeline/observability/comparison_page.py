"""Runs side by side: the tables of ``headrace run compare``, and the page that ``--html`` writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.observability.comparison import Basis, Comparison, Configuration, CurvePoint, RunFigures
from protocol.printable import printable_line

BASES = {"updates": "equal updates", "tokens": "equal trained tokens", "seconds": "equal time of the learner"}


def run_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a header, and a row of figures for each run."""
    letters = {place: one.name for one in comparison.configurations for place in one.runs}
    head = ("run", "configuration", "algorithm", "seed", "updates", "accuracy, last", "best", "trained tokens", "tokens/s",
            "learner waits", "staleness", "dropped")  # fmt: skip
    return [head, *(_run_row(run, letters[place]) for place, run in enumerate(comparison.runs))]


def _run_row(run: RunFigures, letter: str) -> tuple[str, ...]:
    dropped = sum(run.dropped.values()) if run.records.fleet else None
    stale = "–" if run.staleness_mean is None else f"{run.staleness_mean:.2f}, at most {run.staleness_max}"
    return (
        run.name,
        letter,
        run.algorithm or "–",
        "–" if run.seed is None else str(run.seed),
        f"{run.num_updates:,}",
        accuracy(run.curve[-1] if run.curve else None),
        percent(max((point.accuracy.value for point in run.curve), default=None)),
        f"{run.num_tokens:,}",
        "–" if run.tokens_per_s is None else f"{run.tokens_per_s:,.0f}",
        percent(run.wait_share),
        stale,
        percent(dropped),
    )


def basis_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a header, and each run's accuracy at each equal cost."""
    head = ("at", "up to", *(run.name for run in comparison.runs))
    return [head, *(_basis_row(basis) for basis in comparison.bases)]


def _basis_row(basis: Basis) -> tuple[str, ...]:
    unit = {"updates": "", "tokens": " tokens", "seconds": " s"}[basis.name]
    return (BASES[basis.name], f"{basis.limit:,.0f}{unit}", *(accuracy(point, where=True) for point in basis.points))


def configuration_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a header, and a row for each configuration."""
    rows = [("configuration", "runs", "seeds", "accuracy at equal updates", "interval over")]
    return rows + [_configuration_row(comparison.runs, one) for one in comparison.configurations]


def _configuration_row(runs: Sequence[RunFigures], one: Configuration) -> tuple[str, ...]:
    names = ", ".join(runs[place].name for place in one.runs)
    seeds = ", ".join("–" if runs[place].seed is None else str(runs[place].seed) for place in one.runs)
    found = one.accuracy
    if found is None:
        return (one.name, names, seeds, "no interval on record", "–")
    value = f"{100 * found.value:.1f} % ({100 * found.low:.1f} to {100 * found.high:.1f})"
    of_prompts = "the prompts of one run" if len(one.runs) == 1 else "the prompts of one run, the widest"
    return (one.name, names, seeds, value, f"{len(one.runs)} runs" if one.is_of_seeds else of_prompts)


def setting_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a header, and a row for each setting that differs."""
    head = ("setting", *(run.name for run in comparison.runs))
    return [head, *((key, *values) for key, values in comparison.differing.items())]


def role_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a header, and throughput and use of time for each role of each run."""
    rows = [("run", "role", "workers", "computing", "tokens/s", "waits for")]
    for run in comparison.runs:
        for use in run.uses:
            share = f"{100 * use.compute_share:.0f} %"
            waits = use.waits_in_words(2)
            rows.append((run.name, use.role, f"{use.workers:.1f}", share, f"{use.tokens_per_s:,.0f}", waits))
    return rows


def drop_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a header, and for each reason the share of admitted groups that each run dropped."""
    reasons = dict.fromkeys(reason for run in comparison.runs for reason in run.dropped)
    head = ("groups dropped", *(run.name for run in comparison.runs))
    return [
        head,
        *(
            (
                reason.replace("_", " "),
                *(percent(run.dropped.get(reason, 0.0)) if run.records.fleet else "–" for run in comparison.runs),
            )
            for reason in reasons
        ),
    ]


def accuracy(point: CurvePoint | None, *, where: bool = False) -> str:
    """Format an accuracy with its interval and, with ``where``, its update."""
    if point is None:
        return "–"
    found = point.accuracy
    around = f" ({100 * found.low:.1f} to {100 * found.high:.1f})" if point.has_interval else ""
    return f"{100 * found.value:.1f} %{around}" + (f", update {point.update:,}" if where else "")


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


_MOST_ROWS = 3600
"""Rows of updates in the whole page."""
_NUM_SAMPLED = 2
"""Updates of each run whose samples the page shows."""
_NUM_COLOURS, _NUM_DASHES = 8, 4


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write the page of the report, with all runs; return its path. Raises OSError."""
    # Only the page needs it; it loads what reads tokenizers.
    from pipeline.observability.page.document import document, write_whole
    from pipeline.observability.report import run_answers, run_row

    runs = comparison.runs
    title = " and ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"
    answers: dict[str, object] = {
        "session": {"abilities": ["comparison"], "elastic": []},
        "runs": {"folder": "", "runs": [run_row(run.name, run.records) for run in runs]},
        "comparison": comparison_figures(comparison),
    }
    most_rows = min(600, _MOST_ROWS // len(runs))
    for run in runs:
        answers |= run_answers(run.folder, run.name, run.records, most_rows=most_rows, num_sampled=_NUM_SAMPLED)
    write_whole(path, document(f"Compared: {title}", answers))
    return path


def comparison_figures(comparison: Comparison) -> dict[str, object]:
    """Return what the page shows besides the runs' own figures. A configuration has one colour, and each
    of its runs another dash."""
    looks = {
        comparison.runs[place].name: {"colour": number % _NUM_COLOURS, "dash": index % _NUM_DASHES}
        for number, one in enumerate(comparison.configurations)
        for index, place in enumerate(one.runs)
    }
    few = "all runs have one configuration"
    if len(comparison.configurations) > 1:
        few = "fewer than two configurations have an accuracy with an interval"
    verdicts = [f"{each.first} and {each.second}. {each.words}" for each in comparison.differences]
    lacking = [("setting", *(run.name for run in comparison.runs))]
    lacking += [(key, *values) for key, values in comparison.lacking.items()]
    tables = {
        "runs": run_rows(comparison),
        "configurations": configuration_rows(comparison),
        "bases": basis_rows(comparison),
        "settings": setting_rows(comparison),
        "lacking": lacking,
        "roles": role_rows(comparison),
        "drops": drop_rows(comparison),
    }
    return {
        "looks": looks,
        "verdicts": [printable_line(words) for words in verdicts or [f"There is nothing to compare: {few}."]],
        "notes": [printable_line(words) for words in comparison.notes],
        "tables": {
            name: [[printable_line(cell) for cell in row] for row in rows]
            for name, rows in tables.items()
            if len(rows) > 1
        },
    }
