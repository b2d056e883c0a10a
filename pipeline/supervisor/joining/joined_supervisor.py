"""The supervisor of a joined host: keeps its workers alive until the run ends.

It turns exits, its own workers' heartbeats and the run's state into starts, restarts, and entries
to send home. It has the loop of the run's supervisor (``fleet_loop``), and the same rules
(``host_fleet``): restart budgets, fences, adoption.

A failure here ends this host's workers; the run and other hosts go on. The number of workers is this
host's own: ``headrace scale`` does not change it, and ``headrace fleet drain`` lowers it until the
join ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from pipeline.config.schema import RunConfig
from pipeline.fleet.state import Worker, overdue_ages
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.join_board import JoinBoard
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.process.exit_codes import ExitCode, as_own
from pipeline.runtime.registry.contract import Fleet, Registry, RunState
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.supervisor.fleet_loop import FleetLoop
from pipeline.supervisor.host_fleet import HostFleet
from pipeline.supervisor.joining.home import HomeReader
from pipeline.supervisor.joining.joined_folder import JoinedFolder
from pipeline.supervisor.leftovers import clear_leftovers
from pipeline.supervisor.processes import Command, worker_command
from pipeline.supervisor.pulse import Pulse
from pipeline.supervisor.starter import forks, starter_command
from pipeline.supervisor.takeover import take_over
from protocol.errors import LedgerError, LedgerRefused
from protocol.ids import Role

_HOME_EVERY_S: Final = 1.0
_OVERDUE_EVERY_S: Final = 5.0
_ANSWER_S: Final = 2.0
_ENDED: Final = (RunState.STOPPING, RunState.FINISHED, RunState.FAILED)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class JoinOutcome:
    exit_code: int
    detail: str
    worker: str = ""
    """The worker that failed, if any."""
    last_lines: str = ""
    may_resume: bool = False
    """Whether the run ended before its last update, so that ``up --resume`` can continue it."""


class HostRefusal:
    """Records that the ledger's server no longer accepts this host, and why."""

    def __init__(self) -> None:
        self.reason = ""
        """Empty while it accepts."""
        self.came = asyncio.Event()

    def by_ledger(self, reason: str) -> None:
        self.reason = reason
        self.came.set()


class JoinedSupervisor:
    """The workers of one joined folder. The caller holds its lock."""

    def __init__(
        self,
        config: RunConfig,
        folder: JoinedFolder,
        count: int,
        *,
        command: Command = worker_command,
        refusal: HostRefusal | None = None,
    ) -> None:
        self._config, self._folder, self._counts = config, folder, {folder.role: count}
        self._fleet = HostFleet(config, folder.path, command, folder.worker_name)
        self._is_forking = command is worker_command and config.supervisor.preload and forks(config, folder.role)
        self.stopped = asyncio.Event()
        """Set by a signal, or by a start that is given up."""
        self._next_home_s = self._next_overdue_s = 0.0
        self._overdue_s: dict[Role, float] = {}
        self._home = HomeReader(folder.path)
        self._refusal = refusal or HostRefusal()
        self._loop = FleetLoop(self._fleet, Pulse(folder.path), stopping="join_stopping", on_stop=self.stopped.set)
        self._state = RunState.RUNNING
        self._left_out: set[str] = set()
        """Workers that an operator has drained, for as long as this join lives."""

    def prepare(self) -> None:
        """Start the starter, which forks workers, and wait for its imports. Blocks."""
        if self._is_forking:
            command = starter_command(self._folder.path, self._folder.role)
            forked: Callable[[Role], bool] = partial(forks, self._config)
            self._fleet.processes.prepare(command, forked, self.stopped.is_set)

    def signals(self) -> contextlib.AbstractContextManager[None]:
        """Handle signals: the first drains, a second ends at once."""
        return self._loop.signals()

    async def run(self, ledger_url: str) -> JoinOutcome:
        """Keep the workers alive until the run ends, a signal comes, or the workers fail. Raises
        LedgerUnavailable: the ledger does not answer at the start."""
        run = self._config.run.name
        clients = [connect(ledger_url, timeout_s=_ANSWER_S, patience_s=2 * _ANSWER_S) for _ in range(2)]
        ledger, registry = RedisLedger(clients[0], run), RedisRegistry(clients[0], run)
        board = JoinBoard(clients[1], run)
        try:
            await take_over(self._fleet, registry, self._folder.is_own)
            ending = await self._until_refused(self._supervise(registry, ledger, board))
            if not self._refusal.reason:
                await self._send_rest(board)
            self._home.save()
        finally:
            await asyncio.to_thread(self._fleet.processes.close)
            await ledger.aclose()
            await registry.aclose()
            await board.aclose()
            clear_leftovers(self._folder.path)
        return self._outcome(ending)

    def close(self) -> None:
        """End the starter if ``run`` was never called."""
        self._fleet.processes.close()

    async def _until_refused(self, supervising: Coroutine[None, None, str]) -> str:
        """Return why the supervision ended. A refusal ends it at once: workers that the ledger
        refuses have nothing to hand back."""
        async with asyncio.TaskGroup() as tasks:
            supervised = tasks.create_task(supervising)
            refused = tasks.create_task(self._refusal.came.wait())
            # no deadline: one of the two ends with the run at the latest
            await asyncio.wait([supervised, refused], return_when=asyncio.FIRST_COMPLETED)
            refused.cancel()
            supervised.cancel()
        return self._refusal.reason if supervised.cancelled() else supervised.result()

    async def _supervise(self, registry: Registry, ledger: RedisLedger, board: JoinBoard) -> str:
        ending = ""

        async def poll(now: float) -> bool:
            nonlocal ending
            ending = await self._poll_ledger(registry, ledger, now) or ending or self._own_end()
            if now >= self._next_home_s:
                self._next_home_s = now + _HOME_EVERY_S
                await self._send_home(board)
            return bool(ending)

        await self._loop.run(poll=poll, exited=self._fleet.record_exit)
        return ending

    async def _poll_ledger(self, registry: Registry, ledger: RedisLedger, now: float) -> str:
        """Read the ledger and act on it; return why the run is over, empty while it goes on."""
        fleet = self._fleet
        try:
            status = await registry.run_status()
            beats = fleet.watchdog.fleet.read(
                await registry.heartbeats_of(list(fleet.processes.pids)), now, await self._overdue(ledger, now)
            )
            wanted = await registry.fleet()
            self._loop.is_ready = any(map(_does_its_work, beats))
            await fleet.fence_exited(registry, beats)
            await fleet.replace(registry, beats, now)
        except LedgerRefused as error:
            fleet.watchdog.reset_timers(now)
            self._refusal.by_ledger(str(error))
            return str(error)
        except LedgerError:
            # workers wait for it too
            fleet.watchdog.reset_timers(now)
            return ""
        self._state = status.state
        if status.state in _ENDED:
            return f"the run is {status.state}: {status.detail}"
        if status.state is RunState.STARTING:
            return "the ledger has no record of the run any more: its server was emptied or lost its file"
        if fleet.plan.is_stopping:
            return ""
        # the run's supervisor drains or evicts a launcher's job as a whole
        is_launched = wanted is None or bool(self._folder.name)
        try:
            return await self._follow(registry, Fleet() if wanted is None or is_launched else wanted, beats, now)
        except LedgerError:
            return ""

    async def _follow(self, registry: Registry, wanted: Fleet, beats: Sequence[Worker], now: float) -> str:
        """Carry out this host's part of the desired fleet; return why that ends the join, or ""."""
        there = self._fleet.incarnations(beats)
        for drain in wanted.drains:
            if not drain.is_replaced and there.get(drain.worker, drain.epoch + 1) <= drain.epoch:
                self._left_out.add(drain.worker)
        host = wanted.eviction_of("", socket.gethostname())
        evicted = {one.worker: one.reason for one in wanted.evictions if one.worker and self._folder.is_own(one.worker)}
        of_host = {} if host is None else dict.fromkeys(self._fleet.processes.pids, host.reason)
        await self._fleet.expel(registry, evicted | of_host)
        if host is not None:
            back = f"`headrace fleet readmit --host {host.host}` on the run's host takes it back"
            return f"this host is evicted by {host.by}: {host.reason}; {back}; the run and other hosts go on"
        left_out = self._left_out | evicted.keys()
        counts = {role: count - len(left_out) for role, count in self._counts.items()}
        if not any(count > 0 for count in counts.values()):
            how = "evicted" if evicted else "drained by an operator"
            return f"its workers were {how}; the run and other hosts go on"
        self._fleet.follow(counts, wanted.drains, beats, now, left_out)
        return ""

    async def _overdue(self, ledger: RedisLedger, now: float) -> dict[Role, float]:
        if now >= self._next_overdue_s:
            self._next_overdue_s = now + _OVERDUE_EVERY_S
            self._overdue_s = overdue_ages(await ledger.queues(), self._config.ledger.scoring_deadline_s)
        return self._overdue_s

    async def _send_home(self, board: JoinBoard) -> bool:
        """Send new lines and tallies; return whether there were any. What the ledger refuses stays
        here, and is marked as a gap at home."""
        entry = await asyncio.to_thread(self._home.next_entry)
        if entry:
            with contextlib.suppress(LedgerError):
                await board.send_home(entry)
        return bool(entry)

    async def _send_rest(self, board: JoinBoard) -> None:
        """Send the last lines of ended workers, then the final entry."""
        while await self._send_home(board):
            pass
        with contextlib.suppress(LedgerError):
            await board.send_home(await asyncio.to_thread(self._home.last_entry))

    def _own_end(self) -> str:
        failure = self._fleet.plan.failure
        if failure is not None:
            return f"{failure.worker} {failure.reason} (exit code {failure.exit_code}); the run and other hosts go on"
        return "stopped by a signal; the run and other hosts go on" if self._loop.num_signals else ""

    def _outcome(self, ending: str) -> JoinOutcome:
        failure = self._fleet.plan.failure
        if self._loop.num_signals > 1:
            return JoinOutcome(ExitCode.INTERRUPTED, ending)
        if failure is not None:
            lines = self._fleet.processes.logs(failure.worker)
            return JoinOutcome(as_own(failure.exit_code), ending, failure.worker, lines)
        if self._refusal.reason:
            return JoinOutcome(ExitCode.CONFIG, ending)
        may_resume = self._state in (RunState.STOPPING, RunState.FAILED) and not self._loop.num_signals
        return JoinOutcome(ExitCode.OK, ending, may_resume=may_resume)


def _does_its_work(beat: Worker) -> bool:
    has_weights = beat.who.role is not Role.GENERATOR or beat.policy_version >= 0
    return has_weights and beat.waiting_for.is_in_service and not beat.is_silent
