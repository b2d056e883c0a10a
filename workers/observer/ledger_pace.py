"""Whether the ledger answers slowly, by the time that most workers wait for its answers. Pure;
times are arguments.

One worker's long wait is its own. When the middle worker's wait is several times the usual one, the
ledger is slow, or the way to it. Then other signs of slowness follow from that: heartbeats come
late, so clocks seem to differ, and work that includes a write takes longer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Final

from pipeline.incidents.book import Suspicion
from pipeline.runtime.liveness import is_recent
from pipeline.runtime.registry.contract import Heartbeat

LEDGER: Final = "ledger"
"""Its name as a component."""
SLOW_MS: Final = 40.0
"""An answer that takes less is never slow."""
SLOW_TIMES: Final = 4.0
"""Usual times of an answer from which on it is slow."""
HOLD_S: Final = 3.0
"""Answers are slow for so long before the ledger is named."""
FOLLOWS_S: Final = 10.0
"""After the last slow answers: measurements over a while still contain them."""
_FEWEST_LOOKS: Final = 3
_FEWEST_WORKERS: Final = 3
_USUAL_S, _SLOW_USUAL_S = 60.0, 1800.0
"""Time constants of the usual time of an answer, and of that while answers are slow."""


class LedgerPace:
    """The usual and the present time of the ledger's answers. Memory is a few numbers."""

    def __init__(self) -> None:
        self._usual_ms = math.nan
        self._now_ms = math.nan
        self._time_s = math.nan
        self._since_s: float | None = None
        """Since when they are slow, by the reader's clock."""
        self._last_s = -math.inf
        """When they were slow for the last time."""
        self._num_slow = 0

    def observe(self, now_s: float, at_s: float, beats: Sequence[Heartbeat]) -> list[Suspicion]:
        """Take in the heartbeats of a moment; return the suspicion of the ledger, or nothing.

        Args:
            now_s: monotonic seconds.
            at_s: the same moment by the wall clock.
            beats: the last heartbeat of each worker."""
        waits_ms = [
            beat.vitals.ledger_rtt_ms
            for beat in beats
            if beat.vitals is not None and beat.vitals.ledger_rtt_ms > 0.0 and is_recent(beat.silent_s)
        ]
        passed_s = now_s - self._time_s
        self._time_s = now_s
        if len(waits_ms) < _FEWEST_WORKERS:
            return []
        self._now_ms = median(waits_ms)
        if math.isnan(self._usual_ms):
            self._usual_ms = self._now_ms
        is_slow = self._now_ms > max(SLOW_MS, SLOW_TIMES * self._usual_ms)
        if passed_s > 0.0:
            share = -math.expm1(-passed_s / (_SLOW_USUAL_S if is_slow else _USUAL_S))
            self._usual_ms += share * (self._now_ms - self._usual_ms)
        if not is_slow:
            if now_s - self._last_s > HOLD_S:
                self._since_s, self._num_slow = None, 0
        else:
            self._since_s = now_s if self._since_s is None else self._since_s
            self._last_s, self._num_slow = now_s, self._num_slow + 1
        if self._since_s is None or now_s - self._since_s < HOLD_S or self._num_slow < _FEWEST_LOOKS:
            return []
        sentence = (
            f"most workers wait {self._now_ms:.0f} ms or longer for an answer of it; "
            f"usual are {self._usual_ms:.1f} ms, and {max(SLOW_MS, SLOW_TIMES * self._usual_ms):.0f} ms the limit"
        )
        score = self._now_ms / max(SLOW_MS, SLOW_TIMES * self._usual_ms)
        return [Suspicion(LEDGER, "ledger", at_s - (now_s - self._since_s), sentence, score=score)]

    def away(self, now_s: float) -> None:
        """Note that the ledger gives no answer at all."""
        self._last_s = now_s

    def explain(self, now_s: float) -> bool:
        """Return whether slow answers may be the cause of other slowness of this moment."""
        return now_s - self._last_s <= FOLLOWS_S
