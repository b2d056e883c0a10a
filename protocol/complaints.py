"""How often the same complaint is logged: once, then at most once a minute, with the number left out.

*Consumes* complaints, by whom and what they are about. *Produces* whether to log one. *Waits for* nothing. So a hostile peer
fills no disk, and invented names fill no memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

LOG_EVERY_S = 60.0
MAX_KINDS = 4096
"""Complaints that are told apart; further ones are counted by their callers and not logged."""


@dataclass(slots=True)
class _Complaint:
    logged_at_s: float
    num_silent: int = 0


class Complaints:
    """Remembers what was logged when. Used by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[tuple[str, str], _Complaint] = {}

    def due(self, who: str, what: str) -> int | None:
        """Return how many like this one were left out since the last that was logged; None when this one is left out too."""
        now = self._clock()
        known = self._known.get((who, what))
        if known is not None and now - known.logged_at_s < LOG_EVERY_S:
            known.num_silent += 1
            return None
        if known is None and len(self._known) >= MAX_KINDS:
            return None
        self._known[who, what] = _Complaint(now)
        return known.num_silent if known else 0
