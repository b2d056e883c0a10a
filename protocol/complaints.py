"""How often the same complaint is logged: once a minute for each peer, and for few peers, with the
number left out.

*Consumes* complaints, by whom and of which kind. *Produces* whether to log one. *Waits for*
nothing. So hostile peers fill no disk, however many names or keys they invent, and no memory. Kinds
are the program's own words, never a peer's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

LOG_EVERY_S = 60.0
MAX_LOGGED = 10
"""Peers of which one kind of complaint is logged in that time; of further ones the number is, with
the next line.
"""


@dataclass(slots=True)
class _Kind:
    began_s: float
    logged: set[str] = field(default_factory=set[str])
    num_silent: int = 0


class Complaints:
    """Remembers what was logged when. Used by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def due(self, who: str, kind: str) -> int | None:
        """Return how many of this kind were left out since the last that was logged; None when this
        one is left out too.
        """
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
