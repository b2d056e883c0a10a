"""Finds the processes that must be replaced: frozen, stuck, idle although there is work, or never
begun. Pure; time is an argument.

What a heartbeat says about its worker is judged by ``pipeline.fleet.health``. This adds what only
the holder of the processes knows: a process without a heartbeat of its own has not started, or has
left and does not end, and a silent process of this host (``pipeline.process.descendants``) may not
have run at all."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from pipeline.fleet.limits import Limits
from pipeline.fleet.state import FleetState
from pipeline.process.descendants import Activity
from pipeline.runtime.liveness import HEARTBEAT_WITHIN_S
from pipeline.runtime.registry.contract import Heartbeat
from protocol.ids import Role

_NO_OVERDUE: Mapping[Role, float] = {}
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
        self._fleet = FleetState(limits)
        self._processes: dict[str, _Process] = {}
        self._silent: frozenset[str] = frozenset()
        self._evaluated_s: float | None = None

    def reset_timers(self, now_s: float) -> None:
        """Restart all limits of silence, because heartbeats could not be read."""
        self._fleet.distrust(now_s)
        for process in self._processes.values():
            process.said_s = process.ran_s = now_s

    def quiet(self, now_s: float) -> list[str]:
        """Return workers whose heartbeats are late, for which ``evaluate`` needs their activity."""
        return [name for name, process in self._processes.items() if now_s - process.said_s > HEARTBEAT_WITHIN_S]

    def evaluate(
        self,
        beats: Iterable[Heartbeat],
        pids: Mapping[str, int],
        now_s: float,
        overdue_s: Mapping[Role, float] = _NO_OVERDUE,
        activity: Mapping[str, Activity | None] = _NO_ACTIVITY,
    ) -> dict[str, str]:
        """Return the reason for every process in ``pids`` (by worker) that must be replaced.

        ``now_s``: the reader's monotonic time. ``overdue_s``: how far each role's work is beyond
        its deadline. ``activity``: of silent workers on this host."""
        beats = list(beats)
        stood_s = 0.0 if self._evaluated_s is None else now_s - self._evaluated_s
        # a reader that stood still has not seen its workers run
        if self._evaluated_s is None or stood_s > self._limits.silent_after_s / 2:
            self.reset_timers(now_s)
        elif stood_s > self._limits.stopped_after_s / 2:
            activity = _NO_ACTIVITY
        self._evaluated_s = now_s
        self._fleet.read(beats, now_s)
        by_pid = {(beat.who.worker, beat.pid): beat for beat in beats}
        self._processes = {name: process for name, process in self._processes.items() if pids.get(name) == process.pid}
        dead, silent = dict[str, str](), set[str]()
        for worker, pid in pids.items():
            process = self._processes.setdefault(worker, _Process(pid, now_s, now_s, now_s))
            beat = by_pid.get((worker, pid))
            if beat is not None:
                process.has_begun = True
                process.said_s = max(process.said_s, now_s - self._fleet.silent_s(beat))
            done = activity.get(worker)
            if done is None or done != process.activity:
                process.activity, process.ran_s = done, now_s
            reason, is_silent = self._reason(process, beat, now_s, overdue_s)
            if reason:
                dead[worker] = reason
            if is_silent:
                silent.add(worker)
        self._silent = frozenset(silent)
        return dead

    def departed(self, beats: Iterable[Heartbeat], pids: Mapping[str, int], gone: Container[int]) -> dict[str, str]:
        """Return the reason for every silent worker of the last reading that another process
        started, by worker.

        ``pids``: the supervisor's own processes. ``gone``: process ids on this host that have
        ended."""
        silent: dict[str, str] = {}
        for beat in beats:
            if pids.get(beat.who.worker) != beat.pid:
                silent_s = self._fleet.silent_s(beat)
                if silent_s > (self._limits.silent_after_s if beat.pid in gone else self._limits.least_s):
                    silent[beat.who.worker] = f"no heartbeat for {silent_s:.0f} s"
        return silent

    def is_silent(self, worker: str) -> bool:
        """Return whether a worker's heartbeat has stopped: its process is frozen or gone."""
        return worker in self._silent

    def _reason(
        self, process: _Process, beat: Heartbeat | None, now_s: float, overdue_s: Mapping[Role, float]
    ) -> tuple[str, bool]:
        silent_s, limits = now_s - process.said_s, self._limits
        if not process.has_begun:
            is_late = silent_s > limits.start_timeout_s
            words = f"not started after {now_s - process.started_s:.0f} s (supervisor.start_timeout_s)"
            return (words if is_late else ""), False
        # without a heartbeat it has left or was fenced, and is about to end
        if beat is None:
            is_late = silent_s > max(limits.silent_after_s, limits.drain_timeout_s)
            words = f"left {silent_s:.0f} s ago and has not ended (supervisor.drain_timeout_s)"
            return (words if is_late else ""), silent_s > limits.silent_after_s
        stopped_s = now_s - max(process.ran_s, process.said_s)
        found = self._fleet.health(beat, stopped_s=stopped_s, overdue_s=overdue_s.get(beat.who.role, 0.0))
        return (found.evidence if found.is_certain else ""), found.is_silent and found.is_certain
