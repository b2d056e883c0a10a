"""Incarnations that ended badly, found by their successors' epochs. Pure; time is an argument.

A registration takes one epoch. The fence of a worker that crashed, froze or stood still takes one
more. So a successor whose epoch is two higher shows such an end, however soon it came. A worker
that drained was not fenced: its successor has the next epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.incidents.book import Suspicion
from pipeline.runtime.registry.contract import Heartbeat

KEPT_S = 600.0
"""A worker that is away for so long is forgotten."""


@dataclass(slots=True)
class _LastEpoch:
    epoch: int
    seen_s: float
    """Time of the last moment with it."""
    beat_s: float
    """Of its last heartbeat."""


class Replacements:
    """Remembers the epoch of each worker. The fleet of the last ten minutes bounds its memory."""

    def __init__(self) -> None:
        self._seen: dict[str, _LastEpoch] = {}

    def look(self, now_s: float, at_s: float, beats: Sequence[Heartbeat]) -> list[Suspicion]:
        """Return the ends that this moment's heartbeats show.

        Args:
            now_s: monotonic seconds.
            at_s: the same moment by the wall clock.
            beats: the last heartbeat of each worker."""
        found: list[Suspicion] = []
        for beat in beats:
            worker, epoch = beat.who.worker, beat.who.epoch
            before = self._seen.get(worker)
            if before is not None and epoch - before.epoch > 1:
                since_s = at_s - (now_s - before.beat_s)
                found.append(_replaced(beat, before.epoch, since_s))
            self._seen[worker] = _LastEpoch(epoch, now_s, now_s - beat.silent_s)
        for worker, seen in list(self._seen.items()):
            if now_s - seen.seen_s > KEPT_S:
                del self._seen[worker]
        return found


def _replaced(beat: Heartbeat, epoch: int, since_s: float) -> Suspicion:
    return Suspicion(
        component=beat.who.worker,
        kind="replaced",
        since_s=since_s,
        sentence=f"incarnation {epoch} ended without a drain and was fenced; {beat.who.epoch} is in its place",
        role=str(beat.who.role),
        score=1.0,
    )
