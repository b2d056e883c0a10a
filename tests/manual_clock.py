"""A clock that tests move by hand."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class ManualClock:
    """Time that stands still until a test moves it.

    Example::

        clock = ManualClock()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(poll_every_second(clock))
            await clock.advance(10.0)  # ten polls, no waiting"""

    def __init__(self, *, start_s: float = 1_000.0) -> None:
        self._now = start_s
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []

    @property
    def num_sleepers(self) -> int:
        """Number of tasks that sleep on this clock."""
        return len(self._sleepers)

    def monotonic(self) -> float:
        """Return the present moment."""
        return self._now

    def time(self) -> float:
        """Return the present moment, as ``monotonic``."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Return once ``advance`` has moved time by ``seconds``."""
        await self.wait(asyncio.Event(), seconds)

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Return once ``event`` is set; ``advance`` sets it after ``seconds``."""
        if seconds <= 0.0:
            await asyncio.sleep(0)
            return
        entry = (self._now + seconds, next(self._order), event)
        heapq.heappush(self._sleepers, entry)
        try:
            await event.wait()
        finally:
            # Set or cancelled before its time.
            if entry in self._sleepers:
                self._sleepers.remove(entry)
                heapq.heapify(self._sleepers)

    async def advance(self, seconds: float) -> None:
        """Move time on. Sleepers wake in order, each at its moment, and run until
        they wait again."""
        if seconds < 0.0:
            raise ValueError(f"time cannot move by {seconds} s, since it never goes back; expected a duration from 0")
        await settle()
        until = self._now + seconds
        while self._sleepers and self._sleepers[0][0] <= until:
            self._now, _, woken = heapq.heappop(self._sleepers)
            woken.set()
            await settle()
        self._now = until
        await settle()


async def settle(turns: int = 20) -> None:
    """Let every runnable task run until it waits for something other than the loop."""
    for _ in range(turns):
        await asyncio.sleep(0)
