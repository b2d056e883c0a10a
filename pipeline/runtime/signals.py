"""Signals that end a process, and its terminals."""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that drain: SIGTERM, SIGINT, and SIGHUP unless ignored (``nohup``)."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGTERM, signal.SIGINT)
    return (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def own_terminals() -> tuple[int, ...]:
    """Return the standard descriptors that are terminals; read this before a terminal hangs up."""
    return tuple(descriptor for descriptor in range(3) if os.isatty(descriptor))


def leave_terminals(terminals: tuple[int, ...]) -> None:
    """Point them to the null device: a write to a closed terminal is an error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in terminals:
        with suppress(OSError):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
