"""Claims about the supervisor: real processes, a real embedded ledger; the workers alone do no
work."""

from __future__ import annotations

import os
import re
import signal
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.fleet.status import RunSnapshot
from pipeline.ledger.address import read_address
from pipeline.observability.fleet_history import fleet_history
from pipeline.observability.start_record import STARTS_NAME, read_starts
from pipeline.operator.runs import list_runs
from pipeline.process.exit_codes import ExitCode
from pipeline.process.records import process_runs
from pipeline.runtime.registry.contract import RunState
from pipeline.supervisor.mirror_runner import MirrorRunner
from pipeline.supervisor.run_folder import prepare_run_dir, run_lock, supervisor_pid
from protocol.errors import ConfigError, LedgerMismatch
from tests.pipeline.op_config import op_config
from tests.pipeline.supervisor.supervised import LIMIT_S, Run

pytestmark = pytest.mark.timeout(90)


class LastCopies(MirrorRunner):
    """Notes when the copies at the run's end are begun."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def poll(self, now: float, *, is_last: bool = False) -> None:
        pass

    def close(self) -> None:
        pass

    async def finish(self, is_stopped: Callable[[], bool], *, plain: bool = True) -> str:
        self._order.append("copies, with lines" if plain else "copies, with bars")
        return "not all is copied"


def test_one_signal_drains_everything_and_leaves_no_process(tmp_path: Path) -> None:
    run, order = Run(tmp_path), list[str]()
    run.supervisor._mirror = LastCopies(order)
    run.leave = lambda: order.append("the terminal is free")
    run.when_live(run.interrupt)
    outcome = run.until_end()
    assert order == ["the terminal is free", "copies, with bars"]
    assert outcome.status.detail.endswith("; not all is copied")
    assert outcome.exit_code == ExitCode.OK
    assert outcome.status.state is RunState.STOPPING
    assert "--resume" in outcome.status.detail
    assert not any(process_runs(beat.pid) for snapshot in run.snapshots for beat in snapshot.workers)
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
    spans, _ = fleet_history(run.run_dir).read()
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
    assert "report_not_written" in told and f"headrace run report {run.run_dir}" in told


def test_a_start_that_cannot_be_recorded_changes_nothing_of_how_the_run_ended(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (run.run_dir / STARTS_NAME).mkdir()
    run.when_live(run.interrupt)
    with capture_logs() as logged:
        assert run.until_end().exit_code == ExitCode.OK
    assert [row["event"] for row in logged].count("start_not_recorded") == 2


def test_a_second_signal_ends_even_the_deaf_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, f"supervisor.drain_timeout_s={2 * LIMIT_S}", generator="deaf")

    def twice(_: RunSnapshot) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    run.when_live(twice, num_workers=2)
    assert run.until_end().exit_code == ExitCode.INTERRUPTED


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
        killed.update({beat.who.worker: beat.pid for beat in snapshot.workers})
        address = read_address(run.run_dir)
        assert address is not None
        os.kill(killed["generator-0"], signal.SIGKILL)
        os.kill(address.pid, signal.SIGKILL)

    def react(snapshot: RunSnapshot) -> None:
        pids = {beat.who.worker: beat.pid for beat in snapshot.workers}
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
        pids = {beat.who.worker: beat.pid for beat in snapshot.workers}
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
    run = Run(tmp_path, "supervisor.stuck_after_s=4", reward="still")
    first: dict[str, int] = {}

    def react(snapshot: RunSnapshot) -> None:
        pids = {beat.who.worker: beat.pid for beat in snapshot.workers}
        if not first and len(pids) >= 3:
            first.update(pids)
        elif first and pids.get("reward-0", first["reward-0"]) != first["reward-0"]:
            assert pids["generator-0"] == first["generator-0"], "one that turns idle is left alone"
            run.interrupt(snapshot)

    run.react = react
    with capture_logs() as logged:
        assert run.until_end().exit_code == ExitCode.OK
    (replaced,) = [row for row in logged if row["event"] == "worker_replaced"]
    assert replaced["worker"] == "reward-0"
    (stand,) = replaced["stands"]
    assert stand.startswith("reward-0 stands in task life: ") and " run (supervisor/fake_worker.py:" in stand


def test_a_stopped_worker_is_replaced_within_seconds_though_a_silent_one_has_long(tmp_path: Path) -> None:
    run = Run(tmp_path, "supervisor.silent_after_s=1000")
    stopped: dict[str, int] = {}

    def stop(snapshot: RunSnapshot) -> None:
        stopped.update({beat.who.worker: beat.pid for beat in snapshot.workers})
        os.kill(stopped["reward-0"], signal.SIGSTOP)
        run.react = until_back

    def until_back(snapshot: RunSnapshot) -> None:
        now = {beat.who.worker: beat.pid for beat in snapshot.workers}
        if now.get("reward-0", stopped["reward-0"]) != stopped["reward-0"]:
            assert now | {"reward-0": 0} == stopped | {"reward-0": 0}, "the others are left alone"
            run.interrupt(snapshot)

    run.when_live(stop)
    with capture_logs() as logged:
        assert run.until_end().exit_code == ExitCode.OK
    (replaced,) = [row for row in logged if row["event"] == "worker_replaced"]
    assert "its process does not run (supervisor.stopped_after_s)" in replaced["reason"]
    assert not process_runs(stopped["reward-0"])


def test_a_worker_that_keeps_getting_stuck_ends_the_run_as_stuck(tmp_path: Path) -> None:
    limits = ("silent_after_s", "start_timeout_s", "drain_timeout_s", "drain_ceiling_s")
    settings = [f"supervisor.{name}=1000" for name in limits]
    once = ("supervisor.stuck_after_s=8", "supervisor.max_restarts=1", "supervisor.restart_window_s=100000")
    outcome = Run(tmp_path, *settings, *once, reward="still").until_end()
    assert outcome.exit_code == ExitCode.STUCK
    assert outcome.failure is not None
    assert "2 infrastructure failures within" in outcome.failure.reason


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


@pytest.mark.timeout(90)
@pytest.mark.skipif(sys.platform != "linux", reason="environments are read in /proc")
def test_each_worker_sees_the_gpus_that_the_fleet_file_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    run = Run(tmp_path, "fleet.generator=2", "fleet.gpus.generator=[5,6]", "fleet.gpus.learner=[4]")
    seen = dict[str, str | None]()

    def look(snapshot: RunSnapshot) -> None:
        for beat in snapshot.workers:
            pairs = (pair.partition(b"=") for pair in Path(f"/proc/{beat.pid}/environ").read_bytes().split(b"\0"))
            environment = {name.decode(): value.decode() for name, _, value in pairs}
            seen[beat.who.worker] = environment.get("CUDA_VISIBLE_DEVICES")
        run.interrupt(snapshot)

    run.when_live(look, 4)
    run.until_end()
    assert seen == {"learner": "4", "generator-0": "5", "generator-1": "6", "reward-0": None}
