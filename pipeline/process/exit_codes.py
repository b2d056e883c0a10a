"""Exit codes of processes. The numbers are stable: scripts may rely on them."""

from __future__ import annotations

import signal
from enum import IntEnum, StrEnum
from typing import cast

from protocol import errors


class FailureKind(StrEnum):
    """Kind of a worker's failure. Each kind has a restart budget of its own."""

    INFRASTRUCTURE = "infrastructure"
    """A failure around the worker: a signal, the kernel's memory killer, a freeze, the ledger, the
    disk. Counted for the worker."""
    DATA = "data"
    """An error of the worker at its work. Another worker gets the work and may fail too, so it is
    counted for the role."""


class ExitCode(IntEnum):
    """Exit status of ``headrace`` and of every worker."""

    OK = 0
    """Finished, or drained on request."""
    FAILURE = 1
    """An unexpected error, with a traceback in the log. The supervisor restarts the worker."""
    CONFIG = 2
    """A setting, a file or the data is wrong; nothing was started. A restart does not help."""
    LEDGER_UNAVAILABLE = 3
    """The ledger's server was away or refused writes for too long, or lost its last writes."""
    FENCED = 4
    """A newer incarnation of this worker exists; this one wrote nothing more."""
    DRAIN_TIMEOUT = 5
    """Not drained by the deadline; others lease the unfinished work."""
    STARVED = 6
    """The data has nothing to learn from, or too few prompts for one update. Checkpoints are kept."""
    BAD_STEPS = 7
    """Training has diverged: too many non-finite optimiser steps in a row, none of them committed,
    or weights with non-finite logits."""
    STUCK = 8
    """Frozen, or without progress on its work: the supervisor fenced and killed it."""
    HOST_FAILED = 9
    """The host failed: a full disk, no memory, a file or a socket error."""
    ENGINE = 10
    """An engine died, could not load a version, or disagreed with the learner's log-probs; or a
    rank of a learner or value worker died. Or a learner's step differed when it was made again. The
    supervisor restarts the worker."""
    NOT_ALL_JUDGED = 11
    """``headrace score``: the report is whole, but some responses have no verdict or a late one."""
    INTERRUPTED = 130
    """Stopped twice, or before the run began: ended at once."""

    @property
    def is_hopeless(self) -> bool:
        """Whether the same worker would end the same way again."""
        return self in {ExitCode.CONFIG, ExitCode.STARVED, ExitCode.BAD_STEPS}


class DrainTimeout(errors.DeadlineExceeded):
    """A worker did not drain by its deadline."""


class Interrupted(errors.HeadraceError):
    """A worker was stopped a second time, or a run before it began."""


_PRECEDENCE = (
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
"""Of several errors, the first of these decides."""


_BY_TYPE = (
    (errors.Fenced, ExitCode.FENCED),
    ((Interrupted, KeyboardInterrupt), ExitCode.INTERRUPTED),
    ((errors.ConfigError, errors.LedgerMismatch, errors.LedgerRefused), ExitCode.CONFIG),
    (errors.Diverged, ExitCode.BAD_STEPS),
    ((errors.EngineDied, errors.ParityFailed, errors.StepDiffered, errors.WeightsRejected), ExitCode.ENGINE),
    (errors.LedgerError, ExitCode.LEDGER_UNAVAILABLE),
    (DrainTimeout, ExitCode.DRAIN_TIMEOUT),
    # Python's is an OSError, and no failure of the host
    (TimeoutError, ExitCode.FAILURE),
    ((MemoryError, OSError), ExitCode.HOST_FAILED),
)
"""Of an error's types, the first of these decides."""


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code for ``error``; of an exception group, that of its decisive member."""
    if isinstance(error, BaseExceptionGroup):
        members = cast("tuple[BaseException, ...]", error.exceptions)  # pyright: ignore[reportUnknownMemberType]
        return min((exit_code_of(member) for member in members), key=_PRECEDENCE.index)
    return next((code for kinds, code in _BY_TYPE if isinstance(error, kinds)), ExitCode.FAILURE)


def kind_of(exit_code: int) -> FailureKind:
    """Return the budget that a failure counts for; a negative code is a signal's number."""
    is_its_own = exit_code > 0 and exit_code not in _SURROUNDINGS
    return FailureKind.DATA if is_its_own else FailureKind.INFRASTRUCTURE


def as_own(exit_code: int) -> int:
    """Return the command's code for a worker's: 128 + N for signal N, as in shells."""
    return _SHELL_SIGNAL - exit_code if exit_code < 0 else exit_code


def from_shell(exit_code: int) -> int:
    """Return a process's code for a shell's, which is 128 + N for signal N. 130 stays: it is
    INTERRUPTED."""
    is_signal = _SHELL_SIGNAL < exit_code < _SHELL_SIGNAL + signal.NSIG and exit_code != ExitCode.INTERRUPTED
    return _SHELL_SIGNAL - exit_code if is_signal else exit_code


_SHELL_SIGNAL = 128
_SURROUNDINGS = frozenset(ExitCode) - {ExitCode.FAILURE}
