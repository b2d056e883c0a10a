"""Keeps the ledger's server alive, and feeds metrics, fleet history and view.

A thread watches the server. The loop reads overdue work and totals, and waits for those answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.server.disk import disk_trouble
from pipeline.ledger.server.embedded import EmbeddedServer
from pipeline.ledger.server.probe import ServerWatch
from pipeline.ledger.types import QueueStat, Totals
from pipeline.observability.status import RunSnapshot
from pipeline.runtime.registry.contract import Heartbeat, Registry, RunState, RunStatus
from pipeline.supervisor.fleet_plan import FleetPlan
from protocol.errors import LedgerDiskFailed, LedgerError, LedgerUnavailable
from protocol.ids import Role
from protocol.trajectory import Field

if TYPE_CHECKING:
    from pipeline.observability.metrics import MetricsServer


from collections.abc import Iterable, Mapping
from pathlib import Path

from pipeline.observability.effective_reader import EffectiveTimeReader
from pipeline.observability.effective_time import EffectiveTime
from pipeline.observability.fleet_history import FleetHistoryFile, FleetMeter

# Records how the fleet spends its time (``fleet_history``).
#
# The loop's heartbeats become a row every few seconds. A disk that refuses the row is logged once,
# and the run goes on.

_EFFECTIVE_EVERY_S = 30.0
_LEAST_S = 0.5
"""Least length of a run's last interval."""


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

    async def record(
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

    async def record_last(self, ledger: RedisLedger, queues: Sequence[QueueStat], now_s: float) -> None:
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


_SERVER_CHECK_S = 1.0
_NO_ROOM_CHECK_S = 5.0
_SUSPICIOUS_CHECK_S = 0.1
"""Interval while the server seems dead, until enough probes agree."""
_OVERDUE_CHECK_S = 1.0
_SCORED = {
    Role.REWARD: (Field.REWARD,),
    Role.REFERENCE: (Field.REFERENCE, Field.GUIDANCE),
    Role.VALUE: (Field.VALUE,),
}

log = structlog.get_logger(__name__)


class Monitor:
    """Everything that the supervisor's loop reads and writes apart from processes."""

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
        """Whether an operator has paused admission, at most 1 s ago."""
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
        """Have a thread watch the embedded server, from the first call on.

        A mute server would hold up the loop. A loop that waits for a dead one would hold up its
        start. Raises LedgerUnavailable: it cannot be started again, or not be ended."""
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
                # The start is repeated until there is room.
                log.error("ledger_server_not_started", reason=str(error), disk=trouble)
                pause_s = _NO_ROOM_CHECK_S
            else:
                pause_s = _SUSPICIOUS_CHECK_S if self._watch_server.is_suspicious else _SERVER_CHECK_S

    async def end_record(self, now: float) -> None:
        """Write the last row of the fleet's history, if the ledger answers."""
        if self._recorder is not None:
            with suppress(LedgerError):
                await self._recorder.record_last(self._ledger, self._queues, now)

    async def close(self, *, stops_server: bool = True) -> None:
        """End the watch of the embedded server, and the server. Raises LedgerUnavailable when it
        does not end."""
        await asyncio.to_thread(self._close, stops_server=stops_server)

    def _close(self, *, stops_server: bool) -> None:
        self._is_closing.set()
        if not stops_server:
            self._keeper.shutdown()
        elif self._server is not None:
            # The first stop ends the wait of a start under way.
            self._server.stop()
            self._keeper.shutdown()
            # The second ends a start that was about to begin.
            self._server.stop()

    async def check(self) -> None:
        """Check that the ledger takes writes. While it does not, old heartbeats mean nothing.
        Raises LedgerUnavailable: it does not answer, or its disk takes no writes."""
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
        """Return the age of each scoring role's work beyond its deadline, at most 1 s old."""
        if now >= self._next_overdue_s:
            self._next_overdue_s = now + _OVERDUE_CHECK_S
            self._queues = await self._ledger.queues()
            self._totals = await self._ledger.totals()
            self.is_paused = self._totals.paused is not None
            self._overdue_s = overdue_ages(self._queues, self._scoring_deadline_s)
        return self._overdue_s

    async def show(self, status: RunStatus, beats: Sequence[Heartbeat], plan: FleetPlan, now: float) -> None:
        """Update the metrics endpoint, the fleet's history and, when the time has come, the view. A
        new state is shown at once: it may be the last."""
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
        # A busy terminal misses one picture; a closed one misses all.
        with suppress(OSError):
            self._watch(snapshot)


def overdue_ages(queues: Sequence[QueueStat], scoring_deadline_s: float) -> dict[Role, float]:
    """Return the age of each scoring role's work beyond its deadline, in seconds."""
    ages = {queue.name: queue.oldest_age_s or 0.0 for queue in queues}
    oldest = {role: [ages[field] for field in fields if field in ages] for role, fields in _SCORED.items()}
    return {role: max(found) - scoring_deadline_s for role, found in oldest.items() if found}
