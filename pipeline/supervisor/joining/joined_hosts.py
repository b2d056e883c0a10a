"""A run's joined hosts as its supervisor sees them: serves them, and waits for their last log
lines.

*Consumes* heartbeats, and what joined hosts send home. *Produces* the thread of ``run_host``, if
the wire leaves this host. *Waits for* the last entry about each worker alive when the run ended, as
long as for a drain without progress; joined hosts drain by themselves.

A worker shows that it is alive by heartbeats and new log lines. Without a heartbeat record it has
left, or was fenced and starts again. One with a stale heartbeat is not waited for: its host is dead
or cut off."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import structlog

from pipeline.config.schema import RunConfig
from pipeline.fleet.limits import limits_of
from pipeline.fleet.state import Worker, read_once
from pipeline.process.records import has_life
from pipeline.runtime.liveness import RESTARTED_WITHIN_S
from pipeline.runtime.registry.contract import Registry
from pipeline.supervisor.joining.home import HomeEntry, is_joined
from protocol.errors import LedgerError
from protocol.ids import Role

_LOOK_S: Final = 0.25

log = structlog.get_logger(__name__)


class JoinedHosts:
    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._config, self._run_dir = config, run_dir
        self._are_served = config.wire.transport == "tcp"
        self._lock = threading.Lock()
        self._seen_s: dict[str, float] = {}
        """When each worker last showed that it is alive; without those of ended joins."""

    @contextmanager
    def served(self, ledger_url: str) -> Iterator[None]:
        """Serve joining hosts, if the wire leaves this host."""
        if not self._are_served:
            yield
            return
        from pipeline.supervisor.joining.run_host import RunHost

        with RunHost(self._config, self._run_dir, ledger_url, on_entry=self._hear):
            yield

    def observe(self, beats: Sequence[Worker], own: Collection[str] = (), *, is_running: bool) -> None:
        """Record the workers alive elsewhere; once the run ends, only those that fall silent.
        ``own``: this supervisor's workers."""
        if not self._are_served:
            return
        now = time.monotonic()
        silent = {beat.who.worker for beat in beats if beat.is_silent}
        joined = {beat.who.worker for beat in beats} - silent - {*own} if is_running else set[str]()
        # a worker started by hand in the run's folder logs there itself
        alive = [name for name in joined if is_joined(self._run_dir, name) and not has_life(self._run_dir, name)]
        with self._lock:
            if is_running:
                recent_s = now - RESTARTED_WITHIN_S
                self._seen_s = {name: at_s for name, at_s in self._seen_s.items() if at_s > recent_s}
            self._seen_s |= dict.fromkeys(alive, now)
            for name in silent & self._seen_s.keys():
                del self._seen_s[name]

    async def await_last_lines(self, registry: Registry, given_up: Callable[[], bool]) -> None:
        """Wait for the joined workers' last entries. ``given_up``: whether the operator wants to
        end at once."""
        limits = limits_of(self._config)
        deadline_s = time.monotonic() + limits.drain_timeout_s
        while (awaited := sorted(self._seen_s)) and not given_up() and time.monotonic() < deadline_s:
            try:
                self.observe(read_once(await registry.heartbeats_of(awaited), limits), is_running=False)
            except LedgerError:
                # without the ledger nothing comes home
                break
            await asyncio.sleep(_LOOK_S)
        if awaited:
            log.warning("logs_not_awaited", workers=awaited, action="their joined folders have the last lines")

    def _hear(self, entry: HomeEntry) -> None:
        """Record an entry of a joined host. Called on the thread of ``run_host``."""
        names = {piece.worker for piece in entry.pieces}
        # a joined supervisor has no heartbeat that could fall silent if its host dies
        workers = [name for name in names if not name.startswith(f"{Role.SUPERVISOR}-")]
        with self._lock:
            self._seen_s |= dict.fromkeys(workers, time.monotonic())
            for name in entry.ended:
                self._seen_s.pop(name, None)
