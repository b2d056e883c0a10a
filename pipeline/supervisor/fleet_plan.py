"""Decides which worker processes to start, drain and kill. Pure; it owns no process.

Its input is the desired number of workers by role, exits with their codes, and the time. The
supervisor carries out the interventions (``executor``) and reports the exits.

    absent ──start──> running ──exit──> backoff ──start──> running ...
               adopt ──┘│  │  └─drain──> draining ──exit──> (forgotten)
                        │  └─exit, well──> ended ──(still wanted while the run goes on)──> backoff
                        └── exit over the restart budget ──> the fleet has failed

One for one: the death of a worker ends no other. A restarted learner or value worker restores its
own last checkpoint. A budget allows a number of failures within a sliding period (OTP's intensity
and period). Infrastructure failures count against their worker. Data failures count against the
role, because the work that caused one goes to another worker of the role.

A worker that has used up its budget, or cannot be repaired by a restart, fails the fleet, with two
exceptions: the observer is dispensable and is given up, and ``evicts`` may evict the worker
instead. Beyond repair are a wrong setting, at the first exit, and a repeated error, at the second:
the same error again, before any finished work or after exactly as much as before. Signals and
transient errors (``pipeline.process.exit_codes``) never count as repeated. A training step whose
repetition gives another result means an unsound machine; the second one within a day fails the
fleet, whatever was done in between.

Starts are spread over the supervisor's turns. The first worker of every role starts before the
second of any. A newer desired fleet replaces starts that have not happened. An adopted process is
treated like a started one."""

from __future__ import annotations

import itertools
import math
import signal
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pipeline.process.exit_codes import ExitCode, FailureKind, LastError, kind_of
from protocol.errors import StepDiffered
from protocol.ids import Role

if TYPE_CHECKING:
    from pipeline.config.runtime import SupervisorSection

MAX_STARTS_A_TURN = 4
"""Keeps the supervisor responsive to signals and exits: at most 20 starts a second."""
_MAX_BACKOFF_FACTOR = 16
_A_DAY_S = 86400.0
_ENDED_WELL = frozenset({ExitCode.OK, ExitCode.STARVED})
_ALONE = frozenset({Role.LEARNER, Role.VALUE, Role.OBSERVER})
_DISPENSABLE = frozenset({Role.OBSERVER})
"""Roles that a run can do without: their workers are given up, and the fleet does not fail."""
_HOPELESS = frozenset(code for code in ExitCode if code.is_hopeless)


class WorkerPhase(StrEnum):
    ABSENT = "absent"
    RUNNING = "running"
    BACKOFF = "backoff"
    DRAINING = "draining"
    ENDED = "ended"
    """Ended well (a learner that is done), or failed for good."""


_WITHOUT_PROCESS = (WorkerPhase.ABSENT, WorkerPhase.BACKOFF)


class Verb(StrEnum):
    START = "start"
    DRAIN = "drain"
    KILL = "kill"
    REPLACE = "replace"
    """Fence and kill; the plan starts it again."""
    EXPEL = "expel"
    """Fence and kill; it is not started again."""
    FENCE = "fence"
    """For a worker that another supervisor, or none, holds: it ends because of it."""


@dataclass(frozen=True, slots=True)
class Intervention:
    """What a policy wants done to one worker. ``executor`` carries it out."""

    worker: str
    verb: Verb
    reason: str = ""
    """Why, in words, for log and record; empty: not recorded."""
    role: Role | None = None
    """Known for all but foreign workers."""
    stands: tuple[str, ...] = ()
    """Where it hangs."""
    has_case: bool = False
    """Whether the steps of a repair case are its record."""


@dataclass(frozen=True, slots=True)
class FleetFailure:
    worker: str
    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Failure:
    at_s: float
    worker: str
    kept: str | None
    """The newest checkpoint at that moment, "" for none; None for a worker that writes none."""


@dataclass(slots=True)
class PlannedWorker:
    name: str
    role: Role
    phase: WorkerPhase = WorkerPhase.ABSENT
    start_at_s: float = 0.0
    """In backoff: earliest time of the next start."""
    kill_at_s: float = 0.0
    """While draining: its deadline."""
    ceiling_s: float = math.inf
    """While draining: the latest that progress may move the deadline to."""
    is_given_up: bool = False
    """Failed too often, or beyond repair; the run goes on without it."""
    is_being_replaced: bool = False
    """Found frozen or stuck, and being killed."""
    failures: deque[_Failure] = field(default_factory=deque[_Failure])
    """Infrastructure failures that still count: within the period, or since the last checkpoint."""
    unsound_s: float | None = None
    """When it last ended because a repeated step gave another result."""
    stuck_with: str | None = None
    """Newest checkpoint when it was last replaced as stuck."""
    last_error: tuple[str, int] | None = None
    """Identity of its last process's error, and the work finished by then; None without an error."""


class FleetPlan:
    """The state of every worker, and the actions that lead to the desired fleet."""

    def __init__(
        self,
        settings: SupervisorSection,
        name: Callable[[Role, int], str] | None = None,
        evicts: Callable[[str, Role, str, bool], bool] | None = None,
    ) -> None:
        """``name``: maps role and number to a worker's name; default ``worker_name``. ``evicts``:
        called with a failing worker's name, role, reason, and whether all counted failures were its
        own; returns True if it is evicted and the run goes on without it."""
        self._settings = settings
        self._name = name or worker_name
        self._evicts = evicts
        self._workers: dict[str, PlannedWorker] = {}
        self._data_failures: dict[Role, deque[_Failure]] = {}
        self.is_stopping = False
        self.failure: FleetFailure | None = None
        self.given_up: list[FleetFailure] = []
        """Workers that the run goes on without, to be logged once each."""

    @property
    def workers(self) -> Iterable[PlannedWorker]:
        """Every worker that is wanted or still running."""
        return self._workers.values()

    @property
    def is_down(self) -> bool:
        return not any(w.phase in (WorkerPhase.RUNNING, WorkerPhase.DRAINING) for w in self._workers.values())

    @property
    def absent(self) -> list[str]:
        """Wanted workers without a process, which start now or after a pause."""
        return [w.name for w in self._workers.values() if w.phase in _WITHOUT_PROCESS]

    @property
    def wanted(self) -> dict[str, Role]:
        """Workers that run or are about to, with their roles."""
        phases = {WorkerPhase.RUNNING, *_WITHOUT_PROCESS}
        return {w.name: w.role for w in self._workers.values() if w.phase in phases and not w.is_given_up}

    def role_of(self, name: str) -> Role | None:
        return self._workers[name].role if name in self._workers else None

    def is_draining(self, name: str) -> bool:
        worker = self._workers.get(name)
        return worker is not None and worker.phase is WorkerPhase.DRAINING

    def is_being_replaced(self, name: str) -> bool:
        """Whether this worker is being killed on purpose, to start again."""
        worker = self._workers.get(name)
        return worker is not None and worker.is_being_replaced

    def adopt(self, name: str, role: Role) -> None:
        """Take over a running process of an earlier supervisor. Surplus ones are drained later."""
        self._workers[name] = PlannedWorker(name, role, WorkerPhase.RUNNING)

    def replace(self, name: str, reason: str = "", *, kept: str | None = None) -> bool:
        """Record that a worker is frozen or stuck; return False if that is already known.

        ``kept``: newest checkpoint ("" for none) of a learner or value worker that was alive but
        stuck. If it was stuck before with the same checkpoint, the fleet fails, since it would be
        stuck for ever."""
        worker = self._workers[name]
        is_news, worker.is_being_replaced = not worker.is_being_replaced, True
        if is_news and kept is not None:
            if worker.stuck_with == kept:
                after = f"after checkpoint {kept}" if kept else "before its first checkpoint"
                self.failure = self.failure or FleetFailure(
                    name,
                    ExitCode.STUCK,
                    f"was stuck twice {after} and would be again: {reason}; give it more time (supervisor.stuck_after_s, "
                    "start_timeout_s) or less work at once (learner.micro_batch_tokens), or search its log for the cause",
                )
            worker.stuck_with = kept
        return is_news

    def moved(self, name: str, at_s: float, patience_s: float) -> None:
        """Extend a drain's deadline: it made progress at ``at_s``, and its next step may take
        ``patience_s``."""
        worker = self._workers.get(name)
        if worker is not None and worker.phase is WorkerPhase.DRAINING:
            worker.kill_at_s = min(max(worker.kill_at_s, at_s + patience_s), worker.ceiling_s)

    def recycle(self, now_s: float) -> list[Intervention]:
        """Drain every running worker; those still wanted start again afterwards."""
        running = [worker for worker in self._workers.values() if worker.phase is WorkerPhase.RUNNING]
        return [action for worker in running for action in self._retire(worker, now_s)]

    def want(
        self, counts: Mapping[Role, int], now_s: float, left_out: Collection[str] = frozenset()
    ) -> list[Intervention]:
        """Set the desired worker counts, and drain surplus workers: those of ``left_out``, then the
        highest numbers.

        A worker that ended well without being drained (by a signal from outside) starts again after
        a pause."""
        actions: list[Intervention] = []
        wanted = wanted_names(counts, left_out, self._name)
        for name, role in wanted.items():
            if name not in self._workers:
                self._workers[name] = PlannedWorker(name, role)
        for worker in list(self._workers.values()):
            if worker.name not in wanted:
                actions += self._retire(worker, now_s)
            elif worker.phase is WorkerPhase.ENDED and self.failure is None and not worker.is_given_up:
                self._failed(worker, -signal.SIGTERM, now_s)
        return actions

    def hasten(self, name: str, now_s: float) -> None:
        """Skip the pause before a restart because a standby is ready, unless the worker also failed
        recently, within the longest pause."""
        worker = self._workers.get(name)
        if worker is None or worker.phase is not WorkerPhase.BACKOFF:
            return
        recent_s = now_s - _MAX_BACKOFF_FACTOR * self._settings.backoff_s
        if sum(failure.at_s > recent_s for failure in worker.failures) == 1:
            worker.start_at_s = now_s

    def renew(self, name: str, now_s: float, reason: str) -> list[Intervention]:
        """Drain a running worker; if it is still wanted, it starts again afterwards."""
        worker = self._workers.get(name)
        is_running = worker is not None and worker.phase is WorkerPhase.RUNNING
        return self._retire(worker, now_s, reason) if worker is not None and is_running else []

    def stop(self, now_s: float) -> list[Intervention]:
        """Drain all workers and start none."""
        self.is_stopping = True
        return [action for worker in list(self._workers.values()) for action in self._retire(worker, now_s)]

    def due(self, now_s: float) -> list[Intervention]:
        """Return this turn's actions: kills of overdue drains, and a few of the due starts."""
        actions: list[Intervention] = []
        startable: list[PlannedWorker] = []
        for worker in self._workers.values():
            if worker.phase is WorkerPhase.DRAINING and now_s >= worker.kill_at_s:
                worker.kill_at_s = worker.ceiling_s = now_s + self._settings.drain_timeout_s
                why = "did not drain in time; others lease what it held"
                actions.append(Intervention(worker.name, Verb.KILL, why, worker.role))
            is_over = worker.phase is WorkerPhase.BACKOFF and now_s >= worker.start_at_s
            if worker.phase is WorkerPhase.ABSENT or is_over:
                startable.append(worker)
        if self.is_stopping or self.failure is not None:
            return actions
        for worker in sorted(startable, key=lambda worker: _number(worker.name))[:MAX_STARTS_A_TURN]:
            worker.phase = WorkerPhase.RUNNING
            actions.append(Intervention(worker.name, Verb.START, role=worker.role))
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
        """Record the end of a worker's process.

        ``exit_code`` is negative for a signal. ``error``: what ended it, if known. ``delivered``:
        finished pieces of work. ``kept``: newest checkpoint of a learner or value worker, "" for
        none."""
        worker = self._workers[name]
        if worker.phase is WorkerPhase.DRAINING:
            del self._workers[name]
            return
        if worker.is_being_replaced:
            worker.is_being_replaced, exit_code, error = False, ExitCode.STUCK, None
        is_repeated = _repeats(worker, error, delivered)
        worker.last_error = None if error is None else (error.identity, delivered)
        is_unsound = _is_unsound(worker, error, now_s)
        if exit_code in _ENDED_WELL:
            worker.phase = WorkerPhase.ENDED
        elif is_unsound:
            reason = f"computed a step differently when it repeated it, for the second time within a day{_words(error)}"
            self._fail(worker, exit_code, f"{reason}; test that host, then go on elsewhere with `headrace up --resume`")
        elif exit_code in _HOPELESS:
            self._fail(worker, exit_code, f"ended in a way that a restart cannot repair{_words(error)}")
        elif is_repeated:
            got = f"after {delivered} pieces of work, as before" if delivered else "before it had finished any work"
            reason = f"ended twice by the same error, {got}; a restart cannot repair it{_words(error)}"
            self._fail(worker, ExitCode.CONFIG, reason)
        else:
            self._failed(worker, exit_code, now_s, error, kept)

    def _failed(
        self,
        worker: PlannedWorker,
        exit_code: int,
        now_s: float,
        error: LastError | None = None,
        kept: str | None = None,
    ) -> None:
        """Count an unrequested end; start again after a pause, or fail."""
        kind = kind_of(exit_code)
        if kind is FailureKind.DATA:
            most, period_s = self._settings.max_data_failures, self._settings.data_failure_window_s
            of_whom = f" of {worker.role} workers"
            failures = self._data_failures.setdefault(worker.role, deque())
        else:
            most, period_s = self._settings.max_restarts, self._settings.restart_window_s
            of_whom, failures = "", worker.failures
        failures.append(_Failure(now_s, worker.name, kept))
        recent = [failure for failure in failures if failure.at_s > now_s - period_s]
        fruitless = _since_checkpoint(failures)
        between, counted = f"within {period_s:g} s", recent
        if len(recent) <= most:
            between, counted = "without a checkpoint between them", fruitless
        if len(counted) > most:
            reason = f"failed too often: {len(counted)} {kind} failures{of_whom} {between}, {most} are allowed{_words(error)}"
            is_its_own = all(failure.worker == worker.name for failure in counted)
            self._fail(worker, exit_code, reason, is_its_own=is_its_own)
            return
        while failures[0] not in recent and failures[0] not in fruitless:
            failures.popleft()
        factor = min(2 ** (max(len(recent), len(fruitless)) - 1), _MAX_BACKOFF_FACTOR)
        worker.phase = WorkerPhase.BACKOFF
        worker.start_at_s = now_s + factor * self._settings.backoff_s

    def _fail(self, worker: PlannedWorker, exit_code: int, reason: str, *, is_its_own: bool = True) -> None:
        worker.phase = WorkerPhase.ENDED
        if worker.role in _DISPENSABLE:
            worker.is_given_up = True
            self.given_up.append(FleetFailure(worker.name, exit_code, reason))
        elif self.failure is None:
            if self._evicts is not None and self._evicts(worker.name, worker.role, reason, is_its_own):
                worker.is_given_up = True
            else:
                self.failure = FleetFailure(worker.name, exit_code, reason)

    def _retire(self, worker: PlannedWorker, now_s: float, reason: str = "") -> list[Intervention]:
        if worker.phase is WorkerPhase.RUNNING:
            worker.phase = WorkerPhase.DRAINING
            worker.ceiling_s = now_s + self._settings.drain_ceiling_s
            worker.kill_at_s = min(now_s + self._settings.drain_timeout_s, worker.ceiling_s)
            return [Intervention(worker.name, Verb.DRAIN, reason, worker.role)]
        if worker.phase is not WorkerPhase.DRAINING:
            del self._workers[worker.name]
        return []


def _repeats(worker: PlannedWorker, error: LastError | None, delivered: int) -> bool:
    """Whether the same error ended the worker twice, with no more work finished in between."""
    if error is None or error.may_pass or worker.last_error is None:
        return False
    identity, before = worker.last_error
    return identity == error.identity and delivered in (0, before)


def _since_checkpoint(failures: Iterable[_Failure]) -> list[_Failure]:
    """Return the last worker's newest failures that share its newest checkpoint."""
    *_, last = failures
    if last.kept is None:
        return []
    own = [failure for failure in failures if failure.worker == last.worker]
    return list(itertools.takewhile(lambda failure: failure.kept == last.kept, reversed(own)))


def _is_unsound(worker: PlannedWorker, error: LastError | None, now_s: float) -> bool:
    if error is None or error.type != StepDiffered.__name__:
        return False
    before_s, worker.unsound_s = worker.unsound_s, now_s
    return before_s is not None and now_s - before_s < _A_DAY_S


def _words(error: LastError | None) -> str:
    return "" if error is None else f": {error}"


def worker_name(role: Role, number: int) -> str:
    """Return a name such as ``generator-0``; the only worker of its role has no number."""
    return str(role) if role in _ALONE and number == 0 else f"{role}-{number}"


def worker_number(name: str) -> int:
    """Return the number of a worker that ``worker_name`` named."""
    _, _, number = name.rpartition("-")
    return int(number) if number.isdecimal() else 0


def wanted_names(
    counts: Mapping[Role, int],
    left_out: Collection[str] = frozenset(),
    name: Callable[[Role, int], str] = worker_name,
) -> dict[str, Role]:
    """Return the fleet's worker names and roles: the lowest numbers of each role, except those of
    ``left_out``."""
    names: dict[str, Role] = {}
    for role, count in counts.items():
        free = (one for number in itertools.count() if (one := name(role, number)) not in left_out)
        names |= dict.fromkeys(itertools.islice(free, count), role)
    return names


def _number(name: str) -> int:
    return int(name.rpartition("-")[2]) if "-" in name else 0
