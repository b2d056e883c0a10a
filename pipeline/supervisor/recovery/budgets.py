"""Budgets of repairs: restarts that incidents order, and evictions. Pure; times are arguments."""

from __future__ import annotations

from collections import deque

from pipeline.supervisor.recovery.levels import EscalationLimits
from pipeline.supervisor.recovery.past import PastRepairs


class _Window:
    """Counts events within the last seconds."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._times: deque[float] = deque()

    def add(self, now_s: float) -> None:
        """Count one event."""
        self._times.append(now_s)

    def count(self, now_s: float) -> int:
        """Return the events within the window."""
        while self._times and self._times[0] <= now_s - self._length_s:
            self._times.popleft()
        return len(self._times)


class Budgets:
    """The budgets of one run, and their use so far."""

    def __init__(self, limits: EscalationLimits) -> None:
        self._limits = limits
        self._restarts: dict[str, _Window] = {}
        self._evictions = _Window(limits.window_s)
        self._past_losses: dict[str, int] = {}

    def recall(self, now_s: float, past: PastRepairs) -> None:
        """Take over what earlier supervisors have used."""
        for worker, ages in past.restarts.items():
            for age_s in ages:
                self._restarts.setdefault(worker, _Window(self._limits.window_s)).add(now_s - age_s)
        for age_s in past.evictions:
            self._evictions.add(now_s - age_s)
        self._past_losses = dict(past.losses)

    def past_losses(self, worker: str) -> int:
        """Return a worker's losses in a row before this supervisor, once."""
        return self._past_losses.pop(worker, 0)

    def take_restart(self, now_s: float, worker: str) -> bool:
        """Take one of the restarts that incidents may order; return whether there was one."""
        window = self._restarts.setdefault(worker, _Window(self._limits.window_s))
        if window.count(now_s) >= self._limits.incident_restarts:
            return False
        window.add(now_s)
        return True

    def restarts_used(self, now_s: float, worker: str) -> str:
        """Return why incidents may order no restart of this worker."""
        num = self._restarts[worker].count(now_s)
        allowed = f"{self._limits.incident_restarts} are allowed"
        return f"incidents have restarted it {num} times within {self._limits.window_s:g} s, {allowed}"

    def take_eviction(self, now_s: float) -> None:
        """Take one of the evictions."""
        self._evictions.add(now_s)

    def evictions_used(self, now_s: float) -> str:
        """Return why no worker may be evicted, or ""."""
        num = self._evictions.count(now_s)
        if num < self._limits.max_evictions:
            return ""
        allowed = f"recovery.max_evictions = {self._limits.max_evictions} are allowed"
        return f"{num} workers were evicted within {self._limits.window_s:g} s, {allowed}: look for a common cause"

    def forget(self, now_s: float) -> None:
        """Forget workers without a restart in the window."""
        for worker in [name for name, window in self._restarts.items() if not window.count(now_s)]:
            del self._restarts[worker]
