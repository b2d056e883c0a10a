"""One log per worker: JSON lines in a file, readable lines on a terminal.

The log contains structlog events, records of the standard library's logging, and warnings. It goes to
``<run_dir>/logs/<worker>.jsonl``, with role, worker, run and policy version on every line. It also goes to
standard error: all of it on a terminal, otherwise only warnings and errors, which the supervisor keeps. Full
files are rotated.

    {"event":"update","update":3,"level":"info","at":"2025-01-31T12:00:00.000001Z",
     "role":"learner","worker":"learner","run":"demo","policy_version":3}"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from protocol.printable import json_safe, printable, printable_line

MAX_FILE_BYTES = 32 << 20
NUM_OLD_FILES = 3


class WorkerLog:
    """The logging of one process, from ``open_log`` until ``close``.

    Attributes:
        context: Fields of every later line, also of other libraries.
        path: The file."""

    def __init__(
        self,
        path: Path,
        context: dict[str, object],
        *,
        terminal: TextIO | None,
        max_file_bytes: int,
        num_old_files: int,
    ) -> None:
        self.path = path
        self.context = context
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = RotatingFileHandler(
            path, maxBytes=max_file_bytes, backupCount=num_old_files, encoding="utf-8", errors="backslashreplace"
        )
        file.setFormatter(_formatter(self._on_every_line, [structlog.processors.format_exc_info, _to_json]))
        self._handlers: list[logging.Handler] = [file]
        if terminal is not None:
            is_terminal = terminal.isatty()
            readable = logging.StreamHandler(terminal)
            readable.setLevel(logging.INFO if is_terminal else logging.WARNING)
            renderer = structlog.dev.ConsoleRenderer(
                colors=is_terminal, exception_formatter=structlog.dev.plain_traceback
            )
            readable.setFormatter(_formatter(self._on_every_line, [_without_names, renderer]))
            self._handlers.append(readable)
        root = logging.getLogger()
        self._previous = (root.handlers[:], root.level, warnings.showwarning)
        self._was_configured = structlog.get_config() if structlog.is_configured() else None
        root.handlers[:] = self._handlers
        root.setLevel(logging.INFO)
        warnings.showwarning = _log_warning
        structlog.configure(
            processors=[
                structlog.stdlib.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
                structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
            ],
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
            logger_factory=structlog.stdlib.LoggerFactory(),
            cache_logger_on_first_use=False,
        )
        self.logger = cast("FilteringBoundLogger", structlog.get_logger("headrace"))

    def flush(self) -> None:
        for handler in self._handlers:
            handler.flush()

    def close(self) -> None:
        """Close the file and restore logging. Repeated calls do nothing."""
        root = logging.getLogger()
        if root.handlers[:] != self._handlers:
            return
        root.handlers[:], level, warnings.showwarning = self._previous
        root.setLevel(level)
        structlog.reset_defaults()
        if self._was_configured is not None:
            structlog.configure(**self._was_configured)
        for handler in self._handlers:
            handler.close()

    def _on_every_line(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        for name, value in self.context.items():
            event.setdefault(name, value)
        return event


def log_to_stderr() -> None:
    """Log to standard error until ``open_log``; standard output is for a command's answer."""
    is_terminal = sys.stderr.isatty()
    structlog.configure(
        processors=[
            *(() if is_terminal else (_warnings_alone,)),
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
            _without_names,
            structlog.dev.ConsoleRenderer(colors=is_terminal, exception_formatter=structlog.dev.plain_traceback),
        ],
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


def open_log(
    run_dir: Path,
    *,
    role: str,
    worker: str,
    run: str,
    terminal: TextIO | None = sys.stderr,
    max_file_bytes: int = MAX_FILE_BYTES,
    num_old_files: int = NUM_OLD_FILES,
) -> WorkerLog:
    """Send this process's whole log to the worker's file and to ``terminal``."""
    context: dict[str, object] = {"role": str(role), "worker": worker, "run": run, "policy_version": -1}
    path = run_dir / "logs" / f"{worker}.jsonl"
    return WorkerLog(path, context, terminal=terminal, max_file_bytes=max_file_bytes, num_old_files=num_old_files)


def _formatter(on_every_line: Processor, last: Iterable[Processor]) -> structlog.stdlib.ProcessorFormatter:
    foreign: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
    ]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=foreign,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, on_every_line, *last],
    )


def _log_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: TextIO | str | None
) -> None:
    """Log a warning as one line; ``warnings.showwarning`` would print two."""
    text = f"{category.__name__}: {message}"
    logging.getLogger("py.warnings").warning(text, extra={"at_line": f"{filename}:{lineno}"})


def _to_json(logger: WrappedLogger, method: str, event: EventDict) -> str:
    return json_safe(json.dumps(event, ensure_ascii=False, default=repr))


def _warnings_alone(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if method in ("debug", "info"):
        raise structlog.DropEvent
    return event


def _without_names(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Remove role and run, which the worker's name implies, and make texts safe for a terminal."""
    return {
        printable_line(name): printable(value) if isinstance(value, str) else value
        for name, value in event.items()
        if name not in ("role", "run")
    }
