"""Finds the processes that must be replaced: frozen, stuck, idle although there is work, or never
begun. Pure; time is an argument.

What a heartbeat says about its worker is judged by ``pipeline.fleet.health``. This adds what only
the holder of the processes knows: a process without a heartbeat of its own has not started, or has
left and does not end, and a silent process of this host (``pipeline.process.descendants``) may not
have run at all."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from pipeline.fleet.health import of_stopped
from pipeline.fleet.limits import Limits
from pipeline.fleet.state import FleetState, Worker
from pipeline.process.descendants import Activity
from pipeline.runtime.liveness import HEARTBEAT_WITHIN_S

_NO_ACTIVITY: Mapping[str, Activity | None] = {}


@dataclass(slots=True)
class _Process:
    pid: int
    started_s: float
    said_s: float
    """When its last heartbeat came, or its limits began again."""
    ran_s: float
    """When it may last have run."""
    activity: Activity | None = None
    """None: unknown, so it may have run."""
    has_begun: bool = False
    """Whether it has sent a heartbeat."""


class Watchdog:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.fleet = FleetState(limits)
        self._processes: dict[str, _Process] = {}
        self._silent: frozenset[str] = frozenset()
        self._evaluated_s: float | None = None

    def reset_timers(self, now_s: float) -> None:
        """Restart all limits of silence, because heartbeats could not be read."""
        self.fleet.distrust(now_s)
        for process in self._processes.values():
            process.said_s = process.ran_s = now_s

    def quiet(self, now_s: float) -> list[str]:
        """Return workers whose heartbeats are late, for which ``evaluate`` needs their activity."""
        return [name for name, process in self._processes.items() if now_s - process.said_s > HEARTBEAT_WITHIN_S]

    def evaluate(
        self,
        workers: Iterable[Worker],
        pids: Mapping[str, int],
        now_s: float,
        activity: Mapping[str, Activity | None] = _NO_ACTIVITY,
    ) -> dict[str, str]:
        """Return the reason for every process in ``pids`` (by worker) that must be replaced.

        ``workers``: of the last reading, at ``now_s``. ``activity``: of silent workers on this
        host."""
        stood_s = math.inf if self._evaluated_s is None else now_s - self._evaluated_s
        # a reader that stood still has not seen its workers run
        if stood_s > self._limits.silent_after_s / 2:
            self.reset_timers(now_s)
        elif stood_s > self._limits.stopped_after_s / 2:
            activity = _NO_ACTIVITY
        self._evaluated_s = now_s
        by_pid = {(one.who.worker, one.pid): one for one in workers}
        self._processes = {name: process for name, process in self._processes.items() if pids.get(name) == process.pid}
        dead, silent = dict[str, str](), set[str]()
        for worker, pid in pids.items():
            process = self._processes.setdefault(worker, _Process(pid, now_s, now_s, now_s))
            found = by_pid.get((worker, pid))
            if found is not None:
                process.has_begun = True
                process.said_s = max(process.said_s, now_s - found.silent_s)
            done = activity.get(worker)
            if done is None or done != process.activity:
                process.activity, process.ran_s = done, now_s
            reason, is_silent = self._reason(process, found, now_s)
            if reason:
                dead[worker] = reason
            if is_silent:
                silent.add(worker)
        self._silent = frozenset(silent)
        return dead

    def departed(self, workers: Iterable[Worker], pids: Mapping[str, int], gone: Container[int]) -> dict[str, str]:
        """Return the reason for every silent worker of the last reading that another process
        started, by worker.

        ``pids``: the supervisor's own processes. ``gone``: process ids on this host that have
        ended."""
        silent: dict[str, str] = {}
        for one in workers:
            limit_s = self._limits.silent_after_s if one.pid in gone else self._limits.least_s
            if pids.get(one.who.worker) != one.pid and one.silent_s > limit_s:
                silent[one.who.worker] = f"no heartbeat for {one.silent_s:.0f} s"
        return silent

    def is_silent(self, worker: str) -> bool:
        """Return whether a worker's heartbeat has stopped: its process is frozen or gone."""
        return worker in self._silent

    def _reason(self, process: _Process, worker: Worker | None, now_s: float) -> tuple[str, bool]:
        silent_s, limits = now_s - process.said_s, self._limits
        if not process.has_begun:
            is_late = silent_s > limits.start_timeout_s
            words = f"not started after {now_s - process.started_s:.0f} s (supervisor.start_timeout_s)"
            return (words if is_late else ""), False
        # without a heartbeat it has left or was fenced, and is about to end
        if worker is None:
            is_late = silent_s > max(limits.silent_after_s, limits.drain_timeout_s)
            words = f"left {silent_s:.0f} s ago and has not ended (supervisor.drain_timeout_s)"
            return (words if is_late else ""), silent_s > limits.silent_after_s
        stopped_s = now_s - max(process.ran_s, process.said_s)
        found = of_stopped(worker.health, limits, worker.silent_s, stopped_s)
        return (found.evidence if found.is_certain else ""), found.is_silent and found.is_certain
