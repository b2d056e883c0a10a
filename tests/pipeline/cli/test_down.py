"""`headrace down` waits as long as a drain may last, reports what drains, and can be left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from pipeline.cli import headrace
from pipeline.ledger.address import read_ledger_url
from pipeline.ledger.redis.client import connect
from pipeline.ledger.server.embedded import EmbeddedServer
from pipeline.operator import ending
from pipeline.runtime.clock import RealClock
from pipeline.runtime.registry.contract import RunState, RunStatus, WaitingFor
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.registry.redis_heartbeats import RedisHeartbeatWriter
from pipeline.runtime.worker_state import WorkerState
from pipeline.supervisor.run_folder import run_lock
from protocol.errors import DeadlineExceeded
from protocol.ids import Role
from tests.pipeline.made_run import made_run

pytestmark = pytest.mark.timeout(60)


@contextmanager
def begun_run(folder: Path) -> Iterator[tuple[Path, EmbeddedServer]]:
    """A run with a learner that has reported once that it writes a checkpoint."""
    run_dir, _, server = made_run(folder, "supervisor.drain_ceiling_s=1")
    asyncio.run(_begin(run_dir))
    try:
        yield run_dir, server
    finally:
        server.stop()


@contextmanager
def draining_run(folder: Path, *, for_s: float) -> Iterator[Path]:
    """... and a supervisor (this process) that ends after so long."""
    is_held, is_over = threading.Event(), threading.Event()

    def supervise(run_dir: Path) -> None:
        with run_lock(run_dir):
            is_held.set()
            is_over.wait(for_s)

    with begun_run(folder) as (run_dir, _):
        supervisor = threading.Thread(target=supervise, args=(run_dir,))
        supervisor.start()
        is_held.wait()
        try:
            yield run_dir
        finally:
            is_over.set()
            supervisor.join()


async def _begin(run_dir: Path) -> None:
    url = read_ledger_url(run_dir)
    registry = RedisRegistry(connect(url), "op")
    await registry.set_run_status(RunStatus(RunState.RUNNING))
    worker_state = WorkerState(await registry.register(Role.LEARNER, "learner"), RealClock())
    worker_state.waiting_for(WaitingFor.DISK, "a checkpoint")
    await registry.aclose()
    await asyncio.to_thread(_beat, url, worker_state)


def _beat(url: str, worker_state: WorkerState) -> None:
    writer = RedisHeartbeatWriter(url, "op")
    assert writer.beat(worker_state.heartbeat())
    writer.close()


def _status(run_dir: Path) -> RunState:
    async def look() -> RunState:
        registry = RedisRegistry(connect(read_ledger_url(run_dir)), "op")
        try:
            return (await registry.run_status()).state
        finally:
            await registry.aclose()

    return asyncio.run(look())


def _down(run_dir: Path, *words: str) -> Result:
    return CliRunner().invoke(headrace, ["down", str(run_dir), *words], standalone_mode=False)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.operator.ending._REPORT_EVERY_S", 0.3)


def test_down_tells_what_still_drains_until_it_has(tmp_path: Path) -> None:
    with draining_run(tmp_path, for_s=1.5) as run_dir:
        done = _down(run_dir)
        assert done.exception is None
        first, *others = done.stderr.splitlines()
        assert first == f"{run_dir} was asked to drain and end; Ctrl-C stops waiting, not the drain"
        assert "still draining: learner (disk: a checkpoint)" in others
        assert "is down" in done.stdout
        assert _status(run_dir) is RunState.STOPPING


def test_down_waits_as_long_as_a_drain_may_last_and_what_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.operator.ending._ENDING_S", 0.5)
    with draining_run(tmp_path, for_s=20.0) as run_dir:
        began = time.monotonic()
        done = _down(run_dir)
        assert isinstance(done.exception, DeadlineExceeded)
        assert "did not end within 1.5 s" in str(done.exception)
        assert time.monotonic() - began >= 1.5
        assert "did not end within 0.2 s" in str(_down(run_dir, "--timeout", "0.2").exception)


def test_an_interrupted_down_leaves_the_drain_going(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drains = ending._drain_progress

    async def interrupted(run_dir: Path) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return await drains(run_dir)

    monkeypatch.setattr(ending, "_drain_progress", interrupted)
    with draining_run(tmp_path, for_s=20.0) as run_dir:
        done = _down(run_dir, "--timeout", "15")
        assert isinstance(done.exception, click.Abort)
        assert "is still draining" in done.stderr
        assert _status(run_dir) is RunState.STOPPING


def test_down_without_a_supervisor_tells_drain_progress_and_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # then the learner of the test counts as gone
    monkeypatch.setattr("pipeline.runtime.liveness.SILENT_AFTER_S", 4.0)
    with begun_run(tmp_path) as (run_dir, server):
        pid = server.pid()
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        waking = threading.Timer(1.0, os.kill, (pid, signal.SIGCONT))
        waking.start()
        done = _down(run_dir)
        waking.join()
        assert done.exception is None
        told = done.stderr.splitlines()
        assert "still waiting for its ledger's server to answer" in told
        assert "still waiting for workers to drain: learner (disk: a checkpoint)" in told
        assert "is down" in done.stdout
        assert not server.is_there()


HOLD = """
import sys, time
from pathlib import Path
from pipeline.supervisor.run_folder import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_down_reaches_a_supervisor_that_has_no_server_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.operator.attached._ANSWER_S", 0.5)
    run_dir, _, server = made_run(tmp_path)
    server.stop()
    with subprocess.Popen([sys.executable, "-c", HOLD, run_dir], stdout=subprocess.PIPE) as starting:
        assert starting.stdout is not None and starting.stdout.readline()
        assert ending.end_run(run_dir, now=False, timeout_s=30.0, report=lambda _: None)
        assert starting.wait(10) == -signal.SIGTERM


def test_down_names_the_supervisor_that_it_asks(tmp_path: Path) -> None:
    async def status_of(run_dir: Path) -> RunStatus:
        registry = RedisRegistry(connect(read_ledger_url(run_dir)), "op")
        try:
            return await registry.run_status()
        finally:
            await registry.aclose()

    with draining_run(tmp_path, for_s=1.0) as run_dir:
        ending.end_run(run_dir, now=False, timeout_s=20.0, report=lambda _: None)
        status = asyncio.run(status_of(run_dir))
    assert (status.state, status.supervisor) == (RunState.STOPPING, os.getpid())
