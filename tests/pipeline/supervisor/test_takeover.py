"""Claims about the processes that a new supervisor may take over: this very process, and only its
worker's newest incarnation."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pipeline.process.records import Life, Started, identify, read_started, write_life, write_started
from pipeline.supervisor.host_fleet import HostFleet
from pipeline.supervisor.processes import Processes, worker_command
from pipeline.supervisor.starter import AdoptedProcess
from pipeline.supervisor.takeover import take_over
from protocol.ids import Role
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.op_config import op_config


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A child process that sleeps; here it stands for a worker whose supervisor is gone."""
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    yield started
    started.kill()
    started.wait()


def on_record(run_dir: Path, process: subprocess.Popen[bytes], *, epoch: int = 0) -> None:
    identity = identify(process.pid)
    assert identity is not None
    write_started(run_dir, "generator-0", Started(identity, Role.GENERATOR))
    if epoch:
        write_life(run_dir, "generator-0", Life(identity, epoch))


async def after(run_dir: Path, registry: MemoryRegistry) -> tuple[list[str], Processes]:
    fleet = HostFleet(op_config(run_dir), run_dir, worker_command)
    return await take_over(fleet, registry), fleet.processes


async def test_the_newest_incarnation_is_adopted_signalled_and_reaped(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    registry = MemoryRegistry()
    who = await registry.register(Role.GENERATOR, "generator-0")
    on_record(tmp_path, process, epoch=who.epoch)
    adopted, processes = await after(tmp_path, registry)
    assert adopted == ["generator-0"]
    assert processes.pids == {"generator-0": process.pid}
    assert processes.reap() == []
    processes.stop("generator-0", now=True)
    process.wait()
    [ended] = processes.reap()
    assert (ended.worker, ended.role, ended.code) == ("generator-0", Role.GENERATOR, -signal.SIGKILL)
    assert read_started(tmp_path) == {}


async def test_one_that_is_still_starting_is_adopted(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    registry = MemoryRegistry()
    # the one before it
    await registry.register(Role.GENERATOR, "generator-0")
    on_record(tmp_path, process)
    adopted, _ = await after(tmp_path, registry)
    assert adopted == ["generator-0"]


async def test_a_fenced_process_is_killed_though_it_is_frozen(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    registry = MemoryRegistry()
    who = await registry.register(Role.GENERATOR, "generator-0")
    on_record(tmp_path, process, epoch=who.epoch)
    process.send_signal(signal.SIGSTOP)
    await registry.fence("generator-0")
    adopted, processes = await after(tmp_path, registry)
    assert adopted == []
    assert processes.pids == {}
    assert process.wait(60) == -signal.SIGKILL


async def test_a_process_that_got_the_number_of_a_dead_one_is_left_alone(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    on_record(tmp_path, process)
    record = read_started(tmp_path)["generator-0"]
    other = msgspec.structs.replace(record.identity, started="another boot 1")
    write_started(tmp_path, "generator-0", msgspec.structs.replace(record, identity=other))
    adopted, processes = await after(tmp_path, MemoryRegistry())
    assert adopted == []
    processes.close()
    with pytest.raises(ProcessLookupError):
        AdoptedProcess(other, lambda: None)
    assert process.poll() is None


async def test_a_process_of_another_host_is_left_alone(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    on_record(tmp_path, process)
    record = read_started(tmp_path)["generator-0"]
    other = msgspec.structs.replace(record.identity, host="elsewhere")
    write_started(tmp_path, "generator-0", msgspec.structs.replace(record, identity=other))
    assert (await after(tmp_path, MemoryRegistry()))[0] == []
    assert process.poll() is None


def test_an_adopted_process_tells_its_exit_code_by_what_it_wrote(process: subprocess.Popen[bytes]) -> None:
    identity = identify(process.pid)
    assert identity is not None
    adopted = AdoptedProcess(identity, lambda: 6)
    assert adopted.poll() is None
    process.kill()
    assert adopted.wait() == 6
    # no process is left to receive it
    adopted.send_signal(signal.SIGTERM)


def test_a_zombie_has_ended(process: subprocess.Popen[bytes]) -> None:
    identity = identify(process.pid)
    assert identity is not None
    adopted = AdoptedProcess(identity, lambda: None)
    process.kill()
    # dead, and not reaped
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert identify(process.pid) is None
    assert adopted.poll() == -signal.SIGKILL


def test_an_end_is_seen_however_many_files_the_supervisor_has_open(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this system permits no more than a thousand open files")
    identity, opened = identify(process.pid), os.pidfd_open(process.pid)
    assert identity is not None
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        monkeypatch.setattr(os, "pidfd_open", lambda _: fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 1500))
        adopted = AdoptedProcess(identity, lambda: None)
        assert adopted.poll() is None
        adopted.kill()
        assert adopted.wait() == -signal.SIGKILL
    finally:
        os.close(opened)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_damaged_record_counts_as_absent(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    on_record(tmp_path, process)
    (tmp_path / "processes" / "generator-0.json").write_bytes(b"{")
    assert Processes(tmp_path).find() == []
