"""The observer: a real registry's heartbeats in, incidents and files out, in driven time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from pipeline.config.operations import ObserverSection
from pipeline.fleet.incidents.records import INCIDENTS_NAME, Incident, RunIncidents
from pipeline.fleet.peers.thresholds import Tail, Thresholds
from pipeline.fleet.suspicions import AWAY_S, FleetSuspicions
from pipeline.runtime.flow_ring import FlowRingWriter, flow_folder
from pipeline.runtime.message_record import key_of
from pipeline.runtime.registry.contract import FailureReport, Heartbeat, WaitingFor
from pipeline.runtime.registry.entries import Vitals
from pipeline.supervisor.leftovers import clear_leftovers
from protocol.errors import LedgerUnavailable
from protocol.ids import Role
from tests.manual_clock import ManualClock
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.pipeline.runtime.ring_records import Ended, chunk_id, write
from tests.transports import zmq_transport
from workers.observer.observer import Observer

LIMIT_S = 20.0


class LeavingRegistry(MemoryRegistry):
    """A registry whose server can go away."""

    is_away = False

    async def heartbeats(self, role: Role | None = None, *, below_version: int | None = None) -> list[Heartbeat]:
        if LeavingRegistry.is_away:
            raise LedgerUnavailable("no server answers")
        return await super().heartbeats(role, below_version=below_version)


class Site:
    """A fleet whose heartbeats the test writes, and its observer."""

    def __init__(self, run_dir: Path, clock: ManualClock, registry: MemoryRegistry, observer: Observer) -> None:
        self.run_dir, self.clock, self.registry, self.observer = run_dir, clock, registry, observer
        self.beats: dict[str, Heartbeat] = {}
        self.writer = registry.writer()

    async def add(self, role: Role, *names: str) -> None:
        for name in names:
            who = await self.registry.register(role, name)
            now_s = self.clock.time()
            self.beats[name] = Heartbeat(
                who=who, pid=1, host="host", at_s=now_s, started_s=now_s, progress=0, progress_at_s=now_s,
                waiting_for=WaitingFor.INPUT,
            )  # fmt: skip

    async def pass_s(self, seconds: int, *, without: frozenset[str] = frozenset()) -> None:
        """Let seconds pass. Workers of ``without`` send no heartbeat."""
        for _ in range(seconds):
            for name, beat in self.beats.items():
                if name not in without:
                    self.beats[name] = msgspec.structs.replace(beat, at_s=self.clock.time(), progress=beat.progress + 1)
                    self.writer.beat(self.beats[name])
            looked = self.num_looked
            await self.clock.advance(1.0)
            await until(lambda looked=looked: self.num_looked > looked)

    @property
    def num_looked(self) -> float:
        counters = self.observer.ctx.counters
        return counters.get("moments", 0.0) + counters.get("missed_moments", 0.0)

    @property
    def incidents(self) -> list[Incident]:
        return list(RunIncidents(self.run_dir).read())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110  the end of a look is announced by nothing
            await asyncio.sleep(0.001)


@asynccontextmanager
async def observed(run_dir: Path, *, clock: ManualClock | None = None, thresholds: str = "") -> AsyncGenerator[Site]:
    clock = clock or ManualClock(start_s=1e9)
    registry = LeavingRegistry(clock=clock)
    async with asyncio.TaskGroup() as tasks:
        config = small_config(run_dir).model_copy(update={"observer": ObserverSection(thresholds=thresholds)})
        transport = zmq_transport("observer#1")
        ctx = await context_of(config, run_dir, Role.OBSERVER, "observer", tasks, registry, transport, clock)
        observer = Observer(ctx)
        await observer.setup()
        running = tasks.create_task(observer.run())
        try:
            yield Site(run_dir, clock, registry, observer)
        finally:
            ctx.draining.set()
            await clock.advance(1.0)
            await running
            await observer.drain()
            await ctx.cancel_spawned()
            ctx.close()


async def test_a_silent_worker_is_an_incident_and_a_healthy_fleet_has_none(tmp_path: Path) -> None:
    async with observed(tmp_path) as site:
        await site.add(Role.GENERATOR, *(f"generator-{n}" for n in range(6)))
        await site.pass_s(30)
        assert site.incidents == []
        await site.pass_s(12, without=frozenset({"generator-3"}))
        (only,) = site.incidents
        assert (only.component, only.kind, only.role, only.is_open) == ("generator-3", "silent", "generator", True)
        assert only.since_s == pytest.approx(1e9 + 29.0, abs=2.0)
        assert site.observer.ctx.counters["incidents_open"] == 1
        await site.pass_s(180)
        assert [one.is_open for one in site.incidents] == [False]
        assert site.observer.ctx.counters == site.observer.ctx.counters | {"incidents": 1, "incidents_open": 0}


async def test_an_observer_reads_the_failures_of_workers_from_the_registry(tmp_path: Path) -> None:
    async with observed(tmp_path) as site:
        await site.add(Role.REFERENCE, "reference-0", "reference-1")
        await site.pass_s(3)
        who = site.beats.pop("reference-1").who
        await site.registry.depart(who, FailureReport(who=who, error="RuntimeError", message="a task was lost"))
        await site.pass_s(2)
        (only,) = site.incidents
        assert (only.component, only.kind) == ("reference-1", "failed")


async def test_the_incident_of_a_hung_worker_gets_stacks_while_the_observer_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    examined: list[list[str]] = []

    def stands_of(_: Path, workers: list[str], **how: object) -> dict[str, tuple[str, ...]]:
        examined.append(workers)
        assert answers.wait(LIMIT_S)
        return {worker: (f"{worker} stands in main: spin", "reference-0 moves") for worker in workers}

    monkeypatch.setattr("workers.observer.observer.stands_of", stands_of)
    async with observed(tmp_path) as site:
        await site.add(Role.REFERENCE, *(f"reference-{n}" for n in range(6)))
        for second in range(1, 13):
            hung = site.beats["reference-1"]
            vitals = Vitals(loop_lag_ms=1e3 * second)
            site.beats["reference-1"] = msgspec.structs.replace(hung, vitals=vitals, turned_at_s=1e9)
            await site.pass_s(1)
        (only,) = site.incidents
        assert (only.component, only.kind, only.stacks) == ("reference-1", "hung", ())
        answers.set()
        await until(lambda: bool(site.incidents[0].stacks))
        assert site.incidents[0].stacks == ("reference-1 stands in main: spin", "reference-0 moves")
        assert examined == [["reference-1"]]


async def test_an_observer_judges_by_the_thresholds_of_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Thresholds] = []
    monkeypatch.setattr(FleetSuspicions, "judge_by", lambda self, thresholds: taken.append(thresholds))
    written = Thresholds({8: Tail(2.0, 0.5)})
    written.write(tmp_path / "own.json")
    async with observed(tmp_path, thresholds=str(tmp_path / "own.json")) as site:
        await site.pass_s(1)
    assert taken == [written]
    # a file that cannot be read stops no observer
    async with observed(tmp_path, thresholds=str(tmp_path / "absent.json")) as site:
        await site.pass_s(2)
        assert site.num_looked >= 2
    assert taken == [written]


async def test_a_registry_without_an_answer_is_an_incident_and_blames_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with observed(tmp_path) as site:
        await site.add(Role.GENERATOR, *(f"generator-{n}" for n in range(6)))
        await site.pass_s(20)

        monkeypatch.setattr(LeavingRegistry, "is_away", True)
        await site.pass_s(int(AWAY_S) + 10)
        monkeypatch.setattr(LeavingRegistry, "is_away", False)
        await site.pass_s(60)
        assert [(one.component, one.kind, one.is_open) for one in site.incidents] == [("ledger", "silent", False)]
        assert site.incidents[0].records[0].evidence == ("no server answers",)


async def test_the_next_observer_goes_on_with_the_numbers_of_the_one_before(tmp_path: Path) -> None:
    clock = ManualClock(start_s=1e9)
    for silent in ("generator-3", "generator-4"):
        async with observed(tmp_path, clock=clock) as site:
            await site.add(Role.GENERATOR, *(f"generator-{n}" for n in range(6)))
            await site.pass_s(15)
            await site.pass_s(12, without=frozenset({silent}))
    assert [(one.number, one.component) for one in site.incidents] == [(1, "generator-3"), (2, "generator-4")]
    assert not any(one.is_open for one in site.incidents), "an observer that leaves ends what is open"


async def test_its_own_heartbeat_is_not_judged_and_metrics_come_to_the_disk(tmp_path: Path) -> None:
    async with observed(tmp_path) as site:
        await site.add(Role.GENERATOR, "generator-0")
        await site.add(Role.OBSERVER, "observer")
        await site.pass_s(5)
        # A table within the open incidents' time, not only at the end.
        assert not (tmp_path / "observed").exists()
        await site.pass_s(118)
        assert len(list((tmp_path / "observed").glob("metrics-*"))) == 1
    rows = [row for file in (tmp_path / "observed").iterdir() for row in pq.read_table(file).to_pylist()]
    assert {row["worker"] for row in rows} == {"generator-0"}
    assert len({row["time_s"] for row in rows}) >= 123


async def test_a_disk_that_refuses_incidents_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / INCIDENTS_NAME).mkdir()
    async with observed(tmp_path) as site:
        await site.add(Role.GENERATOR, *(f"generator-{n}" for n in range(6)))
        await site.pass_s(15)
        await site.pass_s(12, without=frozenset({"generator-3"}))
        assert site.observer.ctx.counters["incidents"] == 1


async def test_a_silence_that_lasts_is_one_open_incident_for_as_long(tmp_path: Path) -> None:
    async with observed(tmp_path) as site:
        await site.add(Role.GENERATOR, *(f"generator-{n}" for n in range(6)))
        await site.pass_s(15)
        await site.pass_s(200, without=frozenset({"generator-3"}))
        assert [(one.component, one.is_open, len(one.records)) for one in site.incidents] == [("generator-3", True, 2)]
        assert [str(record.step) for record in site.incidents[0].records] == ["opened", "grew"], "its cause was found"


async def test_states_are_kept_each_second_by_the_wall_clock_those_of_a_silent_worker_too(tmp_path: Path) -> None:
    async with observed(tmp_path) as site:
        await site.add(Role.REWARD, "reward-0", "reward-1")
        await site.pass_s(5)
        await site.pass_s(5, without=frozenset({"reward-1"}))
    (file,) = (tmp_path / "observed").glob("states-*.parquet")
    rows = pq.read_table(file).to_pylist()
    assert {row["waiting_for"] for row in rows} == {"input"}
    late = {name: [row["given_s"] - row["time_s"] for row in rows if row["worker"] == name] for name in site.beats}
    assert [len(each) for each in late.values()] == [11, 11] or [len(each) for each in late.values()] == [10, 10]
    assert max(late["reward-0"]) < 2.0 <= 4.0 <= late["reward-1"][-1]
    assert {int(row["given_s"] - 1e9) for row in rows} >= set(range(1, 10))


async def test_messages_of_workers_of_its_host_are_kept_in_the_runs_folder(tmp_path: Path) -> None:
    async with observed(tmp_path) as site:
        await site.add(Role.REWARD, "reward-0")
        ring = FlowRingWriter(flow_folder(tmp_path), site.beats["reward-0"].who)
        with closing(ring):
            for number in range(5):
                write(ring, Ended(site.clock.monotonic()), number)
                await site.pass_s(1)
        clear_leftovers(tmp_path)
    (file,) = (tmp_path / "observed").glob("messages-*.parquet")
    rows = pq.read_table(file).to_pylist()
    assert [(row["key"], row["worker"], row["time_s"]) for row in rows] == [
        (key_of(chunk_id(number)), "reward-0", 1e9 + number) for number in range(5)
    ]
    assert site.observer.ctx.counters["records_lost"] == 0
