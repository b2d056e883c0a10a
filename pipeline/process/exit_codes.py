"""How a process of Headrace ends, for the supervisor, for scripts and for people.

*Consumes* an exception. *Produces* one number of ``ExitCode``. The numbers are stable: scripts may
rely on them.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import cast

from protocol.errors import (
    ConfigError,
    DeadlineExceeded,
    Diverged,
    EngineDied,
    Fenced,
    HeadraceError,
    LedgerError,
    LedgerMismatch,
    LedgerRefused,
    ParityFailed,
    WeightsRejected,
)


class FailureKind(StrEnum):
    """Why a worker ended that should not have; each kind has a restart budget of its own."""

    INFRASTRUCTURE = "infrastructure"
    """What surrounds the worker: a signal, the kernel's memory killer, a frozen process, the
    ledger, the disk. Counted a worker."""
    DATA = "data"
    """An error of its own while it worked. What it worked on goes to another worker of the role and
    may end that one too, so these are counted over the role."""


class ExitCode(IntEnum):
    """Exit status of ``headrace`` and of every worker."""

    OK = 0
    """Finished, or drained in good order when asked to stop."""
    FAILURE = 1
    """An error that nobody expected; the log holds its traceback. The supervisor restarts the
    worker.
    """
    CONFIG = 2
    """A setting, a file or the data is wrong; nothing was started. A restart cannot help."""
    LEDGER_UNAVAILABLE = 3
    """No ledger server answered, or it refused writes, for longer than the configured outage; or it
    lost its last writes.
    """
    FENCED = 4
    """A newer incarnation of this worker exists; this one stopped at once and wrote
    nothing more.
    """
    DRAIN_TIMEOUT = 5
    """Asked to stop, but not drained by the deadline; what was unfinished is leased to others."""
    STARVED = 6
    """The data is exhausted and an update can never fill again. What was accepted is kept."""
    BAD_STEPS = 7
    """Training has diverged: too many non-finite optimiser steps in a row, none of them committed,
    or weights that give logits which are not finite."""
    STUCK = 8
    """Frozen, or without progress though it had work: the supervisor fenced and killed it."""
    HOST_FAILED = 9
    """The host refused it: no room on a disk, no memory, a file or a socket that fails."""
    ENGINE = 10
    """An engine died, could not take a published version, or computed other log-probs than the
    learner with it; what it held goes on elsewhere. Or a rank of a learner or value worker died.
    The supervisor starts it again."""
    NOT_ALL_JUDGED = 11
    """``headrace score``: the report is whole; some responses have no verdict, were not judged in
    time, or are unreadable.
    """
    INTERRUPTED = 130
    """Told twice to stop, or before the run had begun: ended at once."""

    @property
    def is_hopeless(self) -> bool:
        """Whether starting the same worker again would only end the same way."""
        return self in {ExitCode.CONFIG, ExitCode.STARVED, ExitCode.BAD_STEPS}


class DrainTimeout(DeadlineExceeded):
    """A worker that was asked to stop had not drained by its deadline."""


class Interrupted(HeadraceError):
    """A worker was told a second time to stop, which means at once; or a run before
    it had begun.
    """


_TELLING = (
    ExitCode.FENCED,
    ExitCode.INTERRUPTED,
    ExitCode.CONFIG,
    ExitCode.BAD_STEPS,
    ExitCode.ENGINE,
    ExitCode.FAILURE,
    ExitCode.HOST_FAILED,
    ExitCode.LEDGER_UNAVAILABLE,
    ExitCode.DRAIN_TIMEOUT,
)
"""Of several errors at once, the first of these decides."""


def exit_code_of(error: BaseException) -> ExitCode:
    """Return how a process ends that was ended by ``error``; of an exception group, the most
    telling member decides.
    """
    if isinstance(error, BaseExceptionGroup):
        members = cast("tuple[BaseException, ...]", error.exceptions)  # pyright: ignore[reportUnknownMemberType]
        return min((exit_code_of(member) for member in members), key=_TELLING.index)
    if isinstance(error, Fenced):
        return ExitCode.FENCED
    if isinstance(error, Interrupted | KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, ConfigError | LedgerMismatch | LedgerRefused):
        return ExitCode.CONFIG
    if isinstance(error, Diverged):
        return ExitCode.BAD_STEPS
    if isinstance(error, EngineDied | ParityFailed | WeightsRejected):
        return ExitCode.ENGINE
    if isinstance(error, LedgerError):
        return ExitCode.LEDGER_UNAVAILABLE
    if isinstance(error, DrainTimeout):
        return ExitCode.DRAIN_TIMEOUT
    if isinstance(error, MemoryError | OSError) and not isinstance(error, TimeoutError):
        return ExitCode.HOST_FAILED
    return ExitCode.FAILURE


def kind_of(exit_code: int) -> FailureKind:
    """Return which budget an unwanted exit is counted against; a negative code is the number of a
    signal.
    """
    is_its_own = exit_code > 0 and exit_code not in _SURROUNDINGS
    return FailureKind.DATA if is_its_own else FailureKind.INFRASTRUCTURE


def as_own(exit_code: int) -> int:
    """Return a worker's exit code as the command's own: one that a signal killed becomes 128 + the
    signal, as in shells.
    """
    return 128 - exit_code if exit_code < 0 else exit_code


_SURROUNDINGS = frozenset(ExitCode) - {ExitCode.FAILURE}
