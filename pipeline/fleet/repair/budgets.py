"""Budgets of repairs: restarts ordered because of incidents, and evictions. Pure; times are
arguments."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.config.operations import RecoverySection
from pipeline.fleet.repair.levels import RepairLevel, StepOutcome
from pipeline.fleet.repair.records import StepRow

# What earlier supervisors have used of the budgets, from ``repairs.jsonl``: a restarted supervisor
# must not give a flapping worker all its repairs again. Steps older than the window do not count.


@dataclass(frozen=True, slots=True)
class PastRepairs:
    restarts: dict[str, tuple[float, ...]]
    """By worker: ages in seconds of the restarts ordered because of incidents, oldest first."""
    evictions: tuple[float, ...]
    """Ages in seconds, oldest first."""
    losses: dict[str, int]
    """Consecutive losses of workers that have not been repaired since."""


@dataclass(slots=True)
class _PastCase:
    worker: str
    num_losses: int = 0
    is_own: bool = False
    is_closed: bool = False


def past_repairs(rows: Iterable[StepRow], at_s: float, window_s: float) -> PastRepairs:
    """Reconstruct the past repairs from recorded steps.

    A case is closed if its last step is a level that is done and has no deadline left.

    Args:
        rows: Steps of all earlier supervisors, oldest first.
        at_s: Now, in seconds since 1970. A step from the future, by another clock, counts as just now.
        window_s: Older steps are ignored."""
    restarts: dict[str, list[float]] = {}
    evictions = list[float]()
    cases: dict[int, _PastCase] = {}
    for row in rows:
        age_s = max(0.0, at_s - row.at_s)
        if row.case == 0 or age_s >= window_s:
            continue
        case = cases.setdefault(row.case, _PastCase(row.worker))
        has_begun = row.outcome == StepOutcome.BEGUN
        if row.rung == RepairLevel.ISOLATE and row.outcome == StepOutcome.DONE:
            # the supervisor saw the loss itself
            case.is_own = True
            case.num_losses += 1
        elif has_begun and (
            row.rung == RepairLevel.ISOLATE or (row.rung == RepairLevel.ROLE_RESTART and not case.is_own)
        ):
            restarts.setdefault(row.worker, []).append(age_s)
        elif has_begun and row.rung == RepairLevel.EVICT:
            evictions.append(age_s)
        case.is_closed = (
            row.outcome == StepOutcome.DONE and (row.limit_s or 0.0) <= age_s and row.rung != RepairLevel.ISOLATE
        )
    losses = dict[str, int]()
    for case in cases.values():
        losses[case.worker] = 0 if case.is_closed else case.num_losses
    return PastRepairs(
        {worker: tuple(sorted(ages, reverse=True)) for worker, ages in restarts.items()},
        tuple(sorted(evictions, reverse=True)),
        {worker: number for worker, number in losses.items() if number},
    )


class _Window:
    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._times: deque[float] = deque()

    def add(self, now_s: float) -> None:
        self._times.append(now_s)

    def count(self, now_s: float) -> int:
        while self._times and self._times[0] <= now_s - self._length_s:
            self._times.popleft()
        return len(self._times)


class Budgets:
    def __init__(self, limits: RecoverySection) -> None:
        self._limits = limits
        self._restarts: dict[str, _Window] = {}
        self._evictions = _Window(limits.window_s)
        self._past_losses: dict[str, int] = {}

    def recall(self, now_s: float, past: PastRepairs) -> None:
        for worker, ages in past.restarts.items():
            for age_s in ages:
                self._restarts.setdefault(worker, _Window(self._limits.window_s)).add(now_s - age_s)
        for age_s in past.evictions:
            self._evictions.add(now_s - age_s)
        self._past_losses = dict(past.losses)

    def past_losses(self, worker: str) -> int:
        """Return and clear a worker's consecutive losses before this supervisor."""
        return self._past_losses.pop(worker, 0)

    def take_restart(self, now_s: float, worker: str) -> bool:
        """Use one of the restarts allowed for incidents; return whether one was left."""
        window = self._restarts.setdefault(worker, _Window(self._limits.window_s))
        if window.count(now_s) >= self._limits.incident_restarts:
            return False
        window.add(now_s)
        return True

    def restarts_used(self, now_s: float, worker: str) -> str:
        num = self._restarts[worker].count(now_s)
        allowed = f"{self._limits.incident_restarts} are allowed"
        return f"incidents have restarted it {num} times within {self._limits.window_s:g} s, {allowed}"

    def take_eviction(self, now_s: float) -> None:
        self._evictions.add(now_s)

    def evictions_used(self, now_s: float) -> str:
        """Say why no worker may be evicted, or ""."""
        num = self._evictions.count(now_s)
        if num < self._limits.max_evictions:
            return ""
        allowed = f"recovery.max_evictions = {self._limits.max_evictions} are allowed"
        return f"{num} workers were evicted within {self._limits.window_s:g} s, {allowed}: look for a common cause"

    def forget(self, now_s: float) -> None:
        for worker in [name for name, window in self._restarts.items() if not window.count(now_s)]:
            del self._restarts[worker]
