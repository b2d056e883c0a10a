"""Claims about processes that import while a run is still being checked: they become its workers, or nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.cli.up import carry_out
from pipeline.config.schema import RunConfig
from pipeline.process.descendants import WORKER_MARK, marked, worker_mark
from pipeline.process.exit_codes import ExitCode
from pipeline.process.records import process_runs
from pipeline.supervisor.launchers.seam import Exit
from pipeline.supervisor.processes import Processes
from pipeline.supervisor.run_folder import check_no_run, prepare_run_dir
from pipeline.supervisor.starter import EarlyProcesses, forks
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.pipeline.op_config import op_config
from tests.pipeline.supervisor.supervised import Run

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="workers import early on Linux only"),
]
VLLM = "generation.engine=vllm"


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(_: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "tests.pipeline.supervisor.fake_early", *arguments]

    def starter(config: Path) -> list[str]:
        return [sys.executable, "-m", "tests.pipeline.supervisor.fake_worker_starter", str(config)]

    monkeypatch.setattr("pipeline.supervisor.starter.headrace", SimpleNamespace(command=command))
    monkeypatch.setattr("pipeline.supervisor.starter.starter_command", starter)


def of(config: RunConfig) -> list[int]:
    return marked(WORKER_MARK, worker_mark(config.run_dir))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 50.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def process_of(run_dir: Path, worker: str) -> int:
    """Return a worker's process, which shows its mark a moment after it was begun."""
    mark = worker_mark(run_dir, worker)
    until(lambda: len(marked(WORKER_MARK, mark)) == 1)
    return marked(WORKER_MARK, mark)[0]


@pytest.mark.parametrize(
    "error", [ConfigError("this model is wrong"), KeyboardInterrupt("now")], ids=["failed", "Ctrl-C"]
)
def test_a_check_that_fails_while_workers_import_says_its_error_and_leaves_no_process_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    config = op_config(tmp_path, VLLM, "fleet.generator=2")
    seen: list[int] = []

    def check(*_: object, **__: object) -> None:
        until(lambda: len(of(config)) >= 3)
        seen.extend(of(config))
        raise error

    monkeypatch.setattr("pipeline.preflight.checks.preflight", check)
    with pytest.raises(type(error), match=str(error)):
        carry_out(config, partial(prepare_run_dir, config, resume=False), is_live=False)
    assert len(seen) == 3, "the starter and two generators import meanwhile"
    assert of(config) == []
    assert not config.run_dir.exists()
    check_no_run(config)


def begun(config: RunConfig, early: EarlyProcesses) -> Processes:
    """The processes of a run whose checks have passed."""
    processes = Processes(prepare_run_dir(config, resume=False), lambda role, _, name: [str(role), name, "7"])
    processes.early = early
    processes.prepare(["no", "such", "starter"], partial(forks, config))
    return processes


def test_a_worker_of_vllm_is_the_process_that_imported_during_the_checks(tmp_path: Path) -> None:
    config = op_config(tmp_path, VLLM)
    with EarlyProcesses(config, config.run_dir) as early:
        waiting = process_of(config.run_dir, "generator-0")
        processes = begun(config, early)
        try:
            processes.start(Role.GENERATOR, "generator-0")
            assert processes.pids == {"generator-0": waiting}
            ended: list[Exit] = []
            until(lambda: bool(ended.extend(processes.reap()) or ended))
            assert (ended[0].pid, ended[0].code) == (waiting, 7)
            assert processes.logs("generator-0") == "became 7"
        finally:
            processes.close()


def test_a_process_that_died_while_it_imported_costs_no_start(tmp_path: Path) -> None:
    config = op_config(tmp_path, VLLM)
    with EarlyProcesses(config, config.run_dir) as early:
        waiting = process_of(config.run_dir, "generator-0")
        os.kill(waiting, signal.SIGKILL)
        until(lambda: not process_runs(waiting))
        with pytest.raises((EOFError, OSError)):
            early.check_vllm(5.0)
        processes = begun(config, early)
        processes._command = lambda *_: [sys.executable, "-c", "print('imports itself')"]
        try:
            processes.start(Role.GENERATOR, "generator-0")
            until(lambda: processes.logs("generator-0") == "imports itself")
        finally:
            processes.close()


def test_the_process_that_imports_vllm_answers_what_it_says_of_the_configuration(tmp_path: Path) -> None:
    refused = op_config(tmp_path, VLLM, "run.name=refused")
    with EarlyProcesses(refused, refused.run_dir) as early:
        assert early.check_vllm(50.0) == "no such architecture"
    config = op_config(tmp_path, VLLM)
    with EarlyProcesses(config, config.run_dir) as early:
        assert early.check_vllm(50.0) is None
    for without in (op_config(tmp_path), op_config(tmp_path, VLLM, "supervisor.preload=false")):
        with EarlyProcesses(without, without.run_dir) as early, pytest.raises(EOFError):
            early.check_vllm(50.0)


def test_what_a_starter_printed_before_there_was_a_folder_is_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [sys.executable, "-m", "tests.pipeline.supervisor.fake_starter", "broken"]
    monkeypatch.setattr("pipeline.supervisor.starter.starter_command", lambda _: broken)
    config = op_config(tmp_path, VLLM)
    with EarlyProcesses(config, config.run_dir) as early:
        begun(config, early).close()
    assert "no module named so" in (config.run_dir / "logs" / "starter.out").read_text()


def test_an_early_process_that_no_worker_needs_ends_once_the_fleet_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.preflight.checks.check_vllm", lambda *_: "")
    monkeypatch.setattr("pipeline.preflight.checks.ask_vllm", lambda *_, **__: None)
    run = Run(tmp_path, VLLM, "fleet.generator=1")
    larger = op_config(tmp_path, VLLM, "fleet.generator=2")
    left: list[int] = []
    with EarlyProcesses(larger, run.run_dir) as early:
        run.supervisor._processes.early = early
        first = process_of(run.run_dir, "generator-0")
        second = process_of(run.run_dir, "generator-1")

        def react(snapshot: object) -> None:
            pids = run.supervisor._processes.pids
            if pids.get("generator-0") == first and not process_runs(second):
                left.append(first)
                run.interrupt(run.snapshots[-1])

        run.react = react
        assert run.until_end().exit_code == ExitCode.OK
    assert left == [first]
