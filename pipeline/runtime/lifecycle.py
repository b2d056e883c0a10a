"""A worker's life as a pure state machine with a two-phase stop.

    starting ──ready──> running ──stop──> draining ──ended──> stopped
        └────────────────stop────────────────┘

The first stop request begins the drain and sets its deadline. Progress extends the deadline, up to a ceiling.
A second signal, or the deadline, makes the stop immediate. A further request for another reason, such as the
end of the run, never shortens the drain."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from pipeline.process.exit_codes import ExitCode, LastError, exit_code_of, last_error
from pipeline.process.records import Life, identify, worker_pid, write_life
from pipeline.runtime.registry.contract import MAX_DETAIL_CHARS, FailureReport
from protocol.ids import Incarnation
from protocol.printable import printable_line


class LifecyclePhase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """The state of a worker's life. Transitions return a new one."""

    drain_timeout_s: float
    """Limit of a drain without progress."""
    drain_ceiling_s: float = math.inf
    """Limit of a whole drain."""
    phase: LifecyclePhase = LifecyclePhase.STARTING
    deadline_s: float | None = None
    """When the drain must end, by the caller's monotonic clock; set while draining."""
    ceiling_s: float = math.inf
    """Latest possible deadline."""
    reason: str = ""
    """Why it stops, for people."""
    code: ExitCode = ExitCode.OK
    """Exit code after a drain in time."""
    num_signals: int = 0

    def ready(self) -> Lifecycle:
        return replace(self, phase=LifecyclePhase.RUNNING) if self.phase is LifecyclePhase.STARTING else self

    def stop(self, now_s: float, reason: str, *, code: ExitCode = ExitCode.OK) -> Lifecycle:
        """Begin to drain. The first reason is kept, and the first code other than OK."""
        if self.phase is LifecyclePhase.STOPPED:
            return self
        code = code if self.code is ExitCode.OK else self.code
        if self.phase is LifecyclePhase.DRAINING:
            return replace(self, code=code)
        ceiling_s = now_s + self.drain_ceiling_s
        deadline_s = min(now_s + self.drain_timeout_s, ceiling_s)
        return replace(
            self, phase=LifecyclePhase.DRAINING, deadline_s=deadline_s, ceiling_s=ceiling_s, reason=reason, code=code
        )

    def moved(self, at_s: float, patience_s: float) -> Lifecycle:
        """Record progress at ``at_s``; the next step may take ``patience_s``."""
        if self.phase is not LifecyclePhase.DRAINING or self.deadline_s is None:
            return self
        return replace(self, deadline_s=min(max(self.deadline_s, at_s + patience_s), self.ceiling_s))

    def signal(self, now_s: float, name: str) -> Lifecycle:
        """Record a SIGTERM or SIGINT: the first one drains, the second is immediate."""
        stopped = self.stop(now_s, f"received {name}")
        return replace(stopped, num_signals=self.num_signals + 1)

    def ended(self) -> Lifecycle:
        return replace(self, phase=LifecyclePhase.STOPPED)

    @property
    def is_draining(self) -> bool:
        return self.phase is LifecyclePhase.DRAINING

    @property
    def is_immediate(self) -> bool:
        return self.num_signals >= 2 and self.phase is not LifecyclePhase.STOPPED

    def is_overdue(self, now_s: float) -> bool:
        return self.is_draining and self.deadline_s is not None and now_s >= self.deadline_s


_NOT_ITS_OWN: Final = frozenset({ExitCode.FENCED, ExitCode.INTERRUPTED, ExitCode.LEDGER_UNAVAILABLE})
"""Ends that others caused: a newer incarnation, a person, the ledger's server."""


class FirstError:
    """Remembers the first error of a worker's tasks.

    A worker departs while its TaskGroup is still collecting errors, and its departure names the reason."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record an error that leaves the block."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error
            raise

    async def record_from(self, coroutine: Coroutine[None, None, None]) -> None:
        with self.recording():
            await coroutine

    def report(self, who: Incarnation) -> FailureReport | None:
        """Return the error for the registry; None without an error, or if it is not the worker's own."""
        if self._error is None or exit_code_of(self._error) in _NOT_ITS_OWN:
            return None
        found = last_error(self._error)
        message = printable_line(" ".join(found.message.split()))
        return FailureReport(who=who, error=found.type, message=message[:MAX_DETAIL_CHARS])


class LifeRecord:
    """This process's life record. Failing writes are ignored; a later supervisor then knows less."""

    def __init__(self, run_dir: Path, worker: str) -> None:
        self._run_dir = run_dir
        self._worker = worker
        self._identity = identify(worker_pid())
        self._epoch = 0

    def registered(self, epoch: int) -> None:
        self._epoch = epoch
        self._write(None, None, 0)

    def ended(self, code: int, error: BaseException | None, delivered: int = 0) -> None:
        """Record the exit code, the error if one ended it, and the finished pieces of work."""
        self._write(code, None if error is None else last_error(error), delivered)

    def _write(self, exit_code: int | None, error: LastError | None, delivered: int) -> None:
        if self._identity is not None:
            with contextlib.suppress(OSError):
                life = Life(self._identity, self._epoch, exit_code, error, delivered)
                write_life(self._run_dir, self._worker, life)
