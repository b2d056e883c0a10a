"""``headrace top`` shows a run on a full screen with keys that change it, or as lines. ``headrace
run dashboard`` shows the runs of a folder in a browser."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import PATH, echo_json, json_option, plain_option, run_argument
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.operator.attached import Attached

_MAX_CHUNKS = 64


@click.command(
    epilog="\b\nExamples:\n  headrace top\n  headrace top runs/demo\n  headrace top --plain --every 60 >> top.log\n"
    "  headrace top --json\n\nPress ? for the keys and q to quit; the run continues."
)
@run_argument
@plain_option
@click.option(
    "--every", "every_s", type=click.FloatRange(min=1.0), default=5.0, show_default=True, help="Seconds between lines."
)
@json_option
def top(run: Path | None, plain: bool, every_s: float, as_json: bool) -> int:
    """Show a run on a full screen: roles, queues, rates, versions, waits, incidents.

    Without a terminal, prints a line every few seconds until the run has ended. With --json, prints
    one snapshot, whose rates are measured over a second."""
    from pipeline.operator.attached import find_run
    from pipeline.operator.top.run import has_screen, run_top

    run_dir = find_run(run)
    if not (plain or as_json) and has_screen() and sys.stdout.isatty():
        return run_top(run_dir, life)
    import asyncio

    from pipeline.operator.top.feed import RunFeed
    from pipeline.operator.top.run import one_picture, run_plain
    from pipeline.runtime.clock import RealClock

    feed = RunFeed(run_dir, life)
    if as_json:

        async def look() -> None:
            try:
                echo_json(await one_picture(feed, RealClock()))
            finally:
                await feed.aclose()

        asyncio.run(look())
    else:
        try:
            run_plain(feed, click.echo, every_s=every_s)
        except BrokenPipeError:
            # The reader, such as `head`, is gone; the interpreter's last flush would fail, too.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


async def life(at: Attached, name: str) -> list[str]:
    """Return as lines a trajectory's life and its chunks that the ledger still has, or one chunk.
    Raises ConfigError."""
    import asyncio

    from pipeline.cli.peek import described
    from pipeline.cli.samples import picture_of
    from protocol.errors import WireError
    from protocol.ids import TrajectoryId

    lines: list[str] = []
    try:
        asked = TrajectoryId.parse(name)
    except ValueError:
        chunks = [name]
    else:
        chunks = [f"{name}.{index}" for index in range(_MAX_CHUNKS)]
        lines += [*map(click.unstyle, (await picture_of(at, asked)).shown()), ""]
    for chunk in chunks:
        blobs = await at.ledger.peek(chunk)
        if not blobs:
            break
        try:
            # The first use of a tokenizer takes a second.
            lines += [*await asyncio.to_thread(described, at, blobs), ""]
        except WireError as error:
            lines += [f"{chunk} is of another version: {error}", ""]
    if not lines:
        raise ConfigError(
            f"{name} is not in the ledger: it was never written, or was trained on or dropped. Expected a "
            f"trajectory such as t.12.3, or a chunk such as t.12.3.0"
        )
    return lines


def main() -> int:
    """Show a run for its supervisor. ``headrace up`` starts this with a folder and a file
    descriptor."""
    from pipeline.operator.top.run import run_beside

    return run_beside(Path(sys.argv[1]), life, int(sys.argv[2]))


_PORT = 8421


@click.command(
    epilog="""\b
Examples:
  headrace run dashboard                # the runs under ./runs
  headrace run dashboard runs/demo --port 9000
  ssh -L 8421:127.0.0.1:8421 HOST       # then open the printed address

The printed address contains a token, which every reader needs. It changes at every start, unless
--token-file names a file, which is created if missing."""
)
@click.argument("runs", required=False, type=PATH, metavar="[RUN|FOLDER]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=_PORT,
    show_default=True,
    help="Port, or the next free one after it; 0: any free port.",
)
@click.option("--token-file", type=PATH, help="File of mode 0600 with the token, for other machines and restarts.")
def dashboard(runs: Path | None, host: str, port: int, token_file: Path | None) -> None:
    """Show runs live in a browser, with their workers, curves and responses."""
    import importlib.util

    if importlib.util.find_spec("starlette") is None or importlib.util.find_spec("uvicorn") is None:
        raise ConfigError(
            "the dashboard needs starlette and uvicorn, which are not installed: pip install 'headrace[web]'"
        )
    from pipeline.operator.runs import no_runs_words, run_folders
    from pipeline.operator.web.serving import serve
    from pipeline.runtime.log import log_to_stderr

    folder = runs or Path("runs")
    if not run_folders(folder):
        raise ConfigError(no_runs_words(folder))
    log_to_stderr()
    # resolved, since "." has no name
    serve(folder.resolve(), host=host, port=port, token_file=token_file, say=lambda line: click.echo(line))
