"""Claims about signals that ask a process to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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


_ENDED = """
import asyncio, os, signal, sys, threading
from pipeline.runtime.process_setup import obeying

heard = []

async def life():
    with obeying(lambda number, _: heard.append(number.name), lambda: heard.append("late")):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)
        while not heard:
            await asyncio.sleep(0.01)

threading.Thread(target=threading.Event().wait, daemon=True).start()
asyncio.run(life())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    os.kill(os.getpid(), number)
print(*heard)
"""


def test_a_signal_after_the_end_is_heard_and_kills_nobody_whichever_thread_gets_it() -> None:
    done = subprocess.run([sys.executable, "-c", _ENDED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["SIGTERM", "late", "late", "late"]
