"""Which workers are alive by name only: frozen, stuck, idle beside their work, or never begun.
Pure; time is an argument.

*Consumes* heartbeats as they are read, how long each role's work has lain in the ledger, and the
reader's own monotonic time. *Produces* workers to be replaced, with reasons. *Waits for* nothing.

A worker is judged by what changes between two readings, on the reader's clock: wall clocks jump,
and a laptop that slept for an hour, a ledger that was away for a minute, or a reader that was
itself stopped must not look like a fleet of dead workers.

    what stands still          means                                  borne for
    the heartbeat              the process is frozen                  silent_after_s
    nothing: it has left       the process does not end               drain_timeout_s
    turns, and pieces          the main loop is dead, whatever        the limit of what it says it waits for
                               it says that it waits for
    progress, and pieces, at   it is stuck with work in its hands     the limit of what it says it waits for
    compute or with work held
    progress, at input, while  it turns, but past its work            60 s, or stuck_after_s
    its role's work lies overdue

A piece is what long work tells of before it has ended: a layer of a pass, a decode step, a verdict,
a file (``pipeline.process.work``). How long one may take follows from what was measured: several
times the slowest so far of that kind of work, and a minute in any case. What a person has set
(``stuck_after_s``) is the most that is borne, however slow pieces were.

An idle worker turns and holds nothing: it may be idle for ever. One that waits for credit or
weights may hold what it likes. How long a worker was idle before its work says nothing of that
work.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from pipeline.process.work import LEAST_S, piece_limit_s
from pipeline.runtime.registry.contract import MAY_HOLD, Heartbeat, WaitingFor
from protocol.ids import Role

_NO_OVERDUE: Mapping[Role, float] = {}
_WITH_DISK = frozenset({WaitingFor.DISK, WaitingFor.DRAINING})
"""Where what is written to the disk is what is waited for; elsewhere it must not hide that nothing
else moves.
"""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long each sign of death may last, in seconds."""

    stuck_after_s: float | None
    """Without a turn of the main loop, or without progress though there is work: at most. None: as
    long as what was measured says, and a minute where nothing was."""
    start_timeout_s: float
    """Without progress from the start of the process to its main loop (imports, models, data), and
    in the first call of a computation."""
    silent_after_s: float = 10.0
    """Without a heartbeat: its thread writes one every second."""
    checkpoint_timeout_s: float = 600.0
    drain_timeout_s: float = 20.0
    outage_timeout_s: float = 0.0
    """How long a worker itself bears a ledger that is full or away, before it ends."""
    send_timeout_s: float = 0.0
    """How long a sender waits for room in a mailbox, before it leaves a chunk to the
    overdue index.
    """

    @property
    def least_s(self) -> float:
        """How long a worker may stand still where nothing is measured."""
        return LEAST_S if self.stuck_after_s is None else self.stuck_after_s

    def drain_limit_s(self, beat: Heartbeat) -> float:
        """Return how long a worker that drains may stand still: what is computed or written is
        brought to its end.
        """
        piece_s = piece_limit_s(beat.work.slowest_s, self.stuck_after_s) if beat.work.slowest_s else 0.0
        storing_s = self.checkpoint_timeout_s if beat.waiting_for is WaitingFor.DISK else 0.0
        return max(self.drain_timeout_s, piece_s, storing_s)

    def limit_s(self, waiting_for: WaitingFor, slowest_s: float = 0.0) -> float:
        """Return how long a worker may stand still at this wait; ``slowest_s``: what its slowest
        piece of work took so far.
        """
        match waiting_for:
            case WaitingFor.STARTING | WaitingFor.COMPILE:
                return self.start_timeout_s
            case WaitingFor.DISK:
                return self.checkpoint_timeout_s
            case WaitingFor.LEDGER:
                return self.outage_timeout_s + self.least_s
            case WaitingFor.ROOM:
                return self.send_timeout_s + self.least_s
            case WaitingFor.DRAINING | WaitingFor.STOPPED:
                return self.drain_timeout_s + piece_limit_s(slowest_s, self.stuck_after_s)
            case _:
                return piece_limit_s(slowest_s, self.stuck_after_s)


@dataclass(slots=True)
class _Seen:
    """What was last read of a process, and when that last changed by the reader's clock."""

    pid: int
    started_s: float
    """When this process was first looked at."""
    changed_s: float
    moved_s: float
    turned_s: float
    beat_at_s: float | None = None
    """As the worker said, by its own clock: only whether it changes matters."""
    progress: tuple[int, ...] = ()
    """Turns of the loop that did something, pieces, and beginnings: only whether they change
    matters.
    """
    turns: int = -1


class Watchdog:
    """Watches the processes of one supervisor."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._seen: dict[str, _Seen] = {}
        self._guests: dict[str, _Seen] = {}
        self._looked_s: float | None = None

    def blind(self, now_s: float) -> None:
        """Say that no heartbeat could be read just now: everybody's patience starts again."""
        for seen in [*self._seen.values(), *self._guests.values()]:
            seen.changed_s = seen.moved_s = seen.turned_s = now_s

    def look(
        self,
        beats: Iterable[Heartbeat],
        pids: Mapping[str, int],
        now_s: float,
        overdue_s: Mapping[Role, float] = _NO_OVERDUE,
    ) -> dict[str, str]:
        """Return worker -> why it must be replaced, among the processes ``pids`` that are there.

        Args:
            beats: The last heartbeat of every worker.
            pids: The processes to be judged, by worker.
            now_s: The reader's monotonic time.
            overdue_s: For how long work of a role has lain in the ledger beyond its deadline.
        """
        if self._looked_s is not None and now_s - self._looked_s > self._timeouts.silent_after_s / 2:
            # it is the reader that stood still
            self.blind(now_s)
        self._looked_s = now_s
        by_pid = {(beat.who.worker, beat.pid): beat for beat in beats}
        for worker in [name for name, seen in self._seen.items() if pids.get(name) != seen.pid]:
            del self._seen[worker]
        dead: dict[str, str] = {}
        for worker, pid in pids.items():
            seen = self._seen.setdefault(worker, _Seen(pid, now_s, now_s, now_s, now_s))
            beat = by_pid.get((worker, pid))
            _remember(seen, beat, now_s)
            reason = self._reason(seen, beat, now_s, overdue_s)
            if reason is not None:
                dead[worker] = reason
        return dead

    def departed(
        self, beats: Iterable[Heartbeat], pids: Mapping[str, int], gone: Container[int], now_s: float
    ) -> dict[str, str]:
        """Return worker -> why it is to be buried, among those that somebody else started and that
        fell silent.

        Args:
            beats: The last heartbeat of every worker.
            pids: The processes that are ours, and so not judged here.
            gone: Process ids of guests on this host that are known to have ended.
            now_s: The reader's monotonic time.
        """
        guests = {beat.who.worker: beat for beat in beats if pids.get(beat.who.worker) != beat.pid}
        for worker in [
            name for name, seen in self._guests.items() if name not in guests or guests[name].pid != seen.pid
        ]:
            del self._guests[worker]
        buried: dict[str, str] = {}
        for worker, beat in guests.items():
            seen = self._guests.setdefault(worker, _Seen(beat.pid, now_s, now_s, now_s, now_s))
            _remember(seen, beat, now_s)
            silent_s = now_s - seen.changed_s
            if silent_s > (self._timeouts.silent_after_s if beat.pid in gone else self._timeouts.least_s):
                buried[worker] = f"no heartbeat for {silent_s:.0f} s"
        return buried

    def moved_s(self, worker: str) -> float | None:
        """Return when a worker was last seen to get on with its work, by the reader's clock; None
        for a stranger.
        """
        seen = self._seen.get(worker)
        return None if seen is None else seen.moved_s

    def is_silent(self, worker: str, now_s: float) -> bool:
        """Return whether a worker's heartbeat stands still: its process is frozen or gone, whatever
        it was doing.
        """
        seen = self._seen.get(worker)
        return seen is not None and now_s - seen.changed_s > self._timeouts.silent_after_s

    def _reason(self, seen: _Seen, beat: Heartbeat | None, now_s: float, overdue_s: Mapping[Role, float]) -> str | None:
        timeouts = self._timeouts
        silent_s, still_s, dead_s = now_s - seen.changed_s, now_s - seen.moved_s, now_s - seen.turned_s
        if seen.beat_at_s is None:
            is_late = silent_s > timeouts.start_timeout_s
            return f"not started after {now_s - seen.started_s:.0f} s (supervisor.start_timeout_s)" if is_late else None
        # it has said goodbye, or was fenced: it is about to end
        if beat is None:
            is_late = silent_s > max(timeouts.silent_after_s, timeouts.drain_timeout_s)
            return f"left {silent_s:.0f} s ago and has not ended (supervisor.drain_timeout_s)" if is_late else None
        if silent_s > timeouts.silent_after_s:
            return f"no heartbeat for {silent_s:.0f} s (supervisor.silent_after_s)"
        at, limit_s = beat.waiting_for, timeouts.limit_s(beat.waiting_for, beat.work.slowest_s)
        if at is WaitingFor.STARTING:
            is_late = min(still_s, now_s - seen.started_s) > limit_s
            return f"not started after {now_s - seen.started_s:.0f} s (supervisor.start_timeout_s)" if is_late else None
        if at in (WaitingFor.COMPUTE, WaitingFor.COMPILE) and still_s > limit_s:
            return f"at {at} without progress for {still_s:.0f} s, {limit_s:g} s are allowed"
        if beat.turns > 0 and dead_s > limit_s:
            return f"its loop has not turned for {dead_s:.0f} s, last at {at}; {limit_s:g} s are allowed"
        if beat.held > 0 and at not in MAY_HOLD and still_s > limit_s:
            return f"holds {beat.held} pieces of work without progress for {still_s:.0f} s, at {at}; {limit_s:g} s are allowed"
        lain_s = overdue_s.get(beat.who.role, 0.0)
        if at is WaitingFor.INPUT and min(lain_s, still_s) > timeouts.least_s:
            return f"idle for {still_s:.0f} s though work of its role is overdue since {lain_s:.0f} s"
        return None


def _remember(seen: _Seen, beat: Heartbeat | None, now_s: float) -> None:
    if beat is None:
        return
    if beat.at_s != seen.beat_at_s:
        seen.beat_at_s, seen.changed_s = beat.at_s, now_s
    progress = (beat.progress, beat.work.steps, beat.storing.steps if beat.waiting_for in _WITH_DISK else 0, beat.begun)
    if progress != seen.progress:
        seen.progress, seen.moved_s, seen.turned_s = progress, now_s, now_s
    if beat.turns != seen.turns:
        seen.turns, seen.turned_s = beat.turns, now_s
