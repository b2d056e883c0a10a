"""``headrace run compare``: runs side by side, from their folders alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import PATH, aligned, echo_json, json_option
from protocol.errors import ConfigError
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.observability.comparison import Comparison

_MOST_RUNS = 24
_MOST_NAMED = 8
_WIDEST = 36
"""Most characters of a setting's value; the page has all."""


@click.command(
    epilog="""\b
Examples:
  headrace run compare runs/a runs/b
  headrace run compare runs/dapo-* runs/vapo-* --html compared.html
  headrace run compare a b --json       # names of runs under ./runs

Runs that differ only in their seed count as one configuration, with a mean and a t-interval. Where
95 % intervals overlap, no difference is reported. Runs that recorded the accuracy of each prompt
are also compared prompt by prompt."""
)
@click.argument("runs", nargs=-1, required=True, type=PATH, metavar="RUN RUN...")
@click.option("--html", type=PATH, metavar="FILE", help="Write a self-contained page with charts.")
@json_option
def compare(runs: tuple[Path, ...], html: Path | None, as_json: bool) -> None:
    """Compare runs: settings, seeds, accuracy at equal cost, throughput, drops."""
    from pipeline.observability.comparison import compare_runs, read_runs

    folders = [_known(run) for run in runs]
    if len(folders) < 2:
        raise click.UsageError(f"one run given: expected at least two, as in: headrace run compare {runs[0]} OTHER")
    if len(folders) > _MOST_RUNS:
        raise click.UsageError(f"{len(folders)} runs given: expected at most {_MOST_RUNS}")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise click.UsageError("a run is given twice: give each once")
    found = compare_runs(read_runs(folders))
    if html is not None:
        from pipeline.observability.comparison_page import write_comparison

        try:
            write_comparison(found, html)
        except OSError as error:
            raise ConfigError(f"--html {html} cannot be written: {error.strerror}; give another file") from error
    if as_json:
        echo_json(_as_json(found))
    else:
        click.echo("\n".join(map(printable_line, in_lines(found))))
    if html is not None:
        click.echo(f"page: {html}", err=as_json)


def _known(run: Path) -> Path:
    """Return a run's folder, also by its name under ./runs. Raises ConfigError with those that
    exist."""
    from pipeline.config import RESOLVED_NAME
    from pipeline.operator.runs import unknown_run_words

    for folder in (run, Path("runs") / run):
        if (folder / RESOLVED_NAME).is_file():
            return folder
    raise ConfigError(unknown_run_words(run))


def in_lines(found: Comparison) -> list[str]:
    """Return a comparison as lines of text."""
    from pipeline.observability import comparison_rows as rows

    lines = [*_turned(rows.run_rows(found)), "", "accuracy at equal cost"]
    lines += [*_turned(rows.basis_rows(found)), ""]
    if len(found.configurations) < len(found.runs):
        lines += [*aligned(rows.configuration_rows(found)), ""]
    lines += [each.words for each in found.differences]
    if len(found.configurations) == 1:
        lines.append("All runs have one configuration: there is no difference to call.")
    if found.differing:
        lines += ["", *aligned([tuple(_short(cell) for cell in row) for row in rows.setting_rows(found)])]
    elif not found.lacking:
        lines += ["", "no setting differs, but for the seed"]
    if found.lacking:
        names = ", ".join(list(found.lacking)[:_MOST_NAMED])
        more = f" and {len(found.lacking) - _MOST_NAMED} more" if len(found.lacking) > _MOST_NAMED else ""
        lines.append(f"set in some runs alone: {names}{more}")
    for found_rows in (rows.role_rows(found), rows.drop_rows(found)):
        if len(found_rows) > 1:
            lines += ["", *aligned(found_rows)]
    return lines + ([""] if found.notes else []) + list(found.notes)


def _turned(table: list[tuple[str, ...]]) -> list[str]:
    """Return a table with a column for each row: runs stand side by side."""
    return aligned(list(zip(*table, strict=True)))


def _short(cell: str) -> str:
    return cell if len(cell) <= _WIDEST else f"…{cell[1 - _WIDEST :]}"


def _as_json(found: Comparison) -> dict[str, object]:
    """Return the figures of a comparison; histories and samples stay in the runs' folders."""
    runs = [
        {
            "run": run.folder, "name": run.name, "seed": run.seed, "algorithm": run.algorithm, "num_updates": run.num_updates,
            "num_trained_tokens": run.num_tokens, "train_s": run.train_s, "tokens_per_s": run.tokens_per_s,
            "learner_wait_share": run.wait_share, "staleness_mean": run.staleness_mean, "staleness_max": run.staleness_max,
            "dropped": run.dropped, "roles": run.uses,
            "curve": [
                {
                    "update": point.update, "num_tokens": point.num_tokens, "train_s": point.train_s,
                    "accuracy": point.accuracy.value, "low": point.accuracy.low if point.has_interval else None,
                    "high": point.accuracy.high if point.has_interval else None, "num_responses": point.num_responses,
                }
                for point in run.curve
            ],
        }
        for run in found.runs
    ]  # fmt: skip
    bases = [
        {
            "name": basis.name,
            "limit": basis.limit,
            "accuracy": [point and point.accuracy.value for point in basis.points],
        }
        for basis in found.bases
    ]
    return {
        "runs": runs, "differing": found.differing, "lacking": found.lacking, "bases": bases,
        "configurations": found.configurations, "differences": found.differences, "notes": found.notes,
    }  # fmt: skip
