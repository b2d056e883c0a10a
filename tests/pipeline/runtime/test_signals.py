"""Claims about signals that ask a process to end."""

from __future__ import annotations

import os
import signal

import pytest

from pipeline.runtime.process_setup import leave_terminals, own_terminals, stop_signals


def test_a_hangup_ends_a_process_unless_it_was_started_to_ignore_it() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert set(stop_signals()) == {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert set(stop_signals()) == {signal.SIGTERM, signal.SIGINT}, "as by nohup"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_written_to_a_terminal_that_has_hung_up_goes_nowhere() -> None:
    master, slave = os.openpty()
    kept = os.dup(0)
    try:
        os.dup2(slave, 0)
        assert 0 in own_terminals()
        os.close(master)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(0, b"x")
        leave_terminals((0,))
        assert os.write(0, b"x") == 1
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(slave)
