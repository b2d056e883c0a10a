"""The supervisor: the desired fleet in, processes out.

*Consumes* the desired fleet (the configuration's, later changed by ``headrace scale``), exits, heartbeats, and the run's state.
*Produces* processes, restarts, and the run's end. *Waits for* signals and exits, a fifth of a second at a time.

What to do is decided by ``pipeline.fleet``; this module starts, signals and reaps processes, and keeps the embedded ledger
server alive. A worker whose heartbeat stops (frozen) or whose main loop stands still while it claims to compute (stuck) is
fenced first and killed then, so that whatever it still writes has no effect.

Workers are in sessions of their own: Ctrl-C on the terminal reaches the supervisor alone, which drains the fleet; a second one
ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import structlog

from pipeline.config.load import write_resolved
from pipeline.config.schema import RunConfig
from pipeline.fleet import Action, FleetFailure, FleetPlan, RestartPolicy, Verb
from pipeline.replay.buffer import LedgerSpec
from pipeline.replay.connect import connect
from pipeline.replay.redis import RedisReplay
from pipeline.report import write_report
from pipeline.runtime.exit_codes import ExitCode
from pipeline.runtime.registry import Fleet, Heartbeat, Registry, RunState, RunStatus, WaitingFor
from pipeline.runtime.registry_redis import RedisRegistry
from pipeline.runtime.server import EmbeddedServer, open_ledger, read_ledger_url
from pipeline.weights import remove_weights
from protocol.errors import ConfigError, LedgerUnavailable
from protocol.ids import Role

_TICK_S = 0.2
_SILENT_AFTER_S = 10.0
"""A worker without a heartbeat for this long is frozen: its heartbeat thread writes every second."""
_START_TIMEOUT_S = 120.0
"""For imports, models and data, before the first progress."""
_LAST_LINES = 20

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    exit_code: int
    status: RunStatus
    failure: FleetFailure | None = None
    last_lines: str = ""
    """Of the worker that the fleet failed by."""


@dataclass(frozen=True, slots=True)
class View:
    """What the supervisor shows whoever watches, at every tick."""

    replay: RedisReplay
    registry: Registry
    plan: FleetPlan


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    started_s: float


def desired_counts(config: RunConfig) -> dict[Role, int]:
    """Return how many workers of each role the configuration asks for."""
    counts = {Role.LEARNER: 1, Role.GENERATOR: config.fleet.generator, Role.REWARD: config.fleet.reward}
    if config.needs_reference:
        counts[Role.REFERENCE] = config.fleet.reference
    return counts


def prepare_run_dir(config: RunConfig, *, resume: bool) -> Path:
    """Make the run's folder, or check that there is one to resume. Raises ConfigError."""
    run_dir = config.run_dir
    exists = (run_dir / "config.toml").exists()
    if exists and not resume:
        raise ConfigError(
            f"{run_dir} holds a run already; go on with it by --resume, or start another with --set run.name=OTHER"
        )
    if resume and not exists:
        raise ConfigError(f"{run_dir} holds no run to resume; start it without --resume")
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    (run_dir / "logs").mkdir(exist_ok=True)
    write_resolved(config, run_dir)
    return run_dir


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run's lock: one supervisor a run. Raises ConfigError when another holds it."""
    with (run_dir / "supervisor.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another supervisor runs {run_dir}; look at it with `headrace status {run_dir}`"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


class Supervisor:
    """Runs one fleet from start to end."""

    def __init__(self, config: RunConfig, run_dir: Path, spec: LedgerSpec) -> None:
        self._spec = spec
        settings = config.supervisor
        self._config = config
        self._run_dir = run_dir
        self._children: dict[str, _Child] = {}
        self._plan = FleetPlan(
            RestartPolicy(
                max_restarts=settings.max_restarts,
                window_s=settings.restart_window_s,
                backoff_s=settings.backoff_s,
                drain_timeout_s=settings.drain_timeout_s,
            )
        )
        self._num_signals = 0
        self._stop_detail = ""

    async def run(self, watch: Callable[[View], object] | None = None, *, watch_every_s: float = 1.0) -> Outcome:
        """Start the ledger and the fleet, keep them, and return once the run has ended and every process is gone."""
        settings = self._config.ledger
        server = await asyncio.to_thread(
            open_ledger, self._run_dir, configured_url=settings.url, max_memory_mb=settings.max_memory_mb
        )
        client = connect(read_ledger_url(self._run_dir))
        registry = RedisRegistry(client, self._config.run.name)
        replay = RedisReplay(client, self._config.run.name)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        status = RunStatus(RunState.RUNNING)
        try:
            await replay.open(self._spec)
            await registry.set_run_status(status)
            await registry.set_fleet(Fleet(desired_counts(self._config)))
            status = await self._supervise(registry, replay, server, watch, watch_every_s)
            await registry.set_run_status(status)
            audit = await replay.audit()
            await asyncio.to_thread(
                write_report,
                self._run_dir,
                title=self._config.run.name,
                detail=f"{status.state}: {status.detail}",
                audit=audit,
            )
        finally:
            self._kill_all()
            await registry.aclose()
            if server is not None:
                await asyncio.to_thread(server.stop)
            remove_weights(self._run_dir)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return self._outcome(status)

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def _supervise(
        self,
        registry: Registry,
        replay: RedisReplay,
        server: EmbeddedServer | None,
        watch: Callable[[View], object] | None,
        watch_every_s: float,
    ) -> RunStatus:
        view = View(replay, registry, self._plan)
        next_watch = 0.0
        status = RunStatus(RunState.RUNNING)
        while True:
            now = time.monotonic()
            self._reap(now)
            if server is not None and not await asyncio.to_thread(server.is_alive):
                log.error("ledger_server_died", action="restarting it on its append-only file")
                await asyncio.to_thread(server.start)
            with contextlib.suppress(LedgerUnavailable):  # it is being restarted; the workers ride it out as well
                if status.state is RunState.RUNNING:
                    status = await self._steer(registry, now)
                await self._replace_silent(registry)
                if watch is not None and now >= next_watch:
                    next_watch = now + watch_every_s
                    result = watch(view)
                    if asyncio.iscoroutine(result):
                        await result
            if status.state is not RunState.RUNNING:
                self._carry_out(self._plan.stop(now))
            self._carry_out(self._plan.due(now))
            if status.state is not RunState.RUNNING and self._plan.is_down:
                return status
            await asyncio.sleep(_TICK_S)

    async def _steer(self, registry: Registry, now: float) -> RunStatus:
        """Apply the desired fleet, and find out whether the run is to end."""
        if self._plan.failure is not None:
            failure = self._plan.failure
            status = RunStatus(RunState.FAILED, f"{failure.worker} {failure.reason} (exit code {failure.exit_code})")
        elif self._num_signals:
            status = RunStatus(RunState.STOPPING, "stopped by a signal; go on with --resume")
        else:
            status = await registry.run_status()
        if status.state is RunState.RUNNING:
            fleet = await registry.fleet()
            if fleet is not None:
                self._carry_out(self._plan.want(fleet.counts, now))
        elif status.state is not RunState.FINISHED:
            await registry.set_run_status(status)
        return status

    async def _replace_silent(self, registry: Registry) -> None:
        """Fence and kill workers that are frozen or stuck."""
        wall = time.time()
        for beat in await registry.heartbeats():
            child = self._children.get(beat.who.worker)
            if child is None or child.process.pid != beat.pid:
                continue
            reason = _why_dead(beat, wall, self._config.supervisor.stuck_after_s)
            if reason is None:
                continue
            log.error("worker_replaced", worker=beat.who.worker, reason=reason)
            await registry.fence(beat.who.worker)
            child.process.kill()

    def _on_signal(self) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            self._kill_all()

    # -- processes -----------------------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if action.verb is Verb.START:
                self._start(action)
            elif child := self._children.get(action.worker):
                child.process.send_signal(signal.SIGTERM if action.verb is Verb.DRAIN else signal.SIGKILL)

    def _start(self, action: Action) -> None:
        output = self._output_path(action.worker).open("wb")
        command = [sys.executable, "-P", "-m", "workers", str(action.role)]
        process = subprocess.Popen(
            [*command, "--run-dir", str(self._run_dir), "--name", action.worker],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._children[action.worker] = _Child(process, output, time.time())
        log.info("worker_started", worker=action.worker, pid=process.pid)

    def _reap(self, now: float) -> None:
        for name, child in list(self._children.items()):
            code = child.process.poll()
            if code is None:
                continue
            child.output.close()
            del self._children[name]
            self._plan.exited(name, code, now)
            if code != ExitCode.OK:
                log.warning("worker_exited", worker=name, exit_code=code)

    def _kill_all(self) -> None:
        for child in self._children.values():
            child.process.kill()
            child.process.wait()

    def _output_path(self, worker: str) -> Path:
        return self._run_dir / "logs" / f"{worker}.out"

    def _outcome(self, status: RunStatus) -> Outcome:
        failure = self._plan.failure
        if failure is not None:
            lines = self._output_path(failure.worker).read_text(errors="replace").splitlines()[-_LAST_LINES:]
            return Outcome(failure.exit_code or ExitCode.RESTART_BUDGET, status, failure, "\n".join(lines))
        if self._num_signals > 1:
            return Outcome(ExitCode.INTERRUPTED, status)
        return Outcome(ExitCode.OK, status)


def _why_dead(beat: Heartbeat, wall: float, stuck_after_s: float) -> str | None:
    if wall - beat.at_s > _SILENT_AFTER_S:
        return f"no heartbeat for {wall - beat.at_s:.0f} s"
    still_s = wall - beat.progress_at_s
    if beat.waiting_for is WaitingFor.COMPUTE and still_s > stuck_after_s:
        return f"computing without progress for {still_s:.0f} s"
    if beat.waiting_for is WaitingFor.STARTING and still_s > _START_TIMEOUT_S:
        return f"not started after {still_s:.0f} s"
    return None
