"""Keeps the ledger's server alive, and feeds metrics, the fleet history and the live view.

A thread watches the server, while the supervisor's loop reads overdue work and totals."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from pipeline.fleet.state import Worker, overdue_ages
from pipeline.fleet.status import RunSnapshot
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.server.disk import disk_trouble
from pipeline.ledger.server.embedded import EmbeddedServer
from pipeline.ledger.server.probe import ServerWatch
from pipeline.ledger.types import QueueStat, Totals
from pipeline.observability.effective_reader import EffectiveTimeReader
from pipeline.observability.effective_time import EffectiveTime
from pipeline.observability.fleet_history import FleetMeter, fleet_history
from pipeline.runtime.registry.contract import Registry, RunState, RunStatus
from pipeline.supervisor.fleet_plan import FleetPlan
from protocol.errors import LedgerDiskFailed, LedgerError, LedgerUnavailable
from protocol.ids import Role

if TYPE_CHECKING:
    from pipeline.observability.metrics import MetricsServer

_EFFECTIVE_EVERY_S = 30.0
_LEAST_S = 0.5
"""Shortest last interval that is worth a row."""


class FleetRecorder:
    """Writes a row about how the fleet spends its time every few seconds (``fleet_history``). If
    the disk refuses one, that is logged once and the run goes on."""

    def __init__(self, run_dir: Path, now_s: float, *, clock: Callable[[], float] = time.time) -> None:
        """``now_s``: monotonic; ``clock``: wall clock."""
        self._meter = FleetMeter(now_s)
        self._history = fleet_history(run_dir)
        self._clock = clock
        self._is_refused = False
        self._effective_time = EffectiveTimeReader(run_dir)
        self._next_effective_s = 0.0

    async def effective_time(self, now_s: float) -> EffectiveTime | None:
        """Return how much of the run's time became updates; None if it was read less than half a
        minute ago."""
        if now_s < self._next_effective_s:
            return None
        self._next_effective_s = now_s + _EFFECTIVE_EVERY_S
        with suppress(OSError):
            return await asyncio.to_thread(self._effective_time.read)
        return None

    async def record(
        self,
        beats: Iterable[Worker],
        wanted: Mapping[str, Role],
        ledger: RedisLedger,
        queues: Sequence[QueueStat],
        now_s: float,
    ) -> None:
        """Take in heartbeats, and write a row when it is due. ``wanted``: workers that run or
        start. Raises LedgerError."""
        self._meter.observe(beats, now_s, wanted)
        if self._meter.is_due(now_s):
            await self._write(ledger, queues, now_s)

    async def record_last(self, ledger: RedisLedger, queues: Sequence[QueueStat], now_s: float) -> None:
        if self._meter.is_due(now_s, _LEAST_S):
            await self._write(ledger, queues, now_s)

    async def _write(self, ledger: RedisLedger, queues: Sequence[QueueStat], now_s: float) -> None:
        row = self._meter.finish_row(await ledger.totals(), queues, now_s, self._clock())
        try:
            await asyncio.to_thread(self._history.append, row)
        except OSError as error:
            if not self._is_refused:
                log.warning("fleet_history_not_written", reason=str(error))
            self._is_refused = True
        else:
            self._is_refused = False


_SERVER_CHECK_S = 1.0
_NO_ROOM_CHECK_S = 5.0
_SUSPICIOUS_CHECK_S = 0.1
"""Interval while the server seems dead, until enough probes agree."""
_OVERDUE_CHECK_S = 1.0

log = structlog.get_logger(__name__)


class Monitor:
    def __init__(
        self,
        registry: Registry,
        ledger: RedisLedger,
        server: EmbeddedServer | None,
        metrics: MetricsServer | None,
        watch: Callable[[RunSnapshot], None] | None,
        watch_every_s: float,
        scoring_deadline_s: float,
        server_patience_s: float,
        recorder: FleetRecorder | None = None,
    ) -> None:
        self.registry = registry
        self._recorder = recorder
        self._scoring_deadline_s = scoring_deadline_s
        self._ledger = ledger
        self._server = server
        self._metrics = metrics
        self._queues: Sequence[QueueStat] = ()
        self._totals: Totals | None = None
        self.is_paused = False
        """Whether an operator has paused admission; at most 1 s old."""
        self._watch = watch
        self._watch_every_s = watch_every_s
        self._next_watch_s = self._next_overdue_s = 0.0
        self._shown: RunState | None = None
        self._overdue_s: dict[Role, float] = {}
        self._watch_server = ServerWatch(patience_s=server_patience_s)
        self._keeper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger-server")
        self._keeping: Future[None] | None = None
        self._is_closing = threading.Event()
        self._folder = None if server is None else server.folder
        self._is_disk_full = False

    def keep_server(self) -> None:
        """Start a thread that watches the embedded server; later calls raise what it met.

        A separate thread, since an unresponsive server would block the loop, and a loop blocked by
        a dead one could not restart it. Raises LedgerUnavailable: the server cannot be restarted or
        killed."""
        if self._server is None:
            return
        if self._keeping is None:
            self._keeping = self._keeper.submit(self._keep, self._server)
        elif self._keeping.done():
            self._keeping.result()

    def _keep(self, server: EmbeddedServer) -> None:
        pause_s = 0.0
        while not self._is_closing.wait(pause_s):
            try:
                server.supervise(self._watch_server, time.monotonic())
            except LedgerUnavailable as error:
                if self._is_closing.is_set():
                    return
                trouble = disk_trouble(server.folder, is_refused=False)
                if not trouble:
                    raise
                # retry until the disk has room
                log.error("ledger_server_not_started", reason=str(error), disk=trouble)
                pause_s = _NO_ROOM_CHECK_S
            else:
                pause_s = _SUSPICIOUS_CHECK_S if self._watch_server.is_suspicious else _SERVER_CHECK_S

    async def end_record(self, now: float) -> None:
        if self._recorder is not None:
            with suppress(LedgerError):
                await self._recorder.record_last(self._ledger, self._queues, now)

    async def close(self, *, stops_server: bool = True) -> None:
        """Stop watching the embedded server, then stop the server. Raises LedgerUnavailable if it
        does not end."""
        await asyncio.to_thread(self._close, stops_server=stops_server)

    def _close(self, *, stops_server: bool) -> None:
        self._is_closing.set()
        if not stops_server:
            self._keeper.shutdown()
        elif self._server is not None:
            # the first stop ends a start in progress
            self._server.stop()
            self._keeper.shutdown()
            # the second ends one that was about to begin
            self._server.stop()

    async def check(self) -> None:
        """Check that the ledger accepts writes; while it does not, old heartbeats mean nothing.

        Raises LedgerUnavailable: it does not answer, or its disk is full."""
        try:
            await self._ledger.check()
        except LedgerDiskFailed as error:
            if not self._is_disk_full:
                self._is_disk_full = True
                log.error("ledger_disk_full", reason=str(error), folder=str(self._folder))
            raise
        if self._is_disk_full:
            self._is_disk_full = False
            log.warning("ledger_disk_has_room_again")

    async def overdue(self, now: float) -> dict[Role, float]:
        """Return how far each scoring role's oldest work is beyond its deadline, in seconds; at
        most 1 s old."""
        if now >= self._next_overdue_s:
            self._next_overdue_s = now + _OVERDUE_CHECK_S
            self._queues = await self._ledger.queues()
            self._totals = await self._ledger.totals()
            self.is_paused = self._totals.paused is not None
            self._overdue_s = overdue_ages(self._queues, self._scoring_deadline_s)
        return self._overdue_s

    async def show(self, status: RunStatus, beats: Sequence[Worker], plan: FleetPlan, now: float) -> None:
        """Update the metrics endpoint, the fleet history and, when due, the live view. A new state
        is shown at once, since it may be the last."""
        if self._metrics is not None:
            effective = await self._recorder.effective_time(now) if self._recorder is not None else None
            num_unreadable = len(self.registry.unreadable)
            self._metrics.update(beats, self._queues, self._totals, effective, num_unreadable)
        if self._recorder is not None:
            await self._recorder.record(beats, plan.wanted, self._ledger, self._queues, now)
        is_due = now >= self._next_watch_s or status.state is not self._shown
        if self._watch is None or not is_due:
            return
        self._next_watch_s = now + self._watch_every_s
        snapshot = RunSnapshot(status, beats, await self._ledger.totals(), tuple(plan.absent))
        self._shown = status.state
        # a terminal that is busy or closed only misses updates
        with suppress(OSError):
            self._watch(snapshot)
