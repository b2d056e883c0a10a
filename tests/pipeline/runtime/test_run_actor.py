"""``run_actor`` on real processes and a real ledger server: how workers live, stop, fail and are
fenced."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import write_resolved
from pipeline.ledger.redis.client import connect
from pipeline.ledger.server.embedded import EmbeddedServer
from pipeline.process import records
from pipeline.process.exit_codes import ExitCode
from pipeline.process.stacks.request import request_stacks
from pipeline.runtime.flow_ring import FlowRingReader, flow_folder
from pipeline.runtime.registry.contract import FailureReport, Heartbeat, RunState, RunStatus, WaitingFor
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.supervisor.leftovers import clear_leftovers
from protocol.errors import LedgerUnavailable
from tests.pipeline.runtime.fakes import small_config

pytestmark = pytest.mark.integration
_PATIENCE_S = 30.0


class Run:
    """A run's folder with a ledger, and the workers that a test starts in it."""

    def __init__(self, folder: Path, **settings: float) -> None:
        self.folder = folder
        config = small_config(folder, **settings)
        self.name = config.run.name
        write_resolved(config, folder)
        self.server = EmbeddedServer(folder, max_memory_mb=64)
        self.server.start()
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, kind: str, worker: str = "reward-0", *more: str) -> subprocess.Popen[bytes]:
        module = "tests.pipeline.runtime.tiny_actors"
        command = [sys.executable, "-P", "-m", module, kind, str(self.folder), worker, *more]
        root = Path(__file__).parents[3]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        with (self.folder / f"{worker}.out").open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=root, env=environment, start_new_session=True
            )
        self.processes.append(process)
        return process

    def registry(self) -> RedisRegistry:
        return RedisRegistry(connect(self.server.url), self.name)

    def marks(self, worker: str = "reward-0") -> list[str]:
        path = self.folder / f"{worker}.marks"
        return path.read_text().split() if path.exists() else []

    def log(self, worker: str = "reward-0") -> list[dict[str, Any]]:
        path = self.folder / "logs" / f"{worker}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def wait_for_mark(self, word: str, worker: str = "reward-0") -> None:
        self.wait_until(lambda: word in self.marks(worker), f"{worker} to {word}")

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"waited in vain for {what}: {self._outputs()}"
            time.sleep(0.01)

    def _outputs(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob("*.out"))

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.server.stop()
        clear_leftovers(self.folder)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    opened = Run(tmp_path)
    yield opened
    opened.end()


async def beat_when(registry: RedisRegistry, holds: Callable[[Heartbeat], bool], what: str) -> Heartbeat:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        try:
            beats = await registry.heartbeats()
        except LedgerUnavailable:
            continue
        if beats and holds(beats[0]):
            return beats[0]
        await asyncio.sleep(0.02)
    raise AssertionError(f"no heartbeat ever had {what}")


async def _failures(run: Run) -> list[FailureReport]:
    registry = run.registry()
    try:
        return await registry.failures()
    finally:
        await registry.aclose()


async def test_a_sigterm_drains_and_departs(run: Run):
    process = run.start("Ticking")
    registry = run.registry()
    beat = await beat_when(registry, lambda beat: beat.progress > 5, "progress")
    assert (beat.who.worker, beat.who.epoch, beat.pid, beat.policy_version) == ("reward-0", 1, process.pid, 3)
    assert beat.waiting_for in {WaitingFor.INPUT, WaitingFor.LEDGER}
    assert beat.counters["turns"] > 5
    seen = await beat_when(registry, lambda beat: bool(beat.vitals and beat.vitals.num_fds), "a reading of its host")
    assert seen.vitals is not None
    assert (seen.vitals.num_fds or 0) > 5 and 0.0 < (seen.vitals.disk_free_share or 0.0) <= 1.0
    assert seen.vitals.cpu > 0.0 and 0.0 < seen.vitals.ledger_rtt_ms < 10_000.0
    with closing(FlowRingReader(flow_folder(run.folder) / "reward-0.ring")) as reader:
        assert reader.read() == [] and reader.num_damaged == 0
    process.send_signal(signal.SIGTERM)
    assert process.wait(_PATIENCE_S) == ExitCode.OK
    assert run.marks() == ["setup", "run", "drain", "teardown"]
    assert await registry.heartbeats() == await registry.failures() == []
    last = run.log()[-1]
    assert (last["event"], last["reason"], last["code"]) == ("worker_ended", "received SIGTERM", "OK")
    assert (last["role"], last["worker"], last["run"], last["policy_version"]) == ("reward", "reward-0", run.name, 3)
    await registry.aclose()


def test_a_standby_s_parts_serve_a_worker_of_changed_settings_and_others_are_closed(run: Run):
    assert run.start("Made", "reward-0", "1").wait(_PATIENCE_S) == ExitCode.OK
    assert run.marks() == ["setup", "warm", "drain", "teardown"]
    assert run.start("Made", "reward-1", "5").wait(_PATIENCE_S) == ExitCode.OK
    assert run.marks("reward-1") == ["closed", "setup", "run", "drain", "teardown"]
    assert [line["event"] for line in run.log("reward-1")].count("standby_not_used") == 1


def test_a_second_signal_is_immediate(run: Run):
    process = run.start("SlowToDrain")
    run.wait_for_mark("run")
    process.send_signal(signal.SIGINT)
    run.wait_for_mark("drain")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(_PATIENCE_S) == ExitCode.INTERRUPTED
    # its drain would take a minute
    assert time.monotonic() - began < 20.0
    assert asyncio.run(_failures(run)) == [], "a person ended it"
    assert "drained" not in run.marks()


def test_a_second_signal_does_not_wait_for_a_computation(run: Run):
    process = run.start("Computing")
    run.wait_for_mark("run")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(_PATIENCE_S) == ExitCode.INTERRUPTED


def test_a_drain_ends_at_its_deadline(tmp_path: Path):
    run = Run(tmp_path, drain_timeout_s=0.3)
    try:
        process = run.start("SlowToDrain")
        run.wait_for_mark("run")
        process.send_signal(signal.SIGTERM)
        assert process.wait(_PATIENCE_S) == ExitCode.DRAIN_TIMEOUT
        assert run.marks() == ["setup", "run", "drain", "teardown"]
        assert "made no progress for 0.3 s" in run.log()[-1]["reason"]
        (told,) = asyncio.run(_failures(run))
        assert told.error == "DrainTimeout"
    finally:
        run.end()


def test_a_crash_is_a_failure_with_its_traceback_in_the_log(run: Run):
    assert run.start("Crashing").wait(_PATIENCE_S) == ExitCode.FAILURE
    (line,) = [line for line in run.log() if line["event"] == "worker_failed"]
    assert "Traceback" in line["exception"]
    assert "ZeroDivisionError: a bug in the loop" in line["exception"]
    assert "tiny_actors.py" in line["exception"]
    assert run.marks() == ["setup", "run", "teardown"]


async def test_a_spawned_task_that_fails_ends_the_worker_and_the_registry_has_the_reason(run: Run):
    assert run.start("LosingATask").wait(_PATIENCE_S) == ExitCode.FAILURE
    assert any("LookupError: a bug in a task" in line.get("exception", "") for line in run.log())
    (told,) = await _failures(run)
    assert (str(told.who), told.error, told.message) == ("reward-0#1", "LookupError", "a bug in a task")


def test_a_main_loop_that_returns_is_a_crash(run: Run):
    assert run.start("Returning").wait(_PATIENCE_S) == ExitCode.FAILURE
    assert any("expected to run until ctx.draining is set" in line.get("exception", "") for line in run.log())


def test_a_worker_that_is_done_ends_with_its_own_code_after_its_drain(run: Run):
    assert run.start("Finishing").wait(_PATIENCE_S) == ExitCode.STARVED
    assert run.marks() == ["setup", "drain", "teardown"]
    assert run.log()[-1]["reason"] == "the data is exhausted"


def test_a_stop_ends_a_worker_that_is_still_loading_its_engine_at_once(run: Run):
    process = run.start("SlowStart")
    run.wait_for_mark("setup")
    process.terminate()
    assert process.wait(_PATIENCE_S) == ExitCode.OK, "no drain's deadline ended it"
    assert run.marks() == ["setup"], "what was not set up is neither run nor torn down"
    assert run.log()[-1]["reason"] == "received SIGTERM"


async def test_a_worker_whose_engine_died_after_work_is_its_own_next_incarnation(run: Run):
    process = run.start("LosingItsEngine")
    registry = run.registry()
    beat = await beat_when(registry, lambda beat: beat.counters.get("turns", 0) > 0, "turns")
    await registry.aclose()
    assert (beat.who.epoch, beat.pid) == (3, process.pid), "the process keeps its imports"
    assert run.marks() == ["setup", "teardown", "setup", "teardown", "setup", "run"]
    assert {str(told.who) for told in await _failures(run)} == {"reward-0#1", "reward-0#2"}
    process.terminate()
    assert process.wait(_PATIENCE_S) == ExitCode.OK, "a stop is heard as before"
    assert run.marks()[-2:] == ["drain", "teardown"]


@pytest.mark.parametrize("kind", ["LosingItsEngineIdle", "LosingItsEngineSoon"])
def test_an_engine_that_dies_before_any_work_or_within_the_supervisors_window_ends_the_process(run: Run, kind: str):
    assert run.start(kind).wait(_PATIENCE_S) == ExitCode.ENGINE, "the supervisor counts it, and pauses"
    assert run.marks() == ["setup", "teardown"]


def test_a_worker_that_was_fenced_as_its_engine_died_does_not_come_back(run: Run):
    assert run.start("LosingItsEngineFenced").wait(_PATIENCE_S) == ExitCode.FENCED
    assert run.marks() == ["setup", "teardown"]
    assert run.log()[-1]["reason"] == "reward-0 is fenced: a newer incarnation of it exists; this process ends"


def test_a_wrong_setting_is_a_sentence_not_a_traceback(run: Run):
    assert run.start("Misconfigured").wait(_PATIENCE_S) == ExitCode.CONFIG
    assert run.log()[-1]["reason"] == "model.path is /nowhere; expected a folder of a Hugging Face model"
    assert not any("exception" in line for line in run.log())


async def test_a_worker_drains_when_the_run_is_over(run: Run):
    process = run.start("Ticking")
    run.wait_for_mark("run")
    registry = run.registry()
    await registry.set_run_status(RunStatus(RunState.FINISHED, "all updates are done"))
    assert process.wait(_PATIENCE_S) == ExitCode.OK
    assert "drain" in run.marks()
    assert run.log()[-1]["reason"] == "the run is finished: all updates are done"
    await registry.aclose()


async def test_a_fenced_worker_ends_at_once_without_draining(run: Run):
    process = run.start("Ticking")
    run.wait_for_mark("run")
    registry = run.registry()
    await beat_when(registry, lambda beat: beat.progress > 0, "progress")
    await registry.fence("reward-0")
    assert process.wait(_PATIENCE_S) == ExitCode.FENCED
    assert "drain" not in run.marks()
    assert await registry.heartbeats() == []
    await registry.aclose()


def test_a_second_process_of_a_name_takes_its_place(run: Run):
    first = run.start("Ticking")
    run.wait_for_mark("run")
    second = run.start("Ticking")
    assert first.wait(_PATIENCE_S) == ExitCode.FENCED
    assert second.poll() is None
    second.send_signal(signal.SIGTERM)
    assert second.wait(_PATIENCE_S) == ExitCode.OK


async def test_a_beating_thread_does_not_hide_a_dead_loop_and_ends_it_when_fenced(run: Run):
    process = run.start("DeadLoop")
    registry = run.registry()
    first = await beat_when(registry, lambda beat: beat.waiting_for is WaitingFor.COMPUTE, "a computing loop")
    later = await beat_when(registry, lambda beat: beat.at_s >= first.at_s + 1.5, "a later time")
    assert later.progress == first.progress
    assert later.vitals is not None and later.vitals.loop_lag_ms > 1_000.0
    assert later.progress_at_s == pytest.approx(first.progress_at_s, abs=0.1)
    identity = records.identify(process.pid)
    assert identity is not None
    records.write_started(run.folder, "reward-0", records.Started(identity, "reward"))
    look = (await asyncio.to_thread(partial(request_stacks, run.folder, answer_s=_PATIENCE_S))).looks["reward-0"]
    main = look.stack("main")
    assert look.is_whole and main is not None
    assert str(main.frames[0]).startswith("run (runtime/tiny_actors.py:")
    await registry.fence("reward-0")
    assert process.wait(_PATIENCE_S) == ExitCode.FENCED
    await registry.aclose()


async def test_a_ledger_that_is_killed_and_restarted_is_survived(run: Run):
    process = run.start("Ticking")
    registry = run.registry()
    before = await beat_when(registry, lambda beat: beat.progress > 5, "progress")
    pid = run.server.pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    # long enough for a heartbeat to be lost: each tries for 2 s
    await asyncio.sleep(3.0)
    run.server.start()
    after = await beat_when(registry, lambda beat: beat.progress > before.progress + 5, "progress after the outage")
    assert (after.pid, after.who) == (process.pid, before.who)
    assert before.vitals and after.vitals and before.vitals.retries == 0 < after.vitals.retries
    run.wait_until(lambda: any(line["event"] == "heartbeats_resumed" for line in run.log()), "heartbeats to resume")
    process.send_signal(signal.SIGTERM)
    assert process.wait(_PATIENCE_S) == ExitCode.OK
    await registry.aclose()


def test_a_worker_told_to_stop_before_it_reached_the_ledger_ends(run: Run):
    run.server.stop()
    process = run.start("Ticking")
    run.wait_until(lambda: (run.folder / "logs" / "reward-0.jsonl").exists(), "the log")
    # it has its signal handlers once its loop runs
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(_PATIENCE_S) in {ExitCode.INTERRUPTED, -signal.SIGTERM}
    assert run.marks() == []


def test_no_ledger_within_the_allowed_outage_has_its_own_code(tmp_path: Path):
    run = Run(tmp_path, outage_timeout_s=0.5)
    try:
        run.server.stop()
        assert run.start("Ticking").wait(_PATIENCE_S) == ExitCode.LEDGER_UNAVAILABLE
        assert "does not answer" in run.log()[-1]["reason"]
    finally:
        run.end()


def test_a_folder_that_is_no_run_is_a_sentence(tmp_path: Path):
    command = [sys.executable, "-P", "-m", "tests.pipeline.runtime.tiny_actors", "Ticking", str(tmp_path), "reward-0"]
    root = Path(__file__).parents[3]
    ended = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == ExitCode.CONFIG
    assert "is not a run" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_importing_the_actor_loads_no_torch():
    code = "import sys, pipeline.runtime.actor; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
