"""Leaves threads and packages out of commands that look at a run or change it.

Such a command never uses them, and a quarter of its time would go into them."""

from __future__ import annotations

import importlib
import os
import sys

_OPTIONAL = {"structlog": "rich", "redis.asyncio": "opentelemetry"}
"""Packages that a library imports where they are installed, for tracebacks and metrics of its own.
Commands log to standard error without them, and nothing turns those metrics on."""


def be_lean() -> None:
    """Have this process start no numeric threads, and its libraries do without what is optional.
    Imports before and after this call are as ever."""
    # numpy's library starts a thread for each core when it is loaded
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for library, package in _OPTIONAL.items():
        if library in sys.modules or package in sys.modules:
            continue
        # None: an import of it fails as if it were not installed
        sys.modules[package] = None  # type: ignore[assignment]
        try:
            importlib.import_module(library)
        finally:
            del sys.modules[package]
