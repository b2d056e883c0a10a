"""A time limit that does not count standstills.

While the whole machine or this process stands still (a stopped process, a suspended virtual
machine, a blocked event loop), the clock goes on. A plain deadline then expires as soon as
everything resumes, before the awaited work had a chance. So time is counted in small steps here,
and a step counts at most about its own length."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_STEP_S = 0.1
_MOST_STEPS = 2.0
"""A step counts at most this many times its length; the rest was a standstill."""


class Waited:
    """Seconds waited, without standstills. Pure."""

    def __init__(self, now_s: float, step_s: float = _STEP_S) -> None:
        self.step_s = step_s
        self.seconds = 0.0
        self._last_s = now_s

    def step(self, now_s: float) -> float:
        """Count the time since the last step; return the total."""
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
    """Run the block for at most ``limit_s``, not counting standstills. Raises TimeoutError.

    ``waited`` counts the time used. ``clock`` gives monotonic seconds."""
    loop = asyncio.get_running_loop()
    counted = Waited(clock()) if waited is None else waited
    counted.step_s = min(step_s, limit_s / 4)
    async with asyncio.timeout(None) as timeout:

        def check() -> None:
            nonlocal timer
            if counted.step(clock()) >= limit_s:
                timeout.reschedule(loop.time())
            else:
                timer = loop.call_later(counted.step_s, check)

        timer = loop.call_later(counted.step_s, check)
        try:
            yield
        finally:
            timer.cancel()
            counted.step(clock())
