"""How long something usually takes at most, and how often an attempt may fail.

A time limit comes from the past of a role or of a kind of link: twice the 99th percentile of the
samples, and at least ``FLOOR_S``. With few samples the factor is larger, because their maximum is no
percentile. The reader's interval is added, since a row cannot show what happened since the previous
one.

Whether attempts fail too often is a sequential probability ratio test on counts:

    S <- max(0, S + failed ln(p1/p0) + finished ln((1-p1)/(1-p0)))

Here p0 is the role's median failure rate, at least 3 %, and p1 is four times p0, clamped to 40 to
90 %. One row contributes at most 5. A worker fails the test at ``fleet.limits.evidence_bound``."""

from __future__ import annotations

from collections import deque
from math import inf, log

import numpy as np

FLOOR_S = 3.0
_KEPT = 2000
_BLOCK = 200
_KEPT_BLOCKS = 100
_FACTORS = ((100, 2.0), (30, 2.5), (10, 3.0), (3, 4.0))
"""Minimum number of samples, and the factor that then applies."""
_UNSEEN_S = 60.0
"""Limit with fewer than three samples."""
_TAIL_SHARE = 0.1
_REGULAR = 10
_REGULAR_FACTOR = 2.0
"""With this many samples and none above twice the median, the smallest factor is enough."""
_RECENT = 60
_RECENT_FACTOR = 1.5
_LONGEST_FACTOR = 1.1
_FALSE_ALARMS = 0.01
"""Expected number of false alarms in as many further samples as were seen."""


class UsualLimit:
    """Samples of how long something took, and the limit that follows."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_KEPT)
        self.num_seen = 0
        self._maxima: deque[float] = deque([0.0], maxlen=_KEPT_BLOCKS)
        """Maximum of each block of samples, because a large role replaces its samples quickly."""
        self._known = (-1, _UNSEEN_S)

    def add(self, seconds: float) -> None:
        self._seen.append(seconds)
        self.num_seen += 1
        if self.num_seen % _BLOCK == 0:
            self._maxima.append(seconds)
        else:
            self._maxima[-1] = max(self._maxima[-1], seconds)

    def add_capped(self, seconds: float) -> None:
        """Add a sample, capped at half the limit once there are enough samples."""
        is_known = self.num_seen >= _REGULAR
        self.add(min(seconds, max(FLOOR_S, self._usual_s()) / 2) if is_known else seconds)

    def limit_s(self, interval_s: float, *, floor_s: float = FLOOR_S) -> float:
        """Return the longest normal time, given rows every ``interval_s``."""
        return max(floor_s, self._usual_s()) + interval_s

    def _usual_s(self) -> float:
        counted, limit_s = self._known
        # one more sample hardly moves a percentile of hundreds
        if self.num_seen > counted + counted // 20:
            limit_s = self._limit()
            self._known = (self.num_seen, limit_s)
        return limit_s

    def _limit(self) -> float:
        n = len(self._seen)
        factor = next((factor for least, factor in _FACTORS if n >= least), inf)
        if factor == inf:
            return _UNSEEN_S
        seen = np.fromiter(self._seen, np.float64)
        middle, high, higher = np.quantile(seen, [0.5, 1 - _TAIL_SHARE, 0.99])
        if n >= _REGULAR and seen.max() <= _REGULAR_FACTOR * middle:
            factor = _FACTORS[0][1]
        # assumes an exponential tail above the 90th percentile; the largest value to be expected
        scale = (higher - high) / log(10)
        tail = float(higher + scale * log(max(1.0, 0.01 * self.num_seen / _FALSE_ALARMS)))
        # the usual time may have just changed for all workers, as with longer prompts
        recent = float(seen[-_RECENT:].max()) if n >= _RECENT else 0.0
        return max(factor * float(higher), tail, _RECENT_FACTOR * recent, _LONGEST_FACTOR * max(self._maxima))


P0_FLOOR = 0.03
P1_FLOOR = 0.4
_CLIP = 5.0


class ErrorTest:
    """The failure test of one worker."""

    def __init__(self) -> None:
        self.total = 0.0
        self.failed = 0.0
        """Failures since ``total`` was last 0."""
        self.attempts = 0.0
        """Attempts since ``total`` was last 0."""
        self.share = 0.0
        """Running average of the failure rate."""

    def count(self, finished: float, failed: float, usual_share: float) -> None:
        attempts = finished + failed
        if attempts <= 0:
            return
        self.share += min(1.0, attempts / 50) * (failed / attempts - self.share)
        p0 = min(0.5, max(P0_FLOOR, usual_share))
        p1 = min(0.9, max(P1_FLOOR, 4 * p0))
        step = failed * log(p1 / p0) + finished * log((1 - p1) / (1 - p0))
        self.total = max(0.0, self.total + max(-_CLIP, min(_CLIP, step)))
        if self.total == 0:
            self.failed = self.attempts = 0.0
        else:
            self.failed += failed
            self.attempts += attempts
