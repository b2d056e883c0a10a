"""The first error of a worker's tasks, known before all of them have ended.

A worker departs while its TaskGroup still collects errors. Its departure already has the reason."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Final

from pipeline.process.exit_codes import ExitCode, exit_code_of
from pipeline.process.last_error import last_error
from pipeline.runtime.registry.contract import MAX_DETAIL_CHARS, FailureReport
from protocol.ids import Incarnation
from protocol.printable import printable_line

_NOT_ITS_OWN: Final = frozenset({ExitCode.FENCED, ExitCode.INTERRUPTED, ExitCode.LEDGER_UNAVAILABLE})
"""Ends that others brought about: a newer incarnation, a person, the ledger's server."""


class FirstError:
    """Notes the first error of a worker's tasks."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    @contextmanager
    def noted(self) -> Generator[None]:
        """Note the error that leaves the block."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error
            raise

    async def noting(self, coroutine: Coroutine[None, None, None]) -> None:
        """Await a coroutine, and note its error."""
        with self.noted():
            await coroutine

    def report(self, who: Incarnation) -> FailureReport | None:
        """Return the error for the registry; None without one, or for one that is not the worker's
        own."""
        if self._error is None or exit_code_of(self._error) in _NOT_ITS_OWN:
            return None
        found = last_error(self._error)
        message = printable_line(" ".join(found.message.split()))
        return FailureReport(who=who, error=found.type, message=message[:MAX_DETAIL_CHARS])
