"""``headrace run trace``: what happened to a trajectory, where progress stopped, and a run as a
timeline."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import PATH, answer, echo_json, json_option, moment, run_among
from protocol.errors import ConfigError, DataError
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.fleet.flow.rows import FlowIncident

_WIDTH = 100


@click.command(
    epilog="""\b
Examples:
  headrace run trace t.12.3             # the life of a trajectory
  headrace run trace runs/demo          # the causes of stalls
  headrace run trace runs/demo --perfetto demo.json
  headrace run trace --from states.parquet --from links.csv
  headrace run trace --from folder/ --json

Open the timeline in ui.perfetto.dev or chrome://tracing. It is made from the run's history and the
observer's records, in the run's folder observed. `headrace ledger trajectory` can also follow a
trajectory.

A table of states has the columns time_s, worker, role, waiting_for, done, in_flight, oldest_age_s,
input_depth, output_depth, errors, policy_version; a table of links has time_s, sender, receiver,
produced, sent, received, done, oldest_age_s, acknowledged. Only times and names are required.
Counts are cumulative. Unknown columns are reported and ignored. pipeline/fleet/flow/README.md has the
rules.

Exit code 0, with or without incidents; 2 for an unreadable table."""
)
@click.argument("words", nargs=-1, metavar="[TRAJECTORY] [RUN]")
@run_among("words")
@click.option(
    "--from", "sources", type=PATH, multiple=True, metavar="FILE",
    help="A CSV or Parquet table, or a folder of them; may be repeated.",
)  # fmt: skip
@click.option("--perfetto", type=PATH, metavar="OUT.json", help="Write the run as a timeline for Perfetto.")
@click.option(
    "--last", "last_min", type=click.FloatRange(0, min_open=True), metavar="MINUTES",
    help="Draw only the last MINUTES of the run.",
)  # fmt: skip
@json_option
@click.pass_context
def trace(
    ctx: click.Context,
    words: tuple[str, ...],
    run: Path | None,
    sources: tuple[Path, ...],
    perfetto: Path | None,
    last_min: float | None,
    as_json: bool,
) -> None:
    """Show a trajectory's life or the causes of a run's stalls, or write a timeline."""
    if sources and (words or run or perfetto):
        raise click.UsageError("--from reads only tables: leave out the run, the trajectory and --perfetto")
    if last_min is not None and perfetto is None:
        raise click.UsageError("--last is for --perfetto: give it a file")
    if words:
        if perfetto:
            raise click.UsageError(f"--perfetto draws a whole run: leave out {' '.join(words)}")
        from pipeline.cli.samples import trajectory
        from protocol.ids import TrajectoryId

        try:
            TrajectoryId.parse(words[0])
        except ValueError as error:
            raise ConfigError(
                f"{error}; or the folder of a run; `headrace run list` and `headrace ledger peek` list both"
            ) from error
        ctx.invoke(trajectory, name=words, named_run=run, as_json=as_json)
        return
    if perfetto is not None:
        _draw(run, perfetto, last_min, as_json)
        return
    from pipeline.fleet.flow.offline import causes_in_run, causes_in_tables
    from pipeline.operator.attached import find_run

    found = causes_in_tables(sources) if sources else causes_in_run(find_run(run))
    for note in found.notes:
        click.echo(printable_line(f"note: {note}"), err=True)
    if as_json:
        echo_json({"incidents": found.incidents})
    else:
        click.echo("\n".join(map(printable_line, in_lines(found.incidents))))


def in_lines(incidents: Sequence[FlowIncident]) -> list[str]:
    if not incidents:
        return ["no incident: no worker or link caused a stall"]
    lines = list[str]()
    for incident in incidents:
        lines.append(f"{moment(incident.named_s, 1)}: first sign at {moment(incident.trigger_s, 1)}")
        for place, cause in enumerate(incident.causes, 1):
            lines.append(f"  {place}. {cause.component}: {cause.kind}, confidence {cause.confidence:.2f}")
            for words in cause.evidence:
                lines += textwrap.wrap(words, _WIDTH, initial_indent="     ", subsequent_indent="       ")
    return lines


def _draw(run: Path | None, out: Path, last_min: float | None, as_json: bool) -> None:
    from pipeline.fleet.flow.host_records import unrecorded_words
    from pipeline.observability.timeline.timeline import write_timeline
    from pipeline.operator.attached import find_run
    from pipeline.process.progress_bar import progress

    run_dir = find_run(run)
    if out.is_dir():
        raise ConfigError(f"--perfetto {out} is a folder; give the name of a file, such as {out / 'trace.json'}")
    with progress(f"drawing {run_dir.name}", total=1.0, unit="files") as bar:
        try:
            report = write_timeline(
                run_dir, out, last_s=None if last_min is None else 60.0 * last_min, progress=bar.reach
            )
        except OSError as error:
            raise DataError(f"--perfetto {out}: cannot be written: {error.strerror or error}") from error
    lines = [
        f"{out}: {report.num_workers} workers, {report.num_updates:,} updates, {report.num_messages:,} messages",
        "open it at https://ui.perfetto.dev, which reads it in the browser and sends it nowhere",
    ]
    if report.num_skipped:
        lines.append(f"{report.num_skipped:,} damaged files or lines were skipped")
    if report.num_not_drawn:
        lines.append(f"{report.num_not_drawn:,} messages are not drawn: too many at once at one worker")
    if missing := unrecorded_words(report.without_messages):
        lines.append(missing)
    answer(as_json, {"out": out, "report": report}, *lines)
