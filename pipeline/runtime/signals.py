"""Which signals ask a process of ours to end, and what becomes of its terminal.

*Consumes* what was set when the process began. *Produces* signal numbers. *Waits for* nothing.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that drain: SIGTERM, SIGINT, and SIGHUP unless the process was started to
    ignore it (``nohup``).
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGTERM, signal.SIGINT)
    return (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def own_terminals() -> tuple[int, ...]:
    """Return those of standard input, output and error that are a terminal; once it has hung up,
    the system says no more.
    """
    return tuple(descriptor for descriptor in range(3) if os.isatty(descriptor))


def leave_terminals(terminals: tuple[int, ...]) -> None:
    """Let them lead nowhere: what is written to a terminal that has hung up is an error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in terminals:
        with suppress(OSError):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
