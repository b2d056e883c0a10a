"""Claims about what the kernel shows of a process that runs, sleeps, waits or is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.process import activity
from pipeline.process.activity import Activity, activity_of


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
    monkeypatch.setattr(activity, "_PROC", tmp_path)
    written(tmp_path, ("T", "5 0 1"), (state, "9 0 2"))
    assert activity_of(7) is None


@pytest.mark.parametrize("state", "TS")
def test_a_frozen_control_group_counts_as_a_stop_though_its_threads_seem_to_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(activity, "_PROC", tmp_path)
    written(tmp_path, (state, "5 0 1"), (state, "9 0 2"))
    assert activity_of(7) == Activity(14, 3)


def test_a_kernel_without_the_count_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_PROC", tmp_path)
    written(tmp_path, ("T", "0 0 0"))
    assert activity_of(7) is None
