"""Which workers are alive by name only: frozen, stuck, or never begun. Pure; time is an argument.

*Consumes* heartbeats as they are read, and the reader's own monotonic time. *Produces* workers to be replaced, with reasons.
*Waits for* nothing.

A worker is judged by what changes between two readings, on the reader's clock: wall clocks jump, and a laptop that slept for
an hour, or a ledger that was away for a minute, must not look like a fleet of dead workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.runtime.registry import Heartbeat, WaitingFor


@dataclass(frozen=True, slots=True)
class Patience:
    """How long each sign of death may last."""

    stuck_after_s: float
    """Computing without progress."""
    start_timeout_s: float
    """From the start of the process to the first progress: imports, models, data."""
    silent_after_s: float = 10.0
    """Without a heartbeat: its thread writes one every second."""


@dataclass(slots=True)
class _Seen:
    pid: int
    started_s: float
    """When this process was first looked at."""
    beat_at_s: float | None = None
    """As the worker said, by its own clock: only whether it changes matters."""
    progress: int = -1
    changed_s: float = 0.0
    """When the heartbeat last changed, by the reader's clock."""
    moved_s: float = 0.0
    """When the progress last changed, by the reader's clock."""


class Watchdog:
    """Watches the processes of one supervisor."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._seen: dict[str, _Seen] = {}

    def blind(self, now_s: float) -> None:
        """Say that no heartbeat could be read just now: everybody's patience starts again."""
        for seen in self._seen.values():
            seen.changed_s = seen.moved_s = now_s

    def look(self, beats: Iterable[Heartbeat], pids: Mapping[str, int], now_s: float) -> dict[str, str]:
        """Return worker -> why it must be replaced, among the processes ``pids`` that are there."""
        by_pid = {(beat.who.worker, beat.pid): beat for beat in beats}
        for worker in [name for name, seen in self._seen.items() if pids.get(name) != seen.pid]:
            del self._seen[worker]
        dead: dict[str, str] = {}
        for worker, pid in pids.items():
            seen = self._seen.setdefault(worker, _Seen(pid, now_s, changed_s=now_s, moved_s=now_s))
            beat = by_pid.get((worker, pid))
            _remember(seen, beat, now_s)
            reason = self._reason(seen, beat, now_s)
            if reason is not None:
                dead[worker] = reason
        return dead

    def _reason(self, seen: _Seen, beat: Heartbeat | None, now_s: float) -> str | None:
        patience = self._patience
        age_s, silent_s, still_s = now_s - seen.started_s, now_s - seen.changed_s, now_s - seen.moved_s
        if seen.beat_at_s is None or (beat is not None and beat.waiting_for is WaitingFor.STARTING):
            if age_s > patience.start_timeout_s and still_s > patience.start_timeout_s:
                return f"not started after {age_s:.0f} s (supervisor.start_timeout_s)"
            if seen.beat_at_s is None:
                return None
        if silent_s > patience.silent_after_s:
            return f"no heartbeat for {silent_s:.0f} s"
        if (
            beat is not None
            and beat.waiting_for is WaitingFor.COMPUTE
            and still_s > patience.stuck_after_s
            and age_s > patience.start_timeout_s
        ):
            return f"computing without progress for {still_s:.0f} s (supervisor.stuck_after_s)"
        return None


def _remember(seen: _Seen, beat: Heartbeat | None, now_s: float) -> None:
    if beat is None:
        return
    if beat.at_s != seen.beat_at_s:
        seen.beat_at_s, seen.changed_s = beat.at_s, now_s
    if beat.progress != seen.progress:
        seen.progress, seen.moved_s = beat.progress, now_s
