"""Whether pieces of work take longer than their size lets expect: a CUSUM on ln(service/expected).

    x = ln(seconds a piece / expected seconds a piece) / sigma
    S <- max(0, S + min(x, 4) - 0.8)          for each observation; slow at S >= 12

Expected is the role's median of more than ``SETTLED_S`` ago. Where the median of its last seconds
is longer, the whole role is slower for a common cause, and that median counts. So does a worker's
own past: a host that was always slower is not slow now. Sigma is the role's, by the median absolute
deviation, with a floor. The piece that runs adds what its age shows already (censored
evidence), for as long as it runs. A worker that waits for input loses evidence: it keeps up.

An observation is a stretch of at least two rows in which the worker computed, with at least one
piece finished in it. Before a role has enough of them, expected is the time between two pieces by
its past rate, idle time included. A worker with work all the time that finishes less than it used
to is slow. Where rows carry cumulative seconds and sizes of service, an observation is their
ratio.

The workers of a small role become slow by a common cause one after the other. So one of them is
blamed only when another is known to take the usual time meanwhile (``slow_workers``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import exp, inf, log
from statistics import median

import numpy as np

DRIFT = 0.8
CAP = 4.0
BOUND = 12.0
_MOST = 2 * BOUND
"""Evidence that is kept: a worker that recovered is soon not slow any more."""
SIGMA_FLOOR = 0.25
_MAD_TO_SIGMA = 1.4826
_KEPT_ROLE = 200
_KEPT_OWN = 100
SETTLED_S = 30.0
"""Observations younger than this are judged, and are not yet the past."""
_NOW_S = 20.0
_FEWEST_ROLE = 8
_FEWEST_OWN = 8
_LEAST_ROWS = 2
_LEAST_NOW = 5
_MANY_NOW = 100
"""Of so many one worker's own hardly move the median."""
_KEPT_YOUNG = 5000
_SIGMA_BY_RATE = 0.4
_LATELY = 5
_COMMON = 0.3
_SMALL = 5
"""Below so many workers a role has no median by which a common cause shows."""
_CLEARLY = 2.0
"""Ratio of service from which on slowness is no habit of a worker."""
_RISING = 0.5
"""Of the bound: in a small role a worker with so much evidence is counted as slow."""
_WITNESS_S = 20.0
"""A small role's other workers have so long to finish a piece. Then they have no work."""


class RoleService:
    """Observations of all workers of a role: ln(seconds a piece)."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_KEPT_ROLE)
        self._young: deque[tuple[float, float, str]] = deque()
        self._now: tuple[float, list[tuple[float, str]], float] = (-inf, [], 0.0)
        """Time, and the observations of the last seconds then, with their median."""
        self._known: tuple[int, float, float] = (0, 0.0, 1.0)
        self._num = 0
        self.past_rate = 0.0
        """Pieces a second of its middle worker, of more than ``SETTLED_S`` ago; 0: not known."""

    def add(self, now_s: float, value: float, worker: str) -> None:
        """Count one observation."""
        self._young.append((now_s, value, worker))
        if len(self._young) > _KEPT_YOUNG:
            self._settle()

    def expected(self, now_s: float, worker: str) -> tuple[float, float] | None:
        """Return center and sigma of ln(seconds a piece) for a worker now; None if not known."""
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
        """Return the median of the other workers' observations of the last seconds."""
        if now_s - self._now[0] >= 1.0 or now_s < self._now[0]:
            found = [(value, other) for at_s, value, other in self._young if now_s - at_s <= _NOW_S]
            self._now = (now_s, found, median(value for value, _ in found) if found else 0.0)
        _, found, middle = self._now
        if len(found) >= _MANY_NOW:
            return middle
        others = [value for value, other in found if other != worker]
        return median(others) if len(others) >= _LEAST_NOW else None


class ServiceSum:
    """The CUSUM of one worker."""

    def __init__(self, worker: str) -> None:
        self.total = 0.0
        self.since_s = inf
        """When evidence began to add up, by the reader's clock; infinite without any."""
        self.seen_s = -inf
        """Time of the last observation, by the reader's clock."""
        self.ratio = 1.0
        """Service of the last observation over the expected one."""
        self._ratios: deque[float] = deque(maxlen=_LATELY)
        self._by_role: deque[float] = deque(maxlen=_LATELY)
        self._worker = worker
        self._own: deque[tuple[float, float]] = deque(maxlen=_KEPT_OWN)
        self._busy_s = 0.0
        self._done = 0.0
        self._rows = 0

    @property
    def at_least(self) -> float | None:
        """Lower quartile of the last observations over the role's expected ones; None without any.
        The worker's own past does not count."""
        return sorted(self._by_role)[len(self._by_role) // 4] if self._by_role else None

    @property
    def lately(self) -> float:
        """Median of the last ratios; 1 without any."""
        return median(self._ratios) if self._ratios else 1.0

    def leave(self) -> None:
        """End the present stretch: the worker waits."""
        self._busy_s, self._done, self._rows = 0.0, 0.0, 0

    def rest(self) -> None:
        """End the present stretch: the worker waits for input, so it keeps up."""
        self.leave()
        self.total = max(0.0, self.total - DRIFT)

    def compute(self, now_s: float, seconds: float, done: float, role: RoleService) -> None:
        """Count time that the worker computed, and pieces that it finished meanwhile."""
        self._busy_s += seconds
        self._done += done
        self._rows += 1
        if self._rows >= _LEAST_ROWS and self._done >= 1:
            self.observe(now_s, log(max(1e-9, self._busy_s) / self._done), role)
            self.leave()

    def observe(self, now_s: float, value: float, role: RoleService) -> None:
        """Judge one observation, ln(seconds a piece), and remember it."""
        of_role = role.expected(now_s, self._worker)
        if of_role is not None:
            self._by_role.append(exp(value - of_role[0]))
            expected, sigma = self._with_own(of_role, now_s)
            self.ratio = exp(value - expected)
            self._ratios.append(self.ratio)
            self.total = min(_MOST, max(0.0, self.total + min((value - expected) / sigma, CAP) - DRIFT))
            self.since_s = inf if self.total <= 0.0 else min(self.since_s, now_s)
        self.seen_s = now_s
        if self.total < BOUND or self.lately < _CLEARLY or len(self._own) < _FEWEST_OWN:
            # what is clearly slow does not become usual
            self._own.append((now_s, value))
        role.add(now_s, value, self._worker)

    def evidence(self, now_s: float, role: RoleService) -> float:
        """Return the sum, with what the running stretch shows already."""
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


def slow_workers(of_role: Sequence[tuple[ServiceSum, float]], now_s: float, part: float = 1.0) -> list[ServiceSum]:
    """Return the workers of a role that are slow by no common cause.

    A cause is common when more than 30 % of the role are slow, and two at least.

    Args:
        of_role: of each worker its CUSUM and its present evidence.
        now_s: by the reader's clock.
        part: share of the bound from which on a worker is slow."""
    bound = part * BOUND
    slow = [one for one, evidence in of_role if evidence >= bound]
    most = max(1.0, _COMMON * len(of_role))
    if len(of_role) >= _SMALL:
        return slow if len(slow) <= most else []
    found = list[ServiceSum]()
    for suspect in slow:
        alike = [one for one, evidence in of_role if evidence >= _RISING * bound and _is_alike(one, suspect)]
        others = [one for one, _ in of_role if one is not suspect]
        if len(alike) <= most and (not others or _has_witness(suspect, others, now_s)):
            found.append(suspect)
    return found


def _is_alike(one: ServiceSum, suspect: ServiceSum) -> bool:
    """Return whether a worker is about as slow as the suspect, on a scale of ratios."""
    return max(one.lately, one.ratio) ** 2 > max(suspect.lately, suspect.ratio)


def _has_witness(suspect: ServiceSum, others: Sequence[ServiceSum], now_s: float) -> bool:
    """Return whether another worker took the usual time since the suspect is slow. Others that
    finish nothing for long have no work."""
    since = [one for one in others if one.seen_s > suspect.since_s]
    if not since:
        return now_s - suspect.since_s > _WITNESS_S
    return any(one.ratio**2 <= max(suspect.lately, suspect.ratio) for one in since)
