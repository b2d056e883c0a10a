"""Runs an actor as a process: from the run's folder to an exit code.

*Consumes* an actor's class, the run's folder and a worker's name. *Produces* a registered worker with
heartbeats and a log, and an exit code. *Waits for* the ledger at the start, up to the limit of an outage; then
for the actor, signals, the run's status and news that it is fenced.

One TaskGroup has the actor's own tasks and these:

* *life*: the actor's setup, run, drain and teardown
* *stop watch*: raises when the stop is immediate, the drain overdue or the incarnation fenced
* *run watch*: starts a drain when the run is over
* *links*, *flow* and *news*: read the links' counters, record messages, read the registry's changes

A worker goes on without its supervisor; the next one adopts it (``pipeline.process.records``)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from structlog.typing import FilteringBoundLogger

from pipeline.config.load import read_resolved
from pipeline.config.schema import RunConfig
from pipeline.files import keep_private
from pipeline.ledger.address import read_ledger_url
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.process.exit_codes import DrainTimeout, ExitCode, Interrupted, exit_code_of
from pipeline.process.records import worker_pid
from pipeline.process.stacks.dump import StackDump
from pipeline.process.work import listening
from pipeline.runtime.clock import Clock, RealClock
from pipeline.runtime.context import ActorContext
from pipeline.runtime.heartbeat import HeartbeatThread
from pipeline.runtime.lifecycle import FirstError, Lifecycle, LifeRecord
from pipeline.runtime.liveness import heartbeat_every_s
from pipeline.runtime.log import WorkerLog, open_log
from pipeline.runtime.notifications import LOOK_ANYWAY_S
from pipeline.runtime.prepared import PreparedParts
from pipeline.runtime.process_setup import limit_threads, obeying, threads_of
from pipeline.runtime.registry.contract import Heartbeat, Registry, RunState, Topic, WaitingFor
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.registry.redis_heartbeats import RedisHeartbeatWriter
from pipeline.runtime.tracing import open_spans
from pipeline.runtime.worker_start import begin_vitals, connect_worker, hear_settings, open_ring, open_transport
from protocol.errors import ConfigError, EngineProcessDied, Fenced, LedgerError
from protocol.ids import Incarnation, is_worker_name
from protocol.printable import printable

if TYPE_CHECKING:
    from pipeline.runtime.actor import Actor

_LINKS_S = 0.5
_STOP_WATCH_S = 1.0
_TEARDOWN_S = 5.0
_DEPART_S = 2.0
_SPANS_S = 2.0
_HEARTBEAT_END_S = 5.0
_IMMEDIATE_S = 0.5
_ENDED = {RunState.STOPPING, RunState.FINISHED, RunState.FAILED}


def run_actor(
    load: Callable[[], type[Actor]],
    run_dir: Path,
    worker: str,
    made: PreparedParts | None = None,
    clock: Clock | None = None,
) -> int:
    """Run one worker until it ends, and return its exit code (``pipeline.process.exit_codes``).

    Args:
        load: Returns the actor's class. Called after threads are limited, so it may import anything.
        run_dir: The run's folder, with its resolved configuration and its ledger's address.
        worker: Name in the fleet. An older process with this name is fenced from now on.
        made: Parts that this process made as a standby.
        clock: Instead of the operating system's."""
    run_dir = run_dir.absolute()
    keep_private()
    # before any import of a numeric library
    limit_threads(1)
    life = LifeRecord(run_dir, worker)
    try:
        if not is_worker_name(worker):
            raise ConfigError(
                f"--name {worker!r:.80} is not a valid worker name; expected letters, digits, '.', '_' and '-', such as "
                "generator-2"
            )
        config = read_resolved(run_dir)
        url = read_ledger_url(run_dir)
    except ConfigError as error:
        sys.stderr.write(f"{printable(worker)}: {error}\n")
        life.ended(ExitCode.CONFIG, error)
        return ExitCode.CONFIG
    try:
        actor_class = load()
    except Exception as error:  # noqa: BLE001 - a failed import precedes the log
        traceback.print_exc()
        code = exit_code_of(error)
        life.ended(code, error)
        return code
    if "torch" not in sys.modules:
        limit_threads(threads_of(config, actor_class.role))
    log = open_log(run_dir, role=actor_class.role, worker=worker, run=config.run.name)
    stacks = _stack_dump(run_dir, worker, log)
    if made is not None and not made.fits(config):
        log.logger.warning("standby_not_used", reason="the settings have changed since")
        made.release()
    # exclude modules from garbage collection, which with torch would pause everything for 0.1 s each time
    gc.freeze()
    host_of = partial(
        WorkerProcess, actor_class, config, run_dir, worker, url, log, stacks, clock or RealClock(),
        on_epoch=life.registered,
    )  # fmt: skip
    host = host_of(prepared=made)
    code = ExitCode.FAILURE
    try:
        while True:
            code = asyncio.run(host.run())
            if not host.may_start_anew:
                break
            log.logger.warning("engine_replaced", reason="only its engine's processes died; this process starts others")
            host = host_of(after=host.epoch)
    finally:
        if stacks is not None:
            stacks.close()
        log.flush()
        life.ended(code, host.error, host.delivered)
    if host.is_computing:
        # the interpreter would wait for the compute thread, which cannot be stopped
        os._exit(code)
    log.close()
    return code


def _stack_dump(run_dir: Path, worker: str, log: WorkerLog) -> StackDump | None:
    """Return the writer of this process's stacks; None if no file can be written."""
    try:
        return StackDump(run_dir, worker)
    except OSError as error:
        log.logger.warning("stacks_not_written", reason=str(error))
        return None


class WorkerProcess:
    """One worker's process, from its first connection to its exit code."""

    def __init__(
        self,
        actor_class: type[Actor],
        config: RunConfig,
        run_dir: Path,
        worker: str,
        url: str,
        log: WorkerLog,
        stacks: StackDump | None,
        clock: Clock,
        *,
        on_epoch: Callable[[int], None],
        prepared: PreparedParts | None = None,
        after: int | None = None,
    ) -> None:
        """``after``: epoch of the incarnation that this process was before; a fence since then ends it."""
        self._actor_class = actor_class
        self._config = config
        self._run_dir = run_dir
        self._worker = worker
        self._url = url
        self._on_epoch, self._after = on_epoch, after
        self._prepared = prepared
        self._worker_log = log
        self._stacks = stacks
        self._has_late_signal = False
        self._log: FilteringBoundLogger = log.logger
        self._clock = clock
        settings = config.supervisor
        self._lifecycle = Lifecycle(settings.drain_timeout_s, settings.drain_ceiling_s)
        self._nudged = asyncio.Event()
        self._is_fenced = False
        self._worked_s = 0.0
        """From the end of the set-up until it stopped or failed."""
        self._context: ActorContext | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._first_error = FirstError()
        self.error: BaseException | None = None
        """The error that ended the process, if any."""

    @property
    def epoch(self) -> int | None:
        return None if self._context is None else self._context.who.epoch

    @property
    def delivered(self) -> int:
        return 0 if self._context is None else self._context.delivered

    @property
    def may_start_anew(self) -> bool:
        """Whether this process should become the worker's next incarnation: nothing but its engine's processes
        died, after work and so late that the supervisor's budget of restarts would not count an end before.
        An engine that keeps dying ends the process, and is charged.

        That saves the imports. With standbys, one of them takes over sooner."""
        return (
            self.error is not None
            and all(isinstance(error, EngineProcessDied) for error in leaves(self.error))
            and self.delivered > 0
            and self._worked_s > self._config.supervisor.restart_window_s
            and not (self.is_computing or self._lifecycle.is_draining or self._config.fleet.standby)
            and not self._has_late_signal
        )

    @property
    def is_computing(self) -> bool:
        return self._context is not None and self._context.is_computing

    async def run(self) -> ExitCode:
        with obeying(self._on_signal, self._on_late_signal):
            try:
                async with asyncio.TaskGroup() as tasks:
                    self._watch(tasks, "stop-watch", self._watch_stop())
                    tasks.create_task(self._live(tasks), name="life")
            except BaseExceptionGroup as group:
                return self._explain(group)
        counters = dict(self._context.counters) if self._context else {}
        self._log.info("worker_ended", reason=self._lifecycle.reason, code=self._lifecycle.code.name, counters=counters)
        return self._lifecycle.code

    # -- life --------------------------------------------------------------------------------------

    async def _live(self, tasks: asyncio.TaskGroup) -> None:
        who = await self._register()
        self._on_epoch(who.epoch)
        client = connect_worker(self._config, self._run_dir, self._url, self._worker)
        ledger = RedisLedger(client, self._config.run.name)
        registry = RedisRegistry(client, self._config.run.name, connection=ledger.connection)
        transport = open_transport(self._config, self._run_dir, who)
        spans = open_spans(self._config.tracing, self._config.run.name, who, self._log)
        ctx = self._context = ActorContext(
            config=self._config,
            run_dir=self._run_dir,
            who=who,
            ledger=ledger,
            registry=registry,
            transport=transport,
            log=self._log,
            clock=self._clock,
            tasks=tasks,
            log_context=self._worker_log.context,
            spans=spans,
            ring=open_ring(self._config, self._run_dir, who, self._log),
            first_error=self._first_error,
            prepared=self._prepared,
        )
        ledger.on_trouble(ctx.worker_state.ledger_trouble)
        self._worker_log.context["epoch"] = who.epoch
        self._log.info("worker_started", pid=worker_pid())
        if self._lifecycle.is_draining:
            ctx.draining.set()
        heartbeats = self._heartbeats(ctx)
        ctx.worker_state.on_news = heartbeats.nudge
        await hear_settings(ctx, is_taken=True)
        host_watch = begin_vitals(ctx, ledger)
        heartbeats.start()
        self._watch(tasks, "run-watch", self._watch_run(ctx))
        self._watch(tasks, "news", ctx.notifications.watch())
        self._watch(tasks, "links", self._read_links(ctx))
        self._watch(tasks, "flow", ctx.flow.run())
        try:
            with listening(ctx.work), self._first_error.recording():
                await self._act(self._actor_class(ctx), ctx)
        finally:
            host_watch.stop()
            await asyncio.to_thread(heartbeats.stop, timeout_s=self._at_most(_HEARTBEAT_END_S))
            await self._depart(registry, who)
            if spans is not None:
                await asyncio.to_thread(spans.close, self._at_most(_SPANS_S))
            transport.close()
            ctx.close()
            await ledger.aclose()
            await registry.aclose()
            self._lifecycle = self._lifecycle.ended()
            for watch in self._watches:
                watch.cancel()

    async def _register(self) -> Incarnation:
        """Register this incarnation, waiting out an outage up to its limit. The outage is logged once."""
        client = connect_worker(self._config, self._run_dir, self._url, self._worker)
        registry = RedisRegistry(client, self._config.run.name)
        reported: list[str] = []

        def report(trouble: str) -> None:
            if trouble and not reported:
                reported.append(trouble)
                self._log.warning("ledger_unavailable", reason=trouble)

        registry.on_trouble(report)
        try:
            if self._after is not None and await registry.epoch(self._worker) > self._after:
                raise self._fenced()
            return await registry.register(self._actor_class.role, self._worker)
        finally:
            await registry.aclose()

    async def _act(self, actor: Actor, ctx: ActorContext) -> None:
        if not await self._set_up(actor, ctx):
            return
        self._log.info("worker_ready")
        began_s = self._clock.monotonic()
        try:
            self._lifecycle = self._lifecycle.ready()
            await actor.run()
            if ctx.finished is not None:
                code, reason = ctx.finished
                self._stop(reason or "its work is done", code=code)
            elif not ctx.draining.is_set():
                raise RuntimeError(
                    f"the main loop of {ctx.who} returned; it was expected to run until ctx.draining is set: call ctx.finish "
                    "when its work is done"
                )
            ctx.waiting_for(WaitingFor.DRAINING, self._lifecycle.reason)
            await actor.drain()
        finally:
            self._worked_s = self._clock.monotonic() - began_s
            await ctx.cancel_spawned()
            await self._tear_down(actor)
        ctx.waiting_for(WaitingFor.STOPPED)

    async def _set_up(self, actor: Actor, ctx: ActorContext) -> bool:
        """Set the actor up; return whether it is ready. A stop cancels its set-up at once: the worker holds
        nothing yet, and an engine may take minutes to load."""
        async with asyncio.TaskGroup() as both:
            setup = both.create_task(actor.setup(), name="setup")
            stop = both.create_task(ctx.draining.wait(), name="setup-stop")
            await asyncio.wait({setup, stop}, return_when=asyncio.FIRST_COMPLETED)
            is_ready = setup.done()
            setup.cancel()
            stop.cancel()
        if not is_ready:
            await ctx.cancel_spawned()
            ctx.waiting_for(WaitingFor.STOPPED)
        return is_ready

    async def _tear_down(self, actor: Actor) -> None:
        try:
            async with asyncio.timeout(self._at_most(_TEARDOWN_S)):
                await actor.teardown()
        except TimeoutError:
            self._log.warning("teardown_timed_out")

    def _heartbeats(self, ctx: ActorContext) -> HeartbeatThread:
        loop, limits = asyncio.get_running_loop(), self._config.supervisor

        def on_loop(function: Callable[..., None], *arguments: object) -> None:
            # a RuntimeError means that the loop has ended
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(function, *arguments)

        def heartbeat() -> Heartbeat:
            if self._stacks is not None:
                self._stacks.poll(loop)
            return ctx.worker_state.heartbeat()

        def on_fenced() -> None:
            self._is_fenced = True
            on_loop(self._nudged.set)

        def on_deaf() -> None:
            self._worker_log.flush()
            os._exit(ExitCode.FENCED)

        return HeartbeatThread(
            RedisHeartbeatWriter(self._url, self._config.run.name),
            heartbeat,
            on_fenced=on_fenced,
            on_deaf=on_deaf,
            log=self._log,
            interval_of=lambda workers: heartbeat_every_s(workers, limits.heartbeats_per_s, limits.silent_after_s),
            on_fleet=lambda fleet: on_loop(ctx.notifications.update_fleet, fleet),
        )

    async def _depart(self, registry: Registry, who: Incarnation) -> None:
        """Leave the registry, so that the worker's place is free at once; report the error that ended it."""
        try:
            async with asyncio.timeout(self._at_most(_DEPART_S)):
                await registry.depart(who, self._first_error.report(who))
        except (TimeoutError, LedgerError) as error:
            self._log.warning("departure_not_registered", reason=str(error))

    def _at_most(self, seconds: float) -> float:
        """Return the time limit of an ending step: short when the stop is immediate."""
        return min(seconds, _IMMEDIATE_S) if self._lifecycle.is_immediate else seconds

    # -- stopping ----------------------------------------------------------------------------------

    def _on_late_signal(self) -> None:
        self._has_late_signal = True

    def _on_signal(self, number: signal.Signals, _terminals: tuple[int, ...]) -> None:
        if number is signal.SIGHUP and self._lifecycle.num_signals:
            # shell and kernel both send it when a terminal closes, so it is not a second request
            return
        self._lifecycle = self._lifecycle.signal(self._clock.monotonic(), number.name)
        self._begin_drain()

    def _stop(self, reason: str, *, code: ExitCode = ExitCode.OK) -> None:
        self._lifecycle = self._lifecycle.stop(self._clock.monotonic(), reason, code=code)
        self._begin_drain()

    def _begin_drain(self) -> None:
        self._log.info("worker_stopping", reason=self._lifecycle.reason, num_signals=self._lifecycle.num_signals)
        if self._context is not None:
            self._context.draining.set()
        self._nudged.set()

    async def _watch_stop(self) -> None:
        while True:
            now = self._clock.monotonic()
            if self._context is not None:
                self._lifecycle = self._lifecycle.moved(self._context.moved_s, self._context.drain_patience_s)
            if self._is_fenced:
                raise self._fenced()
            if self._lifecycle.is_immediate:
                raise Interrupted(f"{self._worker} was stopped a second time; it ends without draining")
            if self._lifecycle.is_draining and self._context is None:
                raise Interrupted(f"{self._worker} was stopped before it had reached the ledger; it held nothing")
            if self._lifecycle.is_overdue(now):
                raise DrainTimeout(
                    f"{self._worker} ({self._lifecycle.reason}) did not drain: it made no progress for "
                    f"{self._lifecycle.drain_timeout_s:g} s (supervisor.drain_timeout_s), or took more than "
                    f"{self._lifecycle.drain_ceiling_s:g} s in all (supervisor.drain_ceiling_s). Others lease what it held; "
                    "raise the limit that was too short"
                )
            deadline = self._lifecycle.deadline_s
            self._nudged.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_WATCH_S if deadline is None else max(0.0, deadline - now)):
                    await self._nudged.wait()

    def _fenced(self) -> Fenced:
        return Fenced(f"{self._worker} is fenced: a newer incarnation of it exists; this process ends")

    async def _watch_run(self, ctx: ActorContext) -> None:
        """Drain once the run is over; offer changes of its settings."""
        changed = ctx.notifications.subscribe(Topic.RUN)
        while True:
            changed.clear()
            # the actor's own calls notice that the ledger is down
            with contextlib.suppress(LedgerError):
                status = await ctx.registry.run_status()
                if status.state in _ENDED and not ctx.draining.is_set():
                    self._stop(f"the run is {status.state}: {status.detail}")
                await hear_settings(ctx, is_taken=not self._actor_class.takes_settings)
            await self._clock.wait(changed, LOOK_ANYWAY_S)

    async def _read_links(self, ctx: ActorContext) -> None:
        lag = ctx.worker_state.signs.lag
        while True:
            ctx.refresh_links()
            lag.expect(_LINKS_S)
            await self._clock.sleep(_LINKS_S)
            lag.woke()

    def _watch(self, tasks: asyncio.TaskGroup, name: str, coroutine: Coroutine[None, None, None]) -> None:
        self._watches.append(tasks.create_task(self._first_error.record_from(coroutine), name=name))

    def _explain(self, group: BaseExceptionGroup[BaseException]) -> ExitCode:
        """Log why the worker ended: an expected error as a sentence, others with their traceback."""
        self.error = group
        code = exit_code_of(group)
        if code is ExitCode.FAILURE:
            self._log.error("worker_failed", code=code.name, exc_info=group)
        else:
            reasons = [str(error) for error in leaves(group)]
            self._log.error("worker_ended", code=code.name, reason="; ".join(reasons))
        return code


def leaves(error: BaseException) -> list[BaseException]:
    """Return the exceptions of a group and its nested groups, or the single exception."""
    if isinstance(error, BaseExceptionGroup):
        members: tuple[BaseException, ...] = error.exceptions  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return [leaf for member in members for leaf in leaves(member)]
    return [error]
