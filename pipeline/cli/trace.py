"""``headrace trace``: where progress stopped in tables of worker states and links, and who caused
it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import PATH, echo_json, json_option
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.flow.rows import FlowIncident

_WIDTH = 100


@click.command(
    epilog="""\b
Examples:
  headrace trace --from states.parquet --from links.csv
  headrace trace --from folder/ --json

Of states, a row has time_s, worker, role, waiting_for, done, in_flight, oldest_age_s, input_depth,
output_depth, errors, policy_version. Of links it has time_s, sender, receiver, produced, sent,
received, done, oldest_age_s, acknowledged. Only times and names are needed. Counts are cumulative.
Columns that are not known are named and not read. pipeline/flow/README.md has the rules.

Exit code 0, with and without incidents; 2 for a table that cannot be read."""
)
@click.option(
    "--from", "sources", type=PATH, multiple=True, required=True, metavar="FILE",
    help="A CSV or Parquet table, or a folder of them; may be repeated.",
)  # fmt: skip
@json_option
def trace(sources: tuple[Path, ...], as_json: bool) -> None:
    """Name the causes of stalls in tables of workers and links."""
    from pipeline.flow.tables import read_flow_tables, replay
    from pipeline.flow.watcher import FlowWatch

    tables = read_flow_tables(sources)
    watch = FlowWatch()
    incidents = list(replay(tables, watch))
    if watch.fleet.unknown_words:
        words = ", ".join(map(repr, watch.fleet.unknown_words))
        tables.notes.append(f"waiting_for has words that are not known, and taken for work: {words}")
    for note in tables.notes:
        click.echo(printable_line(f"note: {note}"), err=True)
    if as_json:
        echo_json({"incidents": incidents})
    else:
        click.echo("\n".join(map(printable_line, in_lines(incidents))))


def in_lines(incidents: Sequence[FlowIncident]) -> list[str]:
    """Return incidents as lines of at most 100 columns."""
    if not incidents:
        return ["no incident: nothing stood that a worker or link caused"]
    lines = list[str]()
    for incident in incidents:
        lines.append(f"{incident.named_s:.1f} s: first sign at {incident.trigger_s:.1f} s")
        for place, cause in enumerate(incident.causes, 1):
            lines.append(f"  {place}. {cause.component}: {cause.kind}, confidence {cause.confidence:.2f}")
            for words in cause.evidence:
                lines += textwrap.wrap(words, _WIDTH, initial_indent="     ", subsequent_indent="       ")
    return lines
