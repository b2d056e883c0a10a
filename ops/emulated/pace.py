"""Time that emulated work takes: slept, not spun, and marked piece by piece as real work is."""

from __future__ import annotations

import time

from pipeline.process import work

_LARGEST_CREDIT_S = 0.01
_PIECE_S = 0.25
"""Longest piece of emulated work, as a layer is of a real pass."""


class Pace:
    """Sleeps for work. The excess of one sleep shortens the next, so that rates are true."""

    def __init__(self) -> None:
        self._overslept_s = 0.0

    def spend(self, seconds: float) -> None:
        """Let ``seconds`` of work pass."""
        if seconds <= 0.0:
            return
        started = time.monotonic()
        owed = seconds - self._overslept_s
        while (left := started + owed - time.monotonic()) > 0.0:
            piece = min(_PIECE_S, left)
            time.sleep(piece)
            work.step(piece / owed)
        self._overslept_s = min(_LARGEST_CREDIT_S, time.monotonic() - started - owed)
