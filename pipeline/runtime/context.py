"""The actor's context: everything that the runtime provides to an actor.

*Consumes* the actor's reports: progress, waits, counters, links. *Produces* the heartbeat's content, threads
and tasks. *Waits for* the compute thread in ``compute``, and the storage thread in ``store``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from structlog.typing import FilteringBoundLogger

from pipeline.config.changing import with_settings
from pipeline.config.operations import WORKERS
from pipeline.config.schema import RunConfig
from pipeline.files.code_copies import running_version
from pipeline.ledger.contract import Ledger
from pipeline.process.exit_codes import ExitCode
from pipeline.process.work import Meter, listening, piece_limit_s
from pipeline.runtime.clock import Clock
from pipeline.runtime.flow_ring import FlowRingWriter, LinkSide, LinkState
from pipeline.runtime.lifecycle import FirstError
from pipeline.runtime.notifications import Notifications
from pipeline.runtime.open_messages import FlowRecorder, Inbox, Outbox
from pipeline.runtime.prepared import PreparedParts
from pipeline.runtime.registry.contract import MAX_DETAIL_CHARS, LinkReport, Registry, WaitingFor
from pipeline.runtime.registry.settings_change import SettingsChange, SettingsTaken
from pipeline.runtime.tracing import TrajectorySpans
from pipeline.runtime.worker_state import WorkerState
from protocol.channel import Mailbox, Requester, Responder, Sender
from protocol.ids import Incarnation, Role

T = TypeVar("T")

_WAITS = {kind: index for index, kind in enumerate(WaitingFor)}


class Transport(Protocol):
    """Creates mailboxes and links; see ``protocol.zeromq.ZmqTransport``."""

    @property
    def public_key(self) -> str:
        """This worker's public CURVE key; "" if it has none."""
        ...

    def peers(self) -> dict[str, str] | None:
        """Return public key -> name of each permitted peer; None without keys."""
        ...

    def mailbox(self, endpoint: str) -> Mailbox: ...

    def sender(self, endpoint: str, *, server_key: str = "") -> Sender: ...

    def responder(self, endpoint: str) -> Responder: ...

    def requester(self, endpoint: str, *, server_key: str = "") -> Requester: ...


@dataclass(frozen=True, slots=True)
class WorkInHand:
    """An actor's account of its work, for its vitals."""

    begun_s: float | None = None
    """When it took the oldest work that it still holds, by ``Clock.monotonic``; None if it holds none."""
    input_depth: int | None = None
    """Like ``Vitals.input_depth``; None if unknown."""
    output_depth: int | None = None


class ActorContext:
    """One actor's context. Only functions given to ``compute`` and ``store`` run outside of the loop.

    Attributes:
        config: The run's configuration; replaced by ``take_settings``.
        start_config: The configuration when the worker started, which other ranks read too.
        run_dir: The run's folder.
        who: This incarnation, which every write to the ledger names.
        ledger: The durable ledger.
        registry: The fleet's registry.
        notifications: Subscriptions to changes of the registry.
        transport: Creates mailboxes and links.
        log: structlog logger; every line has role, worker, run and policy version.
        clock: The time.
        draining: Set when the main loop should end.
        flow: Records messages for `headrace run trace` and OpenTelemetry, each if it is on.
        prepared: Parts that this process made while it was a standby.
        delivered: Finished pieces of work. An error before the first is not blamed on the work.
        tasks: The actor's TaskGroup; prefer ``spawn``, which names a task and watches its end."""

    def __init__(
        self,
        *,
        config: RunConfig,
        run_dir: Path,
        who: Incarnation,
        ledger: Ledger,
        registry: Registry,
        transport: Transport,
        log: FilteringBoundLogger,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        log_context: dict[str, object] | None = None,
        spans: TrajectorySpans | None = None,
        ring: FlowRingWriter | None = None,
        first_error: FirstError | None = None,
        prepared: PreparedParts | None = None,
    ) -> None:
        self.config = self.start_config = config
        self.run_dir = run_dir
        self.who = who
        self.ledger = ledger
        self.registry = registry
        self.notifications = Notifications(registry, clock)
        self.transport = transport
        self.log = log
        self.clock = clock
        self.tasks = tasks
        self.draining = asyncio.Event()
        self.worker_state = WorkerState(who, clock)
        if version := running_version(run_dir):
            self.goes_by_code(WORKERS, version)
        self.flow = FlowRecorder(clock, ring, spans)
        self.flow.watch_worker(self._flow_state)
        self.prepared = prepared or PreparedParts()
        self.finished: tuple[ExitCode, str] | None = None
        self.delivered = 0
        self._offered: tuple[SettingsChange, RunConfig] | None = None
        self._first_error = first_error or FirstError()
        self._log_context = {} if log_context is None else log_context
        self._compute_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"compute-{who.worker}")
        self._storage_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"storage-{who.worker}")
        self._busy: set[str] = set()
        self._computed: set[str] = set()
        self._spawned: list[asyncio.Task[None]] = []
        self._unreached: dict[str, str] = {}
        self._links: list[Callable[[], list[LinkReport]]] = []
        self._mailboxes: list[Mailbox] = []
        self._in_hand: Callable[[], WorkInHand] = WorkInHand

    # -- the heartbeat's content -------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, float]:
        """Role-specific numbers in the heartbeat, documented in each role's module."""
        return self.worker_state.counters

    def count(self, name: str, amount: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    @property
    def policy_version(self) -> int:
        """The version that this worker serves or has published, also in log lines; -1 if none."""
        return self.worker_state.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self.worker_state.policy_version = version
        self._log_context["policy_version"] = version
        self.worker_state.on_news()

    def deliver(self) -> None:
        """Count a finished piece of work. The first one is logged, since it shows that the worker is useful."""
        self.delivered += 1
        if self.delivered == 1:
            self.log.info("first_work_done")

    def progress(self, n: int = 1) -> None:
        self.worker_state.progress(n)

    @property
    def held(self) -> int:
        """Number of pieces of work taken but not finished. A worker that makes no progress on them is
        replaced."""
        return self.worker_state.held

    @held.setter
    def held(self, number: int) -> None:
        self.worker_state.held = number

    def waiting_for(self, kind: WaitingFor, detail: str = "") -> None:
        """Report what the main loop is now waiting for; ``detail`` is for people.

        An idle loop reports at every turn: without a report for ``supervisor.stuck_after_s`` it counts as
        stuck."""
        self.worker_state.waiting_for(kind, detail)

    def starting(self, what: str) -> None:
        """Report a long step of the actor's start, such as ``loading my-model, 15,200 MB``."""
        self.worker_state.waiting_for(WaitingFor.STARTING, what)

    def waiting(self, kind: WaitingFor, detail: str = "") -> AbstractContextManager[None]:
        return self.worker_state.waiting(kind, detail)

    @property
    def work(self) -> Meter:
        """Meter of long work on the loop and the compute thread (``pipeline.process.work``)."""
        return self.worker_state.work

    @property
    def storing(self) -> Meter:
        return self.worker_state.storing

    def report_unreached(self, of: str, words: str) -> None:
        """Report the unreachable mailboxes of the role ``of``; empty if there are none."""
        self._unreached[of] = words
        self.worker_state.unreached = "; ".join(filter(None, self._unreached.values()))

    def watch_mailbox(self, mailbox: Mailbox) -> Inbox:
        """Include a mailbox's counters in the heartbeat: one link per main sender, and a sum of the others.

        Returns the inbox that tracks its messages until they are done."""
        inbox = Inbox(self.who.worker, self.clock, self.flow)
        self._mailboxes.append(mailbox)
        self.watch_links(lambda: inbox.reports(mailbox.stats()))
        return inbox

    def outbox(self, role: Role) -> Outbox:
        return Outbox(self.who.worker, role, self.clock, self.flow)

    def watch_in_hand(self, told: Callable[[], WorkInHand]) -> None:
        """Include the actor's work in hand in the vitals. ``told`` is called like the function in
        ``watch_links``."""
        self._in_hand = told

    def watch_links(self, report: Callable[[], list[LinkReport]]) -> None:
        """Include ``report()`` in the heartbeat. It is called on the loop, at most twice a second."""
        self._links.append(report)

    def refresh_links(self) -> None:
        """Read links and work in hand for the next heartbeat. Called by the runtime."""
        self.worker_state.set_links(tuple(link for report in self._links for link in report()))
        in_hand, signs = self._in_hand(), self.worker_state.signs
        signs.begun_s, signs.input_depth, signs.output_depth = (
            in_hand.begun_s,
            in_hand.input_depth,
            in_hand.output_depth,
        )
        signs.refused = sum(link.num_refused for mailbox in self._mailboxes for link in mailbox.stats())

    def _flow_state(self, now_s: float) -> LinkState:
        state, begun_s = self.worker_state, self._in_hand().begun_s
        counts = (state.num_progress, state.held, _WAITS[state.kind])
        age_s = 0.0 if begun_s is None else max(0.0, now_s - begun_s)
        return LinkState(now_s, "", LinkSide.WORKER, counts, state.held, age_s, state.policy_version)

    # -- changes of the settings -------------------------------------------------------------------

    def offer_settings(self, change: SettingsChange) -> None:
        """Have a change of the settings ready for ``take_settings``. Called by the runtime. Raises
        ConfigError for settings that this release does not know."""
        if change.number > self.worker_state.settings.number:
            self._offered = change, with_settings(self.config, change.holds)

    def take_settings(self, first_update: int = 0) -> SettingsChange | None:
        """Apply the newest change of the settings to ``config``, and report that; return the change, None if
        there is no new one. An actor calls this where the change may take effect."""
        if self._offered is None:
            return None
        (change, self.config), self._offered = self._offered, None
        code = self.worker_state.settings.code
        self.worker_state.settings = SettingsTaken(number=change.number, first_update=first_update, code=code)
        self.worker_state.on_news()
        return change

    def give_up_settings(self, former: Mapping[str, str], failed: Sequence[int], why: str) -> None:
        """Go back to the ``former`` values, and report why the changes with the numbers ``failed`` failed.
        The supervisor rolls them back for all workers; until then no change is taken."""
        self.config, self._offered = with_settings(self.config, former), None
        self.worker_state.settings = msgspec.structs.replace(
            self.worker_state.settings, failed=min(failed), failed_to=max(failed), why=why[:MAX_DETAIL_CHARS]
        )
        self.worker_state.on_news()

    def goes_by_code(self, key: str, version: str) -> None:
        """Report the version of the code of one setting that this process now runs."""
        taken = self.worker_state.settings
        self.worker_state.settings = msgspec.structs.replace(taken, code={**taken.code, key: version})
        self.worker_state.on_news()

    # -- work --------------------------------------------------------------------------------------

    async def compute(self, function: Callable[..., T], /, *args: Any) -> T:
        """Run blocking work on the compute thread, in order of arrival, and return its result.

        Its end, and every piece that it reports (``pipeline.process.work``), count as progress. Cancelling
        the wait does not stop the function. The first call of a function is reported as ``COMPILE``; work
        within a wait that has its own time limit is reported as that wait. ``pipeline.supervisor.watchdog``
        has the limits."""
        result = await self._computed_by(function, args, is_piece=True, begins=True)
        self.progress()
        return result

    async def prepare(self, name: str, function: Callable[..., T], /, *args: Any) -> T:
        """Return the part of this name that a standby made; otherwise make it, like ``compute``."""
        part = self.prepared.take(name)
        return await self.compute(function, *args) if part is None else part

    async def turn(self, function: Callable[..., T], /, *args: Any, begins: bool) -> T:
        """Run one turn of an endless loop on the compute thread, like ``compute``.

        Its end does not count as progress, since an engine may return without having done anything; only the
        pieces that it reports do. ``begins`` says that idle time before it does not count, which is wrong
        while earlier turns produced nothing."""
        return await self._computed_by(function, args, is_piece=False, begins=begins)

    async def _computed_by(
        self, function: Callable[..., T], args: tuple[Any, ...], *, is_piece: bool, begins: bool
    ) -> T:
        name = str(getattr(function, "__qualname__", function))
        kind = WaitingFor.COMPUTE if name in self._computed else WaitingFor.COMPILE
        self._computed.add(name)
        is_part = self.worker_state.kind.covers_computing
        with self.worker_state.waiting(
            self.worker_state.kind if is_part else kind, self.worker_state.detail if is_part else ""
        ):
            return await self._on(
                self._compute_thread, "compute", self.work, function, args, is_piece=is_piece, begins=begins
            )

    async def store(self, function: Callable[..., T], /, *args: Any) -> T:
        """Run a blocking write to the disk on the storage thread, and return its result.

        Its end counts as progress. Cancelling the wait does not stop the function."""
        result = await self._on(self._storage_thread, "storage", self.storing, function, args)
        self.progress()
        return result

    @property
    def moved_s(self) -> float:
        """When progress was last made, by the actor's monotonic clock."""
        return self.worker_state.moved_s

    @property
    def drain_patience_s(self) -> float:
        """How long a drain may go without progress. Current work or writes may need longer than the default."""
        settings = self.config.supervisor
        patience_s = settings.drain_timeout_s
        if "compute" in self._busy and (slowest_s := self.work.report().slowest_s):
            patience_s = max(patience_s, piece_limit_s(slowest_s, settings.stuck_after_s))
        if "storage" in self._busy:
            patience_s = max(patience_s, settings.checkpoint_timeout_s)
        return patience_s

    @property
    def is_computing(self) -> bool:
        """Whether the compute or storage thread is running a function."""
        return bool(self._busy)

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, None], *, endless: bool = True) -> asyncio.Task[None]:
        """Run a coroutine alongside the main loop until it is cancelled after the drain.

        An exception in it ends the worker. So does the return of an ``endless`` one before the drain."""
        task = self.tasks.create_task(self._watched(name, coroutine, endless), name=name)
        # closes a coroutine that was cancelled before it started
        task.add_done_callback(lambda _: coroutine.close())
        self._spawned = [task, *(other for other in self._spawned if not other.done())]
        return task

    def finish(self, code: ExitCode = ExitCode.OK, reason: str = "") -> None:
        """Declare the worker's work done: ``run`` may return, and after a drain the process exits with
        ``code``."""
        if self.finished is None:
            self.finished = (code, reason)

    async def cancel_spawned(self, *, timeout_s: float = 5.0) -> None:
        """Cancel spawned tasks and wait for them, up to the limit. Called by the runtime."""
        running = [task for task in self._spawned if not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=timeout_s)

    def close(self) -> None:
        """Let the threads end after their current function. Called by the runtime."""
        self.flow.close()
        for thread in (self._compute_thread, self._storage_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    async def _watched(self, name: str, coroutine: Coroutine[Any, Any, None], endless: bool) -> None:
        with self._first_error.recording():
            await coroutine
            if endless and not self.draining.is_set():
                raise RuntimeError(
                    f"task {name} of {self.who} returned before the drain: return only when ctx.draining is set, or spawn "
                    "it with endless=False"
                )

    async def _on(
        self,
        thread: ThreadPoolExecutor,
        name: str,
        meter: Meter,
        function: Callable[..., T],
        args: tuple[Any, ...],
        *,
        is_piece: bool = True,
        begins: bool = True,
    ) -> T:
        def run() -> T:
            # each thread has its own name in this set
            self._busy.add(name)
            if begins:
                meter.begin()
            try:
                with listening(meter):
                    return function(*args)
            finally:
                if is_piece:
                    meter.step()
                self._busy.discard(name)

        return await asyncio.get_running_loop().run_in_executor(thread, run)
