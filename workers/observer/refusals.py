"""The link that refused messages came by. Pure; time is an argument.

A receiver counts refusals by checksum or schema. The receiver is not at fault when they come from
one sender alone: the link or its sender is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from pipeline.runtime.registry.contract import OTHER_LINKS, Heartbeat

_MEMORY_S: Final = 10.0
_MOST_SHARE: Final = 0.8
_FEWEST: Final = 2.0


class Refusals:
    """Recent refusals of each link, fading within ten seconds. The last heartbeats bound it."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._recent: dict[str, float] = {}
        self._now_s = math.nan

    def look(self, now_s: float, beats: Sequence[Heartbeat]) -> None:
        """Take in the heartbeats of a moment. ``now_s``: monotonic seconds."""
        fading = math.exp(-(now_s - self._now_s) / _MEMORY_S) if now_s > self._now_s else 1.0
        self._now_s = now_s
        counts = {
            link.name: link.refused
            for beat in beats
            for link in beat.links
            if link.name.partition(">")[2] == beat.who.worker
        }
        self._recent = {
            name: fading * self._recent.get(name, 0.0) + max(0, count - self._counts.get(name, count))
            for name, count in counts.items()
        }
        self._counts = counts

    def link_to(self, receiver: str) -> str:
        """Return the link by which nearly all recent refusals of a receiver came; "" for none."""
        of = {name: recent for name, recent in self._recent.items() if name.partition(">")[2] == receiver}
        best = max(of, key=lambda name: of[name], default="")
        if not best or best.startswith(OTHER_LINKS) or of[best] < _FEWEST:
            return ""
        return best if of[best] >= _MOST_SHARE * sum(of.values()) else ""
