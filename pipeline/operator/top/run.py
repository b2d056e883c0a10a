"""Runs the view, on its own terminal or on the one it shares with ``headrace up``.

In the second case it is a separate process, so that it can neither slow down nor kill the supervisor.
The kernel sends Ctrl-C to the supervisor, and this process ignores it. It exits when the pipe held by
the supervisor closes, and so even when the supervisor is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.operator.overview import RunOverview
from pipeline.operator.top.feed import RunFeed
from pipeline.operator.top.format import plain_line
from pipeline.runtime.clock import Clock, RealClock

if TYPE_CHECKING:
    from pipeline.operator.attached import Attached

Describe = Callable[["Attached", str], Awaitable[list[str]]]


def has_screen() -> bool:
    """Return whether this process is in the foreground of a terminal with a screen and a keyboard."""
    if os.environ.get("TERM", "dumb") == "dumb" or not all(os.isatty(descriptor) for descriptor in (0, 2)):
        return False
    with suppress(OSError):
        return os.tcgetpgrp(0) == os.getpgrp()
    return False


def run_top(run_dir: Path, describe: Describe) -> int:
    """Show a run until the user leaves; return the exit code."""
    return asyncio.run(_show(run_dir, describe, until=None))


def run_beside(run_dir: Path, describe: Describe, until: int) -> int:
    """Show a run until the descriptor ``until`` reaches its end, or the user leaves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return asyncio.run(_show(run_dir, describe, until=until))


async def _show(run_dir: Path, describe: Describe, *, until: int | None) -> int:
    # Read when textual is imported. With the kitty protocol, a terminal sends Ctrl-C as text.
    os.environ.setdefault("TEXTUAL_DISABLE_KITTY_KEY", "1")
    from pipeline.operator.top.app import TopApp

    feed = RunFeed(run_dir, describe)
    supervisor = os.getppid()

    def interrupt() -> None:
        os.kill(supervisor, signal.SIGINT)

    app = TopApp(
        feed, on_interrupt=None if until is None else interrupt, on_start=None if until is None else let_signals
    )
    loop = asyncio.get_running_loop()
    if until is not None:
        loop.add_reader(until, app.exit, 0)
    try:
        return await app.run_async() or 0
    finally:
        if until is not None:
            loop.remove_reader(until)
        await feed.aclose()


def let_signals() -> None:
    """Have the terminal send SIGINT for Ctrl-C, as without a full screen. The suspend and quit keys
    send nothing, because they would stop or end the supervisor."""
    with suppress(termios.error, OSError):
        attributes = termios.tcgetattr(sys.__stdin__.fileno())  # type: ignore[union-attr]
        attributes[3] |= termios.ISIG
        for name in (termios.VSUSP, termios.VQUIT):
            attributes[6][name] = b"\x00"
        termios.tcsetattr(sys.__stdin__.fileno(), termios.TCSANOW, attributes)  # type: ignore[union-attr]


FIRST_S = 1.0
"""Time between the two reads that the first rates need."""


async def one_picture(feed: RunFeed, clock: Clock) -> RunOverview:
    """Return a snapshot with rates, after a second."""
    await feed.read()
    await clock.sleep(FIRST_S)
    return await feed.read()


async def print_lines(
    feed: RunFeed, write: Callable[[str], object], *, every_s: float, clock: Clock | None = None
) -> None:
    """Write a line every ``every_s`` seconds, until the run has ended."""
    clock = clock or RealClock()
    picture = await one_picture(feed, clock)
    while True:
        write(plain_line(picture))
        if picture.is_over:
            return
        await clock.sleep(every_s)
        picture = await feed.read()


def run_plain(feed: RunFeed, write: Callable[[str], object], *, every_s: float) -> None:
    async def follow() -> None:
        try:
            await print_lines(feed, write, every_s=every_s)
        finally:
            await feed.aclose()

    asyncio.run(follow())
