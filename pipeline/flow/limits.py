"""How long something may usually take, and how often an attempt may fail.

A limit of time comes from the past of a role, or of a kind of link. It is at least ``FLOOR_S``, and
twice the 99th percentile of what was seen. With few figures the factor is larger, since their largest
one is no percentile. The reader's interval is added: a row cannot show what happened since the row
before.

Attempts fail too often by a sequential probability ratio test on counts:

    S <- max(0, S + failed ln(p1/p0) + finished ln((1-p1)/(1-p0)))

Here p0 is the role's median share of failures, at least 3 %, and p1 is four times p0, from 40 to
90 %. One row counts at most 5. A worker errs at S >= 14 + ln(max(workers / 32, 1))."""

from __future__ import annotations

from collections import deque
from math import inf, log

import numpy as np

FLOOR_S = 3.0
_KEPT = 2000
_BLOCK = 200
_KEPT_BLOCKS = 100
_FACTORS = ((100, 2.0), (30, 2.5), (10, 3.0), (3, 4.0))
"""Figures seen, and the factor from so many on."""
_UNSEEN_S = 60.0
"""Limit before three figures were seen."""
_TAIL_SHARE = 0.1
_STALLED_FACTOR = 1.3
_REGULAR = 10
_REGULAR_FACTOR = 2.0
"""So many figures of which none is above twice the median: the smallest factor is enough."""
_RECENT = 60
_RECENT_FACTOR = 1.5
_LONGEST_FACTOR = 1.1
_FALSE_ALARMS = 0.01
"""Wrong alarms that are allowed, in as many figures as were seen."""


class UsualLimit:
    """Seconds that something took, and the limit that follows."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_KEPT)
        self.num_seen = 0
        self._maxima: deque[float] = deque([0.0], maxlen=_KEPT_BLOCKS)
        """Largest figure of each block of figures: a large role's figures go by fast."""
        self._known = (-1, _UNSEEN_S, _UNSEEN_S)

    def add(self, seconds: float) -> None:
        """Count one finished wait or piece of work."""
        self._seen.append(seconds)
        self.num_seen += 1
        if self.num_seen % _BLOCK == 0:
            self._maxima.append(seconds)
        else:
            self._maxima[-1] = max(self._maxima[-1], seconds)

    def add_capped(self, seconds: float) -> None:
        """Count one, or only so much of it as is half of the limit."""
        is_known = self.num_seen >= _REGULAR
        self.add(min(seconds, max(FLOOR_S, self._limits()[0]) / 2) if is_known else seconds)

    def limit_s(self, interval_s: float, *, floor_s: float = FLOOR_S) -> float:
        """Return the longest time that is not odd, of rows that come every ``interval_s``."""
        return max(floor_s, self._limits()[0]) + interval_s

    def stalled_limit_s(self, interval_s: float) -> float:
        """Return the limit that holds while a role's rate has fallen. It is somewhat more than the
        longest time that was seen, and at most the usual limit."""
        limit, longest = self._limits()
        return max(FLOOR_S, min(limit, _STALLED_FACTOR * longest)) + interval_s

    def _limits(self) -> tuple[float, float]:
        counted, limit, longest = self._known
        # a percentile of hundreds of figures hardly moves with one more
        if self.num_seen > counted + counted // 20:
            limit = self._limit()
            longest = max(self._maxima) if limit < _UNSEEN_S else _UNSEEN_S
            self._known = (self.num_seen, limit, longest)
        return limit, longest

    def _limit(self) -> float:
        n = len(self._seen)
        factor = next((factor for least, factor in _FACTORS if n >= least), inf)
        if factor == inf:
            return _UNSEEN_S
        seen = np.fromiter(self._seen, np.float64)
        middle, high, higher = np.quantile(seen, [0.5, 1 - _TAIL_SHARE, 0.99])
        if n >= _REGULAR and seen.max() <= _REGULAR_FACTOR * middle:
            factor = _FACTORS[0][1]
        # an exponential tail from the 90th percentile on, and the largest figure to be expected
        scale = (higher - high) / log(10)
        tail = float(higher + scale * log(max(1.0, 0.01 * self.num_seen / _FALSE_ALARMS)))
        # the usual may have changed just now, for all workers: longer prompts
        recent = float(seen[-_RECENT:].max()) if n >= _RECENT else 0.0
        return max(factor * float(higher), tail, _RECENT_FACTOR * recent, _LONGEST_FACTOR * max(self._maxima))


P0_FLOOR = 0.03
P1_FLOOR = 0.4
BOUND = 14.0
_CLIP = 5.0


def bound(num_workers: int) -> float:
    """Return the bound for a fleet of so many workers."""
    return BOUND + log(max(num_workers / 32, 1.0))


class ErrorTest:
    """The test of one worker."""

    def __init__(self) -> None:
        self.total = 0.0
        self.failed = 0.0
        """Failures since the sum was last 0."""
        self.attempts = 0.0
        """Attempts since then."""
        self.share = 0.0
        """Running share of failures."""

    def count(self, finished: float, failed: float, usual_share: float) -> None:
        """Count the attempts between two rows."""
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
