"""Samples where this process spends its processor time. Loaded by every Python process of a
measured fleet, before its program.

*Consumes* ``HEADRACE_PROBE``, a folder. *Produces* ``<pid>.jsonl`` in it: lines of wall-clock time
and microseconds by thread and place so far. *Waits for* nothing: a signal comes after every 10 ms
of processor time.

Every thread's time since the last sample goes to where that thread is now: the innermost function
of this project on its stack. A main thread that is found asleep keeps its time for the next sample
that finds it awake, for then another thread rang. Threads of libraries, which have no stack in
Python, go by the name that they gave themselves."""

# ruff: noqa: PTH100, PTH120, PTH123, PTH208 - loaded before every program: nothing more than this is imported
from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from types import FrameType

_EVERY_S = 0.01
_TELL_EVERY_S = 0.5
_ROOT = os.path.dirname(os.path.abspath(__file__)).rsplit("/ops/", 1)[0] + "/"
_PACKAGES = ("protocol", "pipeline", "workers", "ops")
_ASLEEP = ("selectors.py", "threading.py", "socket.py")


class Probe:
    """The sampler of this process."""

    def __init__(self, folder: str) -> None:
        self._path = f"{folder}/{os.getpid()}.jsonl"
        self._spent: dict[str, float] = {}
        self._seen: dict[int, int] = {}
        self._told_at = 0.0
        self._pid = os.getpid()

    def start(self) -> None:
        """Begin, once the program's main thread takes signals."""
        signal.signal(signal.SIGPROF, self._on_signal)
        signal.setitimer(signal.ITIMER_PROF, _EVERY_S, _EVERY_S)
        atexit.register(self._end)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._sample(frame)
        if time.monotonic() - self._told_at > _TELL_EVERY_S:
            self._tell()

    def _sample(self, main: FrameType | None) -> None:
        frames = sys._current_frames()
        threads = {thread.native_id: thread for thread in threading.enumerate()}
        for name in os.listdir("/proc/self/task"):
            task = int(name)
            try:
                with open(f"/proc/self/task/{task}/schedstat") as file:
                    nanoseconds = int(file.read().split()[0])
            except OSError:
                # it has ended
                continue
            delta = nanoseconds - self._seen.get(task, 0)
            if not delta:
                continue
            thread = threads.get(task)
            if thread is None:
                place = f"thread {_name(task)}:"
            else:
                is_main = task == self._pid
                stack = main if is_main else frames.get(thread.ident or 0)
                found = _place(stack)
                if is_main and found is None:
                    # asleep: its time waits for a sample that finds it awake
                    continue
                place = f"{'main' if is_main else thread.name.split('-')[0]}:{found or ''}"
            self._seen[task] = nanoseconds
            self._spent[place] = self._spent.get(place, 0.0) + delta / 1000

    def _tell(self) -> None:
        self._told_at = time.monotonic()
        line = json.dumps({"at_s": time.time(), "argv": sys.orig_argv, "us": self._spent})
        with open(self._path, "a") as file:
            file.write(line + "\n")

    def _end(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        if os.getpid() == self._pid:
            self._tell()


def _place(frame: FrameType | None) -> str | None:
    """Return the innermost file of this project; "" for other code, None for a thread that sleeps
    in the standard library."""
    if frame is not None and frame.f_code.co_filename.rsplit("/", 1)[-1] in _ASLEEP:
        return None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_ROOT) and file[len(_ROOT) :].split("/", 1)[0] in _PACKAGES:
            return file[len(_ROOT) :]
        frame = frame.f_back
    return ""


def _name(task: int) -> str:
    try:
        with open(f"/proc/self/task/{task}/comm") as file:
            return file.read().strip()
    except OSError:
        return "?"


if "HEADRACE_PROBE" in os.environ:
    Probe(os.environ["HEADRACE_PROBE"]).start()
