"""The error that ended a worker, as it is written down, and whether two of them are the same.

*Consumes* exceptions, or what a process printed before it could write anything down. *Produces*
small records. *Waits for* nothing.

Two errors are the same when their types are, and their messages but for numbers: process ids,
addresses, epochs, sizes. An error *may pass* when it tells of the surroundings: the disk, memory,
the network, the ledger, a deadline, an engine that was killed. Another start may find them well,
however often the error came.
"""

from __future__ import annotations

import re

import msgspec

from pipeline.process.exit_codes import ExitCode, exit_code_of
from protocol.errors import EngineDied, LedgerError, WeightsDamaged
from protocol.printable import printable_line

MAX_MESSAGE = 2000
_MAX_TOLD = 500
_NUMBERS = re.compile(r"0x[0-9a-f]+|\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b|\d+", re.IGNORECASE)
_SURROUNDINGS = (OSError, MemoryError, TimeoutError, LedgerError, EngineDied, WeightsDamaged)
_BY_NAME = frozenset(
    {"OSError", "MemoryError", "TimeoutError", "ConnectionError", "KeyboardInterrupt", "OutOfMemoryError"}
)
_PRINTED = "Traceback (most recent call last):"
_LAST_LINE = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?")


class LastError(msgspec.Struct, frozen=True):
    """What ended a worker's process."""

    type: str
    """Name of its class."""
    message: str
    may_pass: bool = False
    """Whether it is one of the surroundings, which another start may find well."""

    @property
    def identity(self) -> str:
        """What two errors have in common that are the same: their type, and their message without
        its numbers.
        """
        return f"{self.type}: {_NUMBERS.sub('#', ' '.join(self.message.split()))}"

    def __str__(self) -> str:
        """Return it in one line, for people."""
        message = " ".join(self.message.split())
        told = message if len(message) <= _MAX_TOLD else f"{message[:_MAX_TOLD]} ..."
        return printable_line(f"{self.type}: {told}" if told else self.type)


def last_error(error: BaseException) -> LastError:
    """Return what is written down of ``error``; of an exception group, of the member that decides
    the exit code.
    """
    code = exit_code_of(error)
    while isinstance(error, BaseExceptionGroup):
        members: tuple[BaseException, ...] = error.exceptions  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        error = next(member for member in members if exit_code_of(member) == code)
    name = type(error).__name__
    may_pass = isinstance(error, _SURROUNDINGS) or name in _BY_NAME or code is ExitCode.INTERRUPTED
    return LastError(name, str(error)[:MAX_MESSAGE], may_pass)


def printed_error(output: str) -> LastError | None:
    """Return the error of the last traceback that a process printed; None when it printed none."""
    _, found, after = output.rpartition(_PRINTED)
    if not found:
        return None
    lines = [line for line in after.splitlines() if line and not line[0].isspace()]
    match = _LAST_LINE.fullmatch(lines[0]) if lines else None
    if match is None:
        return None
    name = match["type"].rpartition(".")[2]
    return LastError(name, (match["message"] or "")[:MAX_MESSAGE], name in _BY_NAME)
