"""``headrace watch``: the odd workers of a fleet, since when and by which metric, from tables."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.cli.common import PATH, echo_json, json_option
from protocol.errors import DataError
from protocol.printable import printable_line

_EPILOG = """\b
Examples:
  headrace watch --from metrics.csv
  headrace watch --from runs/demo/observed --json
  headrace watch --from finished.parquet

\b
A table of metrics has the columns
  time_s, worker, metric, value, and if known role
A table of finished work has
  worker, start_s, duration_s, and if known kind, size, ok
in CSV or Parquet files; several files of a kind are one table. Other columns are ignored, and
named. RUN/observed has the metrics of a run.

Workers are compared inside a role, and each with its own past. Names of metrics are free; those of
a run's history have rules of their own. Rows may be in any order."""


@click.command(epilog=_EPILOG)
@click.option(
    "--from", "tables", type=PATH, multiple=True, required=True, metavar="FILE", help="Table, or a folder; repeatable."
)
@json_option
def watch(tables: tuple[Path, ...], as_json: bool) -> None:
    """Name the odd workers of a fleet, from tables of its metrics or of its finished work."""
    from pipeline.files.columns import table_files
    from pipeline.watch.findings import Finding
    from pipeline.watch.offline import watch_table
    from pipeline.watch.tables import METRIC_COLUMNS, WORK_COLUMNS, TableForm, table_kind

    files, notes = dict[TableForm, list[Path]](), list[str]()
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
                notes.append(f"{file}: left out, since it is no table of metrics or of finished work")
            else:
                files.setdefault(kind, []).append(file)
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
    findings.sort(key=lambda one: (one.alarm_s, one.worker))
    for note in notes:
        click.echo(printable_line(note), err=True)
    if as_json:
        echo_json({"findings": findings})
        return
    for one in findings:
        role = f" ({one.role})" if one.role else ""
        place = f"{one.worker}{role}: {one.kind}, since {one.since_s:.0f} s, seen at {one.alarm_s:.0f} s"
        click.echo(printable_line(place))
        click.echo(printable_line(f"  {one.sentence}"))
    if not findings:
        click.echo(f"no worker of {num_workers} is odd")
