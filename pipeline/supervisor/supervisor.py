"""The supervisor: turns the desired fleet into processes.

*Consumes* the desired fleet (the configuration's, later that of ``headrace scale``), exits,
heartbeats and the run's state. *Produces* processes, restarts, and the run's end. *Waits for*
signals and exits.

``fleet_plan`` and ``watchdog`` decide, and ``host_fleet`` carries the decisions out on processes.
This module connects them to the run, and keeps the embedded ledger server alive (``monitor``).
Workers of an earlier supervisor are adopted (``takeover``); if they have other settings, they are
drained and restarted.

``fleet_loop`` has the loop and what signals do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from pipeline.config.gpus import gpus_of
from pipeline.config.load import read_resolved, write_resolved
from pipeline.config.schema import RunConfig
from pipeline.fleet.state import Worker
from pipeline.fleet.status import RunSnapshot
from pipeline.ledger.address import read_address
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.server.binary import log_choice
from pipeline.ledger.server.embedded import EmbeddedServer, open_ledger, read_ledger_url
from pipeline.ledger.types import LedgerSpec
from pipeline.observability.report import write_report
from pipeline.observability.start_record import EndRow, StartRow, own_start, start_records
from pipeline.process.exit_codes import ExitCode, as_own
from pipeline.runtime.clock import RealClock
from pipeline.runtime.registry.contract import Registry, RunState, RunStatus
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.supervisor.autoscaler import GeneratorDemand
from pipeline.supervisor.code_keeper import CodeKeeper
from pipeline.supervisor.fleet_edits import edit_fleet
from pipeline.supervisor.fleet_loop import FleetLoop
from pipeline.supervisor.fleet_plan import FleetFailure, worker_number
from pipeline.supervisor.fleet_size import SizeGuard, desired_counts
from pipeline.supervisor.host_fleet import CLEAN_EXITS, HostFleet, meaning
from pipeline.supervisor.joining.joined_hosts import JoinedHosts
from pipeline.supervisor.launched import FleetProcesses
from pipeline.supervisor.launchers.seam import Exit, Launcher
from pipeline.supervisor.leftovers import clear_leftovers
from pipeline.supervisor.monitor import FleetRecorder, Monitor
from pipeline.supervisor.processes import Command, worker_command
from pipeline.supervisor.pulse import Pulse
from pipeline.supervisor.repair_policy import RepairPolicy, made_escalation
from pipeline.supervisor.run_folder import server_lock
from pipeline.supervisor.settings_keeper import SettingsKeeper
from pipeline.supervisor.sink_runner import SinkRunner
from pipeline.supervisor.starter import EarlyProcesses, forks, starter_command
from pipeline.supervisor.takeover import set_first_fleet, set_running, start_calls, take_over, works_the_same
from protocol.errors import ConfigError, LedgerError, LedgerRefused
from protocol.ids import Role

if TYPE_CHECKING:
    from pipeline.observability.metrics import MetricsServer
    from pipeline.supervisor.mirror_runner import MirrorRunner

_ANSWER_S = 2.0
"""Limit on the ledger's answers, short enough to handle signals and exits in time."""
_SERVER_PATIENCE_S = 60.0
"""How long an embedded server may be unresponsive; less if ledger.outage_timeout_s is less."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    exit_code: int
    status: RunStatus
    failure: FleetFailure | None = None
    last_lines: str = ""
    """Output of the worker that failed the fleet."""


class Supervisor:
    """Runs one fleet from start to end. The caller holds the lock of the run's folder."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        spec: LedgerSpec,
        *,
        command: Command = worker_command,
        launcher: Launcher | None = None,
        early: EarlyProcesses | None = None,
    ) -> None:
        """``launcher``: starts the workers of ``launch.roles``; None: all run on this host. ``early``: processes
        that import already."""
        self._config, self._run_dir, self._spec = config, run_dir, spec
        processes, place = None, config.launch
        if launcher is not None:
            processes = FleetProcesses(run_dir, command, launcher, place.launched, poll_s=place.poll_s)
        escalation = made_escalation(config, run_dir)
        is_own = command is worker_command
        self._fleet = HostFleet(config, run_dir, command, processes=processes, escalation=escalation, standbys=is_own)
        self._settings = SettingsKeeper(config, run_dir)
        self._code = CodeKeeper(config, run_dir, self._fleet, self._settings)
        self._repairs = RepairPolicy(escalation, self._fleet, run_dir, self._code)
        self._processes, self._plan = self._fleet.processes, self._fleet.plan
        self._processes.early = early
        self._processes.gpus = lambda role, name: gpus_of(config, role, worker_number(name))
        self._is_forking = is_own and config.supervisor.preload
        self._server_patience_s = min(_SERVER_PATIENCE_S, config.ledger.outage_timeout_s / 2)
        self._stop_requested = threading.Event()
        """Tells the thread that opens the ledger, before the loop runs, to give up."""
        self._is_starved = False
        self._size = SizeGuard(config)
        self._demand = None if config.fleet.max_generators is None else GeneratorDemand(config.fleet)
        self._failed_code = ExitCode.LEDGER_UNAVAILABLE
        self._learner_drain_code = int(ExitCode.OK)
        self._mirror = mirror_runner(config, run_dir)
        self._sinks = SinkRunner(config, run_dir)
        self._loop = FleetLoop(
            self._fleet, Pulse(run_dir), stopping="supervisor_stopping", on_stop=self._stop_requested.set
        )
        self._joined_hosts = JoinedHosts(config, run_dir)

    async def run(
        self,
        watch: Callable[[RunSnapshot], None] | None = None,
        *,
        watch_every_s: float = 1.0,
        leave: Callable[[], None] | None = None,
    ) -> RunOutcome:
        """Run the ledger and the fleet until the run has ended and every process is gone.

        ``leave`` gives the terminal back before waiting for the last copies; None: it was not
        taken.

        Raises:
            ConfigError: the metrics port is taken, or there is no ledger server.
            Interrupted: stopped before the ledger's server answered; nothing was started.
            LedgerMismatch: the folder's ledger has other settings.
            LedgerUnavailable: the ledger does not answer at the start, or its embedded server cannot be restarted."""
        with self._loop.signals(), self._metrics() as metrics:
            server = await asyncio.to_thread(self._open_ledger)
            run = self._config.run.name
            client = connect(read_ledger_url(self._run_dir), timeout_s=_ANSWER_S, patience_s=2 * _ANSWER_S)
            ledger, registry = RedisLedger(client, run), RedisRegistry(client, run)
            deadline_s = self._config.ledger.scoring_deadline_s
            patience_s = self._server_patience_s
            recorder = FleetRecorder(self._run_dir, time.monotonic())
            monitor = Monitor(registry, ledger, server, metrics, watch, watch_every_s, deadline_s, patience_s, recorder)
            try:
                # from here on a dead server is restarted
                monitor.keep_server()
                # an external server that is away now may never have existed
                if server is None:
                    await ledger.check()
                async with self._start_calls(monitor) as (starting, _):
                    await starting.open(self._spec)
            # leave the processes of an earlier supervisor alone
            except BaseException:
                await ledger.aclose()
                await registry.aclose()
                await monitor.close(stops_server=server is not None and not server.is_adopted)
                raise
            try:
                with self._joined_hosts.served(read_ledger_url(self._run_dir)):
                    async with self._start_calls(monitor) as (_, starting):
                        await self._begin(starting)
                    status = await self._supervise(monitor)
                    await self._joined_hosts.await_last_lines(registry, lambda: self._loop.num_signals > 1)
                await monitor.end_record(time.monotonic())
                await self._conclude(registry, ledger, status)
                await self._sinks.finish(lambda: self._loop.num_signals > 1, has_failed=status.state is RunState.FAILED)
                if leave is not None:
                    await asyncio.to_thread(leave)
                if self._mirror is not None:
                    left = await self._mirror.finish(lambda: self._loop.num_signals > 1, plain=leave is None)
                    if left:
                        status = RunStatus(status.state, f"{status.detail}; {left}")
            finally:
                if self._mirror is not None:
                    self._mirror.close()
                self._sinks.close()
                await asyncio.to_thread(self._processes.close)
                await ledger.aclose()
                await registry.aclose()
                await monitor.close()
                clear_leftovers(self._run_dir)
        return self._outcome(status)

    # -- beginning and end -------------------------------------------------------------------------

    def _start_calls(self, monitor: Monitor) -> AbstractAsyncContextManager[tuple[RedisLedger, RedisRegistry]]:
        return start_calls(self._config, self._run_dir, monitor, lambda: self._loop.num_signals > 0, answer_s=_ANSWER_S)

    @contextmanager
    def _metrics(self) -> Iterator[MetricsServer | None]:
        port = self._config.supervisor.metrics_port
        if port is None:
            yield None
            return
        from pipeline.observability.metrics import MetricsServer

        config = self._config
        info = {
            "algorithm": config.algorithm.name,
            "engine": config.generation.engine,
            "backend": config.learner.backend,
            "model": config.model.path.name,
        }
        host, run = config.supervisor.metrics_host, config.run.name
        with MetricsServer(port, RealClock(), host=host, run=run, info=info) as metrics:
            yield metrics

    def _open_ledger(self) -> EmbeddedServer | None:
        settings = self._config.ledger
        with server_lock(self._run_dir, given_up=self._stop_requested):
            server = open_ledger(
                self._run_dir,
                configured_url=settings.url,
                max_memory_mb=settings.max_memory_mb,
                patience_s=self._server_patience_s,
                given_up=self._stop_requested,
            )
        address = read_address(self._run_dir)
        if server is not None and not server.is_adopted and address is not None:
            log_choice(Path(address.server))
        return server

    def _write_config(self) -> None:
        """Write the configuration, now that the ledger has accepted it and before any worker reads
        it."""
        try:
            write_resolved(self._config, self._run_dir)
        except OSError as error:
            raise ConfigError(f"{self._run_dir} cannot be written to: {error.strerror}; nothing was started") from error

    async def _begin(self, registry: Registry) -> None:
        """Adopt running workers of an earlier supervisor, and set the desired fleet."""
        found = await registry.run_status()
        earlier = None
        # the settings of the running processes, if known
        with suppress(ConfigError):
            earlier = read_resolved(self._run_dir)
        if self._config.launch.launched:
            from pipeline.supervisor.launchers.build import keep_tokens

            await keep_tokens(self._config, self._run_dir)
        adopted = await take_over(self._fleet, registry)
        await self._settings.begin(registry)
        self._write_config()
        await self._code.begin(self._config.code.workers)
        if self._is_forking:
            command = starter_command(self._run_dir)
            forked = partial(forks, self._config)
            await asyncio.to_thread(self._processes.prepare, command, forked, self._stop_requested.is_set)
        is_kept = False
        if adopted and earlier is not None:
            if not works_the_same(earlier, self._config):
                log.warning("workers_restarted", why="they were started with other settings", workers=adopted)
                self._fleet.executor.act(self._plan.recycle(time.monotonic()))
            else:
                # keep the fleet as `headrace scale` left it
                is_kept = earlier.fleet == self._config.fleet
        await set_first_fleet(registry, desired_counts(self._config), keeps=is_kept)
        await asyncio.to_thread(self._record, self._start)
        await set_running(registry, found)

    def _start(self) -> StartRow:
        address, run = read_address(self._run_dir), self._config.run
        embedded = address is not None and address.is_embedded
        server = (
            f"{address.server} {address.server_version}".strip() if address is not None and embedded else "external"
        )
        of = self._config.types
        types = f"learner {of.learner}, generators {of.generator}, published weights {of.weights}"
        return own_start(RealClock().time(), seed=run.seed, num_updates=run.num_updates, server=server, types=types)

    def _record(self, row: Callable[[], StartRow | EndRow]) -> None:
        """Append to the start record. The run does not depend on it: a failure is logged."""
        try:
            start_records(self._run_dir).append(row())
        except (OSError, ValueError) as error:
            log.warning("start_not_recorded", reason=str(error))

    async def _conclude(self, registry: Registry, ledger: RedisLedger, status: RunStatus) -> None:
        """Write the last state and the report, unless the ledger is away. If the report cannot be
        written (full disk, changed program), the run ends as it would have."""
        await self._repairs.record()
        await asyncio.to_thread(self._record, lambda: EndRow(RealClock().time(), str(status.state), status.detail))
        try:
            await registry.set_run_status(status)
            audit = await ledger.audit()
        except LedgerError as error:
            log.warning("final_state_not_written", reason=str(error))
            return
        # after a second signal, the report is left to `headrace run report`
        if self._loop.num_signals < 2:
            detail = f"{status.state}: {status.detail}"
            write = partial(write_report, title=self._config.run.name, detail=detail, audit=audit)
            try:
                await asyncio.to_thread(write, self._run_dir)
            except Exception as error:
                log.exception("report_not_written", reason=str(error), do=f"headrace run report {self._run_dir}")

    # -- the loop ----------------------------------------------------------------------------------

    async def _supervise(self, monitor: Monitor) -> RunStatus:
        status = RunStatus(RunState.RUNNING)

        def turn(now: float) -> None:
            monitor.keep_server()
            if self._mirror is not None:
                self._mirror.poll(now)
            self._sinks.poll(now)

        async def poll(now: float) -> bool:
            nonlocal status
            status = await self._poll_ledger(monitor, status, now)
            self._loop.is_ready = status.state is RunState.RUNNING
            early = self._processes.early
            if early is not None and self._plan.workers and not self._plan.absent:
                # adopted and evicted workers need none
                self._processes.early = None
                await asyncio.to_thread(early.close)
            return not self._loop.is_ready

        await self._loop.run(poll=poll, exited=self._record_exit, turn=turn)
        return status

    async def _poll_ledger(self, monitor: Monitor, status: RunStatus, now: float) -> RunStatus:
        try:
            await monitor.check()
            overdue_s = await monitor.overdue(now)
            beats = self._fleet.watchdog.fleet.read(await monitor.registry.heartbeats(), now, overdue_s)
            if status.state is RunState.RUNNING:
                status = await self._steer(monitor.registry, beats, now, is_paused=monitor.is_paused)
            own = {worker.name for worker in self._plan.workers}
            self._joined_hosts.observe(beats, own, is_running=status.state is RunState.RUNNING)
            await self._fleet.fence_exited(monitor.registry, beats)
            await self._fleet.replace(monitor.registry, beats, now)
            await self._fleet.fence_departed(monitor.registry, beats)
            if status.state is RunState.RUNNING:
                await self._code.poll(monitor.registry, beats, now, is_paused=monitor.is_paused)
                await self._repairs.poll(monitor.registry, beats, now)
            await monitor.show(status, beats, self._plan, now)
        except LedgerRefused as error:
            self._fleet.reset_timers(now)
            if status.state is RunState.RUNNING:
                self._failed_code = ExitCode.CONFIG
                status = self._ending() or RunStatus(RunState.FAILED, str(error))
        # the ledger is away or was emptied; workers wait for it too
        except LedgerError:
            self._fleet.reset_timers(now)
            if status.state is RunState.RUNNING:
                status = self._ending() or status
        return status

    def _ending(self) -> RunStatus | None:
        """Return why the run ends, as far as this process knows; None if it goes on."""
        failure = self._plan.failure
        if failure is not None:
            return RunStatus(RunState.FAILED, f"{failure.worker} {failure.reason} (exit code {failure.exit_code})")
        if self._loop.num_signals:
            detail = f"stopped by a signal; go on with `headrace up --resume {self._run_dir}`"
            return RunStatus(RunState.STOPPING, detail)
        return None

    async def _steer(self, registry: Registry, beats: Sequence[Worker], now: float, *, is_paused: bool) -> RunStatus:
        if ending := self._ending():
            await registry.set_run_status(ending)
            return ending
        status = await registry.run_status()
        if status.state is RunState.STARTING:
            detail = "the ledger has no record of this run any more: its server was emptied or lost its file"
            return RunStatus(RunState.FAILED, detail)
        if status.state is RunState.RUNNING:
            await self._settings.apply_changes(registry, list(self._fleet.own(beats).values()))
            fleet = await registry.fleet()
            if fleet is not None:
                if self._demand is not None:
                    own = [worker.name for worker in self._plan.workers]
                    if change := self._demand.decide(fleet, beats, own, now, is_paused=is_paused):
                        fleet = await edit_fleet(registry, change) or fleet
                await self._fleet.expel(registry, {one.worker: one.reason for one in fleet.evictions if one.worker})
                if self._size.allows(fleet.counts):
                    self._fleet.follow(fleet.counts, fleet.drains, beats, now, fleet.left_out)
        return status

    def _record_exit(self, exit_: Exit, now: float) -> None:
        was_draining = self._plan.is_draining(exit_.worker)
        code = self._fleet.record_exit(exit_, now)
        if exit_.role is Role.LEARNER:
            self._is_starved |= code == ExitCode.STARVED
            if was_draining and self._plan.is_stopping and code not in CLEAN_EXITS:
                self._learner_drain_code = code if code > 0 else ExitCode.DRAIN_TIMEOUT

    def _outcome(self, status: RunStatus) -> RunOutcome:
        failure = self._plan.failure
        if self._loop.num_signals > 1:
            return RunOutcome(ExitCode.INTERRUPTED, status)
        if failure is not None:
            return RunOutcome(as_own(failure.exit_code), status, failure, self._processes.logs(failure.worker))
        if status.state is RunState.FAILED:
            return RunOutcome(self._failed_code, status)
        if self._is_starved:
            return RunOutcome(ExitCode.STARVED, status)
        if self._learner_drain_code != ExitCode.OK:
            code = self._learner_drain_code
            detail = f"{status.detail}; the learner did not drain ({meaning(code)}): what followed its last checkpoint is lost"
            return RunOutcome(code, RunStatus(status.state, detail))
        return RunOutcome(ExitCode.OK, status)


def mirror_runner(config: RunConfig, run_dir: Path) -> MirrorRunner | None:
    """Return the mirror's copier; None, and no import, for a run without a mirror."""
    if config.checkpoint.mirror is None:
        return None
    from pipeline.supervisor.mirror_runner import MirrorRunner

    return MirrorRunner(config, run_dir)
