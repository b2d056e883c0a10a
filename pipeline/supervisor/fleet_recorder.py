"""Records how the fleet spends its time, beside the supervisor's loop (``fleet_history``).

The loop's heartbeats become a row every few seconds. A disk that refuses the row is logged once,
and the run goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.types import QueueStat
from pipeline.observability.effective_reader import EffectiveTimeReader
from pipeline.observability.effective_time import EffectiveTime
from pipeline.observability.fleet_history import FleetHistoryFile, FleetMeter
from pipeline.runtime.registry.contract import Heartbeat
from protocol.ids import Role

_EFFECTIVE_EVERY_S = 30.0
_LEAST_S = 0.5
"""Least length of a run's last interval."""

log = structlog.get_logger(__name__)


class FleetRecorder:
    """Writes a run's fleet history."""

    def __init__(self, run_dir: Path, now_s: float, *, clock: Callable[[], float] = time.time) -> None:
        """``now_s``: the monotonic time of the begin; ``clock``: of the wall."""
        self._meter = FleetMeter(now_s)
        self._history = FleetHistoryFile(run_dir)
        self._clock = clock
        self._is_refused = False
        self._effective_time = EffectiveTimeReader(run_dir)
        self._next_effective_s = 0.0

    async def effective_time(self, now_s: float) -> EffectiveTime | None:
        """Return how much of the run's time became updates, every half minute; None in between."""
        if now_s < self._next_effective_s:
            return None
        self._next_effective_s = now_s + _EFFECTIVE_EVERY_S
        with suppress(OSError):
            return await asyncio.to_thread(self._effective_time.read)
        return None

    async def look(
        self,
        beats: Iterable[Heartbeat],
        wanted: Mapping[str, Role],
        ledger: RedisLedger,
        queues: Sequence[QueueStat],
        now_s: float,
    ) -> None:
        """Take a look at the heartbeats, and write a row when it is due. ``wanted``: workers
        that run or start. Raises LedgerError."""
        self._meter.see(beats, now_s, wanted)
        if self._meter.is_due(now_s):
            await self._write(ledger, queues, now_s)

    async def end(self, ledger: RedisLedger, queues: Sequence[QueueStat], now_s: float) -> None:
        """Write the row of a last, shorter interval. Raises LedgerError."""
        if self._meter.is_due(now_s, _LEAST_S):
            await self._write(ledger, queues, now_s)

    async def _write(self, ledger: RedisLedger, queues: Sequence[QueueStat], now_s: float) -> None:
        row = self._meter.take(await ledger.totals(), queues, now_s, self._clock())
        try:
            await asyncio.to_thread(self._history.append, row)
        except OSError as error:
            if not self._is_refused:
                log.warning("fleet_history_not_written", reason=str(error))
            self._is_refused = True
        else:
            self._is_refused = False
