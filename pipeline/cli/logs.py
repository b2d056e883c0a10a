"""``headrace run logs``: what workers have logged, on whichever host they are."""

from __future__ import annotations

import time
from pathlib import Path

import click

from pipeline.cli.common import json_option, run_among
from pipeline.operator.attached import find_run
from protocol.errors import ConfigError

_LEVELS = ("info", "warning", "error")
_POLL_S = 0.5


@click.command(
    epilog="""\b
Examples:
  headrace run logs                         # the last 50 lines of all workers
  headrace run logs learner reward-0 runs/demo
  headrace run logs --level warning --last 200
  headrace run logs generator-0 --follow    # until Ctrl-C

Logs of joined and launched workers are copied into the run's folder. With --json each line is the
JSON object in the file."""
)
@click.argument("workers", nargs=-1, metavar="[WORKER]... [RUN]")
@run_among("workers")
@click.option("--last", type=click.IntRange(1), default=50, show_default=True, help="Number of lines.")
@click.option("--level", type=click.Choice(_LEVELS), default="info", show_default=True, help="Lowest level shown.")
@click.option("--follow", is_flag=True, help="Keep printing new lines.")
@json_option
def logs(workers: tuple[str, ...], run: Path | None, last: int, level: str, follow: bool, as_json: bool) -> None:
    """Show the workers' logs, in order of time."""
    from pipeline.observability.log_lines import LogReader

    run_dir = find_run(run)
    reader = LogReader(run_dir, workers=frozenset(workers) or None, level=level)
    if unknown := sorted(set(workers) - set(reader.known())):
        there = ", ".join(reader.known()) or "none"
        raise ConfigError(f"{run_dir} has no log of {', '.join(unknown)}; it has those of: {there}")
    lines = reader.new(last)
    while True:
        for line in lines:
            click.echo(line.as_json() if as_json else line.shown())
        if not follow:
            return
        if not reader.is_behind:
            time.sleep(_POLL_S)
        lines = reader.new()
