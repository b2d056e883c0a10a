"""Which worker processes should be there, and what to do about the difference: a pure state
machine, owning no process.

*Consumes* the desired number of workers by role, exits with their codes, and the time. *Produces*
actions: start, drain, kill. *Waits for* nothing. The supervisor carries the actions out and reports
what happened.

    absent ──start──> running ──exit──> backoff ──start──> running ...
               adopt ──┘│  │  └─drain──> draining ──exit──> (forgotten)
                        │  └─exit, well──> ended ──(still wanted while the run goes on)──> backoff
                        └── exit over the restart budget ──> the fleet has failed

One for one: the death of a worker ends no other. A learner or a value worker that is started again
restores its last checkpoint itself. Restarts have budgets, so many within a sliding period (OTP's
intensity and period): one that dies once a day is restarted for ever, one that dies at once is not.
There are two: infrastructure failures count for the worker that had them; data failures count for
its role, because the work that caused one goes to another worker of the role. An exit that another
start cannot mend (a wrong setting) fails the fleet at the first time. An error that repeats itself
fails it at the second time: the worker ended by it, was started again, and ended by it again before
it had finished any work, or after just as much as before. Signals never do, nor errors of the
surroundings (``pipeline.process.last_error``).

Starts are spread over the supervisor's turns, a few each, the first worker of every role before the
second of any. What is not started yet is only a wish, and a newer wish replaces it at once.

A supervisor that takes over from one that died *adopts* the processes that it finds; from then on
they are like its own.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from pipeline.process.exit_codes import ExitCode, FailureKind, kind_of
from pipeline.process.last_error import LastError
from protocol.ids import Role

MAX_STARTS_A_TURN = 4
"""Between two of them the supervisor hears signals, exits and newer wishes: at most 20 starts a
second.
"""
_MAX_BACKOFF_FACTOR = 16
_ENDED_WELL = frozenset({ExitCode.OK, ExitCode.STARVED})
_HOPELESS = frozenset(code for code in ExitCode if code.is_hopeless)


class WorkerPhase(StrEnum):
    """Where one worker is."""

    ABSENT = "absent"
    RUNNING = "running"
    BACKOFF = "backoff"
    DRAINING = "draining"
    ENDED = "ended"
    """Exited as it should and is not wanted again (a learner that is done)."""


class Verb(StrEnum):
    """What the supervisor is to do."""

    START = "start"
    DRAIN = "drain"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do to one worker."""

    verb: Verb
    worker: str
    role: Role


@dataclass(frozen=True, slots=True)
class FleetFailure:
    """Why the fleet cannot go on."""

    worker: str
    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Intensity:
    """So many failures within so long are borne."""

    max_failures: int
    period_s: float


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often and how fast a worker is restarted."""

    infrastructure: Intensity
    """Of one worker."""
    data: Intensity
    """Of all workers of a role."""
    backoff_s: float
    """Before the first restart; doubles with every failure that still counts, up to
    16 times this.
    """
    drain_timeout_s: float
    """Without anything done."""
    drain_ceiling_s: float = math.inf
    """In all."""


@dataclass(slots=True)
class Worker:
    """One named worker as the plan sees it."""

    name: str
    role: Role
    phase: WorkerPhase = WorkerPhase.ABSENT
    start_at_s: float = 0.0
    """Earliest time of the next start, in backoff."""
    kill_at_s: float = 0.0
    """Deadline of a drain."""
    ceiling_s: float = math.inf
    """The deadline never moves beyond it."""
    num_restarts: int = 0
    """Over the whole run, for people."""
    is_condemned: bool = False
    """Found frozen or stuck: it is being killed."""
    failures: deque[float] = field(default_factory=deque)
    """Times of infrastructure failures within the period; without a checkpoint between them,
    however long they are apart.
    """
    kept: str | None = None
    """The newest checkpoint at its last failure."""
    stuck_with: str | None = None
    """The newest checkpoint when it was last replaced because it stood still."""
    last_error: tuple[str, int] | None = None
    """The error that ended its last process, and how much work that had finished; None when it
    ended in another way.
    """


class FleetPlan:
    """The desired fleet against the present one."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._workers: dict[str, Worker] = {}
        self._data_failures: dict[Role, deque[float]] = {}
        self.is_stopping = False
        self.failure: FleetFailure | None = None

    @property
    def workers(self) -> Iterable[Worker]:
        """Every worker that is wanted or still there."""
        return self._workers.values()

    @property
    def is_down(self) -> bool:
        """Whether no process is left."""
        return not any(w.phase in (WorkerPhase.RUNNING, WorkerPhase.DRAINING) for w in self._workers.values())

    @property
    def absent(self) -> list[str]:
        """Workers that are wanted but have no process: they are to be started, now or after a
        pause.
        """
        return [w.name for w in self._workers.values() if w.phase in (WorkerPhase.ABSENT, WorkerPhase.BACKOFF)]

    def is_draining(self, name: str) -> bool:
        """Whether this worker was asked to end."""
        worker = self._workers.get(name)
        return worker is not None and worker.phase is WorkerPhase.DRAINING

    def adopt(self, name: str, role: Role) -> None:
        """Take over a process that an earlier supervisor started. It is drained if it
        is surplus.
        """
        self._workers[name] = Worker(name, role, WorkerPhase.RUNNING)

    def condemn(self, name: str, reason: str = "", *, kept: str | None = None) -> bool:
        """Take note that a worker was found frozen or stuck, whose exit is then none of its own;
        False when that is known.

        Args:
            name: The worker.
            reason: Why, in words.
            kept: Of a worker that learns and stood still though its process was alive: its newest
                checkpoint, "" for none. When it kept nothing new since the same happened last, it
                would happen for ever, and the fleet has failed.
        """
        worker = self._workers[name]
        is_news, worker.is_condemned = not worker.is_condemned, True
        if is_news and kept is not None:
            if worker.stuck_with == kept:
                after = f"after checkpoint {kept}" if kept else "before its first checkpoint"
                self.failure = self.failure or FleetFailure(
                    name,
                    ExitCode.STUCK,
                    f"stood still twice {after} and would again: {reason}; give it more time (supervisor.stuck_after_s, "
                    "start_timeout_s), less work at once (learner.micro_batch_tokens), or look at its log for what it hangs in",
                )
            worker.stuck_with = kept
        return is_news

    def moved(self, name: str, at_s: float, patience_s: float) -> None:
        """Take note that a worker which drains did something at ``at_s``: what comes next may take
        ``patience_s``.
        """
        worker = self._workers.get(name)
        if worker is not None and worker.phase is WorkerPhase.DRAINING:
            worker.kill_at_s = min(max(worker.kill_at_s, at_s + patience_s), worker.ceiling_s)

    def recycle(self, now_s: float) -> list[Action]:
        """Drain every worker that runs; those that are still wanted are started again when they
        have gone.
        """
        return [
            a for w in list(self._workers.values()) if w.phase is WorkerPhase.RUNNING for a in self._retire(w, now_s)
        ]

    def want(self, counts: dict[Role, int], now_s: float) -> list[Action]:
        """Make ``counts`` the desired fleet; surplus workers, highest numbers first, are drained.

        Call this only while the run goes on: a worker that ended well though nobody had asked it to
        (a person sent it a signal) is wanted again, and is started after a pause.
        """
        actions: list[Action] = []
        for role, count in counts.items():
            for number in range(count):
                name = worker_name(role, number)
                if name not in self._workers:
                    self._workers[name] = Worker(name, role)
        for worker in list(self._workers.values()):
            if _number(worker.name) >= counts.get(worker.role, 0):
                actions += self._retire(worker, now_s)
            elif worker.phase is WorkerPhase.ENDED and self.failure is None:
                self._failed(worker, -signal.SIGTERM, now_s)
        return actions

    def stop(self, now_s: float) -> list[Action]:
        """Drain everything; nothing is started any more."""
        self.is_stopping = True
        return [action for worker in list(self._workers.values()) for action in self._retire(worker, now_s)]

    def due(self, now_s: float) -> list[Action]:
        """Return what is to be done in this turn: kills of drains past their deadline, and a few of
        the starts that are due.
        """
        actions: list[Action] = []
        startable: list[Worker] = []
        for worker in self._workers.values():
            if worker.phase is WorkerPhase.DRAINING and now_s >= worker.kill_at_s:
                worker.kill_at_s = worker.ceiling_s = now_s + self._policy.drain_timeout_s
                actions.append(Action(Verb.KILL, worker.name, worker.role))
            if worker.phase is WorkerPhase.ABSENT or (
                worker.phase is WorkerPhase.BACKOFF and now_s >= worker.start_at_s
            ):
                startable.append(worker)
        if self.is_stopping or self.failure is not None:
            return actions
        for worker in sorted(startable, key=lambda worker: _number(worker.name))[:MAX_STARTS_A_TURN]:
            worker.phase = WorkerPhase.RUNNING
            actions.append(Action(Verb.START, worker.name, worker.role))
        return actions

    def exited(
        self,
        name: str,
        exit_code: int,
        now_s: float,
        *,
        error: LastError | None = None,
        delivered: int = 0,
        kept: str | None = None,
    ) -> None:
        """Take note that a worker's process has ended.

        Args:
            name: The worker.
            exit_code: Negative: the number of the signal that killed it.
            now_s: Monotonic time.
            error: What ended it, if an error did.
            delivered: Pieces of work that it had finished for good.
            kept: Of one that learns, its newest checkpoint, "" for none.
        """
        worker = self._workers[name]
        if worker.phase is WorkerPhase.DRAINING:
            del self._workers[name]
            return
        if worker.is_condemned:
            worker.is_condemned, exit_code, error = False, ExitCode.STUCK, None
        is_repeated = _repeats(worker, error, delivered)
        worker.last_error = None if error is None else (error.identity, delivered)
        if exit_code in _ENDED_WELL:
            worker.phase = WorkerPhase.ENDED
        elif exit_code in _HOPELESS:
            self._fail(worker, exit_code, f"ended in a way that a restart cannot mend{_words(error)}")
        elif is_repeated:
            got = f"after {delivered} pieces of work, as before" if delivered else "before it had finished any work"
            self._fail(
                worker, ExitCode.CONFIG, f"ended twice by the same error, {got}; no restart will mend it{_words(error)}"
            )
        else:
            self._failed(worker, exit_code, now_s, error, kept)

    def _failed(
        self,
        worker: Worker,
        exit_code: int,
        now_s: float,
        error: LastError | None = None,
        kept: str | None = None,
    ) -> None:
        """Count an end that nobody asked for; start again after a pause, or give up."""
        kind = kind_of(exit_code)
        if kind is FailureKind.DATA:
            intensity, whose = self._policy.data, f"{worker.role} workers"
            failures = self._data_failures.setdefault(worker.role, deque())
        else:
            intensity, whose, failures = self._policy.infrastructure, "it", worker.failures
        failures.append(now_s)
        is_for_nothing, worker.kept = kept is not None and kept == worker.kept, kept
        while failures[0] <= now_s - intensity.period_s and not is_for_nothing:
            failures.popleft()
        if len(failures) > intensity.max_failures:
            between = "without a checkpoint between them" if is_for_nothing else f"within {intensity.period_s:g} s"
            times = f"{len(failures)} {kind} failures of {whose} {between}"
            self._fail(worker, exit_code, f"is given up: {times}, {intensity.max_failures} are allowed{_words(error)}")
            return
        factor = min(2 ** (len(failures) - 1), _MAX_BACKOFF_FACTOR)
        worker.phase = WorkerPhase.BACKOFF
        worker.start_at_s = now_s + factor * self._policy.backoff_s
        worker.num_restarts += 1

    def _fail(self, worker: Worker, exit_code: int, reason: str) -> None:
        worker.phase = WorkerPhase.ENDED
        if self.failure is None:
            self.failure = FleetFailure(worker.name, exit_code, reason)

    def _retire(self, worker: Worker, now_s: float) -> list[Action]:
        if worker.phase is WorkerPhase.RUNNING:
            worker.phase = WorkerPhase.DRAINING
            worker.ceiling_s = now_s + self._policy.drain_ceiling_s
            worker.kill_at_s = min(now_s + self._policy.drain_timeout_s, worker.ceiling_s)
            return [Action(Verb.DRAIN, worker.name, worker.role)]
        if worker.phase is not WorkerPhase.DRAINING:
            del self._workers[worker.name]
        return []


def _repeats(worker: Worker, error: LastError | None, delivered: int) -> bool:
    """Whether a worker ended by an error that ended it before, and got no further: no start will
    mend that.
    """
    if error is None or error.may_pass or worker.last_error is None:
        return False
    identity, before = worker.last_error
    return identity == error.identity and delivered in (0, before)


def _words(error: LastError | None) -> str:
    return "" if error is None else f": {error}"


def worker_name(role: Role, number: int) -> str:
    """Return ``generator-0``; the learner and the value process are alone and so have no number."""
    return str(role) if role in (Role.LEARNER, Role.VALUE) and number == 0 else f"{role}-{number}"


def _number(name: str) -> int:
    return int(name.rpartition("-")[2]) if "-" in name else 0
