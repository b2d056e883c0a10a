"""The fleet as one reader of the registry sees it over time: the only place where heartbeats become
workers with a verdict.

A heartbeat says how long its worker has been at its wait. How long the worker has been silent is up
to the reader, since a reader that slept, or a registry that did not answer, must not look like a
dead fleet: silence counts by the registry's clock, and at most for as long as this reader has seen
the same heartbeat. No symptom counts for longer than this reader could read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from pipeline.fleet.health import WELL, Health, health
from pipeline.fleet.limits import Limits
from pipeline.runtime.registry.contract import Heartbeat
from protocol.ids import Role

if TYPE_CHECKING:
    from pipeline.ledger.types import QueueStat

_NO_OVERDUE: Final[Mapping[Role, float]] = {}


class Worker(Heartbeat, frozen=True, kw_only=True):
    """A worker of one reading: its last heartbeat, and the verdict on it. ``silent_s`` counts only
    what the reader trusts."""

    health: Health = WELL


@dataclass(slots=True)
class _Track:
    pid: int
    epoch: int
    at_s: float
    """Of the newest heartbeat, on the worker's clock; only changes matter."""
    since_s: float
    """When it may have arrived, on the reader's clock."""


class FleetState:
    """What a reader who watches the fleet knows about it. Symptoms count from its first reading.
    Memory is bounded by the heartbeats of the last one.

    ``limits``: of the run. All times are the reader's monotonic clock."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._tracks: dict[str, _Track] = {}
        self._read_s = -math.inf
        self._trusted_s = -math.inf

    def distrust(self, now_s: float) -> None:
        """Count every symptom from now on only, because heartbeats could not be read."""
        self._trusted_s = self._read_s = now_s

    def read(
        self, beats: Iterable[Heartbeat], now_s: float, overdue_s: Mapping[Role, float] = _NO_OVERDUE
    ) -> list[Worker]:
        """Take in a reading of all heartbeats; return their workers. ``overdue_s``: how far each
        role's work is beyond its deadline."""
        beats = list(beats)
        if now_s - self._read_s > self.limits.silent_after_s / 2:
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
        return [self._worker(beat, overdue_s) for beat in beats]

    def _worker(self, beat: Heartbeat, overdue_s: Mapping[Role, float]) -> Worker:
        since_s = max(self._tracks[beat.who.worker].since_s, self._trusted_s)
        silent_s = max(0.0, min(beat.silent_s, self._read_s - since_s))
        found = health(
            beat,
            self.limits,
            silent_s=silent_s,
            trusted_s=self._read_s - self._trusted_s,
            overdue_s=overdue_s.get(beat.who.role, 0.0),
        )
        return _judged(beat, found, silent_s)


def read_once(
    beats: Iterable[Heartbeat], limits: Limits, overdue_s: Mapping[Role, float] = _NO_OVERDUE
) -> list[Worker]:
    """Return the workers of a single reading, whose reader trusts the registry's ages."""
    return [
        _judged(beat, health(beat, limits, overdue_s=overdue_s.get(beat.who.role, 0.0)), beat.silent_s)
        for beat in beats
    ]


_FIELDS: Final = tuple(name for name in Heartbeat.__struct_fields__ if name != "silent_s")
_values_of: Final[Any] = attrgetter(*_FIELDS)


def _judged(beat: Heartbeat, found: Health, silent_s: float) -> Worker:
    return Worker(health=found, silent_s=silent_s, **dict(zip(_FIELDS, _values_of(beat), strict=True)))


def overdue_ages(queues: Sequence[QueueStat], scoring_deadline_s: float) -> dict[Role, float]:
    """Return how far each scoring role's oldest work is beyond its deadline, in seconds."""
    # with numpy, which commands that ask the ledger nothing do without
    from protocol.trajectory import Field

    scored = {
        Role.REWARD: (Field.REWARD,),
        Role.REFERENCE: (Field.REFERENCE, Field.GUIDANCE),
        Role.VALUE: (Field.VALUE,),
        Role.ENVIRONMENT: (Field.TURN,),
    }
    ages = {queue.name: queue.oldest_age_s or 0.0 for queue in queues}
    oldest = {role: [ages[field] for field in fields if field in ages] for role, fields in scored.items()}
    return {role: max(found) - scoring_deadline_s for role, found in oldest.items() if found}
