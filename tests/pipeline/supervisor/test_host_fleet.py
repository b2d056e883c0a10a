"""Claims about the workers of one host that need no process: fences, losses and their record."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.fleet.repair.records import read_repairs
from pipeline.fleet.state import Worker
from pipeline.process.exit_codes import ExitCode
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.supervisor import host_fleet
from pipeline.supervisor.fleet_plan import Intervention, Verb
from pipeline.supervisor.host_fleet import HostFleet
from pipeline.supervisor.launchers.seam import Exit
from pipeline.supervisor.run_folder import prepare_run_dir
from protocol.errors import LedgerUnavailable
from protocol.ids import Incarnation, Role
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.op_config import op_config

PID = 4711


class Host:
    """A host's fleet whose plan counts one generator as running, and a registry in memory."""

    def __init__(self, folder: Path) -> None:
        config = op_config(folder, "fleet.generator=1")
        self.run_dir = prepare_run_dir(config, resume=False)
        self.fleet = HostFleet(config, self.run_dir, lambda *_: ["sleep", "60"])
        self.registry = MemoryRegistry()
        self.fleet.plan.adopt("generator-0", Role.GENERATOR)

    async def beat(self, pid: int = PID) -> Worker:
        who = await self.registry.register(Role.GENERATOR, "generator-0")
        return self.of(who, pid)

    def of(self, who: Incarnation, pid: int = PID, at_s: float = 0.0) -> Worker:
        times = {"at_s": at_s, "started_s": 0.0, "progress_at_s": 0.0, "still_s": at_s}
        return Worker(who=who, pid=pid, host="here", progress=1, waiting_for=WaitingFor.COMPUTE, **times)  # type: ignore[arg-type]

    def begin(self, worker: str) -> None:
        self.fleet.executor.act([Intervention(worker, Verb.START, role=Role.GENERATOR)])

    def reap(self) -> None:
        """Wait for a process to end."""
        deadline_s = time.monotonic() + 10.0
        while not self.fleet.processes.reap():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    def ends(self, code: int, pid: int = PID) -> None:
        self.fleet.record_exit(Exit("generator-0", Role.GENERATOR, pid, code), 10.0)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.fleet.processes.kill_all()
    made.fleet.processes.close()


async def test_a_worker_that_died_while_the_ledger_was_away_is_fenced_when_it_is_back(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = await host.beat()
    host.ends(-signal.SIGKILL)

    async def is_away(*_: object) -> int:
        raise LedgerUnavailable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryRegistry, "fence", is_away)
        with pytest.raises(LedgerUnavailable):
            await host.fleet.fence_exited(host.registry, [beat])
    await host.fleet.fence_exited(host.registry, [beat])
    assert await host.registry.epoch("generator-0") == beat.who.epoch + 1
    await host.fleet.fence_exited(host.registry, [beat])
    assert await host.registry.epoch("generator-0") == beat.who.epoch + 1, "once"


async def test_a_restart_is_a_repair_though_its_worker_ends_by_the_fence_itself(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.begin("generator-0")
    (pid,) = host.fleet.processes.pids.values()
    await host.beat(pid)
    fence = MemoryRegistry.fence

    async def fence_and_wait(registry: MemoryRegistry, worker: str) -> int:
        epoch = await fence(registry, worker)
        # it beats within a second, sees the fence and ends, before it is killed
        host.ends(ExitCode.FENCED, pid)
        return epoch

    with monkeypatch.context() as patched:
        patched.setattr(MemoryRegistry, "fence", fence_and_wait)
        wanted = host.fleet.to_replace("generator-0", "it is slow", stood_s=10.0, localise_s=3.0)
        await host.fleet.executor.carry_out(host.registry, [wanted])
    host.reap()
    assert [action.verb for action in host.fleet.plan.due(1e9)] == [Verb.START], "it is started again"
    host.begin("generator-0")
    successor = host.fleet.processes.pids["generator-0"]
    now = time.monotonic()
    workers = host.fleet.watchdog.fleet.read([await host.beat(successor)], now)
    await host.fleet.replace(host.registry, workers, now)
    ((repair,), _) = read_repairs(host.run_dir)
    assert (repair.worker, repair.cause) == ("generator-0", "it is slow")
    assert (repair.detect_s, repair.localise_s) == (7.0, 3.0)


async def test_workers_that_hang_together_are_examined_together(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["generator-0", "generator-1"]
    host.fleet.plan.adopt("generator-1", Role.GENERATOR)
    for name in names:
        host.begin(name)
    examined: list[list[str]] = []

    def stands(_: Path, workers: list[str], **how: object) -> dict[str, tuple[str, ...]]:
        examined.append(sorted(workers))
        return {worker: (f"{worker} stands in compute",) for worker in workers}

    monkeypatch.setattr(host_fleet, "stands_of", stands)
    whos = [await host.registry.register(Role.GENERATOR, name) for name in names]
    pids = host.fleet.processes.pids
    with capture_logs() as logged:
        for now in range(0, 80, 5):
            beats = [host.of(who, pids[who.worker], at_s=float(now)) for who in whos]
            await host.fleet.replace(host.registry, host.fleet.watchdog.fleet.read(beats, float(now)), float(now))
            if examined:
                break
    assert examined == [names]
    told = {row["worker"]: row["stands"] for row in logged if row["event"] == "worker_replaced"}
    assert told == {name: (f"{name} stands in compute",) for name in names}


@pytest.mark.parametrize("code", [ExitCode.OK, ExitCode.FENCED])
async def test_a_worker_that_ended_well_is_not_fenced(host: Host, code: int) -> None:
    beat = await host.beat()
    host.ends(code)
    await host.fleet.fence_exited(host.registry, [beat])
    assert await host.registry.epoch("generator-0") == beat.who.epoch


async def test_no_successor_is_fenced_for_its_predecessors_end(host: Host) -> None:
    await host.beat()
    # a job elsewhere
    host.ends(-signal.SIGKILL, pid=0)
    host.begin("generator-0")
    successor = await host.beat(pid=PID + 1)
    await host.fleet.fence_exited(host.registry, [successor])
    assert await host.registry.epoch("generator-0") == successor.who.epoch


def test_a_worker_that_the_kernel_killed_for_lack_of_memory_is_reported_as_such(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explain(worker: str, role: Role, pid: int, exit_code: int) -> str:
        return f"killed by the kernel for lack of memory; {worker} {role} {pid} {exit_code}"

    monkeypatch.setattr(host.fleet._memory, "explain", explain)
    with capture_logs() as logs:
        host.ends(-signal.SIGKILL)
    said = f"killed by the kernel for lack of memory; generator-0 generator {PID} -9"
    assert [line["meaning"] for line in logs if line["event"] == "worker_exited"] == [said]
    for _ in range(20):
        host.fleet.executor.act([])
        host.fleet.plan.due(10.0 + 1000.0)
        host.ends(-signal.SIGKILL)
        if host.fleet.plan.failure is not None:
            break
    assert host.fleet.plan.failure is not None
    assert said in host.fleet.plan.failure.reason
