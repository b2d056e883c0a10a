"""The full screen of ``up`` is a process of its own: it can neither slow nor end the supervisor."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.fleet.status import RunSnapshot
from pipeline.operator.top import child
from pipeline.operator.top.child import ChildView
from pipeline.runtime.registry.contract import RunState, RunStatus
from protocol import headrace
from tests.pipeline.made_run import made_run
from tests.pipeline.observability.test_live_view import BEATS, TOTALS
from tests.pipeline.op_config import op_config

pytestmark = pytest.mark.timeout(120)
SNAPSHOT = RunSnapshot(RunStatus(RunState.RUNNING), BEATS[:2], TOTALS)
UNTIL_THE_PIPE_ENDS = "import os, sys; os.read(int(sys.argv[1]), 1)"


def view_with(folder: Path, program: str) -> ChildView:
    return ChildView(op_config(folder), folder, command=[sys.executable, "-c", program])


def ended(view: ChildView) -> None:
    """Wait for the child's end, which ``show`` then finds."""
    process = view._child
    assert process is not None
    process.wait(30.0)


def test_the_child_ends_with_the_view_and_the_last_picture_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view = view_with(tmp_path, UNTIL_THE_PIPE_ENDS)
    with view:
        view.show(SNAPSHOT)
        print("a warning", file=view.log_terminal)
        assert capsys.readouterr().err == "", "the terminal is the child's"
        view.show(RunSnapshot(RunStatus(RunState.FINISHED, "4 updates done"), (), TOTALS))
        process = view._child
        assert process is not None
        view.end()
        assert process.returncode == 0
        print("4 of 8 MB are copied", file=view.log_terminal)
    told = capsys.readouterr().err
    assert told.count("4 updates done") == 1, "the picture, once"
    assert told.index("4 updates done") < told.index("4 of 8 MB"), "what follows is below the picture"
    assert "a warning" in told
    assert "\x1b[?1049l" not in told


def test_a_child_that_dies_gives_the_terminal_back_and_lines_follow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with view_with(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)") as view:
        ended(view)
        view.show(SNAPSHOT)
        told = capsys.readouterr().err
        assert told.startswith("\x1b[?1049l\x1b[?25h"), "out of the other screen, with a cursor"
        assert "exit code -9; lines follow" in told
        assert "1,234 groups admitted" in told
        print("a warning", file=view.log_terminal)
        assert capsys.readouterr().err == "a warning\n", "warnings are printed from now on"
    assert "╭" not in capsys.readouterr().err


def test_a_person_who_leaves_the_screen_gets_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with view_with(tmp_path, "") as view:
        ended(view)
        view.show(SNAPSHOT)
        told = capsys.readouterr().err
        assert "exit code" not in told
        assert "1,234 groups admitted" in told


def test_a_child_that_cannot_be_started_is_said_and_lines_follow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ChildView(op_config(tmp_path), tmp_path, command=[str(tmp_path / "absent")]) as view:
        view.show(SNAPSHOT)
    told = capsys.readouterr().err
    assert "no full screen: No such file or directory; lines follow" in told
    assert "1,234 groups admitted" in told


def test_a_frozen_child_holds_up_neither_the_snapshots_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child, "_END_S", 0.1)
    view = view_with(tmp_path, UNTIL_THE_PIPE_ENDS)
    with view:
        process = view._child
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        for _ in range(100):
            view.show(SNAPSHOT)
    assert process.returncode == -signal.SIGKILL
    assert "1,234 groups admitted" in capsys.readouterr().err


@contextmanager
def on_a_terminal(command: list[str], pipe: int) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Run a command whose terminal is a new one of 80x24; yield its other end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        pass_fds=(pipe,),
        start_new_session=True,
        env=os.environ | {"TERM": "xterm-256color", "LANG": "C.UTF-8"},
    )
    try:
        yield ours, process
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def read_until(terminal: int, wanted: bytes, deadline_s: float = 60.0) -> bytes:
    seen, deadline = b"", time.monotonic() + deadline_s
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, seen
        seen += os.read(terminal, 65536)
    return seen


def test_ctrl_c_stays_the_terminals_signal_and_the_pipe_ends_the_screen(tmp_path: Path) -> None:
    """The real view in a real terminal, of a run whose ledger's server is there."""
    run_dir, _, server = made_run(tmp_path)
    reading, writing = os.pipe()
    try:
        command = [*headrace.command("pipeline.cli.top", str(run_dir)), str(reading)]
        with on_a_terminal(command, reading) as (terminal, process):
            before = termios.tcgetattr(terminal)
            seen = read_until(terminal, b"quit")
            assert b"\x1b[?1049h" in seen
            assert not re.search(rb"\x1b\[>\d+u", seen), "Ctrl-C as text would be no signal"
            deadline = time.monotonic() + 30.0
            modes = termios.tcgetattr(terminal)
            while modes[6][termios.VSUSP] != b"\x00" and time.monotonic() < deadline:
                read_until(terminal, b"")
                time.sleep(0.02)
                modes = termios.tcgetattr(terminal)
            assert modes[3] & termios.ISIG
            assert not modes[3] & termios.ICANON
            assert modes[6][termios.VSUSP] == modes[6][termios.VQUIT] == b"\x00"
            os.kill(process.pid, signal.SIGINT)
            os.write(terminal, b"2")
            read_until(terminal, b"[2 workers]")
            os.close(reading)
            os.close(writing)
            read_until(terminal, b"\x1b[?1049l")
            assert process.wait(30.0) == 0, "SIGINT is the supervisor's alone"
            assert termios.tcgetattr(terminal)[3] == before[3]
    finally:
        server.stop()
