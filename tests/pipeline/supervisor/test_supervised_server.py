"""Claims about a supervisor whose ledger server is emptied, mute, frozen, locked or away."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from structlog.testing import capture_logs

from pipeline.fleet.state import Worker
from pipeline.fleet.status import RunSnapshot
from pipeline.ledger.address import LedgerAddress, read_address, read_ledger_url, write_address
from pipeline.ledger.server.embedded import EmbeddedServer
from pipeline.preflight.checks import preflight
from pipeline.process.exit_codes import ExitCode, Interrupted
from pipeline.process.records import process_runs
from pipeline.runtime.registry.contract import Registry, RunState, RunStatus, WaitingFor
from pipeline.supervisor.run_folder import prepare_run_dir, server_lock
from pipeline.supervisor.supervisor import Supervisor
from pipeline.supervisor.takeover import take_over
from protocol.errors import LedgerRefused, LedgerUnavailable
from protocol.ids import Role
from tests.manual_clock import ManualClock
from tests.mute import Manner, keep_busy, mute_server
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.op_config import op_config
from tests.pipeline.supervisor.supervised import Run

pytestmark = pytest.mark.timeout(90)


def test_a_ledger_that_was_emptied_ends_the_run_with_exit_code_3(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def empty(_: RunSnapshot) -> None:
        with redis.Redis.from_url(read_ledger_url(run.run_dir)) as client:
            client.flushall()

    run.when_live(empty)
    outcome = run.until_end()
    assert outcome.exit_code == ExitCode.LEDGER_UNAVAILABLE
    assert "has no record of this run" in outcome.status.detail


@pytest.mark.parametrize("manner", [Manner.MUTE, Manner.TRICKLES])
def test_a_start_at_anothers_mute_server_ends_by_its_deadline_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manner: Manner
) -> None:
    monkeypatch.setattr("pipeline.supervisor.supervisor._ANSWER_S", 0.3)
    run = Run(tmp_path)
    with mute_server(manner) as server:
        write_address(run.run_dir, LedgerAddress(url=server.url))
        # the server is mute for ever
        with pytest.raises(LedgerUnavailable, match=r"the ledger server does not answer .* is it running"):
            run.until_end()
    assert not list(run.run_dir.glob("processes/*.json")), "no worker was started"


def test_a_password_that_is_refused_at_the_start_ends_it_at_once(tmp_path: Path) -> None:
    locked = EmbeddedServer(tmp_path, max_memory_mb=64)
    locked.start()
    run = Run(tmp_path)
    write_address(run.run_dir, LedgerAddress(url=f"unix://:wrong@{locked.socket}"))
    try:
        # an outage is waited for, and for minutes
        with pytest.raises(LedgerRefused, match=r"refused the password.*Put it into ledger\.url or REDIS_URL"):
            run.until_end()
    finally:
        locked.stop()


def test_a_password_that_is_refused_during_a_run_ends_it_with_that_sentence(tmp_path: Path) -> None:
    locked = EmbeddedServer(tmp_path, max_memory_mb=64)
    locked.start()
    run = Run(tmp_path)
    write_address(run.run_dir, LedgerAddress(url=locked.url))

    def change_it(_: RunSnapshot) -> None:
        with redis.Redis.from_url(locked.url) as client:
            client.config_set("requirepass", "another")
            client.client_kill_filter(_type="normal", skipme=True)

    run.when_live(change_it)
    try:
        outcome = run.until_end()
    finally:
        locked.stop()
    assert outcome.exit_code == ExitCode.CONFIG
    assert outcome.status.state is RunState.FAILED
    assert "refused the password" in outcome.status.detail + outcome.last_lines


def test_a_start_at_a_recorded_socket_that_a_mute_stranger_holds_ends_with_its_path(tmp_path: Path) -> None:
    run = Run(tmp_path, "ledger.outage_timeout_s=6")
    (run.run_dir / "ledger").mkdir(mode=0o700)
    with mute_server(Manner.MUTE, run.run_dir / "ledger") as server:
        write_address(run.run_dir, LedgerAddress(url=server.url, is_embedded=True, socket=str(server.path)))
        with pytest.raises(
            LedgerUnavailable, match=r"not this run's recorded server listens on .*server\.sock; find it with"
        ):
            run.until_end()
        assert server.path.is_socket(), "what is not ours stays"


def test_a_start_at_a_frozen_server_of_its_own_ends_it_and_starts_it_again(tmp_path: Path) -> None:
    run = Run(tmp_path, "ledger.outage_timeout_s=6")
    frozen = EmbeddedServer(run.run_dir, max_memory_mb=64)
    frozen.start()
    pid = frozen.pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    began: list[float] = [time.monotonic()]

    def note(snapshot: RunSnapshot) -> None:
        began.append(time.monotonic())
        run.interrupt(snapshot)

    run.when_live(note)
    assert run.until_end().exit_code == ExitCode.OK
    assert began[1] - began[0] >= 3.0
    assert not process_runs(pid)
    # it takes notice of its child's end
    assert not frozen.is_there()


@contextmanager
def frozen_server(run_dir: Path) -> Iterator[None]:
    server = EmbeddedServer(run_dir, max_memory_mb=64)
    server.start()
    pid = server.pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
        assert process_runs(pid), "it is left as it was"
    finally:
        os.kill(pid, signal.SIGCONT)
        server.stop()


@pytest.mark.parametrize("waited_for", [frozen_server, server_lock])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_heard_while_up_waits_for_a_server_or_another_command(
    tmp_path: Path, waited_for: Callable[[Path], AbstractContextManager[None]], number: signal.Signals
) -> None:
    run = Run(tmp_path)
    with waited_for(run.run_dir):
        signalling = threading.Timer(0.5, os.kill, (os.getpid(), number))
        signalling.start()
        began = time.monotonic()
        with pytest.raises(Interrupted, match="nothing was started"):
            run.until_end()
        # the server is waited for twice as long
        assert time.monotonic() - began < 30.0
        signalling.join()
    assert not run.snapshots


@pytest.mark.long
def test_a_server_that_falls_mute_under_a_run_costs_no_worker_and_hides_no_signal(tmp_path: Path) -> None:
    """Twice: once it wakes up again, the second time Ctrl-C comes meanwhile."""
    settings = ("supervisor.stuck_after_s=4", "supervisor.silent_after_s=4", "ledger.outage_timeout_s=100")
    run = Run(tmp_path, *settings)
    first: dict[str, int] = {}
    asleep_s: list[float] = []
    ended: list[threading.Thread] = []
    is_ending: list[bool] = []

    def silence(seconds: float) -> None:
        """The server is at work: one at rest would be replaced."""
        in_a_thread(lambda: keep_busy(read_ledger_url(run.run_dir), seconds))

    def sleep_through() -> None:
        began = time.monotonic()
        keep_busy(read_ledger_url(run.run_dir), 6.0)
        asleep_s.append(time.monotonic() - began)

    def end_meanwhile() -> None:
        began = time.monotonic()
        silence(45.0)
        os.kill(os.getpid(), signal.SIGINT)
        while any(process_runs(pid) for pid in first.values()) and time.monotonic() < began + 45.0:
            time.sleep(0.05)
        asleep_s.append(time.monotonic() - began)

    def in_a_thread(act: Callable[[], None]) -> None:
        ended.append(threading.Thread(target=act))
        ended[-1].start()

    def react(snapshot: RunSnapshot) -> None:
        if not first and len(snapshot.workers) >= 3:
            first.update({beat.who.worker: beat.pid for beat in snapshot.workers})
            in_a_thread(sleep_through)
        elif len(asleep_s) == 1 and not is_ending:
            is_ending.append(True)
            assert {beat.who.worker: beat.pid for beat in snapshot.workers} == first
            in_a_thread(end_meanwhile)

    run.react = react
    with capture_logs() as logged:
        outcome = run.until_end()
    for thread in ended:
        thread.join()
    assert outcome.exit_code == ExitCode.OK
    assert outcome.status.state is RunState.STOPPING
    assert asleep_s[0] >= 5.0
    # a mute server is started anew after half of the outage's limit
    assert asleep_s[1] < 45.0, "the workers drained while no server answered"
    assert not {"worker_replaced", "worker_exited", "worker_killed"} & {row["event"] for row in logged}


def test_a_server_that_is_stopped_under_a_run_costs_seconds_and_no_worker(tmp_path: Path) -> None:
    run = Run(tmp_path, "ledger.outage_timeout_s=100")
    stopped: dict[str, int] = {}
    workers: dict[str, int] = {}

    def stop(snapshot: RunSnapshot) -> None:
        address = read_address(run.run_dir)
        assert address is not None
        workers.update({beat.who.worker: beat.pid for beat in snapshot.workers})
        stopped.update(pid=address.pid)
        os.kill(address.pid, signal.SIGSTOP)
        run.react = until_back

    def until_back(snapshot: RunSnapshot) -> None:
        address = read_address(run.run_dir)
        if address is not None and address.pid != stopped["pid"] and len(snapshot.workers) == len(workers):
            assert {beat.who.worker: beat.pid for beat in snapshot.workers} == workers
            run.interrupt(snapshot)

    run.when_live(stop)
    with capture_logs() as logged:
        outcome = run.until_end()
    assert outcome.exit_code == ExitCode.OK
    assert not process_runs(stopped["pid"])
    (lost,) = (row for row in logged if row["event"] == "ledger_server_lost")
    assert "its process does not run" in lost["why"], "half of the outage's limit is 50 s"
    assert not {"worker_replaced", "worker_exited"} & {row["event"] for row in logged}


class SometimesThere:
    """The supervisor's reads of a ledger that answers only some of the requests, and whose records
    stay as they were."""

    is_paused = False

    def __init__(self, registry: MemoryRegistry) -> None:
        self.registry = registry
        self.answers = True

    async def check(self) -> None:
        if not self.answers:
            raise LedgerUnavailable("its server gave no answer within 2 s")

    async def overdue(self, _: float) -> dict[Role, float]:
        return {}

    async def show(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("answers_every_s", "is_replaced"), [(4, False), (1, True)])
def test_a_server_that_answers_now_and_then_costs_no_worker_without_heartbeats(
    tmp_path: Path, answers_every_s: int, is_replaced: bool
) -> None:
    config = op_config(tmp_path, "supervisor.silent_after_s=10")
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    run_dir = prepare_run_dir(config, resume=False)
    supervisor = Supervisor(config, run_dir, preflight(config).spec, command=lambda *_: command)
    clock = ManualClock()
    around = SometimesThere(MemoryRegistry(clock))

    async def look_for_a_minute(pid: int) -> RunStatus:
        who = await around.registry.register(Role.GENERATOR, "generator-0")
        last_words = Worker(
            who=who, pid=pid, host="here", at_s=1.0, started_s=0.0, progress=1, progress_at_s=1.0, turns=1,
            waiting_for=WaitingFor.INPUT,
        )  # fmt: skip
        around.registry.beat(last_words)
        status = RunStatus(RunState.RUNNING)
        await around.registry.set_run_status(status)
        for second in range(60):
            around.answers = second % answers_every_s == 0
            await clock.advance(1.0)
            status = await supervisor._poll_ledger(around, status, float(second))  # pyright: ignore[reportArgumentType]
        return status

    supervisor._plan.adopt("generator-0", Role.GENERATOR)
    supervisor._processes.start(Role.GENERATOR, "generator-0")
    try:
        with capture_logs() as logged:
            status = asyncio.run(look_for_a_minute(supervisor._processes.pids["generator-0"]))
    finally:
        supervisor._processes.close()
    assert status.state is RunState.RUNNING
    assert any(row["event"] == "worker_replaced" for row in logged) is is_replaced


def test_junk_in_the_registry_during_a_run_ends_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first: dict[str, int] = {}

    def litter(snapshot: RunSnapshot) -> None:
        first.update({beat.who.worker: beat.pid for beat in snapshot.workers})
        prefix = f"{{{run.config.run.name}}}:"
        with redis.Redis.from_url(read_ledger_url(run.run_dir)) as client:
            for name in ("generator-9", b"\xff\xfe"):
                for key in ("heartbeats", "endpoints", "epochs", "relays"):
                    client.hset(prefix + key, name, b"\xff{")  # pyright: ignore[reportArgumentType]
                for key in ("seen", "endpoint_changes", "mailboxes"):
                    client.execute_command("ZADD", prefix + key, time.time(), name)
            client.zadd(prefix + "failures", {"[": 1.0})
            client.set(prefix + "run_status", "{")
        run.react = later

    def later(snapshot: RunSnapshot) -> None:
        assert {beat.who.worker: beat.pid for beat in snapshot.workers} == first
        if len(run.snapshots) > 25:
            run.interrupt(snapshot)

    run.when_live(litter)
    with capture_logs() as logged:
        assert run.until_end().exit_code == ExitCode.OK
    dropped = [row["entry"] for row in logged if row["event"] == "registry_entry_dropped"]
    assert dropped.count("heartbeats of generator-9") == 1
    assert "run_status" in dropped


def kill_server(run: Run) -> None:
    address = read_address(run.run_dir)
    assert address is not None
    os.kill(address.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "moment", ["before the ledger is opened", "before workers are adopted", "before the state is set"]
)
def test_a_server_that_dies_during_the_start_is_started_again_and_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    run = Run(tmp_path)
    place = {
        "before the ledger is opened": "pipeline.supervisor.takeover.RedisLedger",
        "before workers are adopted": "pipeline.supervisor.supervisor.take_over",
        "before the state is set": "pipeline.supervisor.supervisor.set_running",
    }[moment]
    module, _, name = place.rpartition(".")
    real = getattr(sys.modules[module], name)
    killed: list[bool] = []

    def kill_first(*given: Any) -> Any:
        if not killed:
            killed.append(True)
            kill_server(run)
        return real(*given)

    monkeypatch.setattr(place, kill_first)
    run.when_live(run.interrupt)
    outcome = run.until_end()
    assert killed
    assert outcome.exit_code == ExitCode.OK
    assert outcome.status.state is RunState.STOPPING


def test_ctrl_c_at_a_start_whose_server_does_not_come_back_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, "ledger.outage_timeout_s=600")
    frozen: list[int] = []

    async def freeze(*given: Any) -> list[str]:
        address = read_address(run.run_dir)
        assert address is not None
        frozen.append(address.pid)
        os.kill(address.pid, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        return await take_over(*given)

    monkeypatch.setattr("pipeline.supervisor.supervisor.take_over", freeze)
    monkeypatch.setattr("pipeline.supervisor.monitor.Monitor.keep_server", lambda _: None)
    began = time.monotonic()
    with pytest.raises(Interrupted, match="at the start, while the ledger's server was away"):
        run.until_end()
    assert time.monotonic() - began < 40.0


def test_down_during_a_start_wins_and_no_worker_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)

    async def go_down(fleet: Any, registry: Registry) -> list[str]:
        await registry.set_run_status(RunStatus(RunState.STOPPING, "stopped by `headrace down`", os.getpid()))
        return await take_over(fleet, registry)

    monkeypatch.setattr("pipeline.supervisor.supervisor.take_over", go_down)
    outcome = run.until_end()
    assert outcome.exit_code == ExitCode.OK
    assert outcome.status == RunStatus(RunState.STOPPING, "stopped by `headrace down`", os.getpid())
    assert not list(run.run_dir.glob("processes/*.json")), "no worker was started"
