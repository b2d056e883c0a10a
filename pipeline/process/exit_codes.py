"""How a process ended: its exit code and its error. The codes are stable: scripts may rely on them."""

from __future__ import annotations

import re
import signal
from enum import IntEnum, StrEnum
from typing import cast

import msgspec

from protocol import errors
from protocol.errors import EngineDied, LedgerError, WeightsDamaged
from protocol.printable import printable_line


class FailureKind(StrEnum):
    """What a failure counts against. Each kind has its own restart budget."""

    INFRASTRUCTURE = "infrastructure"
    """Something around the worker failed: a signal, the kernel's OOM killer, a freeze, the ledger,
    the disk. Counted against the worker."""
    DATA = "data"
    """The worker itself raised an error at its work. Another worker gets the same work and may fail
    too, so it is counted against the role."""


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
    """The worker had not drained by the deadline; others lease its unfinished work."""
    STARVED = 6
    """The data has nothing to learn from, or too few prompts for one update. Checkpoints are kept."""
    BAD_STEPS = 7
    """Training has diverged: too many non-finite optimiser steps in a row, none of them committed,
    or weights with non-finite logits."""
    STUCK = 8
    """Frozen, or without progress on its work: the supervisor fenced and killed it."""
    HOST_FAILED = 9
    """The host failed: a full disk, no memory, a file or socket error."""
    ENGINE = 10
    """An engine died, could not load a version, or disagreed with the learner's log-probs; a rank
    of a learner or value worker died; or a learner's repeated step gave a different result. The
    supervisor restarts the worker."""
    NOT_ALL_JUDGED = 11
    """``headrace score``: the report is complete, but some responses have no verdict, or a late
    one."""
    INTERRUPTED = 130
    """Stopped twice, or before the run began; ended at once."""

    @property
    def is_hopeless(self) -> bool:
        """Whether a restart of the same worker would end the same way."""
        return self in {ExitCode.CONFIG, ExitCode.STARVED, ExitCode.BAD_STEPS}


class DrainTimeout(errors.DeadlineExceeded):
    """A worker had not drained by its deadline."""


class Interrupted(errors.HeadraceError):
    """A worker was stopped a second time, or a run was stopped before it began."""


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
"""The first of these found in an exception group decides."""


_BY_TYPE = (
    (errors.Fenced, ExitCode.FENCED),
    ((Interrupted, KeyboardInterrupt), ExitCode.INTERRUPTED),
    ((errors.ConfigError, errors.LedgerMismatch, errors.LedgerRefused), ExitCode.CONFIG),
    (errors.Diverged, ExitCode.BAD_STEPS),
    ((errors.EngineDied, errors.ParityFailed, errors.StepDiffered, errors.WeightsRejected), ExitCode.ENGINE),
    (errors.LedgerError, ExitCode.LEDGER_UNAVAILABLE),
    (DrainTimeout, ExitCode.DRAIN_TIMEOUT),
    # Python's TimeoutError is an OSError, but no failure of the host
    (TimeoutError, ExitCode.FAILURE),
    ((MemoryError, OSError), ExitCode.HOST_FAILED),
)
"""The first entry that matches an error's type decides."""


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code for an error; for an exception group, that of its decisive member."""
    if isinstance(error, BaseExceptionGroup):
        members = cast("tuple[BaseException, ...]", error.exceptions)  # pyright: ignore[reportUnknownMemberType]
        return min((exit_code_of(member) for member in members), key=_PRECEDENCE.index)
    return next((code for kinds, code in _BY_TYPE if isinstance(error, kinds)), ExitCode.FAILURE)


def kind_of(exit_code: int) -> FailureKind:
    """Return which budget a failure counts against. A negative code is a signal."""
    is_its_own = exit_code > 0 and exit_code not in _SURROUNDINGS
    return FailureKind.DATA if is_its_own else FailureKind.INFRASTRUCTURE


def as_own(exit_code: int) -> int:
    """Convert a worker's exit code to the command's: signal N becomes 128 + N, as in shells."""
    return _SHELL_SIGNAL - exit_code if exit_code < 0 else exit_code


def from_shell(exit_code: int) -> int:
    """Convert a shell's exit code: 128 + N becomes -N for signal N. 130 stays: it is INTERRUPTED."""
    is_signal = _SHELL_SIGNAL < exit_code < _SHELL_SIGNAL + signal.NSIG and exit_code != ExitCode.INTERRUPTED
    return _SHELL_SIGNAL - exit_code if is_signal else exit_code


_SHELL_SIGNAL = 128
_SURROUNDINGS = frozenset(ExitCode) - {ExitCode.FAILURE}


# The error that ended a worker, as a record, and whether two errors are the same.
#
# Two errors are the same when their types and messages are equal, numbers aside (process ids,
# addresses, epochs, sizes). A transient error, of the disk, memory, the network, the ledger, a
# deadline or a killed engine, *may pass*: a restart may succeed, however often it has occurred.

MAX_MESSAGE = 2000
_MAX_SHOWN = 500
_NUMBERS = re.compile(r"0x[0-9a-f]+|\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b|\d+", re.IGNORECASE)
_MAY_PASS = (OSError, MemoryError, TimeoutError, LedgerError, EngineDied, WeightsDamaged)
_BY_NAME = frozenset(
    {"OSError", "MemoryError", "TimeoutError", "ConnectionError", "KeyboardInterrupt", "OutOfMemoryError"}
)
_PRINTED = "Traceback (most recent call last):"
_LAST_LINE = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?")


class LastError(msgspec.Struct, frozen=True):
    type: str
    """Class name."""
    message: str
    may_pass: bool = False
    """Whether it is transient."""

    @property
    def identity(self) -> str:
        """The type and the message without numbers, equal for errors that count as the same."""
        return f"{self.type}: {_NUMBERS.sub('#', ' '.join(self.message.split()))}"

    def __str__(self) -> str:
        message = " ".join(self.message.split())
        shown = message if len(message) <= _MAX_SHOWN else f"{message[:_MAX_SHOWN]} ..."
        return printable_line(f"{self.type}: {shown}" if shown else self.type)


def last_error(error: BaseException) -> LastError:
    """Return the record of an error; for an exception group, that of its decisive member."""
    code = exit_code_of(error)
    while isinstance(error, BaseExceptionGroup):
        members: tuple[BaseException, ...] = error.exceptions  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        error = next(member for member in members if exit_code_of(member) == code)
    name = type(error).__name__
    may_pass = isinstance(error, _MAY_PASS) or name in _BY_NAME or code is ExitCode.INTERRUPTED
    return LastError(name, str(error)[:MAX_MESSAGE], may_pass)


def printed_error(output: str) -> LastError | None:
    """Parse the error of the last traceback in a process's output; None without one."""
    _, found, after = output.rpartition(_PRINTED)
    if not found:
        return None
    lines = [line for line in after.splitlines() if line and not line[0].isspace()]
    match = _LAST_LINE.fullmatch(lines[0]) if lines else None
    if match is None:
        return None
    name = match["type"].rpartition(".")[2]
    return LastError(name, (match["message"] or "")[:MAX_MESSAGE], name in _BY_NAME)
