"""``headrace fleet probe``: is a supervisor's event loop alive? For the probes of a container.

It reads one small file, and imports neither the configuration nor a client of the ledger."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.supervisor.pulse import NAME, trouble
from protocol.private import user_state


@click.command(epilog="\b\nExamples:\n  headrace fleet probe live\n  headrace fleet probe ready /runs/demo")
@click.argument("question", type=click.Choice(["live", "ready"]))
@click.argument("folder", required=False, type=click.Path(path_type=Path))
def probe(question: str, folder: Path | None) -> int:
    """Check the supervisor of a folder, by default of this account's newest join.

    live: its loop is alive, or it has ended. ready: a worker is working. Exit code 0, or 1 with the
    reason."""
    if folder is None:
        joined = user_state("joined")
        found = sorted(joined.glob(f"*/*/{NAME}"), key=lambda path: path.stat().st_mtime)
        if not found:
            click.echo(f"no join has begun in {joined}", err=True)
            return 1
        folder = found[-1].parent
    wrong = trouble(folder, needs_ready=question == "ready")
    if wrong:
        click.echo(wrong, err=True)
    return 1 if wrong else 0
