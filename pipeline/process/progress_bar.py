"""Shows progress while a person waits: a bar with the time left, or plain lines where there is no
terminal.

    with progress("scoring", total=2560, unit="responses") as bar:
        bar.advance(12)

Work that ends within two seconds shows nothing. On a terminal there is a bar, redrawn in place.
Elsewhere (a pipe, ``CI``, ``TERM=dumb``, ``plain``) there is a line at the start, then at most one
every ten seconds, and one at the end. ``NO_COLOR`` is respected. Nested bars are drawn below each
other. A thread draws a few times a second; progress may be reported from any thread. A terminal
that hangs up ends the display, not the work."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol, TextIO, TypeVar

T = TypeVar("T")

SILENT_S: Final = 2.0
LINE_EVERY_S: Final = 10.0
_TICK_S = 0.2
_LEAST_SHARE = 0.01
_LEAST_S = 10.0
"""There is no estimate of the time left before this share is done or this time has passed."""
_ENDS_WITHIN_S = 2.0
"""How long to wait for the drawing thread to end."""


class ProgressBar:
    """How far one piece of work is, and when it will end. Thread-safe."""

    def __init__(
        self, what: str, total: float | None, unit: str, clock: Callable[[], float], read: Callable[[], float] | None
    ) -> None:
        """``total``: None if the size is unknown. ``read``: returns the amount done, instead of
        calls of ``advance``."""
        self.what = what
        self.has_failed = False
        """Set it when the work did not finish although the block ends without an error."""
        self.began_s = clock()
        self._clock, self._read, self._unit = clock, read, unit
        self._total, self._done, self._detail = total, 0.0, ""
        self._lock = threading.Lock()

    def advance(self, number: float = 1.0) -> None:
        with self._lock:
            self._done += number

    def reach(self, done: float, total: float | None = None) -> None:
        """Set the amount done, and the total once it is known."""
        with self._lock:
            self._done = done
            self._total = self._total if total is None else total

    def detail(self, words: str) -> None:
        """Set what is being done right now, such as ``model`` or ``prompts``."""
        with self._lock:
            self._detail = words

    @property
    def share(self) -> float | None:
        """The finished share, 0 to 1; None if the size is unknown."""
        done, total, _ = self._state()
        return None if not total else max(0.0, min(1.0, done / total))

    def elapsed_s(self) -> float:
        return max(0.0, self._clock() - self.began_s)

    def left_s(self) -> float | None:
        """Return the time left at the rate so far; None while there is no estimate."""
        share, elapsed_s = self.share, self.elapsed_s()
        if not share or (share < _LEAST_SHARE and elapsed_s < _LEAST_S):
            return None
        return elapsed_s * (1.0 - share) / share

    def in_words(self) -> str:
        """Return progress in words: ``40 %, 1,024 of 2,560 responses, about 0:14 left``."""
        done, total, detail = self._state()
        share, left_s = self.share, self.left_s()
        parts = [detail] if detail else []
        if share is None:
            parts += [f"{done:,.0f} {self._unit}"] if self._unit and done else []
            parts.append(f"{minutes(self.elapsed_s())} so far")
        else:
            parts.append(f"{100 * share:.0f} %")
            if self._unit and total is not None:
                parts.append(f"{done:,.0f} of {total:,.0f} {self._unit}")
            parts.append("no estimate yet" if left_s is None else f"about {minutes(left_s)} left")
        return ", ".join(parts)

    def _state(self) -> tuple[float, float | None, str]:
        if self._read is not None:
            found = self._read()
            with self._lock:
                self._done = found
        with self._lock:
            return self._done, self._total, self._detail


class ProgressPicture(Protocol):
    def draw(self, bars: Sequence[ProgressBar]) -> None:
        """Update the display with all work that has lasted two seconds."""
        ...

    def end(self, bar: ProgressBar, *, failed: bool) -> None: ...


class ProgressLines:
    """Progress as lines: one at the start, at most one every ten seconds, one at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._said_s: dict[ProgressBar, float] = {}

    def draw(self, bars: Sequence[ProgressBar]) -> None:
        for bar in bars:
            elapsed_s, said_s = bar.elapsed_s(), self._said_s.get(bar)
            if elapsed_s >= SILENT_S if said_s is None else elapsed_s - said_s >= LINE_EVERY_S:
                self._said_s[bar] = elapsed_s
                self._write(f"{bar.what}: {bar.in_words()}")

    def end(self, bar: ProgressBar, *, failed: bool) -> None:
        if self._said_s.pop(bar, None) is not None:
            self._write(f"{bar.what}: {'stopped' if failed else 'done'} after {minutes(bar.elapsed_s())}")

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(line + "\n")
            self._stream.flush()


class ProgressBars:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._tasks: dict[ProgressBar, Any] = {}
        self._display: Any = None
        self._is_gone = False

    def draw(self, bars: Sequence[ProgressBar]) -> None:
        due = [bar for bar in bars if bar.elapsed_s() >= SILENT_S]
        if due and not self._is_gone:
            with self._unless_gone():
                self._draw(due)

    def end(self, bar: ProgressBar, *, failed: bool) -> None:
        task = self._tasks.pop(bar, None)
        if self._display is None:
            return
        with self._unless_gone():
            if task is not None:
                self._display.remove_task(task)
            if not self._tasks:
                display, self._display = self._display, None
                display.stop()

    def _draw(self, bars: Sequence[ProgressBar]) -> None:
        display = self._shown()
        for bar in bars:
            if bar not in self._tasks:
                self._tasks[bar] = display.add_task(bar.what, total=None, words=bar.in_words())
            share = bar.share
            total, completed = (None, 0.0) if share is None else (1.0, share)
            display.update(self._tasks[bar], total=total, completed=completed, words=bar.in_words())
        display.refresh()

    @contextmanager
    def _unless_gone(self) -> Generator[None]:
        """Stop drawing once the terminal has hung up."""
        try:
            yield
        except (OSError, ValueError):
            self._is_gone = True

    def _shown(self) -> Any:
        if self._display is None:
            # Deferred: most commands end before anything is shown.
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[words]}", markup=False, style="dim"),
            )
            # else lines on standard output would be written into the bar
            both = sys.stdout.isatty()
            console = Console(file=self._stream)
            display = Progress(*columns, console=console, transient=True, auto_refresh=False, redirect_stdout=both)
            self._display = display
            display.start()
        return self._display


class ProgressView:
    """All bars in progress, and the thread that draws them."""

    def __init__(self, picture: ProgressPicture) -> None:
        self._picture = picture
        self._bars: list[ProgressBar] = []
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self._bars)

    def add(self, bar: ProgressBar) -> None:
        with self._lock:
            self._bars.append(bar)
            if self._thread is None:
                self._stopped = threading.Event()
                self._thread = threading.Thread(target=self._run, args=(self._stopped,), name="progress", daemon=True)
                self._thread.start()

    def remove(self, bar: ProgressBar, *, failed: bool) -> None:
        thread = None
        with self._lock:
            self._bars.remove(bar)
            self._picture.end(bar, failed=failed)
            if not self._bars:
                thread, self._thread = self._thread, None
                self._stopped.set()
        if thread is not None:
            thread.join(_ENDS_WITHIN_S)

    def draw(self) -> None:
        with self._lock:
            self._picture.draw(self._bars)

    def _run(self, stopped: threading.Event) -> None:
        while not stopped.wait(_TICK_S):
            self.draw()


_views: dict[bool, ProgressView] = {}
_views_lock = threading.Lock()


@contextmanager
def progress(
    what: str,
    *,
    total: float | None = None,
    unit: str = "",
    plain: bool = False,
    read: Callable[[], float] | None = None,
) -> Generator[ProgressBar]:
    """Show the progress of the block once it has lasted two seconds.

    Args:
        what: The work, such as ``scoring``.
        total: Its size; None if unknown. ``ProgressBar.reach`` can set it later.
        unit: Unit of the size, such as ``responses``.
        plain: Write lines even on a terminal.
        read: Returns the amount done, in ``unit``; without it the block calls ``advance``."""
    bar = ProgressBar(what, total, unit, time.monotonic, read)
    draws_bars = not plain and shows_bars(sys.stderr)
    with _views_lock:
        view = _views.setdefault(draws_bars, ProgressView((ProgressBars if draws_bars else ProgressLines)(sys.stderr)))
        view.add(bar)
    failed = True
    try:
        yield bar
        failed = False
    finally:
        with _views_lock:
            view.remove(bar, failed=failed or bar.has_failed)
            if not view.is_busy:
                # sys.stderr may have been replaced by the next time
                _views.pop(draws_bars, None)


def tracked(items: Sequence[T], what: str, unit: str) -> Iterator[T]:
    """Yield items and show how many are done; an item is done when the next one is requested."""
    with progress(what, total=len(items), unit=unit) as bar:
        for item in items:
            yield item
            bar.advance()


def shows_bars(stream: TextIO) -> bool:
    """Return whether bars can be redrawn on a stream: it is a terminal, and no CI log."""
    environment = os.environ
    is_log = environment.get("TERM") == "dumb" or environment.get("CI", "").lower() not in ("", "0", "false")
    with suppress(ValueError, OSError):
        return stream.isatty() and not is_log
    return False


def minutes(seconds: float) -> str:
    """Format a duration as ``2:10`` or ``1:02:10``."""
    whole, rest = divmod(int(seconds), 60)
    hours, whole = divmod(whole, 60)
    return f"{hours}:{whole:02d}:{rest:02d}" if hours else f"{whole}:{rest:02d}"
