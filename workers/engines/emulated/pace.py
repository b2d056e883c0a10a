"""Time that emulated work takes: slept, not spun.

*Consumes* seconds of work. *Produces* nothing. *Waits for* time to pass; nobody unblocks it earlier, so callers
keep each call short.
"""

from __future__ import annotations

import time

_LARGEST_CREDIT_S = 0.01


class Pace:
    """Sleeps for work. What one sleep takes too long, the next takes less, so that rates are true over many short calls."""

    def __init__(self) -> None:
        self._overslept_s = 0.0

    def spend(self, seconds: float) -> None:
        """Let ``seconds`` of work pass."""
        if seconds <= 0.0:
            return
        started = time.monotonic()
        owed = seconds - self._overslept_s
        if owed > 0.0:
            time.sleep(owed)
        self._overslept_s = min(_LARGEST_CREDIT_S, time.monotonic() - started - owed)
