"""Limits how often a complaint is logged: once a minute per peer, and for ten peers per kind.

So hostile peers cannot fill disk or memory, however many names or keys they invent. Kinds are the program's
own words, never a peer's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

LOG_EVERY_S = 60.0
MAX_LOGGED = 10
"""Peers logged for one kind in that time. The next line gives the number of the others."""


@dataclass(slots=True)
class _Kind:
    began_s: float
    logged: set[str] = field(default_factory=set[str])
    num_silent: int = 0


class LogLimiter:
    """Decides which complaints are logged. Used by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def due(self, who: str, kind: str) -> int | None:
        """Return how many of this kind were suppressed since the last line; None if this one is not to be
        logged."""
        now = self._clock()
        known = self._kinds.setdefault(kind, _Kind(now))
        if now - known.began_s >= LOG_EVERY_S:
            known.began_s = now
            known.logged.clear()
        if who in known.logged or len(known.logged) >= MAX_LOGGED:
            known.num_silent += 1
            return None
        known.logged.add(who)
        num_silent, known.num_silent = known.num_silent, 0
        return num_silent
