"""Completes heartbeats that a test writes by hand with what a worker measures and the registry adds."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from pipeline.runtime.registry.contract import Heartbeat
from pipeline.runtime.worker_state import Standing


@dataclass
class _Worker:
    at_s: float
    arrived_s: float
    moved_s: float
    turned_s: float
    standing: Standing
    moved: tuple[int, ...] = ()
    turns: int = -1
    still_s: float = 0.0


@dataclass
class Reported:
    """``beats`` on one clock: a heartbeat arrives when its ``at_s`` changes."""

    workers: dict[tuple[str, int], _Worker] = field(default_factory=dict[tuple[str, int], _Worker])

    def beats(self, beats: list[Heartbeat], now_s: float) -> list[Heartbeat]:
        return [self._completed(beat, now_s) for beat in beats]

    def _completed(self, beat: Heartbeat, now_s: float) -> Heartbeat:
        key = (beat.who.worker, beat.pid)
        worker = self.workers.setdefault(key, _Worker(-1.0, now_s, now_s, now_s, Standing(now_s)))
        if beat.at_s != worker.at_s:
            worker.at_s, worker.arrived_s = beat.at_s, now_s
            writes = beat.storing.steps if beat.waiting_for.counts_writes else 0
            moved = (beat.progress, beat.work.steps, writes, beat.begun)
            worker.still_s = worker.standing.observe(now_s, (beat.waiting_for, beat.held > 0), moved)
            if moved != worker.moved:
                worker.moved, worker.moved_s, worker.turned_s = moved, now_s, now_s
            if beat.turns != worker.turns:
                worker.turns, worker.turned_s = beat.turns, now_s
        arrived_s = worker.arrived_s
        # the epoch of the wall clock is long ago
        wall_s = beat.at_s + 1e6
        return msgspec.structs.replace(
            beat,
            at_s=wall_s,
            still_s=worker.still_s,
            moved_at_s=wall_s - (arrived_s - worker.moved_s),
            turned_at_s=wall_s - (arrived_s - worker.turned_s),
            silent_s=now_s - arrived_s,
        )
