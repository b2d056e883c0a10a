"""Claims about the supervisor: real processes, a real embedded ledger; the workers alone do no
work."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import redis
from structlog.testing import capture_logs

from pipeline.ledger.address import LedgerAddress, read_address, read_ledger_url, write_address
from pipeline.ledger.redis.client import connect
from pipeline.ledger.server.embedded import EmbeddedServer
from pipeline.observability.fleet_history import read_fleet_history
from pipeline.observability.start_record import STARTS_NAME, read_starts
from pipeline.observability.status import RunSnapshot
from pipeline.operator.runs import list_runs
from pipeline.preflight.checks import preflight
from pipeline.process.exit_codes import ExitCode, Interrupted
from pipeline.process.records import process_runs
from pipeline.runtime.clock import RealClock
from pipeline.runtime.registry.contract import Heartbeat, RunState, RunStatus, WaitingFor
from pipeline.runtime.registry.memory import MemoryRegistry
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.supervisor.mirror_choice import NoMirror
from pipeline.supervisor.run_folder import prepare_run_dir, run_lock, server_lock, supervisor_pid
from pipeline.supervisor.supervisor import RunOutcome, Supervisor
from protocol.errors import ConfigError, LedgerMismatch, LedgerRefused, LedgerUnavailable
from protocol.ids import Role
from tests.mute import Manner, mute_server
from tests.pipeline.op_config import op_config

pytestmark = pytest.mark.timeout(90)
LIMIT_S = 40.0


def fake_starter(run_dir: Path) -> list[str]:
    return [sys.executable, "-m", "tests.pipeline.supervisor.fake_worker_starter", str(run_dir)]


class Run:
    """One supervised run whose workers follow scripts."""

    def __init__(self, folder: Path, *overrides: str, resume: bool = False, **scripts: str) -> None:
        self.config = op_config(folder, *overrides)
        self.run_dir = prepare_run_dir(self.config, resume=resume)
        self.scripts = scripts
        self.snapshots: list[RunSnapshot] = []
        self.react: Callable[[RunSnapshot], None] = lambda _: None
        self.leave: Callable[[], None] | None = None
        self.supervisor = Supervisor(self.config, self.run_dir, preflight(self.config).spec, command=self._command)

    def _command(self, role: Role, run_dir: Path, name: str) -> list[str]:
        script = self.scripts.get(str(role), "live")
        command = [sys.executable, "-m", "tests.pipeline.supervisor.fake_worker", str(role)]
        return [*command, "--run-dir", str(run_dir), "--name", name, "--script", script]

    def _watch(self, snapshot: RunSnapshot) -> None:
        self.snapshots.append(snapshot)
        self.react(snapshot)

    def until_end(self) -> RunOutcome:
        """Supervise the run. Workers are forked, as those of a real run: each that imports for
        itself costs half a processor second."""

        async def bounded() -> RunOutcome:
            async with asyncio.timeout(LIMIT_S):
                return await self.supervisor.run(self._watch, watch_every_s=0.1, leave=self.leave)

        self.supervisor._is_forking = self.config.supervisor.preload
        with patch("pipeline.supervisor.supervisor.starter_command", fake_starter):
            return asyncio.run(bounded())

    def interrupt(self, _: RunSnapshot) -> None:
        """Ctrl-C, once."""
        self.react = lambda _: None
        os.kill(os.getpid(), signal.SIGINT)

    def when_live(self, act: Callable[[RunSnapshot], None], num_workers: int = 3) -> None:
        """Act once, when so many workers have heartbeats."""
        done: list[bool] = []

        def react(snapshot: RunSnapshot) -> None:
            if len(snapshot.heartbeats) >= num_workers and not done:
                done.append(True)
                act(snapshot)

        self.react = react


class LastCopies(NoMirror):
    """Notes when the copies at the run's end are begun."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    async def finish(self, is_stopped: Callable[[], bool], *, plain: bool = True) -> str:
        self._order.append("copies, with lines" if plain else "copies, with bars")
        return "not all is copied"


def test_one_signal_drains_everything_and_leaves_no_process(tmp_path: Path) -> None:
    run, order = Run(tmp_path), list[str]()
    run.supervisor._mirroring = LastCopies(order)
    run.leave = lambda: order.append("the terminal is free")
    run.when_live(run.interrupt)
    outcome = run.until_end()
    assert order == ["the terminal is free", "copies, with bars"]
    assert outcome.status.detail.endswith("; not all is copied")
    assert outcome.exit_code == ExitCode.OK
    assert outcome.status.state is RunState.STOPPING
    assert "--resume" in outcome.status.detail
    assert not any(process_runs(beat.pid) for snapshot in run.snapshots for beat in snapshot.heartbeats)
    address = read_address(run.run_dir)
    assert address is not None
    assert not process_runs(address.pid)
    assert (run.run_dir / "report.html").exists()
    assert (run.run_dir / "config.toml").exists()
    (started,), _ = read_starts(run.run_dir)
    assert started.start.packages["torch"], "versions of the start, not of the time of the report"
    assert started.end is not None
    assert (started.end.state, started.end.detail + "; not all is copied") == ("stopping", outcome.status.detail)
    (listed,) = list_runs(run.run_dir)
    assert listed.state == "stopped"
    spans, _ = read_fleet_history(run.run_dir)
    assert {"learner", "generator", "reward"} <= set(spans[-1].roles), "a short run has a row, too"


def test_a_report_that_cannot_be_written_changes_nothing_of_how_the_run_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)

    def in_the_way(snapshot: RunSnapshot) -> None:
        (run.run_dir / "report.html").mkdir()
        run.interrupt(snapshot)

    run.when_live(in_the_way)
    assert run.until_end().exit_code == ExitCode.OK
    told = "".join(capfd.readouterr())
    assert "report_not_written" in told and f"headrace report {run.run_dir}" in told


def test_a_start_that_cannot_be_recorded_changes_nothing_of_how_the_run_ended(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (run.run_dir / STARTS_NAME).mkdir()
    run.when_live(run.interrupt)
    with capture_logs() as logged:
        assert run.until_end().exit_code == ExitCode.OK
    assert [row["event"] for row in logged].count("start_not_recorded") == 2


def test_a_second_signal_ends_even_the_deaf_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, "supervisor.drain_timeout_s=60", generator="deaf")
    signalled: list[float] = []

    def twice(_: RunSnapshot) -> None:
        signalled.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    run.when_live(twice, num_workers=2)
    assert run.until_end().exit_code == ExitCode.INTERRUPTED
    assert time.monotonic() - signalled[0] < 10.0


def test_a_setting_that_is_wrong_fails_the_run_at_once_with_the_workers_last_words(tmp_path: Path) -> None:
    outcome = Run(tmp_path, learner="config").until_end()
    assert outcome.exit_code == ExitCode.CONFIG
    assert outcome.status.state is RunState.FAILED
    assert outcome.failure is not None
    assert outcome.failure.worker == "learner"
    assert "learner.flux is 3: nobody wants that" in outcome.last_lines


def test_a_worker_that_keeps_failing_exhausts_its_budget(tmp_path: Path) -> None:
    outcome = Run(tmp_path, "supervisor.max_data_failures=1", reward="crash").until_end()
    assert outcome.exit_code == ExitCode.FAILURE, "the worker's own"
    assert outcome.failure is not None
    assert "2 data failures of reward workers" in outcome.failure.reason
    assert outcome.last_lines.count("the last words of a crash") == 2, "both deaths are kept"


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("raise", "TypeError: nothing computes MambaForCausalLM"),
        ("import", "ModuleNotFoundError: No module named 'tests.pipeline.no_such_module'"),
    ],
)
def test_a_repeated_error_ends_the_run_at_its_second_time_with_its_own_text(
    tmp_path: Path, script: str, text: str
) -> None:
    with capture_logs() as logged:
        outcome = Run(tmp_path, generator=script).until_end()
    assert outcome.exit_code == ExitCode.CONFIG
    assert text in outcome.status.detail
    ended = [row["error"] for row in logged if row["event"] == "worker_exited" and row["worker"] == "generator-0"]
    assert [text in error for error in ended] == [True, True], "what `headrace why` reads"


def test_the_same_error_after_other_work_is_counted_against_the_budget(tmp_path: Path) -> None:
    outcome = Run(tmp_path, "supervisor.max_data_failures=2", generator="raise-later").until_end()
    assert outcome.exit_code == ExitCode.FAILURE
    assert "3 data failures of generator workers" in outcome.status.detail
    assert "TypeError: nothing computes MambaForCausalLM" in outcome.status.detail


@pytest.mark.parametrize(("script", "code"), [("starve", ExitCode.STARVED), ("finish", ExitCode.OK)])
def test_the_run_ends_as_the_learner_did(tmp_path: Path, script: str, code: ExitCode) -> None:
    outcome = Run(tmp_path, learner=script).until_end()
    assert outcome.exit_code == code
    assert outcome.status.state is RunState.FINISHED
    assert outcome.status.detail == f"by {script}"


def test_killed_workers_and_a_killed_ledger_come_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    killed: dict[str, int] = {}

    def kill(snapshot: RunSnapshot) -> None:
        killed.update({beat.who.worker: beat.pid for beat in snapshot.heartbeats})
        address = read_address(run.run_dir)
        assert address is not None
        os.kill(killed["generator-0"], signal.SIGKILL)
        os.kill(address.pid, signal.SIGKILL)

    def react(snapshot: RunSnapshot) -> None:
        pids = {beat.who.worker: beat.pid for beat in snapshot.heartbeats}
        if not killed:
            if len(pids) >= 3:
                kill(snapshot)
        elif pids.get("generator-0", killed["generator-0"]) != killed["generator-0"]:
            assert pids["reward-0"] == killed["reward-0"], "the ledger's absence killed nobody"
            run.interrupt(snapshot)

    run.react = react
    assert run.until_end().exit_code == ExitCode.OK


def test_a_worker_that_a_person_ended_is_started_again_while_the_run_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first: dict[str, int] = {}

    def react(snapshot: RunSnapshot) -> None:
        pids = {beat.who.worker: beat.pid for beat in snapshot.heartbeats}
        if not first and len(pids) >= 3:
            first.update(pids)
            os.kill(pids["reward-0"], signal.SIGTERM)
        elif first and pids.get("reward-0", first["reward-0"]) != first["reward-0"]:
            run.interrupt(snapshot)

    run.react = react
    assert run.until_end().exit_code == ExitCode.OK


def test_metrics_are_served_on_the_configured_port(tmp_path: Path) -> None:
    port = 20_000 + os.getpid() % 20_000
    run = Run(tmp_path, f"supervisor.metrics_port={port}")
    pages: list[str] = []

    def scrape(snapshot: RunSnapshot) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            pages.append(answer.read().decode())
        run.interrupt(snapshot)

    run.when_live(scrape)
    assert run.until_end().exit_code == ExitCode.OK
    assert re.search(r'headrace_up\{role="learner",run="[^"]+",worker="learner"\} 1\.0', pages[0])
    assert re.search(r'headrace_run_info\{algorithm="[^"]+",backend="[^"]+",engine="[^"]+",model="[^"]+"', pages[0])


def test_a_loop_that_never_turns_is_replaced_though_its_heartbeat_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, "supervisor.stuck_after_s=1", reward="still")
    first: dict[str, int] = {}

    def react(snapshot: RunSnapshot) -> None:
        pids = {beat.who.worker: beat.pid for beat in snapshot.heartbeats}
        if not first and len(pids) >= 3:
            first.update(pids)
        elif first and pids.get("reward-0", first["reward-0"]) != first["reward-0"]:
            assert pids["generator-0"] == first["generator-0"], "one that turns idle is left alone"
            run.interrupt(snapshot)

    run.react = react
    assert run.until_end().exit_code == ExitCode.OK


class BeatingClock:
    """The supervisor's time: it jumps once each worker has turned since the last jump, or is the
    one whose loop stands still. So only standing still is measured, however slow the machine is."""

    JUMP_S = 31.0
    """Two of them are over the limit of a minute, one is not."""

    def __init__(self) -> None:
        self._offset_s = 0.0
        self._before: dict[str, tuple[int, float]] = {}

    def monotonic(self) -> float:
        return time.monotonic() + self._offset_s

    def time(self) -> float:
        return time.time()

    def watch(self, snapshot: RunSnapshot, stuck: str) -> None:
        signs = {b.who.worker: (b.pid, b.at_s if b.who.worker == stuck else b.turns) for b in snapshot.heartbeats}
        if len(signs) < 3 or any(beat.waiting_for is not WaitingFor.INPUT for beat in snapshot.heartbeats):
            return
        if all(self._before.get(name) != sign for name, sign in signs.items()):
            self._offset_s += self.JUMP_S if self._before else 0.0
            self._before = signs


def test_a_worker_that_keeps_getting_stuck_ends_the_run_as_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = ("silent_after_s", "start_timeout_s", "drain_timeout_s", "drain_ceiling_s")
    settings = [f"supervisor.{name}=1000" for name in limits]
    run = Run(tmp_path, *settings, "supervisor.max_restarts=1", "supervisor.restart_window_s=100000", reward="still")
    clock = BeatingClock()
    monkeypatch.setattr("pipeline.supervisor.supervisor.time", clock)
    run.react = lambda snapshot: clock.watch(snapshot, "reward-0")
    outcome = run.until_end()
    assert outcome.exit_code == ExitCode.STUCK
    assert outcome.failure is not None
    assert "2 infrastructure failures of it" in outcome.failure.reason


@contextmanager
def killed_supervisor(folder: Path, *overrides: str, **scripts: str) -> Iterator[tuple[Path, dict[str, Heartbeat]]]:
    """A run whose supervisor was killed with -9 when its three workers lived; yields its folder and
    their heartbeats."""
    words = [f"{role}={word}" for role, word in scripts.items()]
    command = [
        sys.executable,
        "-m",
        "tests.pipeline.supervisor.supervised",
        str(folder),
        *overrides,
        "--scripts",
        *words,
    ]
    supervisor = subprocess.Popen(command, start_new_session=True)
    run_dir = folder / "runs" / "op"
    beats: dict[str, Heartbeat] = {}
    deadline = time.monotonic() + LIMIT_S
    while len(beats) < 3:
        assert time.monotonic() < deadline, "the workers did not come"
        assert supervisor.poll() is None
        time.sleep(0.1)
        if read_address(run_dir) is not None:
            beats = heartbeats(run_dir)
    supervisor.kill()
    supervisor.wait()
    try:
        yield run_dir, beats
    finally:
        for beat in beats.values():
            if process_runs(beat.pid):
                os.kill(beat.pid, signal.SIGKILL)


def heartbeats(run_dir: Path) -> dict[str, Heartbeat]:
    async def look() -> dict[str, Heartbeat]:
        registry = RedisRegistry(connect(read_ledger_url(run_dir)), "op")
        try:
            return {beat.who.worker: beat for beat in await registry.heartbeats()}
        finally:
            await registry.aclose()

    return asyncio.run(look())


def test_a_successor_of_a_killed_supervisor_adopts_the_workers_and_cares_for_them(tmp_path: Path) -> None:
    with killed_supervisor(tmp_path) as (run_dir, left):
        assert all(process_runs(beat.pid) for beat in left.values()), "they outlived their supervisor"
        successor = Run(tmp_path, resume=True)
        seen: list[dict[str, Heartbeat]] = []

        def react(snapshot: RunSnapshot) -> None:
            seen.append({beat.who.worker: beat for beat in snapshot.heartbeats})
            now = seen[-1]
            if len(seen) == 5:
                assert {name: (b.pid, b.who.epoch) for name, b in now.items()} == {
                    name: (b.pid, b.who.epoch) for name, b in left.items()
                }, "nobody was started, nobody fenced"
                os.kill(left["generator-0"].pid, signal.SIGKILL)
            elif len(seen) > 5 and "generator-0" in now and now["generator-0"].pid != left["generator-0"].pid:
                assert now["learner"].pid == left["learner"].pid
                successor.interrupt(snapshot)

        successor.react = react
        assert successor.until_end().exit_code == ExitCode.OK
        assert not any(process_runs(beat.pid) for beat in [*left.values(), *seen[-1].values()])
        assert not list((run_dir / "processes").glob("*[!e].json")), "nothing is left on record"


def test_an_adopted_learners_own_exit_code_is_the_runs(tmp_path: Path) -> None:
    with killed_supervisor(tmp_path, learner="starve-later") as (run_dir, left):
        # were it started anew, it would end with 2
        successor = Run(tmp_path, resume=True, learner="config")
        successor.when_live(lambda _: (run_dir / "starve").touch())
        assert successor.until_end().exit_code == ExitCode.STARVED
        assert not process_runs(left["learner"].pid)


def test_workers_of_other_settings_are_drained_first_and_started_with_the_new_ones(tmp_path: Path) -> None:
    with killed_supervisor(tmp_path) as (_, left):
        successor = Run(tmp_path, "generation.temperature=0.5", resume=True)

        def react(snapshot: RunSnapshot) -> None:
            fresh = [beat for beat in snapshot.heartbeats if beat.pid != left[beat.who.worker].pid]
            if len(fresh) >= 3:
                assert not any(process_runs(beat.pid) for beat in left.values())
                successor.interrupt(snapshot)

        successor.react = react
        assert successor.until_end().exit_code == ExitCode.OK


def test_a_successor_that_cannot_begin_leaves_everything_as_it_was(tmp_path: Path) -> None:
    with killed_supervisor(tmp_path) as (run_dir, left):
        with pytest.raises(LedgerMismatch):
            Run(tmp_path, "algorithm.group_size=8", resume=True).until_end()
        before = heartbeats(run_dir)
        assert {name: beat.pid for name, beat in before.items()} == {name: beat.pid for name, beat in left.items()}
        successor = Run(tmp_path, resume=True)
        successor.when_live(successor.interrupt)
        assert successor.until_end().exit_code == ExitCode.OK


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
        began = time.monotonic()
        with pytest.raises(LedgerUnavailable, match=r"the ledger server does not answer .* is it running"):
            run.until_end()
        # the server would be mute for ever
        assert time.monotonic() - began < 15.0
    assert not list(run.run_dir.glob("processes/*.json")), "no worker was started"


def test_a_password_that_is_refused_at_the_start_ends_it_at_once(tmp_path: Path) -> None:
    locked = EmbeddedServer(tmp_path, max_memory_mb=64)
    locked.start()
    run = Run(tmp_path)
    write_address(run.run_dir, LedgerAddress(url=f"unix://:wrong@{locked.socket}"))
    began = time.monotonic()
    try:
        with pytest.raises(LedgerRefused, match=r"refused the password.*Put that into ledger\.url or REDIS_URL"):
            run.until_end()
        # an outage is waited for, and for minutes
        assert time.monotonic() - began < 20.0
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
        began = time.monotonic()
        with pytest.raises(
            LedgerUnavailable, match=r"server\.sock that is not this run's recorded server; find it with"
        ):
            run.until_end()
        assert time.monotonic() - began < 10.0
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
    assert 3.0 <= began[1] - began[0] < 25.0
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
        assert time.monotonic() - began < 6.0
        signalling.join()
    assert not run.snapshots


def test_a_server_that_falls_mute_under_a_run_costs_no_worker_and_hides_no_signal(tmp_path: Path) -> None:
    """Twice: once it wakes up again, the second time Ctrl-C comes meanwhile."""
    settings = ("supervisor.stuck_after_s=2", "supervisor.silent_after_s=2", "ledger.outage_timeout_s=60")
    run = Run(tmp_path, *settings)
    first: dict[str, int] = {}
    asleep_s: list[float] = []
    ended: list[threading.Thread] = []

    def server_pid() -> int:
        address = read_address(run.run_dir)
        assert address is not None
        return address.pid

    def sleep_through() -> None:
        began = time.monotonic()
        os.kill(server_pid(), signal.SIGSTOP)
        time.sleep(4.0)
        os.kill(server_pid(), signal.SIGCONT)
        asleep_s.append(time.monotonic() - began)

    def end_meanwhile() -> None:
        os.kill(server_pid(), signal.SIGSTOP)
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)
        while any(process_runs(pid) for pid in first.values()) and time.monotonic() < began + 20.0:
            time.sleep(0.05)
        asleep_s.append(time.monotonic() - began)
        # that its own end need not be forced
        os.kill(server_pid(), signal.SIGCONT)

    def in_a_thread(act: Callable[[], None]) -> None:
        ended.append(threading.Thread(target=act))
        ended[-1].start()

    def react(snapshot: RunSnapshot) -> None:
        if not first and len(snapshot.heartbeats) >= 3:
            first.update({beat.who.worker: beat.pid for beat in snapshot.heartbeats})
            in_a_thread(sleep_through)
        elif len(asleep_s) == 1 and len(ended) == 1:
            assert {beat.who.worker: beat.pid for beat in snapshot.heartbeats} == first
            in_a_thread(end_meanwhile)

    run.react = react
    with capture_logs() as logged:
        outcome = run.until_end()
    for thread in ended:
        thread.join()
    assert outcome.exit_code == ExitCode.OK
    assert outcome.status.state is RunState.STOPPING
    assert asleep_s[0] >= 4.0
    assert asleep_s[1] < 15.0, "the workers drained while no server answered"
    assert not {"worker_replaced", "worker_exited", "drain_timed_out"} & {row["event"] for row in logged}


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
    around = SometimesThere(MemoryRegistry(RealClock()))

    async def look_for_a_minute(pid: int) -> RunStatus:
        who = await around.registry.register(Role.GENERATOR, "generator-0")
        last_words = Heartbeat(
            who=who, pid=pid, host="here", at_s=1.0, started_s=0.0, progress=1, progress_at_s=1.0, turns=1,
            waiting_for=WaitingFor.INPUT,
        )  # fmt: skip
        around.registry.beat(last_words)
        status = RunStatus(RunState.RUNNING)
        await around.registry.set_run_status(status)
        for second in range(60):
            around.answers = second % answers_every_s == 0
            status = await supervisor._look(around, status, [], float(second))  # pyright: ignore[reportArgumentType]
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


def test_one_supervisor_a_run(tmp_path: Path) -> None:
    run_dir = prepare_run_dir(op_config(tmp_path), resume=False)
    assert supervisor_pid(run_dir) is None
    with run_lock(run_dir):
        assert supervisor_pid(run_dir) == os.getpid()
        with pytest.raises(ConfigError, match=f"another supervisor \\(process {os.getpid()}\\)"), run_lock(run_dir):
            pass
    assert supervisor_pid(run_dir) is None


def test_a_folder_that_cannot_be_written_to_is_told_with_its_way_out(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ConfigError, match=r"choose another place with --set run\.dir=FOLDER"):
        prepare_run_dir(op_config(tmp_path, f"run.dir={tmp_path / 'taken'}"), resume=False)
    with pytest.raises(ConfigError, match="holds no run to resume"):
        prepare_run_dir(op_config(tmp_path), resume=True)


def test_other_settings_of_the_ledger_are_refused_and_the_run_keeps_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.when_live(run.interrupt)
    assert run.until_end().exit_code == ExitCode.OK
    kept = (run.run_dir / "config.toml").read_text()
    with pytest.raises(LedgerMismatch):
        Run(tmp_path, "algorithm.group_size=8", resume=True).until_end()
    assert (run.run_dir / "config.toml").read_text() == kept
