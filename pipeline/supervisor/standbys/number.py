"""How many standbys a fleet needs. Pure.

N workers fail independently, each at rate r. While one standby is refilled, in time w, a worker
fails with probability p = 1 - exp(-r w). Enough standbys are the least k with

    P(Binomial(N, p) <= k) >= 0.99.

Source: Wan et al., ByteRobust, SOSP 2025 (arXiv 2509.16293), its warm standby policy; there p is a
day's, here that of the measured refill."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

CONFIDENCE: Final = 0.99
DAY_S: Final = 86400.0
_LEAST_REPAIRS: Final = 3
"""Repairs of a run from which its own rate is measured; fewer are chance."""


def num_standbys(num_workers: int, rate_per_day: float, refill_s: float, *, confidence: float = CONFIDENCE) -> int:
    """Return the least number of standbys that suffice.

    Args:
        num_workers: Workers that standbys may replace.
        rate_per_day: Failures of one worker a day.
        refill_s: From the use of a standby to the next one's readiness, in seconds.
        confidence: Probability that they suffice."""
    within = 0.0
    for k, chance in enumerate(chances(num_workers, rate_per_day, refill_s)):
        within += chance
        if within >= confidence:
            return k
    return num_workers


def chances(num_workers: int, rate_per_day: float, seconds: float) -> Iterator[float]:
    """Yield the probability that exactly 0, 1, 2 ... of so many workers fail within a time."""
    p = -math.expm1(-rate_per_day * seconds / DAY_S)
    if num_workers <= 0 or p <= 0.0 or p >= 1.0:
        yield from (float(k == (num_workers if p >= 1.0 else 0)) for k in range(max(0, num_workers) + 1))
        return
    # from one k to the next in logarithms: (1 - p)^N underflows in large fleets
    log_term, log_odds = num_workers * math.log1p(-p), math.log(p) - math.log1p(-p)
    for k in range(num_workers + 1):
        yield math.exp(log_term)
        log_term += math.log(num_workers - k) - math.log(k + 1) + log_odds if k < num_workers else 0.0


def measured_rate(assumed_per_day: float, num_repairs: int, num_workers: int, run_s: float) -> float:
    """Return the failures of one worker a day: the run's own, or the assumed ones if it has few.

    Args:
        assumed_per_day: By the settings.
        num_repairs: Repairs of this run so far.
        num_workers: Workers that could fail.
        run_s: Time over which the repairs were counted, in seconds."""
    if num_repairs < _LEAST_REPAIRS or num_workers <= 0 or run_s <= 0.0:
        return assumed_per_day
    return max(assumed_per_day, num_repairs * DAY_S / (num_workers * run_s))
