"""Claims about the vitals in a heartbeat: their measurements, and how a stuck loop or host
shows."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.connection import PipelinedConnection
from pipeline.process.work import Meter, ServiceSums
from pipeline.runtime import host_watch
from pipeline.runtime.host_watch import Gpus, GpuState, HostState, HostWatch
from pipeline.runtime.registry.contract import Heartbeat, LinkReport, WaitingFor
from pipeline.runtime.registry.entries import Vitals
from pipeline.runtime.worker_state import LoopLag, VitalSigns, WorkerState
from protocol.ids import Incarnation, Role
from tests.manual_clock import ManualClock

WHO = Incarnation(role=Role.REWARD, worker="reward-0", epoch=3)


def vitals_of(state: WorkerState) -> Vitals:
    vitals = state.heartbeat().vitals
    assert vitals is not None
    return vitals


async def test_the_loops_lag_is_the_longest_delay_since_the_last_heartbeat() -> None:
    clock = ManualClock()
    lag = LoopLag(clock.monotonic)
    for delay_s in (0.02, 0.3, 0.1):
        lag.expect(0.5)
        await clock.advance(0.5 + delay_s)
        lag.woke()
    assert lag.take_worst_s() == pytest.approx(0.3)
    assert lag.take_worst_s() == 0.0, "each delay is reported once"


async def test_a_loop_that_stands_still_lags_more_in_every_heartbeat() -> None:
    clock = ManualClock()
    lag = LoopLag(clock.monotonic)
    lag.expect(0.5)
    seen: list[float] = []
    for _ in range(3):
        await clock.advance(2.0)
        seen.append(lag.take_worst_s())
    assert seen == pytest.approx([1.5, 3.5, 5.5])
    lag.woke()
    assert lag.take_worst_s() == pytest.approx(5.5), "the whole delay is known once it ends"


async def test_cpu_is_the_cores_that_the_process_used_between_two_heartbeats() -> None:
    clock, spent = ManualClock(), [0.0]
    signs = VitalSigns(clock, Meter(clock.monotonic), lambda: spent[0])
    for used_s, passed_s, share in ((0.5, 1.0, 0.5), (3.0, 2.0, 1.5), (0.0, 1.0, 0.0)):
        spent[0] += used_s
        await clock.advance(passed_s)
        assert signs.collect({}, held=0).cpu == pytest.approx(share)


def test_a_busy_process_reports_about_the_time_that_it_burned() -> None:
    state = WorkerState(WHO, _Real())
    vitals_of(state)
    before, began = time.process_time(), time.monotonic()
    while time.process_time() - before < 0.2:
        sum(range(1000))
    assert vitals_of(state).cpu == pytest.approx(0.2 / (time.monotonic() - began), rel=0.2)


@dataclass
class Server:
    """The measurements of a connection."""

    rtt_s: float
    num_repeats: int


class _Real:
    monotonic, time = staticmethod(time.monotonic), staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing sleeps")

    wait: Any = None


async def test_errors_retries_and_refusals_are_sums_of_what_is_counted() -> None:
    clock = ManualClock()
    signs = VitalSigns(clock, Meter(clock.monotonic))
    signs.ledger = Server(0.25, 3)
    signs.refused = 5
    counters = {"failed": 3.0, "refused_steps": 1.0, "failed_checkpoints": 1.0, "judge:retries": 7.0, "scored": 99.0}
    vitals = signs.collect(counters, held=0)
    assert (vitals.errors, vitals.retries, vitals.refused) == (5, 10, 5)
    assert vitals.ledger_rtt_ms == 250.0


async def test_the_age_of_held_work_grows_while_the_loop_stands_still() -> None:
    clock = ManualClock()
    state = WorkerState(WHO, clock)
    state.held, state.signs.begun_s = 2, clock.monotonic()
    await clock.advance(7.0)
    assert vitals_of(state).oldest_age_s == 7.0
    state.held = 0
    assert vitals_of(state).oldest_age_s == 0.0, "without held work there is no age"


async def test_ages_of_a_links_open_messages_grow_between_two_looks_of_the_loop() -> None:
    clock = ManualClock()
    state = WorkerState(WHO, clock)
    state.set_links(
        (LinkReport(name="a>b", received=3, open=1, oldest_age_s=2.0), LinkReport(name="c>b", received=3, done=3))
    )
    await clock.advance(4.0)
    assert [link.oldest_age_s for link in state.heartbeat().links] == [6.0, 0.0]


def test_service_adds_up_tasks_in_tokens_that_ended_well_by_their_kind() -> None:
    now = [100.0]
    meter = Meter(lambda: now[0])

    def work(kind: str, seconds: float, amount: float, unit: str = "tokens", *, fails: bool = False) -> None:
        with meter.task(kind, amount, unit, pieces=2):
            now[0] += seconds
            if fails:
                raise RuntimeError

    work("scoring", 1.5, 100.0)
    work("scoring", 0.5, 60.0)
    work("update", 4.0, 1000.0)
    work("evaluation", 9.0, 8.0, "responses")
    with pytest.raises(RuntimeError):
        work("scoring", 9.0, 900.0, fails=True)
    with meter.task("update", 10.0, "tokens"):
        work("scoring", 1.0, 5.0)
    meter.served("judging", seconds=0.25, size=30, pieces=3)
    assert meter.service() == {
        "scoring": ServiceSums(4, 2.0, 160.0),
        "update": ServiceSums(3, 5.0, 1010.0),
        "judging": ServiceSums(3, 0.25, 30.0),
    }, "a task inside another is part of it"


def test_the_host_reading_is_of_this_process_and_the_run_folders_disk(tmp_path: Path) -> None:
    watch = HostWatch(tmp_path, uses_gpu=False)
    watch.read(None)
    before = watch.latest()
    with (tmp_path / "one").open("w"), (tmp_path / "two").open("w"):
        watch.read(None)
        during = watch.latest()
    assert before.num_fds is not None and during.num_fds == before.num_fds + 2
    found = os.statvfs(tmp_path)
    assert before.disk_free_bytes == pytest.approx(found.f_bavail * found.f_frsize, rel=0.05)
    assert before.disk_free_share == pytest.approx(found.f_bavail / found.f_blocks, rel=0.05)


def test_a_host_that_hangs_holds_up_no_heartbeat_and_its_old_figures_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount without its server, or a driver, does not answer for minutes."""
    hangs, is_let_go, now = threading.Event(), threading.Event(), [0.0]

    def hanging(folder: Path) -> tuple[int, float]:
        hangs.set()
        is_let_go.wait(30.0)
        return 1, 0.5

    watch = HostWatch(tmp_path, uses_gpu=False, clock=lambda: now[0])
    watch.read(None)
    monkeypatch.setattr(host_watch, "_disk", hanging)
    watch.start()
    assert hangs.wait(10.0)
    state = WorkerState(WHO, ManualClock())
    state.signs.host = watch.latest
    assert vitals_of(state).disk_free_bytes is not None
    now[0] = 60.0
    assert vitals_of(state).disk_free_bytes is None
    watch.stop()
    is_let_go.set()


class Driver:
    """NVIDIA's library as far as it is called, with two GPUs."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, has_driver: bool = True, has_power: bool = True) -> None:
        self._has_driver, self._has_power = has_driver, has_power

    def nvmlInit(self) -> None:  # noqa: N802 -- the library's names
        if not self._has_driver:
            raise self.NVMLError("no driver")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index > 1:
            raise self.NVMLError("no such device")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> int:  # noqa: N802
        return [b"GPU-a", b"GPU-b"].index(uuid)

    def nvmlDeviceGetUUID(self, handle: int) -> str | bytes:  # noqa: N802
        return ["GPU-a1a2a3a4-5", b"GPU-b1b2b3b4-5"][handle]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=[100, 50][handle])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=[10, 5][handle])

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        if not self._has_power:
            raise self.NVMLError("not supported")
        return [300_000, 100_000][handle]


@pytest.mark.parametrize(
    ("visible", "reading"),
    [
        (None, GpuState(0.75, 15, 400.0)),
        ("1", GpuState(0.5, 5, 100.0, ("GPU-b1b2b3b4",))),
        ("GPU-a", GpuState(1.0, 10, 300.0, ("GPU-a1a2a3a4",))),
        ("0, 1", GpuState(0.75, 15, 400.0, ("GPU-a1a2a3a4", "GPU-b1b2b3b4"))),
        ("0,-1,1", GpuState(1.0, 10, 300.0, ("GPU-a1a2a3a4",))),
        ("", None),
        ("-1", None),
        ("7", None),
        ("GPU-c", None),
    ],
)
def test_only_visible_gpus_are_read(
    visible: str | None, reading: GpuState | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", Driver())
    gpus = Gpus.visible({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert (None if gpus is None else gpus.read()) == reading


def test_without_a_driver_or_the_package_there_are_no_gpu_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = __import__("sys").modules
    monkeypatch.setitem(modules, "pynvml", Driver(has_driver=False))
    assert Gpus.visible({}) is None
    monkeypatch.setitem(modules, "pynvml", None)
    assert Gpus.visible({}) is None
    monkeypatch.setitem(modules, "pynvml", Driver(has_power=False))
    gpus = Gpus.visible({})
    assert gpus is not None and gpus.read() == GpuState(0.75, 15, None), "what is offered is read"


async def test_a_ledger_call_measures_its_answer_and_an_open_one_its_age(redis_server: str) -> None:
    client = connect(redis_server)
    connection = PipelinedConnection(client)
    assert connection.rtt_s == 0.0
    for _ in range(20):
        await connection.ask("PING")
    mean_s = connection.rtt_s
    assert 0.0 < mean_s < 0.2
    async with asyncio.TaskGroup() as tasks:
        # the server holds this answer back
        held = tasks.create_task(connection.ask("BLPOP", "no-such-list", 0.3))
        await asyncio.sleep(0.15)
        assert connection.rtt_s > 0.1
        assert await held is None
    assert mean_s < connection.rtt_s < 0.1, "one slow answer of many moves the mean a little"
    assert connection.num_repeats == 0
    await connection.aclose()
    await client.aclose()


def test_an_idle_heartbeat_with_vitals_stays_small() -> None:
    state = WorkerState(WHO, ManualClock())
    state.signs.host = lambda: HostState(
        40, 123_456_789_012, 0.5123, GpuState(0.98, 70 << 30, 650.5, ("GPU-a1a2a3a4",))
    )
    state.work.served("scoring", seconds=12345.6789, size=123456789.0, pieces=123456)
    size = len(msgspec.json.encode(state.heartbeat().vitals))
    assert size < 350, size


def test_a_heartbeat_of_an_earlier_version_has_no_vitals() -> None:
    blob = msgspec.json.encode(
        {
            "who": msgspec.to_builtins(WHO),
            "pid": 1,
            "host": "h",
            "at_s": 0.0,
            "started_s": 0.0,
            "progress": 0,
            "progress_at_s": 0.0,
            "waiting_for": str(WaitingFor.INPUT),
        }
    )
    assert msgspec.json.decode(blob, type=Heartbeat).vitals is None
