"""Claims about what a person sees of long work."""

from __future__ import annotations

import io
import re
import sys
import threading
import time

import pytest

from pipeline.process import progress_bar
from pipeline.process.progress_bar import ProgressBar, ProgressBars, ProgressLines, progress, shows_bars


class Clock:
    """A clock driven by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class HungUp(Terminal):
    def write(self, text: str, /) -> int:
        raise OSError("Input/output error")


def bar_of(clock: Clock, total: float | None = 200.0, what: str = "scoring") -> ProgressBar:
    return ProgressBar(what, total, "responses", clock, None)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_the_time_left_is_that_of_the_pace_so_far() -> None:
    clock = Clock()
    bar = bar_of(clock)
    assert bar.in_words() == "0 %, 0 of 200 responses, no estimate yet"
    clock.now += 9.0
    bar.advance(1)
    assert bar.left_s() is None, "so small a part tells little"
    clock.now += 11.0
    assert bar.left_s() == pytest.approx(20.0 * 199)
    bar.advance(49)
    assert bar.in_words() == "25 %, 50 of 200 responses, about 1:00 left"
    bar.advance(150)
    assert bar.in_words() == "100 %, 200 of 200 responses, about 0:00 left"
    bar.advance(10)
    assert bar.share == 1.0, "an estimated size may be too small"


def test_work_of_unknown_size_has_its_time_so_far_and_what_is_done() -> None:
    clock = Clock()
    bar = bar_of(clock, None)
    bar.detail("torch")
    clock.now += 65.0
    assert bar.in_words() == "torch, 1:05 so far"
    bar.reach(50, 100)
    assert bar.in_words() == "torch, 50 %, 50 of 100 responses, about 1:05 left"


def test_lines_come_after_two_seconds_then_at_most_one_every_ten_and_one_at_the_end() -> None:
    clock, stream = Clock(), io.StringIO()
    bar, lines = bar_of(clock), ProgressLines(stream)
    said: list[float] = []
    for _ in range(120):
        clock.now += 0.25
        bar.advance(1.6)
        before = stream.getvalue()
        lines.draw([bar])
        if stream.getvalue() != before:
            said.append(clock.now - 100.0)
    assert said == [2.0, 12.0, 22.0]
    lines.end(bar, failed=False)
    assert stream.getvalue().splitlines()[0] == "scoring: 6 %, 13 of 200 responses, about 0:29 left"
    assert stream.getvalue().splitlines()[-1] == "scoring: done after 0:30"
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_work_that_ends_within_two_seconds_shows_nothing() -> None:
    clock, stream, terminal = Clock(), io.StringIO(), Terminal()
    bar, lines, bars = bar_of(clock), ProgressLines(stream), ProgressBars(terminal)
    clock.now += 1.9
    for picture in (lines, bars):
        picture.draw([bar])
        picture.end(bar, failed=False)
    assert stream.getvalue() == terminal.getvalue() == ""


def test_work_that_fails_is_not_reported_as_done() -> None:
    clock, stream = Clock(), io.StringIO()
    bar, lines = bar_of(clock), ProgressLines(stream)
    clock.now += 3.0
    lines.draw([bar])
    lines.end(bar, failed=True)
    assert stream.getvalue().splitlines()[-1] == "scoring: stopped after 0:03"


def test_a_bar_comes_after_two_seconds_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    clock, terminal = Clock(), Terminal()
    bar, bars = bar_of(clock), ProgressBars(terminal)
    clock.now += 2.5
    bar.advance(50)
    bars.draw([bar])
    assert "scoring" in plain(terminal.getvalue())
    assert "25 %, 50 of 200 responses, about 0:07 left" in plain(terminal.getvalue())
    bars.end(bar, failed=False)
    assert terminal.getvalue().endswith("\r\x1b[2K\x1b[?25h\r"), "the line is erased, and the cursor is back"


def test_work_inside_of_work_is_a_further_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    clock, terminal = Clock(), Terminal()
    outer, inner, bars = bar_of(clock), bar_of(clock, None, "loading"), ProgressBars(terminal)
    clock.now += 3.0
    bars.draw([outer, inner])
    bars.end(inner, failed=False)
    clock.now += 1.0
    shown = len(terminal.getvalue())
    bars.draw([outer])
    assert "loading" in plain(terminal.getvalue()[:shown])
    assert "loading" not in plain(terminal.getvalue()[shown:])


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    clock, terminal = Clock(), Terminal()
    bar, bars = bar_of(clock), ProgressBars(terminal)
    clock.now += 3.0
    bar.advance(100)
    bars.draw([bar])
    assert not re.search(r"\x1b\[[0-9;]*3[0-9][;m]", terminal.getvalue())


def test_a_terminal_that_hangs_up_ends_the_picture_and_not_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    clock = Clock()
    bar = bar_of(clock)
    clock.now += 3.0
    for picture in (ProgressBars(HungUp()), ProgressLines(HungUp())):
        picture.draw([bar])
        picture.end(bar, failed=False)


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("TERM", "dumb")])
def test_a_log_of_a_build_gets_lines(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    assert shows_bars(Terminal())
    assert not shows_bars(io.StringIO())
    monkeypatch.setenv(name, value)
    assert not shows_bars(Terminal())


def test_a_block_is_drawn_by_a_thread_that_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "SILENT_S", 0.05)
    monkeypatch.setattr(progress_bar, "_TICK_S", 0.01)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    deadline = time.monotonic() + 20.0
    with progress("copying", total=4, unit="files") as bar, progress("hashing", read=lambda: 3.0, unit="MB"):
        bar.advance(2)
        while stream.getvalue().count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
    assert "copying: 50 %, 2 of 4 files" in stream.getvalue()
    assert "hashing: 3 MB, 0:00 so far" in stream.getvalue()
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_an_error_passes_through_and_ends_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "SILENT_S", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(ValueError, match="torn"), progress("copying"):
        raise ValueError("torn")
    assert not progress_bar._views
