"""Whether pieces of work take longer than expected for their size: a CUSUM on ln(service/expected).

    x = ln(seconds a piece / expected seconds a piece) / sigma
    S <- max(0, S + min(x, 4) - 0.8)          for each observation; slow at S >= 12

The expected value is the role's median of more than ``SETTLED_S`` ago. If the role's median of the
last few seconds is higher, the whole role has slowed for a common reason, and that one is used. A
worker's own past can only raise it: a host that was always slower has not become slow. Sigma is the
role's, from the median absolute deviation, with a floor. The piece in progress adds what its age
already shows (censored evidence). A worker that waits for input keeps up, so it loses evidence.

An observation is a stretch of at least two rows of computing in which at least one piece finished. If
rows carry cumulative service seconds and sizes, their ratio is used instead. Until a role has enough
observations, the expected value is the time between pieces at its past rate, idle time included: a
worker that always has work and finishes less than before is slow.

The workers of a small role slow down one after the other even for a common reason, so one is only
blamed when another is known to have taken the usual time meanwhile (``slow_workers``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import exp, inf, log
from statistics import median

import numpy as np

DRIFT = 0.8
CAP = 4.0
BOUND = 12.0
_MAX_EVIDENCE = 2 * BOUND
"""Cap of the accumulated evidence, so that a recovered worker is soon cleared."""
SIGMA_FLOOR = 0.25
_MAD_TO_SIGMA = 1.4826
_KEPT_ROLE = 200
_KEPT_OWN = 100
SETTLED_S = 30.0
"""Observations younger than this are judged but do not count as the past yet."""
_RECENT_S = 20.0
_FEWEST_ROLE = 8
_FEWEST_OWN = 8
_LEAST_ROWS = 2
_FEWEST_RECENT = 5
_MANY_RECENT = 100
"""With this many observations, one worker's own hardly move the median."""
_KEPT_YOUNG = 5000
_SIGMA_BY_RATE = 0.4
_NUM_RATIOS = 5
_COMMON_SHARE = 0.3
_SMALL_ROLE = 5
"""A smaller role has no median that would reveal a common cause."""
_CLEAR_RATIO = 2.0
"""From this ratio on, slowness is not just a worker's habit."""
_RISING_SHARE = 0.5
"""Share of the bound from which a worker of a small role counts as slow, too."""
_WITNESS_S = 20.0
"""How long the other workers of a small role have to finish a piece; after that they have no work."""


class RoleService:
    """Observations of ln(seconds a piece) over all workers of a role."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_KEPT_ROLE)
        self._young: deque[tuple[float, float, str]] = deque()
        self._now: tuple[float, list[tuple[float, str]], float] = (-inf, [], 0.0)
        """Time, the recent observations at that time, and their median."""
        self._known: tuple[int, float, float] = (0, 0.0, 1.0)
        self._num = 0
        self.past_rate = 0.0
        """Pieces per second of the median worker, more than ``SETTLED_S`` ago; 0 if unknown."""

    def add(self, now_s: float, value: float, worker: str) -> None:
        self._young.append((now_s, value, worker))
        if len(self._young) > _KEPT_YOUNG:
            self._settle()

    def expected(self, now_s: float, worker: str) -> tuple[float, float] | None:
        """Return mean and sigma of ln(seconds a piece) expected of a worker; None if unknown."""
        while self._young and now_s - self._young[0][0] > SETTLED_S:
            self._settle()
        counted, center, sigma = self._known
        if self._num > counted + counted // 20:
            seen = np.fromiter(self._seen, np.float64)
            center = float(np.median(seen))
            sigma = max(SIGMA_FLOOR, _MAD_TO_SIGMA * float(np.median(np.abs(seen - center))))
            self._known = (self._num, center, sigma)
        if len(self._seen) < _FEWEST_ROLE:
            if self.past_rate <= 0:
                return None
            center, sigma = -log(self.past_rate), max(SIGMA_FLOOR, _SIGMA_BY_RATE)
        recent = self._recent(now_s, worker)
        return (center if recent is None else max(center, recent)), sigma

    def _settle(self) -> None:
        self._seen.append(self._young.popleft()[1])
        self._num += 1

    def _recent(self, now_s: float, worker: str) -> float | None:
        """Return the median of the other workers' recent observations."""
        if now_s - self._now[0] >= 1.0 or now_s < self._now[0]:
            found = [(value, other) for at_s, value, other in self._young if now_s - at_s <= _RECENT_S]
            self._now = (now_s, found, median(value for value, _ in found) if found else 0.0)
        _, found, middle = self._now
        if len(found) >= _MANY_RECENT:
            return middle
        others = [value for value, other in found if other != worker]
        return median(others) if len(others) >= _FEWEST_RECENT else None


class ServiceSum:
    """The CUSUM of one worker."""

    def __init__(self, worker: str) -> None:
        self.total = 0.0
        self.since_s = inf
        """When evidence began to accumulate, by the reader's clock; infinite if there is none."""
        self.seen_s = -inf
        """Time of the last observation, by the reader's clock."""
        self.ratio = 1.0
        """Last observation relative to the expected one."""
        self._ratios: deque[float] = deque(maxlen=_NUM_RATIOS)
        self._by_role: deque[float] = deque(maxlen=_NUM_RATIOS)
        self._worker = worker
        self._own: deque[tuple[float, float]] = deque(maxlen=_KEPT_OWN)
        self._busy_s = 0.0
        self._done = 0.0
        self._rows = 0

    @property
    def at_least(self) -> float | None:
        """Lower quartile of the last observations relative to what the role (not the worker's own
        past) lets expect; None if there are none."""
        return sorted(self._by_role)[len(self._by_role) // 4] if self._by_role else None

    @property
    def lately(self) -> float:
        """Median of the last ratios; 1 if there are none."""
        return median(self._ratios) if self._ratios else 1.0

    def leave(self) -> None:
        """End the current stretch because the worker waits."""
        self._busy_s, self._done, self._rows = 0.0, 0.0, 0

    def rest(self) -> None:
        """End the current stretch because the worker waits for input, which shows that it keeps up."""
        self.leave()
        self.total = max(0.0, self.total - DRIFT)

    def compute(self, now_s: float, seconds: float, done: float, role: RoleService) -> None:
        """Add time spent computing and the pieces finished in it."""
        self._busy_s += seconds
        self._done += done
        self._rows += 1
        if self._rows >= _LEAST_ROWS and self._done >= 1:
            self.observe(now_s, log(max(1e-9, self._busy_s) / self._done), role)
            self.leave()

    def observe(self, now_s: float, value: float, role: RoleService) -> None:
        """Judge and record one observation of ln(seconds a piece)."""
        of_role = role.expected(now_s, self._worker)
        if of_role is not None:
            self._by_role.append(exp(value - of_role[0]))
            expected, sigma = self._with_own(of_role, now_s)
            self.ratio = exp(value - expected)
            self._ratios.append(self.ratio)
            self.total = min(_MAX_EVIDENCE, max(0.0, self.total + min((value - expected) / sigma, CAP) - DRIFT))
            self.since_s = inf if self.total <= 0.0 else min(self.since_s, now_s)
        self.seen_s = now_s
        if self.total < BOUND or self.lately < _CLEAR_RATIO or len(self._own) < _FEWEST_OWN:
            # clear slowness must not become the norm
            self._own.append((now_s, value))
        role.add(now_s, value, self._worker)

    def evidence(self, now_s: float, role: RoleService) -> float:
        """Return the evidence, including what the current stretch already shows."""
        known = self._expected(now_s, role) if self._busy_s > 0 else None
        if known is None:
            return self.total
        expected, sigma = known
        running = log(self._busy_s / max(1.0, self._done)) - expected
        return self.total + max(0.0, min(running / sigma, CAP) - DRIFT)

    def _expected(self, now_s: float, role: RoleService) -> tuple[float, float] | None:
        of_role = role.expected(now_s, self._worker)
        return None if of_role is None else self._with_own(of_role, now_s)

    def _with_own(self, of_role: tuple[float, float], now_s: float) -> tuple[float, float]:
        own = [value for at_s, value in self._own if now_s - at_s > 2 * SETTLED_S]
        return (max(of_role[0], median(own)) if len(own) >= _FEWEST_OWN else of_role[0]), of_role[1]


def slow_workers(of_role: Sequence[tuple[ServiceSum, float]], now_s: float) -> list[ServiceSum]:
    """Return the workers of a role that are slow without a common cause.

    A cause is common when more than 30 % of the role, and at least two workers, are slow.

    Args:
        of_role: CUSUM and current evidence of each worker.
        now_s: Current time by the reader's clock."""
    slow = [one for one, evidence in of_role if evidence >= BOUND]
    most = max(1.0, _COMMON_SHARE * len(of_role))
    if len(of_role) >= _SMALL_ROLE:
        return slow if len(slow) <= most else []
    found = list[ServiceSum]()
    for suspect in slow:
        alike = [one for one, evidence in of_role if evidence >= _RISING_SHARE * BOUND and _is_alike(one, suspect)]
        others = [one for one, _ in of_role if one is not suspect]
        if len(alike) <= most and (not others or _has_witness(suspect, others, now_s)):
            found.append(suspect)
    return found


def _is_alike(one: ServiceSum, suspect: ServiceSum) -> bool:
    """Return whether a worker is about as slow as the suspect, on a logarithmic scale."""
    return max(one.lately, one.ratio) ** 2 > max(suspect.lately, suspect.ratio)


def _has_witness(suspect: ServiceSum, others: Sequence[ServiceSum], now_s: float) -> bool:
    """Return whether another worker took the usual time since the suspect became slow. If the others
    have finished nothing for long, they have no work and cannot testify."""
    since = [one for one in others if one.seen_s > suspect.since_s]
    if not since:
        return now_s - suspect.since_s > _WITNESS_S
    return any(one.ratio**2 <= max(suspect.lately, suspect.ratio) for one in since)
