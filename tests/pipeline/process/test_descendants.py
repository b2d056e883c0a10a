"""The claims of pipeline.process.descendants that a run's end does not show each time."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.process import descendants
from pipeline.process.descendants import SANDBOX_MARK, Activity, activity_of, end_marked


class Proc:
    """A stand-in for ``/proc`` with one process, in the state that the kernel shows."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._folder = folder / str(pid)
        self._folder.mkdir()

    def show(self, environment: str, *, state: str = "R", flags: int = 0, env_end: int) -> None:
        fields = ["0"] * 48
        fields[5], fields[47] = str(flags), str(env_end)
        (self._folder / "stat").write_text(f"1 (a name) of) {state} {' '.join(fields)}\n")
        (self._folder / "environ").write_text(environment)


@pytest.fixture
def mark() -> str:
    return secrets.token_hex(8)


def test_a_process_in_the_middle_of_exec_is_ended_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        proc = Proc(tmp_path, process.pid)
        proc.show("", env_end=0)
        monkeypatch.setattr(descendants, "_PROC", tmp_path)

        entries = f"PATH=/bin\0{SANDBOX_MARK}={mark}\0"
        monkeypatch.setattr(descendants.time, "sleep", lambda _: proc.show(entries, state="S", env_end=9))
        try:
            number = end_marked(SANDBOX_MARK, mark)
            assert process.wait(10) == -signal.SIGKILL
        finally:
            process.kill()
    assert number == 1


@pytest.mark.parametrize(
    ("state", "flags", "env_end"),
    [
        pytest.param("Z", 0, 0, id="has ended"),
        pytest.param("S", descendants._KERNEL_THREAD, 0, id="is the kernel's"),
        pytest.param("S", 0, 4096, id="was started without one"),
    ],
)
def test_no_search_waits_for_a_process_that_never_has_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, state: str, flags: int, env_end: int
) -> None:
    Proc(tmp_path, 4_000_000).show("", state=state, flags=flags, env_end=env_end)
    monkeypatch.setattr(descendants, "_PROC", tmp_path)
    monkeypatch.setattr(descendants.time, "sleep", lambda _: pytest.fail("waited"))
    assert end_marked(SANDBOX_MARK, mark) == 0


def test_the_kernel_shows_a_process_after_exec_as_such() -> None:
    with subprocess.Popen(["sleep", "600"], env={}) as process:
        try:
            while Path(f"/proc/{process.pid}/cmdline").read_bytes() != b"sleep\x00600\x00":
                pass
            assert not descendants._executes(process.pid)
        finally:
            process.kill()


@contextmanager
def process(code: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", code]) as running:
        try:
            yield running.pid
        finally:
            running.kill()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stop(pid: int) -> Activity | None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: activity_of(pid) is not None)
    return activity_of(pid)


def test_a_stopped_process_does_nothing_until_it_goes_on() -> None:
    with process("import time\nwhile True: time.sleep(0.05)") as pid:
        time.sleep(0.5)
        before = stop(pid)
        time.sleep(0.3)
        assert activity_of(pid) == before
        os.kill(pid, signal.SIGCONT)
        until(lambda: activity_of(pid) not in (None, before))


def test_one_thread_that_runs_speaks_for_a_process_whose_main_thread_waits() -> None:
    beats = "import threading, time\ndef beat():\n  while True: time.sleep(0.05)\n"
    with process(f"{beats}threading.Thread(target=beat).start()\nthreading.Event().wait()") as pid:
        until(lambda: len(list(Path(f"/proc/{pid}/task").iterdir())) == 2 and activity_of(pid) is not None)
        before = activity_of(pid)
        until(lambda: activity_of(pid) not in (None, before))


def test_of_a_process_that_is_gone_or_computes_nothing_is_said() -> None:
    with process("while True: pass") as pid:
        time.sleep(0.5)
        assert {activity_of(pid) for _ in range(20)} == {None}
    assert activity_of(pid) is None


def written(folder: Path, *threads: tuple[str, str]) -> None:
    for number, (state, counted) in enumerate(threads):
        task = folder / "7" / "task" / str(7 + number)
        task.mkdir(parents=True)
        (task / "stat").write_text(f"7 (a) name) {state} 1 2 3\n")
        (task / "schedstat").write_text(f"{counted}\n")


@pytest.mark.parametrize("state", "RDtX")
def test_a_thread_that_may_go_on_by_itself_speaks_for_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(descendants, "_PROC", tmp_path)
    written(tmp_path, ("T", "5 0 1"), (state, "9 0 2"))
    assert activity_of(7) is None


@pytest.mark.parametrize("state", "TS")
def test_a_frozen_control_group_counts_as_a_stop_though_its_threads_seem_to_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(descendants, "_PROC", tmp_path)
    written(tmp_path, (state, "5 0 1"), (state, "9 0 2"))
    assert activity_of(7) == Activity(14, 3)


def test_a_kernel_without_the_count_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descendants, "_PROC", tmp_path)
    written(tmp_path, ("T", "0 0 0"))
    assert activity_of(7) is None


def test_the_shared_memory_of_processes_that_are_ended_is_freed(mark: str) -> None:
    script = (
        "import time; from multiprocessing.shared_memory import SharedMemory; "
        "held = [SharedMemory(create=True, size=1) for _ in range(100)]; "
        "print(*(one.name for one in held), flush=True); time.sleep(600)"
    )
    environment = {SANDBOX_MARK: mark, **os.environ}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        held = [Path("/dev/shm") / name for name in process.stdout.readline().split()]
        assert all(path.exists() for path in held)
        end_marked(SANDBOX_MARK, mark)
    try:
        assert not any(path.exists() for path in held)
    finally:
        for path in held:
            path.unlink(missing_ok=True)
