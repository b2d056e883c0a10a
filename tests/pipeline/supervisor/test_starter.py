"""Claims about the starter: workers forked of it are processes like those that are started anew."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from ops.emulated import OVERRIDES
from pipeline.config.load import write_resolved
from pipeline.process.descendants import WORKER_MARK, marked, worker_mark
from pipeline.process.records import process_runs
from pipeline.runtime.process_setup import limit_threads, thread_environment
from pipeline.supervisor.launchers.seam import Exit
from pipeline.supervisor.processes import Processes
from pipeline.supervisor.run_folder import prepare_run_dir
from pipeline.supervisor.starter import (
    AdoptedProcess,
    Starter,
    StarterEnded,
    forks,
    marked_environment,
    starter_command,
)
from protocol import headrace
from protocol.ids import Role
from tests.pipeline.op_config import op_config
from workers.preparation import imports

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="workers are forked on Linux only"),
]
COMMAND = [sys.executable, "-m", "tests.pipeline.supervisor.fake_starter"]
LIMIT_S = 50.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


@pytest.fixture
def starter(run_dir: Path) -> Iterator[Starter]:
    made = Starter(run_dir, COMMAND)
    made.wait()
    yield made
    made.close()


def forked(
    starter: Starter, run_dir: Path, word: str, environment: Mapping[str, str] | None = None, written: int | None = None
) -> AdoptedProcess:
    environment = marked_environment(worker_mark(run_dir, "value")) if environment is None else environment
    with (run_dir / "logs" / "value.out").open("ab") as output:
        return starter.start(["python", "value", word], environment, output, lambda: written)


def test_a_forked_worker_shows_its_own_command_line_mark_and_session_to_the_system(
    starter: Starter, run_dir: Path
) -> None:
    process = forked(starter, run_dir, "wait")
    try:
        line = Path(f"/proc/{process.pid}/cmdline")
        until(lambda: line.read_bytes().rstrip(b"\0").split(b"\0") == [b"python", b"value", b"wait"])
        assert marked(WORKER_MARK, worker_mark(run_dir, "value")) == [process.pid]
        until(lambda: f"session {process.pid}," in (run_dir / "logs" / "value.out").read_text())
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL


def test_a_forked_worker_has_the_given_environment_and_no_variable_of_the_starter(
    starter: Starter, run_dir: Path
) -> None:
    forked(starter, run_dir, "0", {"HOME": "/elsewhere"}).wait()
    assert "home /elsewhere" in (run_dir / "logs" / "value.out").read_text()
    forked(starter, run_dir, "0", {}).wait()
    assert "home None" in (run_dir / "logs" / "value.out").read_text()


@pytest.mark.parametrize(("word", "code"), [("0", 0), ("7", 7), ("crash", -signal.SIGSEGV), ("fail", 1)])
def test_the_exit_code_of_a_forked_worker_is_its_own(starter: Starter, run_dir: Path, word: str, code: int) -> None:
    assert forked(starter, run_dir, word).wait() == code
    assert ("ValueError: as its command line wants" in (run_dir / "logs" / "value.out").read_text()) == (word == "fail")


def test_forked_workers_outlive_the_starter_and_end_with_the_code_that_they_wrote(run_dir: Path) -> None:
    starter = Starter(run_dir, COMMAND)
    starter.wait()
    process = forked(starter, run_dir, "wait", written=6)
    starter.close()
    assert not process_runs(starter.pid)
    assert process.poll() is None
    process.kill()
    assert process.wait() == 6


def prepared(run_dir: Path, *words: str, forked_roles: frozenset[Role] = frozenset(Role)) -> Processes:
    def command(role: Role, run_dir: Path, name: str) -> list[str]:
        return [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)", name, "wait"]

    processes = Processes(run_dir, command)
    processes.prepare([*COMMAND, *words], forked_roles.__contains__)
    return processes


def is_forked(processes: Processes, name: str) -> bool:
    """Whether a worker is a fork: the fake starter's program marks such a worker."""
    until(lambda: bool(processes.logs(name)))
    return "in session" in processes.logs(name)


def test_only_roles_that_may_be_forked_are_forked(run_dir: Path) -> None:
    processes = prepared(run_dir, forked_roles=frozenset({Role.LEARNER}))
    try:
        for role in (Role.LEARNER, Role.GENERATOR):
            processes.start(role, str(role))
        assert is_forked(processes, "learner")
        assert not is_forked(processes, "generator")
    finally:
        processes.close()


def test_without_its_imports_there_is_no_starter_and_workers_import_for_themselves(run_dir: Path) -> None:
    with capture_logs() as logs:
        processes = prepared(run_dir, "broken")
    try:
        assert [entry["event"] for entry in logs] == ["starter_ended"]
        assert "no module named so" in (run_dir / "logs" / "starter.out").read_text()
        processes.start(Role.LEARNER, "learner")
        assert not is_forked(processes, "learner")
    finally:
        processes.close()


def test_a_killed_starter_costs_no_worker_and_no_start(run_dir: Path) -> None:
    processes = prepared(run_dir)
    try:
        processes.start(Role.LEARNER, "learner")
        assert is_forked(processes, "learner")
        (starter,) = marked(WORKER_MARK, worker_mark(run_dir, "starter")[:-1])
        os.kill(starter, signal.SIGKILL)
        until(lambda: not process_runs(starter))
        processes.start(Role.GENERATOR, "generator-0")
        assert not is_forked(processes, "generator-0")
        assert processes.reap() == []
        assert set(processes.pids) == {"learner", "generator-0"}
    finally:
        processes.close()


def test_a_supervisor_with_more_than_a_thousand_open_files_has_a_starter(run_dir: Path) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2048:
        pytest.skip("fewer files may be open here")
    with ExitStack() as held:
        for _ in range(1100):
            held.enter_context(open(os.devnull, "rb"))  # noqa: PTH123
        made = Starter(run_dir, COMMAND)
        held.callback(made.close)
        made.wait()
        assert process_runs(made.pid)


def test_a_wait_that_is_given_up_leaves_no_starter(run_dir: Path) -> None:
    starter = Starter(run_dir, [sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(StarterEnded, match="still importing"):
        starter.wait(lambda: True)
    starter.close()
    assert not process_runs(starter.pid)


def test_workers_are_forked_of_their_real_imports_whatever_threads_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in thread_environment(1):
        monkeypatch.delenv(name, raising=False)
    config = op_config(tmp_path)
    run_dir = prepare_run_dir(config, resume=False)
    write_resolved(config, run_dir)
    starter = Starter(run_dir, starter_command(run_dir))
    try:
        starter.wait()
    finally:
        starter.close()
    assert (run_dir / "logs" / "starter.out").read_text() == ""


def test_workers_of_vllm_are_not_forked_and_its_modules_not_imported(tmp_path: Path) -> None:
    config = op_config(tmp_path, "generation.engine=vllm", "reference.backend=vllm")
    assert [role for role in Role if not forks(config, role)] == [Role.GENERATOR, Role.REFERENCE]
    assert not any("vllm" in module for module in imports(config))


def test_an_emulated_fleet_imports_no_torch_before_it_forks(tmp_path: Path) -> None:
    assert "workers.engines.training.torch" in imports(op_config(tmp_path))
    emulated = op_config(tmp_path, *OVERRIDES)
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, *imports(emulated)], check=True)


def test_a_process_that_holds_a_device_or_has_threads_is_not_forked(tmp_path: Path) -> None:
    def reasons() -> list[str | None]:
        code = """if True:
            import sys, threading
            from workers.starter import unforkable
            print(unforkable(sys.argv[1]))
            with open(sys.argv[1] + "/device", "w"):
                print(unforkable(sys.argv[1]))
            threading.Thread(target=sys.stdin.read, daemon=True).start()
            print(unforkable(sys.argv[1]))"""
        command, environment = [sys.executable, "-c", code, str(tmp_path)], marked_environment("test")
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdout is not None
            return [process.stdout.readline().strip() for _ in range(3)]

    free, holding, threaded = reasons()
    assert free == "None"
    assert f"an import has opened {tmp_path}/device" in str(holding)
    assert "the imports have started 1 threads" in str(threaded)


def test_threads_may_be_limited_again_alike_after_torch_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    for name, value in thread_environment(1).items():
        monkeypatch.setenv(name, value)
    limit_threads(1)
    with pytest.raises(RuntimeError, match="after torch was imported"):
        limit_threads(2)


def test_processes_start_by_the_code_in_a_folder_and_then_by_the_installed_one_again(run_dir: Path) -> None:
    entry = run_dir / "code" / "protocol" / "headrace.py"
    entry.parent.mkdir(parents=True)
    entry.write_text("import sys\nprint('in session', sys.argv[1:], flush=True)\nsys.stdin.read()\n")

    def command(role: Role, run_dir: Path, name: str) -> list[str]:
        return headrace.command("no.such.module", name)

    processes = Processes(run_dir, command)
    try:
        assert processes.go_by(run_dir / "code") and not processes.go_by(run_dir / "code")
        processes.start(Role.LEARNER, "learner")
        until(lambda: "in session ['no.such.module', 'learner']" in processes.logs("learner"))
        assert processes.go_by(None)
        processes.start(Role.VALUE, "value")
        until(lambda: "No module named 'no'" in processes.logs("value"))
    finally:
        processes.close()


def test_only_the_starters_of_the_installed_and_the_last_used_code_are_kept(run_dir: Path) -> None:
    processes = prepared(run_dir)
    mark = worker_mark(run_dir, "starter")[:-1]
    try:
        # A fork has its starter's mark until it has its own.
        (first,) = marked(WORKER_MARK, mark)
        processes.start(Role.LEARNER, "learner")
        for name in ("a", "b", "c"):
            processes.go_by(run_dir / name)
            until(lambda: is_forked_now(processes))
        until(lambda: len(marked(WORKER_MARK, mark)) == 3)
        assert first in marked(WORKER_MARK, mark)
        # The first knows how its worker ends.
        processes.stop("learner", now=True)
        found: list[Exit] = []
        until(lambda: bool(found.extend(one for one in processes.reap() if one.worker == "learner") or found))
        assert found[0].code == -signal.SIGKILL
    finally:
        processes.close()
    assert marked(WORKER_MARK, mark) == []


def is_forked_now(processes: Processes) -> bool:
    """Whether a worker that starts now is a fork; until its starter is ready it is none."""
    name = f"value-{len(processes.pids)}"
    processes.start(Role.VALUE, name)
    return is_forked(processes, name)
