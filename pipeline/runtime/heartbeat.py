"""The heartbeat thread: reports the main loop's state, and learns when this incarnation is fenced.

*Consumes* the main loop's state (``WorkerState``). *Produces* one heartbeat a second, or every two seconds in
a large fleet, over its own blocking connection, so that a stuck or computing loop is still seen. *Waits for*
the next heartbeat and for the server, each with a limit. It keeps trying at the same pace while the server is
down."""

from __future__ import annotations

import threading
from collections.abc import Callable

from structlog.typing import FilteringBoundLogger

from pipeline.runtime.liveness import HEARTBEAT_EVERY_S, heartbeat_wait_s
from pipeline.runtime.registry.contract import FleetSummary, Heartbeat, HeartbeatWriter
from protocol.errors import LedgerFull, LedgerRefused, LedgerUnavailable


class HeartbeatThread:
    """Writes heartbeats until stopped or fenced.

    Args:
        writer: Used, and finally closed, only by this thread.
        heartbeat: Returns the current state; called from this thread.
        on_fenced: Called once, from this thread, when a newer incarnation exists.
        on_deaf: Called from this thread when ``stop`` is not called within ``grace_s`` of the fencing:
            the main loop is stuck, and the process must end without it.
        log: Logs each outage once.
        interval_of: Returns the seconds between two heartbeats, given the number of the run's workers.
        on_fleet: Called from this thread when silent mailboxes or the server may have changed.
        grace_s: See ``on_deaf``."""

    def __init__(
        self,
        writer: HeartbeatWriter,
        heartbeat: Callable[[], Heartbeat],
        *,
        on_fenced: Callable[[], None],
        on_deaf: Callable[[], None],
        log: FilteringBoundLogger,
        interval_of: Callable[[int], float] = lambda _: HEARTBEAT_EVERY_S,
        on_fleet: Callable[[FleetSummary], None] = lambda _: None,
        grace_s: float = 3.0,
    ) -> None:
        self._writer = writer
        self._heartbeat = heartbeat
        self._on_fenced = on_fenced
        self._on_deaf = on_deaf
        self._log = log
        self._interval_of = interval_of
        self._on_fleet = on_fleet
        self._fleet = FleetSummary(num_connects=1)
        self._grace_s = grace_s
        self._stopped = threading.Event()
        self._woken = threading.Event()
        self._num_failures = 0
        self._worker = ""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start; the first heartbeat is written at once."""
        self._thread.start()

    def nudge(self) -> None:
        """Write the next heartbeat now, because others wait for a change such as the served version."""
        self._woken.set()

    def stop(self, *, timeout_s: float = 5.0) -> None:
        self._stopped.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                if not self._beat():
                    self._on_fenced()
                    if not self._stopped.wait(self._grace_s):
                        self._on_deaf()
                    return
                self._tell(self._writer.fleet)
                self._woken.wait(self._wait_s())
                self._woken.clear()
        finally:
            self._writer.close()

    def _tell(self, fleet: FleetSummary) -> None:
        before, self._fleet = self._fleet, fleet
        if (fleet.num_silent, fleet.num_connects) != (before.num_silent, before.num_connects):
            self._on_fleet(fleet)

    def _wait_s(self) -> float:
        every_s = self._interval_of(self._fleet.num_workers)
        # the time of a lost heartbeat is unknown
        at_s = 0.0 if self._num_failures else self._fleet.at_s
        return heartbeat_wait_s(self._worker, at_s, every_s)

    def _beat(self) -> bool:
        """Write one heartbeat; return False when fenced. A server that is down fences no worker."""
        try:
            heartbeat = self._heartbeat()
            self._worker = heartbeat.who.worker
            is_newest = self._writer.beat(heartbeat)
        except (LedgerUnavailable, LedgerRefused, LedgerFull) as error:
            self._num_failures += 1
            if self._num_failures == 1:
                self._log.warning("heartbeats_lost", reason=str(error))
            return True
        if self._num_failures:
            self._log.info("heartbeats_resumed", num_lost=self._num_failures)
            self._num_failures = 0
        return is_newest
