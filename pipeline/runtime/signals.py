"""Signals that end a process, and its terminals."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that drain: SIGTERM, SIGINT, and SIGHUP unless ignored (``nohup``)."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGTERM, signal.SIGINT)
    return (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def own_terminals() -> tuple[int, ...]:
    """Return the standard descriptors that are terminals; read this before a terminal hangs up."""
    return tuple(descriptor for descriptor in range(3) if os.isatty(descriptor))


@contextmanager
def obeying(obey: Callable[[signal.Signals, tuple[int, ...]], None]) -> Generator[None]:
    """Call ``obey`` with each stop signal and this process's terminals, on the running loop, while
    the block runs."""
    loop = asyncio.get_running_loop()
    numbers, terminals = stop_signals(), own_terminals()
    for number in numbers:
        loop.add_signal_handler(number, obey, number, terminals)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def leave_terminals(terminals: tuple[int, ...]) -> None:
    """Point them to the null device: a write to a closed terminal is an error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in terminals:
        with suppress(OSError):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
