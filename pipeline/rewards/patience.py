"""A limit for a wait that no standstill uses up.

When the whole machine or this process stands still, the clock goes on: a stopped process, a
suspended virtual machine, an event loop that was blocked. A wait with a plain deadline then ends as
soon as all go on, before what it waits for could do anything. So time is counted in small steps
here, and a step counts no more than about its own length."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_STEP_S = 0.1
_MOST_STEPS = 2.0
"""A step that took longer than so many counts as these: the rest was a standstill."""


class Waited:
    """The time of a wait in seconds, without standstills; pure."""

    def __init__(self, now_s: float, step_s: float = _STEP_S) -> None:
        self.step_s = step_s
        self.seconds = 0.0
        self._last_s = now_s

    def step(self, now_s: float) -> float:
        """Count the time since the last step; return all of it."""
        self.seconds += min(now_s - self._last_s, _MOST_STEPS * self.step_s)
        self._last_s = now_s
        return self.seconds


@asynccontextmanager
async def patience(
    limit_s: float,
    waited: Waited | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    step_s: float = _STEP_S,
) -> AsyncIterator[None]:
    """Run the block for at most ``limit_s`` that this process could use. Raises TimeoutError.

    ``waited``: counts what was used, by ``clock``, which gives monotonic seconds."""
    loop = asyncio.get_running_loop()
    counted = Waited(clock()) if waited is None else waited
    counted.step_s = min(step_s, limit_s / 4)
    async with asyncio.timeout(None) as timeout:

        def look() -> None:
            nonlocal timer
            if counted.step(clock()) >= limit_s:
                timeout.reschedule(loop.time())
            else:
                timer = loop.call_later(counted.step_s, look)

        timer = loop.call_later(counted.step_s, look)
        try:
            yield
        finally:
            timer.cancel()
            counted.step(clock())
