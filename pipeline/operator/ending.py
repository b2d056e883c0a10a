"""Ends a run: drains it, or cleans up what a dead supervisor left behind.

With a supervisor, ``end_run`` sets the state "stopping" in the registry, which the supervisor reads
several times a second, and waits for it to exit. Without one, it ends the leftover processes and the
embedded server, and removes published weights, sockets and temporary files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.operator.attached import attach, look_at, workers_of
from pipeline.supervisor.leftovers import clear_leftovers
from protocol.errors import ConfigError, DeadlineExceeded, LedgerError
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.fleet.state import Worker
_POLL_S = 0.2
_REPORT_EVERY_S = 5.0
_NOW_S = 120.0
_ENDING_S = 60.0
"""Time for what follows the drain: the report and stopping the ledger's server."""


def end_run(run_dir: Path, *, now: bool, timeout_s: float | None, report: Callable[[str], object]) -> bool:
    """Drain a run and end it; return whether it was running.

    ``now`` and ``timeout_s`` are those of ``headrace down``. ``report`` receives a line every few
    seconds. Raises DeadlineExceeded."""
    from pipeline.config.load import read_resolved
    from pipeline.ledger.server.copy import remove_stale_copies
    from pipeline.runtime.log import log_to_stderr
    from pipeline.supervisor.run_folder import supervisor_pid

    log_to_stderr()
    remove_stale_copies()
    if timeout_s is None:
        timeout_s = _NOW_S if now else read_resolved(run_dir).supervisor.drain_ceiling_s + _ENDING_S
    deadline = time.monotonic() + timeout_s
    pid = supervisor_pid(run_dir)
    if pid is None:
        was_running = _end_leftovers(run_dir, report, now=now, timeout_s=timeout_s)
    else:
        was_running = True
        if now:
            # Two different signals, because two of the same kind would be merged into one.
            for number in (signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        else:
            _request(run_dir, pid)
        request = "to end at once" if now else "to drain and end; Ctrl-C stops waiting, not the drain"
        report(f"{run_dir} was asked {request}")
        try:
            asyncio.run(_until_down(run_dir, deadline, report))
        except KeyboardInterrupt:
            report(f"{run_dir} is still draining; `headrace down {run_dir}` waits again, and --now ends it at once")
            raise
        if supervisor_pid(run_dir) is not None:
            raise DeadlineExceeded(
                f"{run_dir} did not end within {timeout_s:g} s; end it at once with `headrace down {run_dir} --now`"
            )
    return was_running


def _request(run_dir: Path, pid: int) -> None:
    """Ask the supervisor to drain and end: through the registry, or by a signal if the ledger does not
    answer, for instance because its server has not started yet."""
    try:
        asyncio.run(_request_drain(run_dir, pid))
    except LedgerError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


async def _request_drain(run_dir: Path, pid: int) -> None:
    from pipeline.runtime.registry.contract import RunState, RunStatus

    async with attach(run_dir) as at:
        detail = f"stopped by `headrace down`; continue with `headrace up --resume {at.run_dir}`"
        # The process id addresses this supervisor only, even while it is still starting.
        await at.registry.set_run_status(RunStatus(RunState.STOPPING, detail, pid))


async def _until_down(run_dir: Path, deadline: float, report: Callable[[str], object]) -> None:
    """Wait for the supervisor to exit or the deadline, and report what is still draining."""
    from pipeline.supervisor.run_folder import supervisor_pid

    next_report = time.monotonic() + _REPORT_EVERY_S
    while supervisor_pid(run_dir) is not None and time.monotonic() < deadline:
        if time.monotonic() >= next_report:
            next_report = time.monotonic() + _REPORT_EVERY_S
            report(await _drain_progress(run_dir))
        await asyncio.sleep(_POLL_S)


async def _drain_progress(run_dir: Path) -> str:
    try:
        async with look_at(run_dir) as at:
            workers = await workers_of(at)
    # The ledger's server ends last.
    except LedgerError:
        return "still draining; the ledger does not answer"
    return "still draining: " + (_in_words(workers) or "the ledger's server")


def _in_words(workers: Sequence[Worker]) -> str:
    from pipeline.fleet.status import doing, worker_rows

    return ", ".join(f"{row.worker} ({doing(row)})" for row in worker_rows(workers))


def _end_leftovers(run_dir: Path, report: Callable[[str], object], *, now: bool, timeout_s: float) -> bool:
    """End a dead supervisor's workers, server and processes; return whether there were any."""
    from pipeline.ledger.server.embedded import end_server
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
            return clear_leftovers(run_dir) > 0 or was_running


def _end_jobs(run_dir: Path, report: Callable[[str], object]) -> bool:
    """End a launcher's jobs; return whether there were any. A launcher that does not answer is
    reported and does not keep the rest of the run from ending."""
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
    """Every few seconds, report what is awaited; the yielded function sets it."""
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
    """Drain and then end the workers a dead supervisor left; return whether there were any."""
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
        while left := [beat for beat in await workers_of(attached) if not now and _may_live(beat)]:
            report(f"workers to drain: {_in_words(left)}")
            if time.monotonic() > deadline:
                names = ", ".join(beat.who.worker for beat in left)
                raise DeadlineExceeded(
                    f"{names} did not drain within {timeout_s:g} s; end them with `headrace down {run_dir} --now`"
                )
            await asyncio.sleep(_POLL_S)
        # The rest are dead or silent workers (all of them with --now). Fence off their writes.
        for beat in await registry.heartbeats():
            await registry.fence(beat.who.worker)
        report("workers to end")
        # The rest are frozen and starting processes; with --now, busy ones too.
        for found in processes.find():
            await asyncio.to_thread(processes.end, found)
        if now:
            # a fenced worker exits at its next heartbeat
            await asyncio.sleep(2 * HEARTBEAT_WITHIN_S)
    return True


def _may_live(beat: Worker) -> bool:
    from pipeline.process.records import process_runs

    is_gone = beat.host == socket.gethostname() and not process_runs(beat.pid)
    return not is_gone and not beat.is_silent
