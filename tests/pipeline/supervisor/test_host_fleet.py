"""Claims about the workers of one host that need no process: fences, losses and their record."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pipeline.process.exit_codes import ExitCode
from pipeline.runtime.registry.contract import Heartbeat, WaitingFor
from pipeline.runtime.registry.memory import MemoryRegistry
from pipeline.supervisor.host_fleet import HostFleet
from pipeline.supervisor.launchers.seam import Exit
from protocol.errors import LedgerUnavailable
from protocol.ids import Incarnation, Role
from tests.pipeline.op_config import op_config

PID = 4711


class Host:
    """A host's fleet whose plan counts one generator as running, and a registry in memory."""

    def __init__(self, folder: Path) -> None:
        config = op_config(folder, "fleet.generator=1")
        config.run_dir.mkdir(parents=True)
        self.fleet = HostFleet(config, config.run_dir, lambda *_: ["true"])
        self.registry = MemoryRegistry()
        self.fleet.plan.adopt("generator-0", Role.GENERATOR)

    async def beat(self, pid: int = PID) -> Heartbeat:
        who = await self.registry.register(Role.GENERATOR, "generator-0")
        return self.of(who, pid)

    def of(self, who: Incarnation, pid: int = PID) -> Heartbeat:
        times = {"at_s": 0.0, "started_s": 0.0, "progress_at_s": 0.0}
        return Heartbeat(who=who, pid=pid, host="here", progress=1, waiting_for=WaitingFor.COMPUTE, **times)  # type: ignore[arg-type]

    def ends(self, code: int, pid: int = PID) -> None:
        self.fleet.note(Exit("generator-0", Role.GENERATOR, pid, code), 10.0)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


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
    host.fleet._start(Role.GENERATOR, "generator-0", 11.0)
    successor = await host.beat(pid=PID + 1)
    await host.fleet.fence_exited(host.registry, [successor])
    assert await host.registry.epoch("generator-0") == successor.who.epoch
    host.fleet.processes.close()
