"""The error that ended a worker, as a record, and whether two errors are the same.

Two errors are the same when their types are, and their messages but for numbers: process ids,
addresses, epochs, sizes. An error of the surroundings *may pass*: the disk, memory, the network,
the ledger, a deadline, a killed engine. A restart may succeed, however often it came."""

from __future__ import annotations

import re

import msgspec

from pipeline.process.exit_codes import ExitCode, exit_code_of
from protocol.errors import EngineDied, LedgerError, WeightsDamaged
from protocol.printable import printable_line

MAX_MESSAGE = 2000
_MAX_SHOWN = 500
_NUMBERS = re.compile(r"0x[0-9a-f]+|\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b|\d+", re.IGNORECASE)
_SURROUNDINGS = (OSError, MemoryError, TimeoutError, LedgerError, EngineDied, WeightsDamaged)
_BY_NAME = frozenset(
    {"OSError", "MemoryError", "TimeoutError", "ConnectionError", "KeyboardInterrupt", "OutOfMemoryError"}
)
_PRINTED = "Traceback (most recent call last):"
_LAST_LINE = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?")


class LastError(msgspec.Struct, frozen=True):
    """The error that ended a worker's process."""

    type: str
    """Name of its class."""
    message: str
    may_pass: bool = False
    """Whether it is an error of the surroundings."""

    @property
    def identity(self) -> str:
        """The type, and the message without numbers: equal for two errors that are the same."""
        return f"{self.type}: {_NUMBERS.sub('#', ' '.join(self.message.split()))}"

    def __str__(self) -> str:
        """Return it in one line, safe for a terminal."""
        message = " ".join(self.message.split())
        shown = message if len(message) <= _MAX_SHOWN else f"{message[:_MAX_SHOWN]} ..."
        return printable_line(f"{self.type}: {shown}" if shown else self.type)


def last_error(error: BaseException) -> LastError:
    """Return the record of ``error``; of an exception group, that of its decisive member."""
    code = exit_code_of(error)
    while isinstance(error, BaseExceptionGroup):
        members: tuple[BaseException, ...] = error.exceptions  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        error = next(member for member in members if exit_code_of(member) == code)
    name = type(error).__name__
    may_pass = isinstance(error, _SURROUNDINGS) or name in _BY_NAME or code is ExitCode.INTERRUPTED
    return LastError(name, str(error)[:MAX_MESSAGE], may_pass)


def printed_error(output: str) -> LastError | None:
    """Return the error of the last printed traceback; None without one."""
    _, found, after = output.rpartition(_PRINTED)
    if not found:
        return None
    lines = [line for line in after.splitlines() if line and not line[0].isspace()]
    match = _LAST_LINE.fullmatch(lines[0]) if lines else None
    if match is None:
        return None
    name = match["type"].rpartition(".")[2]
    return LastError(name, (match["message"] or "")[:MAX_MESSAGE], name in _BY_NAME)
