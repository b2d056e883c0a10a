"""What the runtime gives to an actor.

*Consumes* marks from the actor: progress, waits, counters, links. *Produces* what the actor works
with: its configuration, its name in the fleet, the ledger, the registry, the transport, time, one
thread for blocking work, tasks. *Waits for* the compute thread, in ``compute``; for the disk's, in
``store``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from structlog.typing import FilteringBoundLogger

from pipeline.config.schema import RunConfig
from pipeline.ledger.contract import Ledger
from pipeline.process.exit_codes import ExitCode
from pipeline.process.work import Meter, listening, piece_limit_s
from pipeline.runtime.clock import Clock
from pipeline.runtime.notifications import Notifications
from pipeline.runtime.registry.contract import (
    MAX_NAMED_LINKS,
    OTHER_LINKS,
    LinkReport,
    Registry,
    WaitingFor,
    link_name,
)
from pipeline.runtime.worker_state import WorkerState
from protocol.channel import LinkStats, Mailbox, Requester, Responder, Sender
from protocol.ids import Incarnation

T = TypeVar("T")

_LONG = frozenset({WaitingFor.STARTING, WaitingFor.DISK, WaitingFor.DRAINING})


class Transport(Protocol):
    """What makes mailboxes and links: ``protocol.zeromq.ZmqTransport``, or memory in tests."""

    @property
    def public_key(self) -> str:
        """This worker's public CURVE key; "" when the transport has none."""
        ...

    def mailbox(self, endpoint: str) -> Mailbox:
        """Bind a mailbox."""
        ...

    def sender(self, endpoint: str, *, server_key: str = "") -> Sender:
        """Connect a link to a mailbox."""
        ...

    def responder(self, endpoint: str) -> Responder:
        """Bind a responder."""
        ...

    def requester(self, endpoint: str, *, server_key: str = "") -> Requester:
        """Connect to a responder."""
        ...


class ActorContext:
    """One actor's surroundings. Everything but ``compute``'s function runs on the event loop.

    Attributes:
        config: the resolved configuration of the run.
        run_dir: the run's folder.
        who: this incarnation; every write to the ledger carries it.
        ledger: the durable ledger.
        registry: the fleet.
        notifications: subscriptions to changes of the registry.
        transport: mailboxes and links.
        log: structlog logger; role, worker, run and policy version are on every line.
        clock: time.
        draining: set when the main loop should come to its end.
        delivered: pieces of work that the actor has finished for good; an error before the first is
            not of the work.
        tasks: the actor's TaskGroup; prefer ``spawn``, which names the task and watches its end.
    """

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
    ) -> None:
        self.config = config
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
        self.finished: tuple[ExitCode, str] | None = None
        self.delivered = 0
        self._log_context = {} if log_context is None else log_context
        self._compute_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"compute-{who.worker}")
        self._storage_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"storage-{who.worker}")
        self._busy: set[str] = set()
        self._computed: set[str] = set()
        self._spawned: list[asyncio.Task[None]] = []
        self._unreached: dict[str, str] = {}
        self._links: list[Callable[[], list[LinkReport]]] = []

    # -- what the heartbeat says -------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, float]:
        """Role-specific numbers in the heartbeat; each role's module documents its own."""
        return self.worker_state.counters

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter of the heartbeat."""
        self.counters[name] = self.counters.get(name, 0) + amount

    @property
    def policy_version(self) -> int:
        """The version that this worker serves or has published; -1 when it has none. Every line of
        the log says it.
        """
        return self.worker_state.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self.worker_state.policy_version = version
        self._log_context["policy_version"] = version
        self.worker_state.on_version()

    def progress(self, n: int = 1) -> None:
        """Count ``n`` turns of the main loop that did something."""
        self.worker_state.progress(n)

    @property
    def held(self) -> int:
        """Pieces of work taken and not finished; a worker that holds some and does not progress is
        replaced.
        """
        return self.worker_state.held

    @held.setter
    def held(self, number: int) -> None:
        self.worker_state.held = number

    def waiting_for(self, kind: WaitingFor, detail: str = "") -> None:
        """Say what the main loop waits for from now on; ``detail`` in words, for people.

        An idle loop says it again at every turn: a loop that says nothing for
        ``supervisor.stuck_after_s`` counts as stuck.
        """
        self.worker_state.waiting_for(kind, detail)

    def starting(self, what: str) -> None:
        """Say, while the actor starts, what takes its time: ``loading my-model, 15,200 MB``."""
        self.worker_state.waiting_for(WaitingFor.STARTING, what)

    def waiting(self, kind: WaitingFor, detail: str = "") -> AbstractContextManager[None]:
        """Say what is waited for while a ``with`` block runs."""
        return self.worker_state.waiting(kind, detail)

    @property
    def work(self) -> Meter:
        """Counts what is done inside long work, on the loop and on the compute thread; see
        ``pipeline.process.work``.
        """
        return self.worker_state.work

    @property
    def storing(self) -> Meter:
        """... and inside what is written to the disk beside it."""
        return self.worker_state.storing

    def say_unreached(self, of: str, words: str) -> None:
        """Say which mailboxes of ``of`` (a role) cannot be reached; empty when all can."""
        self._unreached[of] = words
        self.worker_state.unreached = "; ".join(filter(None, self._unreached.values()))

    def watch_mailbox(self, mailbox: Mailbox) -> None:
        """Put a mailbox's counters into the heartbeat: one link a sender, for the few that sent
        most, and the others' sum.
        """
        self.watch_links(lambda: _received(mailbox.stats(), self.who.worker))

    def watch_links(self, report: Callable[[], list[LinkReport]]) -> None:
        """Put what ``report`` returns into the heartbeat; it is called on the loop, at most twice a
        second.
        """
        self._links.append(report)

    def refresh_links(self) -> None:
        """Read the counters of all links for the next heartbeat. Called by the runtime."""
        self.worker_state.links = tuple(link for report in self._links for link in report())

    # -- work --------------------------------------------------------------------------------------

    async def compute(self, function: Callable[..., T], /, *args: Any) -> T:
        """Run blocking work on the one thread that the actor owns, in order of arrival, and return
        its result.

        Counts as progress when it ends, and before that with every piece that it tells of
        (``pipeline.process.work``). Cancelling the wait does not stop the function: the thread is
        busy until it ends. The first call of a function is told apart from later ones, and work
        within a wait that has a time limit of its own is told as that wait: each is given its own
        time before the worker counts as stuck (``pipeline.supervisor.watchdog``).
        """
        name = str(getattr(function, "__qualname__", function))
        kind = WaitingFor.COMPUTE if name in self._computed else WaitingFor.COMPILE
        self._computed.add(name)
        is_part = self.worker_state.kind in _LONG
        with self.worker_state.waiting(
            self.worker_state.kind if is_part else kind, self.worker_state.detail if is_part else ""
        ):
            result = await self._on(self._compute_thread, "compute", self.work, function, args)
        self.progress()
        return result

    async def store(self, function: Callable[..., T], /, *args: Any) -> T:
        """Run a blocking write to the disk on a thread of its own, beside the computing, and return
        its result.

        Counts as progress when it ends. Cancelling the wait does not stop the function.
        """
        result = await self._on(self._storage_thread, "storage", self.storing, function, args)
        self.progress()
        return result

    @property
    def moved_s(self) -> float:
        """When anything was last done here, by the actor's monotonic clock."""
        return self.worker_state.moved_s

    @property
    def drain_patience_s(self) -> float:
        """How long a worker that drains may do nothing: what computes or is written now may take
        longer than a window.
        """
        settings = self.config.supervisor
        patience_s = settings.drain_timeout_s
        if "compute" in self._busy and (slowest_s := self.work.report().slowest_s):
            patience_s = max(patience_s, piece_limit_s(slowest_s, settings.stuck_after_s))
        if "storage" in self._busy:
            patience_s = max(patience_s, settings.checkpoint_timeout_s)
        return patience_s

    @property
    def is_computing(self) -> bool:
        """Whether the compute thread, or the one that writes to the disk, is inside a function."""
        return bool(self._busy)

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, None], *, endless: bool = True) -> asyncio.Task[None]:
        """Run a coroutine beside the main loop until the drain is over, when it is cancelled.

        An exception in it ends the worker; so does a return of an ``endless`` one before the drain.
        """
        task = self.tasks.create_task(self._watched(name, coroutine, endless), name=name)
        # of one that was cancelled before it began
        task.add_done_callback(lambda _: coroutine.close())
        self._spawned = [task, *(other for other in self._spawned if not other.done())]
        return task

    def finish(self, code: ExitCode = ExitCode.OK, reason: str = "") -> None:
        """Say that this worker's work is done: ``run`` may return, and the process ends with
        ``code`` after its drain.
        """
        if self.finished is None:
            self.finished = (code, reason)

    async def cancel_spawned(self, *, timeout_s: float = 5.0) -> None:
        """Cancel what was spawned and wait until it has ended, at most so long. Called by the
        runtime after the drain.
        """
        running = [task for task in self._spawned if not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=timeout_s)

    def close(self) -> None:
        """Let the threads end after what they do now. Called by the runtime."""
        for thread in (self._compute_thread, self._storage_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    async def _watched(self, name: str, coroutine: Coroutine[Any, Any, None], endless: bool) -> None:
        await coroutine
        if endless and not self.draining.is_set():
            raise RuntimeError(
                f"task {name} of {self.who} returned; it was expected to run until the drain: return only when ctx.draining is "
                f"set, or spawn it with endless=False"
            )

    async def _on(
        self, thread: ThreadPoolExecutor, name: str, meter: Meter, function: Callable[..., T], args: tuple[Any, ...]
    ) -> T:
        def run() -> T:
            # by that thread alone
            self._busy.add(name)
            meter.begin()
            try:
                with listening(meter):
                    return function(*args)
            finally:
                meter.step()
                self._busy.discard(name)

        return await asyncio.get_running_loop().run_in_executor(thread, run)


def _received(stats: list[LinkStats], mine: str) -> list[LinkReport]:
    """One report for each of the workers that sent most, its incarnations added up, and one for all
    others.
    """
    totals: dict[str, list[int]] = {}
    for link in stats:
        sums = totals.setdefault(link_name(link.peer.partition("#")[0], mine), [0, 0, 0])
        for index, value in enumerate((link.num_messages, link.num_refused, link.num_gaps)):
            sums[index] += value
    ranked = sorted(totals, key=lambda name: (-totals[name][0], name))
    if ranked[MAX_NAMED_LINKS:]:
        others = [totals[name] for name in ranked[MAX_NAMED_LINKS:]]
        totals[link_name(OTHER_LINKS, mine)] = [sum(column) for column in zip(*others, strict=True)]
        ranked[MAX_NAMED_LINKS:] = [link_name(OTHER_LINKS, mine)]
    return [
        LinkReport(name=name, received=totals[name][0], refused=totals[name][1], gaps=totals[name][2])
        for name in sorted(ranked)
    ]
