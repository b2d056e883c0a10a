"""Time as a dependency, so that tests can control it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Return seconds since an arbitrary moment, for durations and deadlines; it never goes back."""
        ...

    def time(self) -> float:
        """Return wall-clock seconds since 1970, for people and other hosts."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``; if that is not positive, at the next turn of the loop."""
        ...

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Return once ``event`` is set, or after ``seconds``."""
        ...


class RealClock:
    """The operating system's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
