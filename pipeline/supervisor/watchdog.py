"""Finds workers that are frozen, stuck, idle although there is work, or that never began. Pure;
time is an argument.

Its input is heartbeats, the age of each role's overdue work, the activity of silent processes of
this host (``pipeline.process.descendants``), and the reader's monotonic clock. Workers are judged
by changes between two readings on that clock: wall clocks jump, and a laptop that slept, a ledger
that was away, or a reader that stalled must not look like a dead fleet.

    without a change              means                         limit
    the heartbeat                 the process is frozen         silent_after_s
    the heartbeat, and no thread  the process is stopped        stopped_after_s
    has run
    none: it has left             the process does not end      drain_timeout_s
    turns, and pieces             the main loop is dead         the limit of its reported wait
    progress, and pieces, at      it is stuck with its work     the limit of its reported wait
    compute or with work held
    progress, at input, while     it turns, but past its work   60 s, or stuck_after_s
    its role's work is overdue

A piece is a reported step of long work: a layer of a pass, a decode step, a verdict, a file
(``pipeline.process.work``). Its limit is several times the slowest piece so far of that kind of
work, and at least a minute; ``stuck_after_s``, if set, is the maximum.

An idle worker holds no work and may be idle for ever. A worker that waits for credit or weights may
hold any work.

Time is counted separately for each kind of wait, since the last progress or start of work. So time
at one wait never counts against another's limit, and a worker that alternates between two without
progress still reaches the limit of one."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from pipeline.process.descendants import Activity
from pipeline.process.work import LEAST_S, piece_limit_s
from pipeline.runtime.liveness import HEARTBEAT_WITHIN_S, REPLACED_AFTER_S, STOPPED_AFTER_S
from pipeline.runtime.registry.contract import Heartbeat, WaitingFor
from pipeline.runtime.registry.waits import LimitKind, Stage
from protocol.ids import Role

_NO_OVERDUE: Mapping[Role, float] = {}
_NO_ACTIVITY: Mapping[str, Activity | None] = {}


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits for each symptom, in seconds."""

    stuck_after_s: float | None
    """Without a turn of the main loop, or progress on work. None: the limit of a piece."""
    start_timeout_s: float
    """Without progress, before the main loop starts and in a computation's first call."""
    silent_after_s: float = REPLACED_AFTER_S
    """Without a heartbeat; a live process sends one every second."""
    stopped_after_s: float = STOPPED_AFTER_S
    """Without a heartbeat, and without any thread running."""
    checkpoint_timeout_s: float = 600.0
    drain_timeout_s: float = 20.0
    outage_timeout_s: float = 0.0
    """A worker's own limit for a ledger that is full or away."""
    send_timeout_s: float = 0.0
    """A sender's own limit for a mailbox; after that the chunk counts as overdue work."""

    @property
    def least_s(self) -> float:
        """Limit without progress when no piece has been measured."""
        return LEAST_S if self.stuck_after_s is None else self.stuck_after_s

    def drain_limit_s(self, beat: Heartbeat) -> float:
        """Return how long a draining worker may go without progress, so that it can finish its
        computation or write."""
        piece_s = piece_limit_s(beat.work.slowest_s, self.stuck_after_s) if beat.work.slowest_s else 0.0
        storing_s = self.checkpoint_timeout_s if beat.waiting_for is WaitingFor.DISK else 0.0
        return max(self.drain_timeout_s, piece_s, storing_s)

    def limit_s(self, waiting_for: WaitingFor, slowest_s: float = 0.0) -> float:
        """Return the limit without progress at a wait. ``slowest_s``: the slowest piece of work so
        far."""
        match waiting_for.limit:
            case LimitKind.START:
                return self.start_timeout_s
            case LimitKind.CHECKPOINT:
                return self.checkpoint_timeout_s
            case LimitKind.OUTAGE:
                return self.outage_timeout_s + self.least_s
            case LimitKind.SEND:
                return self.send_timeout_s + self.least_s
            case LimitKind.DRAIN:
                return self.drain_timeout_s + piece_limit_s(slowest_s, self.stuck_after_s)
            case LimitKind.PIECE:
                return piece_limit_s(slowest_s, self.stuck_after_s)


@dataclass(slots=True)
class _Seen:
    """The last reading of a process, and when things last changed on the reader's clock."""

    pid: int
    started_s: float
    changed_s: float
    moved_s: float
    turned_s: float
    ran_s: float
    """When it may last have run."""
    activity: Activity | None = None
    """None: unknown, so it may have run."""
    beat_at_s: float | None = None
    """On the worker's clock; only changes matter."""
    progress: tuple[int, ...] = ()
    """Productive turns, pieces, and work begun; only changes matter."""
    turns: int = -1
    at: tuple[WaitingFor, bool] = (WaitingFor.STARTING, False)
    """The last reported wait, and whether the worker held work."""
    until_s: float = 0.0
    stood_s: dict[tuple[WaitingFor, bool], float] = field(default_factory=dict[tuple[WaitingFor, bool], float])
    """Time spent at each since the last progress, up to ``until_s``."""

    def restart(self, now_s: float) -> None:
        self.changed_s = self.moved_s = self.turned_s = self.ran_s = self.until_s = now_s
        self.stood_s.clear()


class Watchdog:
    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._seen: dict[str, _Seen] = {}
        self._guests: dict[str, _Seen] = {}
        self._evaluated_s: float | None = None

    def reset_timers(self, now_s: float) -> None:
        """Restart all limits, because heartbeats could not be read."""
        for seen in [*self._seen.values(), *self._guests.values()]:
            seen.restart(now_s)

    def quiet(self, now_s: float) -> list[str]:
        """Return workers whose heartbeats are late, for which ``evaluate`` needs their activity."""
        return [worker for worker, seen in self._seen.items() if now_s - seen.changed_s > HEARTBEAT_WITHIN_S]

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
        stood_s = 0.0 if self._evaluated_s is None else now_s - self._evaluated_s
        # the reader itself stalled
        if stood_s > self._timeouts.silent_after_s / 2:
            self.reset_timers(now_s)
        elif stood_s > self._timeouts.stopped_after_s / 2:
            activity = _NO_ACTIVITY
        self._evaluated_s = now_s
        by_pid = {(beat.who.worker, beat.pid): beat for beat in beats}
        for worker in [name for name, seen in self._seen.items() if pids.get(name) != seen.pid]:
            del self._seen[worker]
        dead: dict[str, str] = {}
        for worker, pid in pids.items():
            seen = self._seen.setdefault(worker, _Seen(pid, now_s, now_s, now_s, now_s, now_s, until_s=now_s))
            beat = by_pid.get((worker, pid))
            _remember(seen, beat, now_s)
            done = activity.get(worker)
            if done is None or done != seen.activity:
                seen.activity, seen.ran_s = done, now_s
            reason = self._reason(seen, beat, now_s, overdue_s)
            if reason is not None:
                dead[worker] = reason
        return dead

    def departed(
        self, beats: Iterable[Heartbeat], pids: Mapping[str, int], gone: Container[int], now_s: float
    ) -> dict[str, str]:
        """Return the reason for every silent worker that another process started, by worker.

        ``pids``: the supervisor's own processes. ``gone``: process ids on this host that have
        ended."""
        guests = {beat.who.worker: beat for beat in beats if pids.get(beat.who.worker) != beat.pid}
        for worker in [n for n, seen in self._guests.items() if n not in guests or guests[n].pid != seen.pid]:
            del self._guests[worker]
        silent: dict[str, str] = {}
        for worker, beat in guests.items():
            seen = self._guests.setdefault(worker, _Seen(beat.pid, now_s, now_s, now_s, now_s, now_s, until_s=now_s))
            _remember(seen, beat, now_s)
            silent_s = now_s - seen.changed_s
            if silent_s > (self._timeouts.silent_after_s if beat.pid in gone else self._timeouts.least_s):
                silent[worker] = f"no heartbeat for {silent_s:.0f} s"
        return silent

    def moved_s(self, worker: str) -> float | None:
        """Return when a worker last made progress, on the reader's clock; None if unknown."""
        seen = self._seen.get(worker)
        return None if seen is None else seen.moved_s

    def is_silent(self, worker: str, now_s: float) -> bool:
        """Return whether a worker's heartbeat has stopped: its process is frozen or gone."""
        seen = self._seen.get(worker)
        return seen is not None and (
            now_s - seen.changed_s > self._timeouts.silent_after_s or self._is_stopped(seen, now_s)
        )

    def _is_stopped(self, seen: _Seen, now_s: float) -> bool:
        return now_s - max(seen.ran_s, seen.changed_s) > self._timeouts.stopped_after_s

    def _reason(self, seen: _Seen, beat: Heartbeat | None, now_s: float, overdue_s: Mapping[Role, float]) -> str | None:
        timeouts = self._timeouts
        silent_s, dead_s = now_s - seen.changed_s, now_s - seen.turned_s
        if seen.beat_at_s is None:
            is_late = silent_s > timeouts.start_timeout_s
            return f"not started after {now_s - seen.started_s:.0f} s (supervisor.start_timeout_s)" if is_late else None
        # without a heartbeat it has left or was fenced, and is about to end
        if beat is None:
            is_late = silent_s > max(timeouts.silent_after_s, timeouts.drain_timeout_s)
            return f"left {silent_s:.0f} s ago and has not ended (supervisor.drain_timeout_s)" if is_late else None
        if silent_s > timeouts.silent_after_s:
            return f"no heartbeat for {silent_s:.0f} s (supervisor.silent_after_s)"
        if self._is_stopped(seen, now_s):
            return f"no heartbeat for {silent_s:.0f} s, and its process does not run (supervisor.stopped_after_s)"
        at, limit_s = beat.waiting_for, timeouts.limit_s(beat.waiting_for, beat.work.slowest_s)
        still_s = seen.stood_s.get(seen.at, 0.0)
        if at is WaitingFor.STARTING:
            is_late = min(still_s, now_s - seen.started_s) > limit_s
            return f"not started after {now_s - seen.started_s:.0f} s (supervisor.start_timeout_s)" if is_late else None
        if at.stage is Stage.COMPUTING and still_s > limit_s:
            return f"at {at} without progress for {still_s:.0f} s, {limit_s:g} s are allowed"
        if beat.turns > 0 and dead_s > limit_s:
            return f"its loop has not turned for {dead_s:.0f} s, last at {at}; {limit_s:g} s are allowed"
        if beat.held > 0 and not at.may_hold and still_s > limit_s:
            return f"holds {beat.held} pieces of work without progress for {still_s:.0f} s, at {at}; {limit_s:g} s are allowed"
        lain_s = overdue_s.get(beat.who.role, 0.0)
        if at is WaitingFor.INPUT and min(lain_s, still_s) > timeouts.least_s:
            return f"idle for {still_s:.0f} s although work of its role has been overdue for {lain_s:.0f} s"
        return None


def _remember(seen: _Seen, beat: Heartbeat | None, now_s: float) -> None:
    if beat is None:
        return
    if beat.at_s != seen.beat_at_s:
        seen.beat_at_s, seen.changed_s = beat.at_s, now_s
    seen.stood_s[seen.at] = seen.stood_s.get(seen.at, 0.0) + now_s - seen.until_s
    seen.until_s = now_s
    progress = (beat.progress, beat.work.steps, beat.storing.steps if beat.waiting_for.counts_writes else 0, beat.begun)
    if progress != seen.progress:
        seen.progress, seen.moved_s, seen.turned_s = progress, now_s, now_s
        seen.stood_s.clear()
    if beat.turns != seen.turns:
        seen.turns, seen.turned_s = beat.turns, now_s
    seen.at = beat.waiting_for, beat.held > 0
