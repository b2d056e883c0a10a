"""The worker's side: SIGUSR1 has it write its stacks to ``<run_dir>/stacks/<worker>.txt``.

``faulthandler`` writes all threads' stacks from within the signal's handler. So it answers even
while a computation holds the interpreter's lock. The heartbeat's thread sees that the file has
grown, and adds the names of threads and what the loop's tasks await.

The first line has the process's identity. It is written once the handler is there: without a
handler the signal would end the process."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, Final

import msgspec

from pipeline.process.records import identify

FOLDER = "stacks"
SIGNAL: Final = getattr(signal, "SIGUSR1", None)
"""None where there is none; then no stacks are written."""
THREADS = "Threads:"
TASK = "Task "
END = "End of a dump"
_MAX_BYTES = 4 << 20
"""A larger file begins anew."""
_MOMENT_S = 0.03
_MOST_LOOKS = 10
_MAX_TASKS = 200
_MAX_DEPTH = 100
_AWAITABLE: tuple[tuple[type[Any], str, str], ...] = (
    (CoroutineType, "cr_frame", "cr_await"),
    (GeneratorType, "gi_frame", "gi_yieldfrom"),
    (AsyncGeneratorType, "ag_frame", "ag_await"),
)
"""Kinds of awaitable things, and where each has its frame and what it awaits itself."""


def stack_file(run_dir: Path, worker: str) -> Path:
    """Return where a worker writes its stacks."""
    return run_dir / FOLDER / f"{worker}.txt"


class StackDump:
    """The file of this process, and the signal's handler."""

    def __init__(self, run_dir: Path, worker: str) -> None:
        """Raises OSError: the file cannot be written."""
        path = stack_file(run_dir, worker)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.unlink(missing_ok=True)
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._file = os.fdopen(opened, "w", encoding="utf-8")
        if SIGNAL is not None:
            # what is there again after ``close``: a late signal must not end the process
            signal.signal(SIGNAL, signal.SIG_IGN)
            faulthandler.register(SIGNAL, file=self._file, all_threads=True, chain=False)
        self._file.write(msgspec.json.encode(identify(os.getpid())).decode() + "\n")
        self._file.flush()
        self._size = self._head = os.fstat(opened).st_size

    def poll(self, loop: asyncio.AbstractEventLoop) -> None:
        """Complete what a signal has begun; called from another thread than the loop's. The
        next call does again what has failed: heartbeats go on."""
        # RuntimeError: the loop's tasks changed while they were listed
        with suppress(OSError, ValueError, RuntimeError):
            size = os.fstat(self._file.fileno()).st_size
            if size == self._size:
                return
            # the handler writes line by line, and must be done
            for _ in range(_MOST_LOOKS):
                before, size = size, self._grown(size)
                if size == before:
                    break
            if size > _MAX_BYTES:
                os.ftruncate(self._file.fileno(), self._head)
            else:
                self._file.write("".join(f"{line}\n" for line in _tail(loop)))
                self._file.flush()
            self._size = os.fstat(self._file.fileno()).st_size

    def _grown(self, size: int) -> int:
        """Return the file's size a moment later."""
        time.sleep(_MOMENT_S)
        return max(size, os.fstat(self._file.fileno()).st_size)

    def close(self) -> None:
        """Ignore the signal from now on."""
        if SIGNAL is not None:
            faulthandler.unregister(SIGNAL)
        self._file.close()


def _tail(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    yield THREADS
    for thread in threading.enumerate():
        yield f"  0x{thread.ident or 0:016x} {thread.name}"
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())[:_MAX_TASKS]:
        yield f"{TASK}{task.get_name()}"
        for frame in _awaits(task.get_coro()):
            code = frame.f_code
            yield f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}'
    yield END


def _awaits(awaited: Any) -> list[FrameType]:
    """Return the frames of a chain of awaits, the innermost first."""
    frames = list[FrameType]()
    while len(frames) < _MAX_DEPTH:
        for kind, frame_of, next_of in _AWAITABLE:
            if isinstance(awaited, kind):
                frame: FrameType | None = getattr(awaited, frame_of)
                awaited = getattr(awaited, next_of)
                break
        else:
            # a future, an iterator written in C, or nothing
            break
        if frame is not None:
            frames.append(frame)
    return frames[::-1]
