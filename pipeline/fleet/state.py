"""The fleet as one reader of the registry sees it over time.

A heartbeat says how long its worker has been at its wait. How long the worker has been silent is up
to the reader, since a reader that slept, or a registry that did not answer, must not look like a
dead fleet: silence counts by the registry's clock, and at most for as long as this reader has seen
the same heartbeat. No symptom counts for longer than this reader could read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.fleet.health import Health, health
from pipeline.fleet.limits import Limits
from pipeline.ledger.types import QueueStat
from pipeline.runtime.registry.contract import Heartbeat
from protocol.ids import Role
from protocol.trajectory import Field

_SCORED: Final = {
    Role.REWARD: (Field.REWARD,),
    Role.REFERENCE: (Field.REFERENCE, Field.GUIDANCE),
    Role.VALUE: (Field.VALUE,),
}


@dataclass(slots=True)
class _Track:
    pid: int
    epoch: int
    at_s: float
    """Of the newest heartbeat, on the worker's clock; only changes matter."""
    since_s: float
    """When it may have arrived, on the reader's clock."""


class FleetState:
    """What a reader knows about the fleet. Memory is bounded by the heartbeats of the last reading.

    ``limits``: of the run. All times are the reader's monotonic clock."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._tracks: dict[str, _Track] = {}
        self._read_s = -math.inf
        self._trusted_s = -math.inf

    def distrust(self, now_s: float) -> None:
        """Count every symptom from now on only, because heartbeats could not be read."""
        self._trusted_s = self._read_s = now_s

    def read(self, beats: Iterable[Heartbeat], now_s: float) -> None:
        """Take in a reading of all heartbeats."""
        stood_s = now_s - self._read_s
        if math.isfinite(stood_s) and stood_s > self.limits.silent_after_s / 2:
            self._trusted_s = now_s
        self._read_s = now_s
        known, self._tracks = self._tracks, {}
        for beat in beats:
            name, before = beat.who.worker, known.get(beat.who.worker)
            if before is None or (before.pid, before.epoch) != (beat.pid, beat.who.epoch):
                before = _Track(beat.pid, beat.who.epoch, beat.at_s, now_s - beat.silent_s)
            elif before.at_s != beat.at_s:
                before.at_s, before.since_s = beat.at_s, now_s
            self._tracks[name] = before

    def silent_s(self, beat: Heartbeat) -> float:
        """Return how long a worker of the last reading has been silent."""
        track = self._tracks.get(beat.who.worker)
        since_s = self._trusted_s if track is None else max(track.since_s, self._trusted_s)
        return max(0.0, min(beat.silent_s, self._read_s - since_s))

    def health(self, beat: Heartbeat, *, stopped_s: float = 0.0, overdue_s: float = 0.0) -> Health:
        """Judge a worker of the last reading (``pipeline.fleet.health``)."""
        return health(
            beat,
            self.limits,
            silent_s=self.silent_s(beat),
            trusted_s=self._read_s - self._trusted_s,
            stopped_s=stopped_s,
            overdue_s=overdue_s,
        )


def overdue_ages(queues: Sequence[QueueStat], scoring_deadline_s: float) -> dict[Role, float]:
    """Return how far each scoring role's oldest work is beyond its deadline, in seconds."""
    ages = {queue.name: queue.oldest_age_s or 0.0 for queue in queues}
    oldest = {role: [ages[field] for field in fields if field in ages] for role, fields in _SCORED.items()}
    return {role: max(found) - scoring_deadline_s for role, found in oldest.items() if found}
