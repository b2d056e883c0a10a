"""Claims about the end of a run with joined hosts: their last lines are awaited, dead hosts are
not."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.fleet.limits import Limits
from pipeline.fleet.state import Worker, read_once
from pipeline.process.records import FOLDER as PROCESSES
from pipeline.process.records import Life, ProcessIdentity, write_life
from pipeline.runtime.liveness import RESTARTED_WITHIN_S
from pipeline.runtime.registry.contract import RunState, WaitingFor
from pipeline.supervisor.joining.home import HomeEntry, HomePiece
from pipeline.supervisor.joining.joined_hosts import JoinedHosts
from protocol.errors import LedgerUnavailable
from protocol.ids import Incarnation, Role
from tests.manual_clock import ManualClock
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.op_config import op_config
from tests.pipeline.supervisor.joining.meeting import meeting, until

pytestmark = pytest.mark.timeout(90)
FAR, OWN, BY_HAND = "generator-hostb-x3f9a1-0", "generator-0", "generator-hand"


class Fleet:
    """A run with one worker of its own, one of another host, and one that was started by hand."""

    def __init__(self, folder: Path) -> None:
        config = op_config(folder, "wire.transport=tcp", "supervisor.drain_timeout_s=3600")
        (config.run_dir / PROCESSES).mkdir(parents=True)
        life = Life(ProcessIdentity("host", 1, "now"))
        write_life(config.run_dir, BY_HAND, life)
        self.clock = ManualClock()
        self.registry = MemoryRegistry(self.clock)
        self.hosts = JoinedHosts(config, config.run_dir)

    async def look(self, *, is_running: bool = True) -> None:
        self.hosts.observe(
            read_once(await self.registry.heartbeats(), Limits(None, 100.0)), {OWN}, is_running=is_running
        )

    async def beat(self) -> None:
        for name in (OWN, FAR, BY_HAND):
            epoch = await self.registry.epoch(name) or (await self.registry.register(Role.GENERATOR, name)).epoch
            now = self.clock.time()
            who = Incarnation(Role.GENERATOR, name, epoch)
            assert self.registry.beat(
                Worker(
                    who=who,
                    pid=1,
                    host="host",
                    at_s=now,
                    started_s=0.0,
                    progress=1,
                    progress_at_s=now,
                    waiting_for=WaitingFor.COMPUTE,
                )
            )

    async def left(self, *, given_up: bool = False) -> list[list[str]]:
        """Return the workers whose last lines were not awaited."""
        with capture_logs() as logged:
            async with asyncio.timeout(60):
                await self.hosts.await_last_lines(self.registry, lambda: given_up)
        return [line["workers"] for line in logged if line["event"] == "logs_not_awaited"]


@pytest.fixture
async def fleet(tmp_path: Path) -> Fleet:
    made = Fleet(tmp_path)
    await made.beat()
    await made.look()
    return made


async def test_the_last_lines_of_a_host_that_drains_longer_are_there_at_the_end(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch, "supervisor.drain_timeout_s=60") as run:
        with run.claimed() as place:
            name = place.worker_name(Role.GENERATOR, 0)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run.join(place, script="slow"))
                run.hosts.observe(await until(run.registry.heartbeats), is_running=True)
                await run.set(RunState.FINISHED, "by the test")
                await run.hosts.await_last_lines(run.registry, lambda: False)
                last = (run.run_dir / "logs" / f"{name}.jsonl").read_bytes()
        assert b"worker_ended" in last
        assert last == (place.path / "logs" / f"{name}.jsonl").read_bytes()


async def test_the_last_entry_of_a_join_ends_the_wait_for_its_workers(fleet: Fleet) -> None:
    fleet.hosts._hear(HomeEntry(ended=(OWN, FAR)))
    assert await fleet.left() == []


async def test_a_worker_that_works_on_after_an_earlier_joins_last_entry_is_waited_for(fleet: Fleet) -> None:
    fleet.hosts._hear(HomeEntry(ended=(FAR,)))
    await fleet.look()
    assert await fleet.left(given_up=True) == [[FAR]]


async def test_a_fenced_worker_that_starts_again_at_the_end_is_waited_for(fleet: Fleet) -> None:
    """With a heartbeat just now; or after a silence, with lines that come home."""
    await fleet.registry.fence(FAR)
    await fleet.look()
    assert await fleet.left(given_up=True) == [[FAR]]
    fleet.hosts._seen_s.clear()
    fleet.hosts._hear(HomeEntry((HomePiece(f"{FAR}.jsonl", 1, 0, b"worker_started"),)))
    await fleet.look()
    assert await fleet.left(given_up=True) == [[FAR]]


async def test_the_log_of_a_joined_supervisor_is_no_sign_of_a_worker(fleet: Fleet) -> None:
    fleet.hosts._hear(HomeEntry((HomePiece("supervisor-hostc-x3f9a1-0.jsonl", 1, 0, b"worker_exited"),)))
    assert await fleet.left(given_up=True) == [[FAR]]


async def test_a_worker_without_a_sign_for_the_time_of_a_restart_is_not_waited_for(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.registry.fence(FAR)
    later_s = time.monotonic() + RESTARTED_WITHIN_S
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    await fleet.look()
    assert await fleet.left(given_up=True) == []


@pytest.mark.parametrize("in_drain", [True, False])
async def test_a_host_that_falls_silent_is_not_waited_for(fleet: Fleet, in_drain: bool) -> None:
    """While the run's own workers drain, when it is fenced, too; or later."""
    await fleet.clock.advance(6.0)
    if in_drain:
        await fleet.look(is_running=False)
        await fleet.registry.fence(FAR)
    assert await fleet.left() == []


async def test_a_second_signal_waits_for_no_host_and_names_its_workers(fleet: Fleet) -> None:
    assert await fleet.left(given_up=True) == [[FAR]]


async def test_without_a_ledger_nothing_is_waited_for(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object) -> list[Worker]:
        raise LedgerUnavailable("no answer")

    monkeypatch.setattr(MemoryRegistry, "heartbeats_of", away)
    assert await fleet.left() == [[FAR]]
