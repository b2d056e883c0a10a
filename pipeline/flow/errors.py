"""Whether attempts fail too often: a sequential probability ratio test on counts.

    S <- max(0, S + failed ln(p1/p0) + finished ln((1-p1)/(1-p0)))

Here p0 is the role's median share of failures, at least 3 %. And p1 is four times p0, from 40 to
90 %. One row counts at most 5. A worker errs at S >= 14 + ln(max(workers / 32, 1))."""

from __future__ import annotations

from math import log

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
