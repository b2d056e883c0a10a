"""``headrace top`` without a screen: a line every few seconds, until the run has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pipeline.operator.overview import RunOverview
from pipeline.operator.top.feed import RunFeed
from pipeline.operator.top.words import plain_line
from pipeline.runtime.clock import Clock, RealClock

FIRST_S = 1.0
"""Between the two readings that the first rates need."""


async def one_picture(feed: RunFeed, clock: Clock) -> RunOverview:
    """Return a picture with rates, after a second."""
    await feed.read()
    await clock.sleep(FIRST_S)
    return await feed.read()


async def print_lines(
    feed: RunFeed, write: Callable[[str], object], *, every_s: float, clock: Clock | None = None
) -> None:
    """Write a line every ``every_s`` seconds; return after the line of a run that has ended."""
    clock = clock or RealClock()
    picture = await one_picture(feed, clock)
    while True:
        write(plain_line(picture))
        if picture.is_over:
            return
        await clock.sleep(every_s)
        picture = await feed.read()


def run_plain(feed: RunFeed, write: Callable[[str], object], *, every_s: float) -> None:
    """Write lines until the run has ended."""

    async def follow() -> None:
        try:
            await print_lines(feed, write, every_s=every_s)
        finally:
            await feed.aclose()

    asyncio.run(follow())
