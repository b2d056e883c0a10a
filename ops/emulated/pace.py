"""The time that emulated work takes: slept, not spun, and reported piece by piece like real work."""

from __future__ import annotations

import time

from pipeline.process import work

_LARGEST_CREDIT_S = 0.01
_PIECE_S = 0.25
"""Longest piece of emulated work, like a layer of a real pass."""


class Pace:
    """Sleeps for work. Oversleeping shortens the next sleep, so that rates are exact."""

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
