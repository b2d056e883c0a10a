"""Budgets of repairs: restarts ordered because of incidents, and evictions. Pure; times are
arguments.

What earlier supervisors have used of them is read from ``repairs.jsonl``: a restarted supervisor must
not give a flapping worker all its repairs again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.config.operations import RecoverySection
from pipeline.fleet.repair.levels import RepairLevel, StepOutcome
from pipeline.fleet.repair.records import StepRow


@dataclass(frozen=True, slots=True)
class PastRepairs:
    restarts: dict[str, tuple[float, ...]]
    """By worker: ages in seconds of the restarts ordered because of incidents, oldest first."""
    evictions: tuple[float, ...]
    """Ages in seconds, oldest first."""
    losses: dict[str, int]
    """Consecutive losses of workers that have not been repaired since."""


def past_repairs(rows: Iterable[StepRow], at_s: float, window_s: float) -> PastRepairs:
    """Reconstruct the past repairs from recorded steps.

    A case is closed if its last step is a level that is done and has no deadline left.

    Args:
        rows: Steps of all earlier supervisors, oldest first.
        at_s: Now, in seconds since 1970. A step from the future, by another clock, counts as just now.
        window_s: Older steps are ignored."""
    restarts, evictions = dict[str, list[float]](), list[float]()
    losses_of, worker_of = dict[int, int](), dict[int, str]()
    closed = set[int]()
    for row in rows:
        age_s = max(0.0, at_s - row.at_s)
        if row.case == 0 or age_s >= window_s:
            continue
        worker_of.setdefault(row.case, row.worker)
        is_isolation = row.rung == RepairLevel.ISOLATE
        is_begun, is_done = row.outcome == StepOutcome.BEGUN, row.outcome == StepOutcome.DONE
        if is_isolation and is_done:
            # the supervisor saw the loss itself
            losses_of[row.case] = losses_of.get(row.case, 0) + 1
        elif is_begun and (is_isolation or (row.rung == RepairLevel.ROLE_RESTART and row.case not in losses_of)):
            restarts.setdefault(row.worker, []).append(age_s)
        elif is_begun and row.rung == RepairLevel.EVICT:
            evictions.append(age_s)
        if is_done and (row.limit_s or 0.0) <= age_s and not is_isolation:
            closed.add(row.case)
        else:
            closed.discard(row.case)
    losses = {worker: 0 if case in closed else losses_of.get(case, 0) for case, worker in worker_of.items()}
    return PastRepairs(
        {worker: tuple(sorted(ages, reverse=True)) for worker, ages in restarts.items()},
        tuple(sorted(evictions, reverse=True)),
        {worker: number for worker, number in losses.items() if number},
    )


class Budgets:
    def __init__(self, limits: RecoverySection) -> None:
        self._limits = limits
        self._restarts: dict[str, list[float]] = {}
        self._evictions: list[float] = []
        self._past_losses: dict[str, int] = {}

    def recall(self, now_s: float, past: PastRepairs) -> None:
        self._restarts = {worker: [now_s - age_s for age_s in ages] for worker, ages in past.restarts.items()}
        self._evictions = [now_s - age_s for age_s in past.evictions]
        self._past_losses = dict(past.losses)

    def past_losses(self, worker: str) -> int:
        """Return and clear a worker's consecutive losses before this supervisor."""
        return self._past_losses.pop(worker, 0)

    def take_restart(self, now_s: float, worker: str) -> bool:
        """Use one of the restarts allowed for incidents; return whether one was left."""
        self._forget(now_s)
        if len(self._restarts.get(worker, ())) >= self._limits.incident_restarts:
            return False
        self._restarts.setdefault(worker, []).append(now_s)
        return True

    def restarts_used(self, worker: str) -> str:
        """Say why ``take_restart`` has just refused."""
        allowed = f"{self._limits.incident_restarts} are allowed"
        num = len(self._restarts.get(worker, ()))
        return f"incidents have restarted it {num} times within {self._limits.window_s:g} s, {allowed}"

    def take_eviction(self, now_s: float) -> None:
        self._evictions.append(now_s)

    def evictions_used(self, now_s: float) -> str:
        """Say why no worker may be evicted, or ""."""
        self._forget(now_s)
        num = len(self._evictions)
        if num < self._limits.max_evictions:
            return ""
        allowed = f"recovery.max_evictions = {self._limits.max_evictions} are allowed"
        return f"{num} workers were evicted within {self._limits.window_s:g} s, {allowed}: look for a common cause"

    def _forget(self, now_s: float) -> None:
        """Forget what is older than the window."""
        from_s = now_s - self._limits.window_s
        recent = {worker: [at_s for at_s in times if at_s > from_s] for worker, times in self._restarts.items()}
        self._restarts = {worker: times for worker, times in recent.items() if times}
        self._evictions = [at_s for at_s in self._evictions if at_s > from_s]
