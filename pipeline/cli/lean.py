"""Leaves threads and packages out of commands that look at a run or change it.

Such a command never uses them, and a quarter of its time would go into them."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager


def be_lean() -> None:
    """Have this process start no numeric threads, and its libraries do without what is optional.
    Imports before and after this call are as ever."""
    # numpy's library starts a thread for each core when it is loaded
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Commands log to standard error without its tracebacks.
    with _without("rich"):
        import structlog  # noqa: F401
    # Nothing turns its metrics on.
    with _without("opentelemetry"):
        import redis.asyncio  # noqa: F401


@contextmanager
def _without(package: str) -> Generator[None]:
    """Have imports of a package fail in this context as if it were not installed; one that is
    imported already stays."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
