"""``headrace watch``: the odd workers of a run or of tables, since when and by which metric."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from pipeline.cli.common import PATH, echo_json, json_option, moment, run_argument
from pipeline.watch.findings import Finding
from protocol.errors import DataError
from protocol.printable import printable_line

_EPILOG = """\b
Examples:
  headrace watch                       # the newest run under ./runs, live or ended
  headrace watch runs/demo --json
  headrace watch --from metrics.csv
  headrace watch --from finished.parquet

A run is watched in its observer's records, which go to the last two minutes. Open incidents that
the observer found later are added.

\b
A table of metrics has the columns
  time_s, worker, metric, value, and if known role
A table of finished work has
  worker, start_s, duration_s, and if known kind, size, ok
in CSV or Parquet files; several files of a kind are one table. Other columns are ignored, and
named. `headrace export RUN --tables FOLDER` writes such tables of a run.

Workers are compared inside a role, and each with its own past. Names of metrics are free; those of
a run's history have rules of their own. Rows may be in any order."""


@click.command(epilog=_EPILOG)
@run_argument
@click.option("--from", "tables", type=PATH, multiple=True, metavar="FILE", help="Table, or a folder; repeatable.")
@json_option
def watch(run: Path | None, tables: tuple[Path, ...], as_json: bool) -> None:
    """Name the odd workers of a run, or of a fleet by tables of its metrics or finished work."""
    if tables and run is not None:
        raise click.UsageError("--from reads tables alone: leave the run out")
    findings, notes, num_workers = _in_tables(tables) if tables else _in_run(run)
    findings.sort(key=lambda one: (one.alarm_s, one.worker))
    for note in notes:
        click.echo(printable_line(note), err=True)
    if as_json:
        echo_json({"findings": findings})
        return
    for one in findings:
        role = f" ({one.role})" if one.role else ""
        place = f"{one.worker}{role}: {one.kind}, since {moment(one.since_s)}, seen at {moment(one.alarm_s)}"
        click.echo(printable_line(place))
        click.echo(printable_line(f"  {one.sentence}"))
    if not findings:
        click.echo(f"no worker of {num_workers} is odd")


def _in_run(run: Path | None) -> tuple[list[Finding], list[str], int]:
    from pipeline.operator.attached import find_run
    from pipeline.process.progress_bar import progress
    from pipeline.watch.offline import watch_run

    run_dir = find_run(run)
    with progress(f"watching {run_dir.name}", total=1.0, unit="files") as bar:
        seen = watch_run(run_dir, bar.reach)
    return seen.findings, seen.notes, seen.num_workers


def _in_tables(tables: Sequence[Path]) -> tuple[list[Finding], list[str], int]:
    from pipeline.files.columns import table_files
    from pipeline.watch.offline import watch_table
    from pipeline.watch.tables import METRIC_COLUMNS, WORK_COLUMNS, TableForm, table_kind

    files, notes, others = dict[TableForm, list[Path]](), list[str](), list[Path]()
    for path in tables:
        for file in table_files(path):
            try:
                kind = table_kind(file)
            except DataError as error:
                # One damaged file of a run's many leaves the others.
                if not path.is_dir():
                    raise
                notes.append(f"left out: {error}")
                continue
            if kind is None:
                others.append(file)
            else:
                files.setdefault(kind, []).append(file)
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        notes.append(f"{others[0]}{more}: left out, since it is no table of metrics or of finished work")
    if not files:
        raise DataError(
            f"{', '.join(map(str, tables[:4]))}: no table to watch; expected the columns "
            f"{', '.join(METRIC_COLUMNS)}, or {', '.join(WORK_COLUMNS)}" + "".join(f"; {note}" for note in notes[:2])
        )
    findings, num_workers = list[Finding](), 0
    for kind, paths in files.items():
        seen = watch_table(paths, kind)
        findings += seen.findings
        notes += seen.notes
        num_workers += seen.num_workers
    return findings, notes, num_workers
