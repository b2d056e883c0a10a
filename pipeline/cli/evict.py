"""``headrace fleet evict`` and ``headrace fleet readmit``: take a worker or a joined host out of a run, and back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import answer, json_option, on_run, run_among
from pipeline.operator.attached import attach
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.operator.attached import Attached
    from pipeline.runtime.registry.contract import Fleet

_host_option = click.option("--host", default="", metavar="HOST", help="All workers of this joined host.")


@click.command(
    epilog="\b\nExamples:\n  headrace fleet evict generator-1\n"
    "  headrace fleet evict generator-1 runs/demo --reason 'ECC errors'\n  headrace fleet evict --host gpu7\n\n"
    "`headrace status` lists names and hosts. `headrace fleet drain` lets a worker finish first."
)
@click.argument("workers", nargs=-1, metavar="[WORKER] [RUN]")
@_host_option
@click.option("--reason", default="", metavar="TEXT", help="Why; shown with the eviction.")
@run_among("workers")
@json_option
def evict(workers: tuple[str, ...], host: str, reason: str, run: Path | None, as_json: bool) -> None:
    """Remove a worker or a joined host from the run at once, until it is readmitted.

    It is fenced and stopped, and others continue its work. It stays out across restarts of
    supervisor and run. The last worker of a role cannot be evicted."""
    from pipeline.operator import evicting

    worker = _one(workers, host)
    fleet = _changed(run, lambda at: evicting.evict(at, worker=worker, host=host, reason=reason))
    answer(as_json, fleet, f"{_named(worker, host)} is evicted, until `headrace fleet readmit`; {_wanted(fleet)}")


@click.command(
    epilog="\b\nExamples:\n  headrace fleet readmit generator-1\n  headrace fleet readmit --host gpu7 --run runs/demo"
)
@click.argument("workers", nargs=-1, metavar="[WORKER] [RUN]")
@_host_option
@run_among("workers")
@json_option
def readmit(workers: tuple[str, ...], host: str, run: Path | None, as_json: bool) -> None:
    """Let an evicted worker or joined host work again."""
    from pipeline.operator import evicting

    worker = _one(workers, host)
    fleet = _changed(run, lambda at: evicting.readmit(at, worker=worker, host=host))
    answer(as_json, fleet, f"{_named(worker, host)} is readmitted; {_wanted(fleet)}")


def _changed(run: Path | None, change: Callable[[Attached], Awaitable[Fleet]]) -> Fleet:
    return on_run(attach)(change)(run=run)


def _one(workers: tuple[str, ...], host: str) -> str:
    """Return the one worker that is named, or "" with a host."""
    if len(workers) != (0 if host else 1):
        named = ", ".join(workers) or "nothing"
        raise click.UsageError(f"{named} given; expected one WORKER, or --host HOST: headrace fleet evict generator-1")
    return workers[0] if workers else ""


def _named(worker: str, host: str) -> str:
    return printable_line(worker or f"host {host}")


def _wanted(fleet: Fleet) -> str:
    return "wanted of this run's own: " + ", ".join(f"{count} {role}" for role, count in fleet.counts.items())
