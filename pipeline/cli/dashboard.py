"""``headrace run dashboard``: the runs of a folder in a browser."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.cli.common import PATH
from protocol.errors import ConfigError

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
    # The present folder, too, has a name.
    serve(folder.resolve(), host=host, port=port, token_file=token_file, say=lambda line: click.echo(line))
