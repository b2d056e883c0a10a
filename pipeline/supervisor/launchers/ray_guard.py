"""Kills a worker on Ray when its actor ends, however it ends.

The actor's process holds this one's standard input open. When it closes, all processes with the
worker's mark are killed, and the worker's private folder is removed.

    python headrace.py pipeline.supervisor.launchers.ray_guard FOLDER MARK"""

from __future__ import annotations

import os
import shutil
import signal
import sys

from pipeline.process.descendants import end_marked

HELD_MARK = "HEADRACE_HELD"
"""Environment variable of a held worker and its descendants; its value is a random name."""


def main() -> int:
    folder, mark = sys.argv[1:]
    # Ray kills the children of an actor's process, so leave them
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_marked(HELD_MARK, mark)
    shutil.rmtree(folder, ignore_errors=True)
    return 0
