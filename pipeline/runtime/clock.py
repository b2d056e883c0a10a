"""Time as a dependency, so that tests move it by hand."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol


class Clock(Protocol):
    """Readings of time, and waits."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary moment, for durations and deadlines; it never goes
        back."""
        ...

    def time(self) -> float:
        """Return wall-clock seconds since 1970, for other hosts and people."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``; at the next turn of the loop for a number up to 0."""
        ...

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Return once ``event`` is set, or after ``seconds``."""
        ...


class RealClock:
    """The operating system's time; the contract is ``Clock``'s."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary moment."""
        return time.monotonic()

    def time(self) -> float:
        """Return wall-clock seconds since 1970."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``."""
        await asyncio.sleep(max(0.0, seconds))

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Return once ``event`` is set, and after ``seconds`` in any case."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
