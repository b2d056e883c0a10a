"""``headrace scale`` and ``headrace down``: what a person changes while a run runs.

Both only write a wish into the registry; the supervisor, which reads it several times a second, carries it out.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import click

from pipeline.cli.common import attach, echo_json, json_option, run_argument
from pipeline.runtime.registry import Fleet, RunState, RunStatus
from protocol.errors import ConfigError, DeadlineExceeded
from protocol.ids import Role

_ELASTIC = (Role.GENERATOR, Role.REWARD, Role.REFERENCE)
_POLL_S = 0.2


@click.command(
    epilog="\b\nExamples:\n  headrace scale generator=4\n  headrace scale generator=1 reward=2 --run runs/demo"
)
@click.argument("counts", nargs=-1, required=True, metavar="ROLE=NUMBER...")
@click.option("--run", type=click.Path(path_type=Path), help="The run's folder; the newest under ./runs when absent.")
@json_option
def scale(counts: tuple[str, ...], run: Path | None, as_json: bool) -> None:
    """Change how many workers of a role a run has, while it runs."""
    wanted = dict(_parse_count(text) for text in counts)

    async def change() -> Fleet:
        async with attach(run) as attached:
            status = await attached.registry.run_status()
            if status.state is not RunState.RUNNING:
                raise ConfigError(f"{attached.run_dir} is {status.state}, not running; `headrace up` starts a run")
            present = await attached.registry.fleet()
            fleet = Fleet({**(present.counts if present else {}), **wanted})
            await attached.registry.set_fleet(fleet)
            return fleet

    fleet = asyncio.run(change())
    if as_json:
        echo_json(fleet)
    else:
        click.echo("wanted: " + ", ".join(f"{count} {role}" for role, count in fleet.counts.items()))


def _parse_count(text: str) -> tuple[Role, int]:
    name, _, number = text.partition("=")
    if name not in _ELASTIC or not number.isdecimal() or int(number) < 1:
        roles = ", ".join(_ELASTIC)
        raise ConfigError(f"`{text}`: expected ROLE=NUMBER with a role of {roles} and a number from 1, as generator=4")
    return Role(name), int(number)


@click.command(epilog="\b\nExamples:\n  headrace down\n  headrace down runs/demo --now")
@run_argument
@click.option("--now", is_flag=True, help="Do not drain: what is unfinished stays in the ledger for --resume.")
@click.option("--timeout", "timeout_s", default=120.0, show_default=True, help="Seconds to wait for the end.")
@json_option
def down(run: Path | None, now: bool, timeout_s: float, as_json: bool) -> None:
    """Ask a run to drain and end, and wait until it has."""

    async def stop() -> tuple[Path, bool]:
        async with attach(run) as attached:
            pid = supervisor_pid(attached.run_dir)
            if pid is None:
                return attached.run_dir, False
            if now:
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGINT)
            else:
                await attached.registry.set_run_status(RunStatus(RunState.STOPPING, "`headrace down`"))
            return attached.run_dir, True

    run_dir, was_running = asyncio.run(stop())
    deadline = time.monotonic() + timeout_s
    while supervisor_pid(run_dir) is not None:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"{run_dir} has not ended within {timeout_s:g} s; `headrace down {run_dir} --now` ends it"
            )
        time.sleep(_POLL_S)
    if as_json:
        echo_json({"run": run_dir, "was_running": was_running})
    else:
        click.echo(f"{run_dir} is down" if was_running else f"{run_dir} was not running")


def supervisor_pid(run_dir: Path) -> int | None:
    """Return the process id of the run's supervisor, or None when none holds the run's lock."""
    import fcntl

    path = run_dir / "supervisor.lock"
    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return int(path.read_text())
