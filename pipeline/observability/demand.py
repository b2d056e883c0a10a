"""How much of its time the learner waits for units: the measure by which generators are scaled.

Pure; time is an argument. Older time counts less: by half after 42 s."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pipeline.runtime.registry.contract import Heartbeat, WaitingFor
from protocol.ids import Role

_MEMORY_S = 60.0
_MAX_STEP_S = 10.0
"""A longer time between two readings counts as this much: what was between is not known."""


class LearnerWaits:
    """Share of the learner's recent time at input, 0 to 1; 0 before the learner has begun."""

    def __init__(self) -> None:
        self.share = 0.0
        self._seen_s: float | None = None

    def skip(self) -> None:
        """Leave out the time until the next reading, which has nothing to do with the need."""
        self._seen_s = None

    def see(self, beats: Iterable[Heartbeat], now_s: float) -> float:
        """Take a reading of heartbeats at ``now_s``, monotonic; return the share."""
        learner = next((beat for beat in beats if beat.who.role is Role.LEARNER), None)
        if learner is None:
            self._seen_s = None
            return self.share
        if self._seen_s is not None:
            kept = math.exp(-min(now_s - self._seen_s, _MAX_STEP_S) / _MEMORY_S)
            self.share = kept * self.share + (1.0 - kept) * float(learner.waiting_for is WaitingFor.INPUT)
        self._seen_s = now_s
        return self.share
