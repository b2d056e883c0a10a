"""``headrace fleet watch``: which workers of a run or of tables are odd, since when, and by which
metric."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import PATH, echo_json, json_option, moment, run_argument
from pipeline.fleet.peers.frame import Finding
from protocol.errors import DataError
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.fleet.peers.offline import Strengths
    from pipeline.fleet.peers.tables import TableForm
    from pipeline.fleet.peers.thresholds import Thresholds

_EPILOG = """\b
Examples:
  headrace fleet watch                       # the newest run under ./runs
  headrace fleet watch runs/demo --json
  headrace fleet watch --from metrics.csv
  headrace fleet watch --from finished.parquet
  headrace fleet watch calibrate runs/good-1 runs/good-2 --to thresholds.json
  headrace fleet watch --from metrics.csv --thresholds thresholds.json

For a run, this reads the observer's records, which are up to two minutes old, and adds open
incidents that the observer found since.

\b
A table of metrics has the columns
  time_s, worker, metric, value, and if known role and phase
A table of finished work has
  worker, start_s, duration_s, and if known kind, size, ok
in CSV or Parquet files; several files of a kind are one table. Other columns
are reported and ignored. `headrace run export RUN --tables FOLDER` writes
such tables.

Workers are compared within a role and phase, and each with its own past. Metrics may have any name;
those of a run's history have special rules. Rows may be in any order."""


class _RunOrCommand(click.Group):
    """A group whose first argument is one of its commands, or a run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            ctx.allow_interspersed_args = True
            return super().parse_args(ctx, args)
        params = self.params
        self.params = [param for param in params if not isinstance(param, click.Argument)]
        try:
            rest = super().parse_args(ctx, args)
        finally:
            self.params = params
        ctx.params["run"] = None
        return rest


@click.group(epilog=_EPILOG, cls=_RunOrCommand, invoke_without_command=True)
@run_argument
@click.option(
    "--from", "tables", type=PATH, multiple=True, metavar="FILE", help="Table, or folder of tables; may be repeated."
)
@click.option("--thresholds", type=PATH, metavar="FILE", help="Thresholds from `calibrate`. Default: built in.")
@json_option
def watch(run: Path | None, tables: tuple[Path, ...], thresholds: Path | None, as_json: bool) -> None:
    """Find workers that behave unlike the others of their role, in a run or in tables."""
    if click.get_current_context().invoked_subcommand is not None:
        return
    from pipeline.fleet.peers.thresholds import read_thresholds

    if tables and run is not None:
        raise click.UsageError("--from reads only tables: leave out the run")
    limits = read_thresholds(thresholds) if thresholds else None
    findings, notes, num_workers = _in_tables(tables, limits) if tables else _in_run(run, limits)
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


@watch.command()
@click.argument("runs", type=PATH, nargs=-1, required=True, metavar="RUN...")
@click.option("--to", "target", type=PATH, required=True, metavar="FILE", help="File of thresholds to write.")
def calibrate(runs: tuple[Path, ...], target: Path) -> None:
    """Fit the thresholds to healthy runs, tables, or folders with tables.

    All of them must be free of faults. Each is one fleet, cut into windows of 15 minutes. A fleet
    size needs 500 worker-windows: 63 windows of 8 workers, or 10 of 50.

    `headrace fleet watch --thresholds` and the setting observer.thresholds read the file."""
    from pipeline.fleet.peers.offline import calibrated, strengths_of_tables

    fleets: list[Strengths] = []
    for run in runs:
        observed = run / "observed"
        files, notes = _by_form((observed if observed.is_dir() else run,))
        for note in notes:
            click.echo(printable_line(note), err=True)
        fleets += [strengths_of_tables(paths, form) for form, paths in files.items()]
    found = calibrated(fleets)
    found.write(target)
    for size, tail in sorted(found.tails.items()):
        click.echo(
            f"about {size} workers: limits times {found.factor(size):.2f}, of {tail.num_strengths} workers and windows"
        )


def _in_run(run: Path | None, limits: Thresholds | None) -> tuple[list[Finding], list[str], int]:
    from pipeline.fleet.peers.offline import watch_run
    from pipeline.operator.attached import find_run
    from pipeline.process.progress_bar import progress

    run_dir = find_run(run)
    with progress(f"watching {run_dir.name}", total=1.0, unit="files") as bar:
        seen = watch_run(run_dir, bar.reach, limits)
    return seen.findings, seen.notes, seen.num_workers


def _in_tables(tables: Sequence[Path], limits: Thresholds | None) -> tuple[list[Finding], list[str], int]:
    from pipeline.fleet.peers.offline import watch_table

    files, notes = _by_form(tables)
    findings, num_workers = list[Finding](), 0
    for form, paths in files.items():
        seen = watch_table(paths, form, thresholds=limits)
        findings += seen.findings
        notes += seen.notes
        num_workers += seen.num_workers
    return findings, notes, num_workers


def _by_form(tables: Sequence[Path]) -> tuple[dict[TableForm, list[Path]], list[str]]:
    """Return the files by form of table, and notes on what is left out. Raises DataError."""
    from pipeline.files.columns import table_files
    from pipeline.fleet.peers.tables import METRIC_COLUMNS, WORK_COLUMNS, table_kind

    files: dict[TableForm, list[Path]] = {}
    notes, others = list[str](), list[Path]()
    for path in tables:
        for file in table_files(path):
            try:
                kind = table_kind(file)
            except DataError as error:
                # In a folder, one damaged file does not stop the others.
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
        notes.append(f"{others[0]}{more}: left out, not a table of metrics or of finished work")
    if not files:
        raise DataError(
            f"{', '.join(map(str, tables[:4]))}: no table to watch; expected the columns "
            f"{', '.join(METRIC_COLUMNS)}, or {', '.join(WORK_COLUMNS)}" + "".join(f"; {note}" for note in notes[:2])
        )
    return files, notes
