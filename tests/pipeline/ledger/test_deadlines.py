"""Every ledger call ends by its own deadline under any fault of the server: one layer repeats."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
from structlog.testing import capture_logs

from pipeline.ledger.address import LedgerAddress, write_address
from pipeline.ledger.redis.client import call_timeouts, connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.server.embedded import EmbeddedServer
from pipeline.runtime.clock import RealClock
from pipeline.runtime.heartbeat import HeartbeatThread
from pipeline.runtime.registry.contract import Fleet, Topic, WaitingFor
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.registry.redis_heartbeats import RedisHeartbeatWriter
from pipeline.runtime.worker_start import connect_worker
from pipeline.runtime.worker_state import WorkerState
from protocol.errors import LedgerDiskFailed, LedgerRefused, LedgerUnavailable
from protocol.ids import Incarnation, Role
from tests.mute import Manner, mute_server
from tests.pipeline.ledger.builders import make_spec
from tests.pipeline.runtime.fakes import small_config

pytestmark = pytest.mark.timeout(60)
ALL = pytest.mark.parametrize("manner", [Manner.MUTE, Manner.GREETS, Manner.TRICKLES])
ASKED_S = 0.5
WHO = Incarnation(Role.LEARNER, "learner", 1)
Call = Callable[[RedisLedger, RedisRegistry], Awaitable[object]]
CALLS: dict[str, Call] = {
    "open": lambda ledger, _: ledger.open(make_spec()),
    "claim": lambda ledger, _: ledger.claim(WHO, policy_version=0),
    "totals": lambda ledger, _: ledger.totals(),
    "dead letters": lambda ledger, _: ledger.dead_letters(),
    "make durable": lambda ledger, _: ledger.make_durable(WHO),
    "register": lambda _, registry: registry.register(Role.REWARD, "reward-0"),
    "set fleet": lambda _, registry: registry.set_fleet(Fleet({})),
    "heartbeats": lambda _, registry: registry.heartbeats(),
    "news": lambda _, registry: registry.notifications({Topic.RUN: ""}, timeout_s=0.1),
}


@pytest.fixture(scope="module")
def locked_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server with a password."""
    server = EmbeddedServer(tmp_path_factory.mktemp("locked"), max_memory_mb=64)
    server.start()
    yield server
    server.stop()


@contextmanager
def within(limit_s: float):
    began = time.monotonic()
    yield
    assert time.monotonic() - began < limit_s


@ALL
async def test_no_call_of_ledger_or_registry_outlasts_what_was_asked(manner: Manner) -> None:
    with mute_server(manner) as server:
        client = connect(server.url, timeout_s=0.2, patience_s=ASKED_S)
        ledger, registry = RedisLedger(client, "test"), RedisRegistry(client, "test")
        for name, call in CALLS.items():
            with within(ASKED_S + 1.0), pytest.raises(LedgerUnavailable, match="does not answer"):
                await call(ledger, registry)
                raise AssertionError(name)
        with within(1.0):
            await ledger.aclose()
            await registry.aclose()


async def test_calls_at_the_same_time_end_at_the_same_time() -> None:
    with mute_server(Manner.MUTE) as server:
        ledger = RedisLedger(connect(server.url, timeout_s=0.1, patience_s=ASKED_S), "r")

        async def fails() -> None:
            with pytest.raises(LedgerUnavailable):
                await ledger.totals()

        with within(ASKED_S + 1.0):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(100):
                    tasks.create_task(fails())
        await ledger.aclose()
        assert server.num_connections < 20, "they connect together, not each for itself"


@ALL
def test_a_heartbeat_ends_by_its_deadline(manner: Manner) -> None:
    worker_state = WorkerState(WHO, RealClock())
    with mute_server(manner) as server:
        writer = RedisHeartbeatWriter(server.url, "r", timeout_s=0.3)
        for _ in range(2):
            with within(1.5), pytest.raises(LedgerUnavailable):
                writer.beat(worker_state.heartbeat())
        with within(1.0):
            writer.close()


async def test_a_server_that_answers_again_within_the_deadline_serves_the_call(redis_server) -> None:
    """The silent connection is closed, and the call is repeated on another."""
    path = redis_server.removeprefix("unix://")
    with mute_server(Manner.MUTE) as server:
        ledger = RedisLedger(connect(server.url.replace(":secret@", ""), timeout_s=0.2, patience_s=10.0), "deadlines")
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(ledger.dead_letters())
            await asyncio.sleep(0.3)
            server.path.unlink()
            server.path.symlink_to(path)
        assert asking.result() == []
        await ledger.aclose()


async def test_a_server_away_with_a_full_disk_gets_the_full_disks_patience(
    tmp_path: Path,
) -> None:
    room = [""]
    url = f"unix://{tmp_path / 'nothing'}"
    client = connect(url, patience_s=0.3, disk_patience_s=1.5, disk_trouble=lambda: room[0])
    ledger, told = RedisLedger(client, "r"), []
    ledger.on_trouble(told.append)
    took: list[float] = []
    for room[0] in ("", "no room in the folder"):
        began = time.monotonic()
        with pytest.raises(LedgerUnavailable, match="does not answer"):
            await ledger.totals()
        took.append(time.monotonic() - began)
    assert took[0] < 1.2, "with room it is away, and no more"
    assert 1.4 < took[1] < 3.0
    assert any("no room in the folder" in words for words in told), "what a worker says that it waits for"
    await ledger.aclose()


def test_a_worker_sees_the_disk_of_its_runs_own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, url = small_config(tmp_path), "unix:///nothing"
    (tmp_path / "ledger").mkdir()
    full = SimpleNamespace(total=1 << 30, used=1 << 30, free=0)
    monkeypatch.setattr("pipeline.ledger.server.disk.shutil.disk_usage", lambda _: full)
    for is_embedded in (True, False):
        write_address(tmp_path, LedgerAddress(url=url, is_embedded=is_embedded))
        patience = call_timeouts(connect_worker(config, tmp_path, url, "learner"))
        assert (str(tmp_path / "ledger") in patience.disk_trouble()) is is_embedded
        assert patience.disk_s == config.ledger.disk_timeout_s


@pytest.mark.parametrize("given", ["wrong@", "somebody:wrong@", ""])
async def test_a_refused_password_ends_every_call_at_once_with_what_to_do(
    locked_server: EmbeddedServer, given: str
) -> None:
    url = f"unix://{':' if given == 'wrong@' else ''}{given}{locked_server.socket}"
    client = connect(url, patience_s=40.0, disk_patience_s=40.0)
    ledger, registry = RedisLedger(client, "test"), RedisRegistry(client, "test")
    for call in CALLS.values():
        with (
            within(5.0),
            pytest.raises(LedgerRefused, match=r"refused the password.*expected.*requirepass.*ledger\.url"),
        ):
            await call(ledger, registry)
    await ledger.aclose()
    await registry.aclose()


def test_a_heartbeat_with_a_refused_password_is_one_that_was_lost(locked_server: EmbeddedServer) -> None:
    beat = WorkerState(WHO, RealClock()).heartbeat
    url = f"unix://:wrong@{locked_server.socket}"
    with capture_logs() as logged:
        writer = RedisHeartbeatWriter(url, "r", timeout_s=5.0)
        log = structlog.get_logger()
        thread = HeartbeatThread(
            writer, beat, on_fenced=pytest.fail, on_deaf=pytest.fail, log=log, interval_of=lambda _: 0.05
        )
        with within(4.0):
            thread.start()
            while not logged:
                time.sleep(0.01)
            thread.stop()
    assert logged[0]["event"] == "heartbeats_lost"
    assert "refused the password" in logged[0]["reason"]


async def test_a_full_disk_is_borne_longer_than_a_server_that_is_away_and_said_to_be_one() -> None:
    with mute_server(Manner.DISK_FULL) as server:
        ledger = RedisLedger(connect(server.url, patience_s=0.2, disk_patience_s=1.0), "r")
        worker_state = WorkerState(WHO, RealClock())
        ledger.on_trouble(worker_state.ledger_trouble)
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:

            async def claim() -> None:
                with pytest.raises(LedgerDiskFailed, match=r"No space left.*|cannot write its append-only file"):
                    await ledger.claim(WHO, policy_version=0)

            claiming = tasks.create_task(claim())
            await asyncio.sleep(0.5)
            assert not claiming.done(), "0.2 s are for a server that does not answer; this one does"
            beat = worker_state.heartbeat()
            assert beat.waiting_for is WaitingFor.LEDGER
            assert "No space left on device" in beat.detail
        assert 0.9 < time.monotonic() - began < 3.0
        assert worker_state.heartbeat().waiting_for is WaitingFor.STARTING, "what it was before"
        server.manner = Manner.MUTE
        with within(1.5), pytest.raises(LedgerUnavailable):
            await ledger.totals()
        await ledger.aclose()
