"""The worker's side: on request it writes its stacks to ``<run_dir>/stacks/<worker>.txt``.

A thread waits for a byte in the pipe ``<run_dir>/sockets/<worker>.request``. It writes what all
threads do, and what the loop's tasks await. It has the interpreter's lock, so that no stack changes
meanwhile.

SIGUSR1 is for a process that gives no such answer, since a computation holds that lock.
``faulthandler`` writes the threads' stacks from within the signal's handler. It reads them while
they may change, and sometimes ends a process whose threads run: one in some hundred signals. The
heartbeat's thread sees that the file has grown, and adds the names and the tasks.

The first line has the process's identity. It is written once the handler is there: without a
handler the signal would end the process."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, Final

import msgspec

from pipeline.process.records import identify
from protocol.endpoints import socket_folders
from protocol.errors import ConfigError
from protocol.private import ensure_private_folder

FOLDER = "stacks"
SIGNAL: Final = getattr(signal, "SIGUSR1", None)
"""None on systems without it; then no stacks are written."""
THREADS = "Threads:"
TASK = "Task "
END = "End of a dump"
_MAX_BYTES = 4 << 20
"""A larger file starts over."""
_MANY = 1 << 16
"""Requests that one answer serves."""
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


def request_pipe(run_dir: Path, worker: str) -> Path:
    """Return the pipe in which a worker receives requests for its stacks."""
    return socket_folders(run_dir)[0] / f"{worker}.request"


def stack_file(run_dir: Path, worker: str) -> Path:
    """Return where a worker writes its stacks."""
    return run_dir / FOLDER / f"{worker}.txt"


def send_request(pipe: Path) -> None:
    """Send a request to the reader of a pipe; nothing happens without one, or if it is full."""
    with suppress(OSError):
        opened = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(opened, b".")
        finally:
            os.close(opened)


class StackDump:
    """The file of this process, the thread that answers, and the signal's handler."""

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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._requests: int | None = None
        # a disk without pipes: there is the signal
        with suppress(OSError, ConfigError):
            pipe = request_pipe(run_dir, worker)
            ensure_private_folder(pipe.parent)
            pipe.unlink(missing_ok=True)
            os.mkfifo(pipe, 0o600)
            # with a writer of its own, it is never at its end
            self._requests = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
            threading.Thread(target=self._answer, args=(self._requests,), name="stacks", daemon=True).start()

    def _answer(self, requests: int) -> None:
        while os.read(requests, _MANY) and not self._is_closed:
            with suppress(OSError, ValueError), self._lock:
                self._write([*_threads(), *_tail(self._loop)])
        os.close(requests)

    def _write(self, lines: Iterable[str]) -> None:
        """Append lines, or start the file over where it is too long."""
        if os.fstat(self._file.fileno()).st_size > _MAX_BYTES:
            os.ftruncate(self._file.fileno(), self._head)
        self._file.write("".join(f"{line}\n" for line in lines))
        self._file.flush()
        self._size = os.fstat(self._file.fileno()).st_size

    def poll(self, loop: asyncio.AbstractEventLoop) -> None:
        """Complete what a signal has begun; called from another thread than the loop's. The
        next call does again what has failed: heartbeats go on."""
        self._loop = loop
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._complete(loop)
        # ValueError: it is closed
        except (OSError, ValueError):
            pass
        finally:
            self._lock.release()

    def _complete(self, loop: asyncio.AbstractEventLoop) -> None:
        size = os.fstat(self._file.fileno()).st_size
        if size == self._size:
            return
        # the handler writes line by line, and must be done
        for _ in range(_MOST_LOOKS):
            before, size = size, self._grown(size)
            if size == before:
                break
        self._write(_tail(loop))

    def _grown(self, size: int) -> int:
        """Return the file's size a moment later."""
        time.sleep(_MOMENT_S)
        return max(size, os.fstat(self._file.fileno()).st_size)

    def close(self) -> None:
        """Answer no more, and ignore the signal from now on. The pipe of this name stays: it may be
        a successor's."""
        self._is_closed = True
        if self._requests is not None:
            os.write(self._requests, b".")
        if SIGNAL is not None:
            faulthandler.unregister(SIGNAL)
        self._file.close()


def _threads() -> Iterator[str]:
    """Return all threads' calls but this one's, as ``faulthandler`` writes them."""
    for ident, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
        if ident == threading.get_ident():
            continue
        yield f"Thread 0x{ident:016x} (most recent call first):"
        at: FrameType | None = frame
        for _ in range(_MAX_DEPTH):
            if at is None:
                break
            yield f'  File "{at.f_code.co_filename}", line {at.f_lineno or "???"} in {at.f_code.co_name}'
            at = at.f_back


def _tail(loop: asyncio.AbstractEventLoop | None) -> Iterator[str]:
    yield THREADS
    for thread in threading.enumerate():
        yield f"  0x{thread.ident or 0:016x} {thread.name}"
    for task in sorted(_tasks(loop), key=lambda task: task.get_name())[:_MAX_TASKS]:
        yield f"{TASK}{task.get_name()}"
        for frame in _awaits(task.get_coro()):
            code = frame.f_code
            yield f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}'
    yield END


def _tasks(loop: asyncio.AbstractEventLoop | None) -> set[asyncio.Task[Any]]:
    for _ in range(_MOST_LOOKS if loop is not None else 0):
        # another thread changes the loop's tasks while they are listed
        with suppress(RuntimeError):
            return asyncio.all_tasks(loop)
    return set()


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
