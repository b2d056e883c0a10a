"""``headrace scale`` and ``headrace down``: change the fleet of a run, or end the run.

*Consumes* the command's arguments. *Produces* an entry in the registry, which the supervisor reads
several times a second. *Waits for* the supervisor's end (``down``). Without a supervisor, ``down``
ends the processes that it left, the embedded server, published weights, sockets and temporary
files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import (
    Attached,
    answer,
    attach,
    find_run,
    json_option,
    look_at,
    on_run,
    run_among,
    run_argument,
)
from protocol.errors import ConfigError, DeadlineExceeded
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.runtime.registry.contract import Fleet, Heartbeat
    from protocol.ids import Role

_ELASTIC = ("generator", "reward", "reference")
_MAX_TRIES = 10
_POLL_S = 0.2
_REPORT_EVERY_S = 5.0
_NOW_S = 120.0
_ENDING_S = 60.0
"""For what follows the drain: the report, and the ledger's server."""


@click.command(
    epilog="\b\nExamples:\n  headrace scale generator=4\n  headrace scale generator=1 reward=2 runs/demo\n"
    "  headrace scale generator=auto   # by demand, with fleet.max_generators"
)
@click.argument("counts", nargs=-1, metavar="ROLE=NUMBER... [RUN]")
@run_among("counts")
@json_option
def scale(counts: tuple[str, ...], run: Path | None, as_json: bool) -> None:
    """Change how many workers a role has, while the run goes on."""
    if not counts:
        raise click.UsageError("no role given; expected ROLE=NUMBER, for example: headrace scale generator=4")
    fleet = change_fleet(run=run, wanted=dict(parse_count(text) for text in counts))
    by_hand = "; generators stay so, until `headrace scale generator=auto`" if fleet.is_by_hand else ""
    words = ", ".join(f"{count} {role}" for role, count in fleet.counts.items())
    answer(as_json, fleet, f"wanted: {words}{by_hand}")


@on_run(attach)
async def change_fleet(at: Attached, wanted: Mapping[Role, int | None]) -> Fleet:
    """Set how many workers of some roles a running run has; return the whole fleet that is wanted.
    None for generators: as many as the learner needs. Raises ConfigError: the run does not run,
    lacks such a role, or the fleet is too large."""
    from pipeline.runtime.registry.contract import RunState
    from pipeline.supervisor.run_folder import supervisor_pid

    status = await at.registry.run_status()
    if status.state is not RunState.RUNNING:
        raise ConfigError(f"{at.run_dir} is {status.state}, not running; `headrace up` starts a run")
    if supervisor_pid(at.run_dir) is None:
        resume = f"`headrace up --resume {at.run_dir}` starts one"
        raise ConfigError(f"{at.run_dir} has no supervisor to change its fleet; {resume}")
    for _ in range(_MAX_TRIES):
        present = await at.registry.fleet()
        if present is None:
            break
        fleet = _changed(at, present, wanted)
        if await at.registry.replace_fleet(present, fleet):
            return fleet
    raise ConfigError(f"the fleet of {at.run_dir} is being changed by others; try again")


def _changed(at: Attached, present: Fleet, wanted: Mapping[Role, int | None]) -> Fleet:
    """Return the fleet with other numbers of some roles. Raises ConfigError."""
    from pipeline.runtime.machine import this_machine
    from pipeline.runtime.registry.contract import Fleet
    from pipeline.supervisor.fleet_size import check_fleet_size
    from protocol.ids import Role

    counts = present.counts
    for role in wanted:
        if role not in counts:
            raise ConfigError(
                f"this run has no {role} workers: its roles are {', '.join(counts)}. "
                "A reference worker needs algorithm.kl_coefficient above 0, or reference.always"
            )
    numbers = {role: count for role, count in wanted.items() if count is not None}
    follows_demand = at.config.fleet.max_generators is not None
    if len(numbers) < len(wanted) and not follows_demand:
        raise ConfigError(
            "generator=auto: the number of generators follows demand only with fleet.max_generators; set it by `headrace up "
            f"--resume {at.run_dir} --set fleet.max_generators=NUMBER`"
        )
    is_by_hand = (Role.GENERATOR in numbers) if Role.GENERATOR in wanted else present.is_by_hand
    is_by_hand = is_by_hand and follows_demand
    fleet = Fleet({**counts, **numbers}, is_by_hand, "" if is_by_hand else present.demand)
    check_fleet_size(fleet.counts, at.config.fleet.max_workers, this_machine(), at.config.launch.elsewhere)
    return fleet


def parse_count(text: str) -> tuple[Role, int | None]:
    """Return role and number of ``ROLE=NUMBER``, None for ``generator=auto``. Raises ConfigError
    for other text."""
    from protocol.ids import Role

    if text == "generator=auto":
        return Role.GENERATOR, None
    name, _, number = text.partition("=")
    if name not in _ELASTIC or not number.isdecimal() or int(number) < 1:
        roles = ", ".join(_ELASTIC)
        raise ConfigError(f"`{text}`: expected ROLE=NUMBER with a role of {roles} and a number from 1, as generator=4")
    return Role(name), int(number)


@click.command(epilog="\b\nExamples:\n  headrace down\n  headrace down runs/demo --now")
@run_argument
@click.option("--now", is_flag=True, help="Do not drain. Unfinished work stays in the ledger for --resume.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.0),
    help="Seconds to wait. Default: supervisor.drain_ceiling_s and a minute; 120 with --now.",
)
@json_option
def down(run: Path | None, now: bool, timeout_s: float | None, as_json: bool) -> None:
    """Drain a run and end it. The command waits, and reports every few seconds what still drains.

    Ctrl-C ends the waiting, not the drain."""
    run_dir = find_run(run)
    was_running = end_run(run_dir, now=now, timeout_s=timeout_s, report=partial(click.echo, err=True))
    ending = "is down" if was_running else "was not running"
    answer(as_json, {"run": run_dir, "was_running": was_running}, f"{run_dir} {ending}")


def end_run(run_dir: Path, *, now: bool, timeout_s: float | None, report: Callable[[str], object]) -> bool:
    """Drain a run and end it; return whether it ran. ``now``, ``timeout_s``: as in ``headrace
    down``. ``report`` receives a line every few seconds. Raises DeadlineExceeded."""
    from pipeline.config.load import read_resolved
    from pipeline.ledger.server.copy import clear_dead_looks
    from pipeline.runtime.log import log_to_stderr
    from pipeline.supervisor.run_folder import supervisor_pid

    log_to_stderr()
    clear_dead_looks()
    if timeout_s is None:
        timeout_s = _NOW_S if now else read_resolved(run_dir).supervisor.drain_ceiling_s + _ENDING_S
    deadline = time.monotonic() + timeout_s
    pid = supervisor_pid(run_dir)
    if pid is None:
        was_running = _end_leftovers(run_dir, report, now=now, timeout_s=timeout_s)
    else:
        was_running = True
        if now:
            # Two different signals: two of one kind would be merged into one.
            for number in (signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        else:
            _request_drain(run=run_dir)
        request = "to end at once" if now else "to drain and end; Ctrl-C ends the waiting, not the drain"
        report(f"{run_dir} was asked {request}")
        try:
            asyncio.run(_until_down(run_dir, deadline, report))
        except KeyboardInterrupt:
            report(f"{run_dir} still drains; `headrace down {run_dir}` waits again, --now ends it")
            raise
        if supervisor_pid(run_dir) is not None:
            raise DeadlineExceeded(f"{run_dir} did not end within {timeout_s:g} s; `headrace down {run_dir} --now`")
    return was_running


@on_run(attach)
async def _request_drain(at: Attached) -> None:
    from pipeline.runtime.registry.contract import RunState, RunStatus

    detail = f"stopped by `headrace down`; go on with `headrace up --resume {at.run_dir}`"
    await at.registry.set_run_status(RunStatus(RunState.STOPPING, detail))


async def _until_down(run_dir: Path, deadline: float, report: Callable[[str], object]) -> None:
    """Wait for the supervisor's end or the deadline, and report what still drains."""
    from pipeline.supervisor.run_folder import supervisor_pid

    next_report = time.monotonic() + _REPORT_EVERY_S
    while supervisor_pid(run_dir) is not None and time.monotonic() < deadline:
        if time.monotonic() >= next_report:
            next_report = time.monotonic() + _REPORT_EVERY_S
            report(await _what_drains(run_dir))
        await asyncio.sleep(_POLL_S)


async def _what_drains(run_dir: Path) -> str:
    from protocol.errors import LedgerError

    try:
        async with look_at(run_dir) as at:
            beats = await at.registry.heartbeats()
    # The ledger's server ends last.
    except LedgerError:
        return "still draining; the ledger does not answer"
    return "still draining: " + (_in_words(beats) or "the ledger's server")


def _in_words(beats: Sequence[Heartbeat]) -> str:
    from pipeline.observability.status import doing, worker_rows

    rows = worker_rows(beats, stuck_after_s=None)
    return ", ".join(f"{row.worker} ({doing(row)})" for row in rows)


def _end_leftovers(run_dir: Path, report: Callable[[str], object], *, now: bool, timeout_s: float) -> bool:
    """End a dead supervisor's workers, server and processes; return whether there was anything."""
    from pipeline.ledger.server.embedded import end_server
    from pipeline.supervisor import leftovers
    from pipeline.supervisor.processes import Processes
    from pipeline.supervisor.run_folder import run_lock, server_lock

    with _reporting(report) as awaited:
        was_running = asyncio.run(_end_workers(run_dir, awaited, now=now, timeout_s=timeout_s))
        awaited("another command that starts or ends its ledger's server")
        # The locks keep a new supervisor from starting.
        with run_lock(run_dir), server_lock(run_dir):
            awaited("its processes to end")
            was_running |= Processes(run_dir).end_strays() > 0
            awaited("its jobs at other places to end")
            was_running |= _end_jobs(run_dir, report)
            awaited("its ledger's server to end")
            was_running |= end_server(run_dir)
            return leftovers.clear(run_dir) > 0 or was_running


def _end_jobs(run_dir: Path, report: Callable[[str], object]) -> bool:
    """End the jobs of a launcher; return whether there were any. A place that does not answer is
    named, and the rest of the run ends."""
    from pipeline.config.load import read_resolved

    config = read_resolved(run_dir)
    if not config.launch.launched:
        return False
    from pipeline.supervisor.launchers.build import end_jobs
    from pipeline.supervisor.launchers.seam import LaunchFailed

    try:
        return end_jobs(config, run_dir) > 0
    except (LaunchFailed, ConfigError) as error:
        report(f"jobs of launch.on={config.launch.on} may be left: {printable_line(str(error))}")
        return False


@contextlib.contextmanager
def _reporting(write_line: Callable[[str], object]) -> Iterator[Callable[[str], None]]:
    """Report what is waited for, every few seconds; the yielded function sets it."""
    ended, awaited = threading.Event(), "its ledger's server to answer"

    def report(words: str) -> None:
        nonlocal awaited
        awaited = words

    def write() -> None:
        while not ended.wait(_REPORT_EVERY_S):
            write_line(f"still waiting for {printable_line(awaited)}")

    reporter = threading.Thread(target=write, name="down-reports", daemon=True)
    reporter.start()
    try:
        yield report
    finally:
        ended.set()
        reporter.join()


async def _end_workers(run_dir: Path, report: Callable[[str], None], *, now: bool, timeout_s: float) -> bool:
    """Drain, then end, the workers that a dead supervisor left; return whether there were any."""
    from pipeline.ledger.address import read_address
    from pipeline.ledger.server.embedded import server_runs
    from pipeline.runtime.liveness import HEARTBEAT_WITHIN_S
    from pipeline.runtime.registry.contract import RunState, RunStatus
    from pipeline.supervisor.processes import Processes

    processes = Processes(run_dir)
    address = read_address(run_dir)
    if address is None or (address.is_embedded and not processes.find() and not server_runs(run_dir)):
        return False
    async with attach(run_dir) as attached:
        registry = attached.registry
        if not await registry.heartbeats() and not processes.find():
            return False
        detail = "stopped by `headrace down`; its supervisor had died"
        await registry.set_run_status(RunStatus(RunState.STOPPING, detail))
        deadline = time.monotonic() + timeout_s
        while left := [beat for beat in await registry.heartbeats() if not now and _may_live(beat)]:
            report(f"workers to drain: {_in_words(left)}")
            if time.monotonic() > deadline:
                names = ", ".join(beat.who.worker for beat in left)
                raise DeadlineExceeded(f"{names} did not drain within {timeout_s:g} s; `headrace down {run_dir} --now`")
            await asyncio.sleep(_POLL_S)
        # Left are dead and silent workers; with --now, all. Their writes no longer count.
        for beat in await registry.heartbeats():
            await registry.fence(beat.who.worker)
        report("workers to end")
        # Left are frozen and starting processes; with --now, busy ones too.
        for found in processes.find():
            await asyncio.to_thread(processes.end, found)
        if now:
            # a fenced worker ends with its next heartbeat
            await asyncio.sleep(2 * HEARTBEAT_WITHIN_S)
    return True


def _may_live(beat: Heartbeat) -> bool:
    from pipeline.process.records import process_runs
    from pipeline.runtime.liveness import is_silent

    is_gone = beat.host == socket.gethostname() and not process_runs(beat.pid)
    return not is_gone and not is_silent(beat.silent_s)
