"""Commands that steer a run: ``scale``, ``down``, ``run pause|resume`` and ``fleet drain|evict|readmit``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import answer, json_option, on_run, run_among, run_argument
from pipeline.operator import steering
from pipeline.operator.attached import Attached, attach, find_run
from pipeline.operator.ending import end_run
from protocol.errors import ConfigError
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.runtime.registry.contract import Fleet
    from protocol.ids import Role


@click.command(
    epilog="\b\nExamples:\n  headrace scale generator=4\n  headrace scale generator=1 reward=2 runs/demo\n"
    "  headrace scale generator=auto   # by demand, up to fleet.max_generators"
)
@click.argument("counts", nargs=-1, metavar="ROLE=NUMBER... [RUN]")
@run_among("counts")
@json_option
def scale(counts: tuple[str, ...], run: Path | None, as_json: bool) -> None:
    """Change how many workers a role has in a running run."""
    if not counts:
        raise click.UsageError("no role given; expected ROLE=NUMBER, for example: headrace scale generator=4")
    fleet = on_run(attach)(steering.change_fleet)(run=run, wanted=dict(parse_count(text) for text in counts))
    by_hand = "; the number of generators is fixed until `headrace scale generator=auto`" if fleet.is_by_hand else ""
    words = ", ".join(f"{count} {role}" for role, count in fleet.counts.items())
    answer(as_json, fleet, f"wanted: {words}{by_hand}")


def parse_count(text: str) -> tuple[Role, int | None]:
    """Parse ``ROLE=NUMBER``; the number of ``generator=auto`` is None. Raises ConfigError for other
    text."""
    from protocol.ids import ELASTIC_ROLES, Role

    if text == "generator=auto":
        return Role.GENERATOR, None
    name, _, number = text.partition("=")
    if name not in ELASTIC_ROLES or not number.isdecimal() or int(number) < 1:
        roles = ", ".join(ELASTIC_ROLES)
        raise ConfigError(
            f"`{text}`: expected ROLE=NUMBER with a role of {roles} and a number of at least 1, for example generator=4"
        )
    return Role(name), int(number)


@click.command(
    epilog="\b\nExamples:\n  headrace fleet drain generator-1\n  headrace fleet drain reward-0 runs/demo --replace\n\n"
    "`headrace status` lists the names. Works for workers of other hosts, too."
)
@click.argument("worker", metavar="WORKER")
@run_argument
@click.option("--replace", is_flag=True, help="Start a new worker in its place.")
@json_option
@on_run(attach)
async def drain(at: Attached, worker: str, replace: bool, as_json: bool) -> None:
    """Let one worker finish or return its work, then stop it.

    It takes no new work, and its role has one worker fewer. Other workers and the restart budget
    are not affected."""
    fleet = await steering.drain(at, worker, replace)
    then = "a new one is started in its place" if replace else "and is not started again"
    counts = ", ".join(f"{count} {role}" for role, count in fleet.counts.items())
    answer(
        as_json, fleet, f"{printable_line(worker)} drains and leaves, {then}; wanted, without joined hosts: {counts}"
    )


@click.command(epilog='\b\nExamples:\n  headrace run pause\n  headrace run pause runs/demo --reason "a new verifier"')
@run_argument
@click.option("--reason", default="", metavar="TEXT", help="Why; shown with the pause.")
@json_option
@on_run(attach)
async def pause(at: Attached, reason: str, as_json: bool) -> None:
    """Stop admitting new groups until `headrace run resume`.

    Work in flight is still sampled, scored and trained, and evaluation continues; then workers
    wait. The pause is stored with the ledger, so it survives restarts of supervisor, server and
    learner."""
    from pipeline.fleet.status import pause_words

    paused = await steering.pause(at, reason)
    way_on = f"work in flight is finished; `headrace run resume {at.run_dir}` goes on"
    answer(as_json, {"run": at.run_dir, "paused": paused}, f"{pause_words(paused)}; {way_on}")


@click.command(epilog="\b\nExamples:\n  headrace run resume\n  headrace run resume runs/demo --json")
@run_argument
@json_option
@on_run(attach)
async def resume(at: Attached, as_json: bool) -> None:
    """Admit new groups again, after `headrace run pause`.

    Not to be confused with `headrace up --resume`, which restarts a run that has ended."""
    from pipeline.fleet.status import pause_words

    ended = await steering.resume(at)
    words = "was not paused" if ended is None else f"admits groups again; {pause_words(ended, has_ended=True)}"
    answer(as_json, {"run": at.run_dir, "ended": ended}, f"{at.run_dir} {words}")


@click.command(epilog="\b\nExamples:\n  headrace down\n  headrace down runs/demo --now")
@run_argument
@click.option("--now", is_flag=True, help="Do not drain. Unfinished work stays in the ledger for --resume.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.0),
    help="Seconds to wait. Default: supervisor.drain_ceiling_s plus 60; 120 with --now.",
)
@json_option
def down(run: Path | None, now: bool, timeout_s: float | None, as_json: bool) -> None:
    """Drain a run and end it. Waits for the end, and reports every few seconds what still drains.

    Ctrl-C stops the waiting; the drain continues."""
    run_dir = find_run(run)
    was_running = end_run(run_dir, now=now, timeout_s=timeout_s, report=partial(click.echo, err=True))
    ending = "is down" if was_running else "was not running"
    answer(as_json, {"run": run_dir, "was_running": was_running}, f"{run_dir} {ending}")


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
    worker = _one(workers, host)
    fleet = _changed(run, lambda at: steering.evict(at, worker=worker, host=host, reason=reason))
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
    worker = _one(workers, host)
    fleet = _changed(run, lambda at: steering.readmit(at, worker=worker, host=host))
    answer(as_json, fleet, f"{_named(worker, host)} is readmitted; {_wanted(fleet)}")


def _changed(run: Path | None, change: Callable[[Attached], Awaitable[Fleet]]) -> Fleet:
    return on_run(attach)(change)(run=run)


def _one(workers: tuple[str, ...], host: str) -> str:
    """Return the one worker that was named, or "" if a host was."""
    if len(workers) != (0 if host else 1):
        named = ", ".join(workers) or "nothing"
        raise click.UsageError(f"{named} given; expected one WORKER, or --host HOST: headrace fleet evict generator-1")
    return workers[0] if workers else ""


def _named(worker: str, host: str) -> str:
    return printable_line(worker or f"host {host}")


def _wanted(fleet: Fleet) -> str:
    return "wanted, without joined hosts: " + ", ".join(f"{count} {role}" for role, count in fleet.counts.items())
