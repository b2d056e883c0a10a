"""Claims about who killed a worker: the kernel, for lack of memory, or somebody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.fleet.state import Worker
from pipeline.runtime.machine import CONTROL_GROUPS
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.supervisor.memory_kills import MemoryKills
from protocol.ids import Incarnation, Role

PID = 2458
KILL = -signal.SIGKILL


class Host:
    """Files of a kernel, by version of its control groups."""

    def __init__(self, folder: Path, version: int) -> None:
        self.groups, self.proc = folder / "cgroup", folder / "proc"
        self.group = self.groups / "memory" / "job" if version == 1 else self.groups / "job"
        self.group.mkdir(parents=True)
        (self.proc / "self").mkdir(parents=True)
        line = "4:memory:/job\n3:cpu:/\n" if version == 1 else "0::/job\n"
        (self.proc / "self" / "cgroup").write_text(line, encoding="utf-8")
        (self.group / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text("4000000000\n")
        self._version = version
        self.count(0, 0)

    def count(self, in_group: int, on_host: int) -> None:
        name, rest = ("memory.oom_control", "under_oom 0\n") if self._version == 1 else ("memory.events", "oom 9\n")
        (self.group / name).write_text(f"{rest}oom_kill {in_group}\n", encoding="ascii")
        (self.proc / "vmstat").write_text(f"pgfault 7\noom_kill {on_host}\n", encoding="ascii")

    def kills(self) -> MemoryKills:
        return MemoryKills(groups=self.groups, proc=self.proc)


@pytest.fixture(params=[1, 2])
def host(tmp_path: Path, request: pytest.FixtureRequest) -> Host:
    return Host(tmp_path, request.param)


def beat(worker: str, rss_bytes: int, pid: int) -> Worker:
    who = Incarnation(role=Role(worker.partition("-")[0]), worker=worker, epoch=1)
    return Worker(
        who=who, pid=pid, host="h", at_s=0.0, started_s=0.0, progress=1, progress_at_s=0.0,
        waiting_for=WaitingFor.COMPUTE, rss_bytes=rss_bytes,
    )  # fmt: skip


def look(kills: MemoryKills, learner_bytes: int = 3_100_000_000) -> None:
    beats = [beat("learner", learner_bytes, PID), beat("generator-0", 500_000_000, 8), beat("generator-9", 1 << 40, 9)]
    kills.observe(beats, {"learner": PID, "generator-0": 8})


def test_a_kill_of_the_kernel_says_who_held_what_and_what_to_lower(host: Host) -> None:
    kills = host.kills()
    look(kills)
    look(kills, 1_000_000)
    host.count(1, 1)
    words = kills.explain("learner", Role.LEARNER, PID, KILL)
    assert "killed by the kernel for lack of memory while it used 3.1 GB" in words
    assert "generator-0 500 MB" in words
    assert "generator-9" not in words, "one of another host"
    assert "all processes share 4.0 GB" in words
    assert str(host.group) in words
    assert "lower learner.micro_batch_tokens" in words


def test_each_kill_explains_one_end_and_an_older_one_none(host: Host) -> None:
    kills = host.kills()
    assert kills.explain("learner", Role.LEARNER, PID, KILL) == "", "kill -9 by a person"
    host.count(2, 2)
    # the looks come between a kill and its end's
    look(kills)
    assert kills.explain("learner", Role.LEARNER, PID, KILL)
    assert kills.explain("generator-0", Role.GENERATOR, 8, KILL)
    assert kills.explain("reward-0", Role.REWARD, 9, KILL) == ""
    look(kills)
    assert kills.explain("reward-0", Role.REWARD, 9, KILL) == ""
    host.count(3, 3)
    look(kills)
    look(kills)
    assert kills.explain("reward-0", Role.REWARD, 9, KILL) == "", "a verifier's process, a while ago"


@pytest.mark.parametrize(("code", "pid"), [(-signal.SIGTERM, PID), (1, PID), (KILL, 0)])
def test_other_ends_and_those_on_other_hosts_are_not_the_kernels(host: Host, code: int, pid: int) -> None:
    kills = host.kills()
    host.count(1, 1)
    assert kills.explain("learner", Role.LEARNER, pid, code) == ""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 64 MB below this process's; skips where none can be made."""
    for root, limit in ((CONTROL_GROUPS / "memory", "memory.limit_in_bytes"), (CONTROL_GROUPS, "memory.max")):
        group = root / f"headrace-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text("64M", encoding="ascii")
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        break
    else:
        pytest.skip("no control group with a limit of memory can be made here: that takes root and a writable cgroup")
    yield group
    for _ in range(50):
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.1)
        else:
            break


def test_a_process_that_the_kernel_really_killed_is_told_from_one_that_a_person_killed(small_group: Path) -> None:
    kills = MemoryKills()
    hungry = f"""
import os
open("{small_group}/cgroup.procs", "w").write(str(os.getpid()))
kept = [bytearray(b"x" * (1 << 20)) for _ in range(400)]
"""
    eater = subprocess.Popen([sys.executable, "-c", hungry])
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert eater.wait(30) == KILL
    assert "killed by the kernel for lack of memory" in kills.explain("learner", Role.LEARNER, eater.pid, KILL)
    sleeper.kill()
    assert sleeper.wait(30) == KILL
    assert kills.explain("reward-0", Role.REWARD, sleeper.pid, KILL) == ""
