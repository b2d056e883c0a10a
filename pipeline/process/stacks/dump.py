"""The worker's side: on request it writes its stacks to ``<run_dir>/stacks/<worker>.txt``.

A thread waits for a byte in the pipe ``<run_dir>/sockets/<worker>.request``, then writes what all
threads do and what the loop's tasks await. It holds the interpreter's lock, so no stack changes
meanwhile.

SIGUSR1 is for a process that cannot answer because a computation holds that lock: ``faulthandler``
writes the threads' stacks from the signal handler. It reads them while they may change, and about
one signal in some hundreds kills a process with running threads. The heartbeat thread notices that
the file has grown, and adds thread names and tasks.

The file's first line is the process's identity. It is written once the handler is installed:
without one the signal would kill the process."""

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
"""None on systems without it, where no stacks are written."""
THREADS = "Threads:"
TASK = "Task "
END = "End of a dump"
_MAX_BYTES = 4 << 20
"""A file larger than this is started over."""
_MANY = 1 << 16
"""One answer serves up to this many pending requests."""
_MOMENT_S = 0.03
_MOST_LOOKS = 10
_END_S = 2.0
"""How long the end waits for an answer that is being written."""
_MAX_TASKS = 200
_MAX_DEPTH = 100
_AWAITABLE: tuple[tuple[type[Any], str, str], ...] = (
    (CoroutineType, "cr_frame", "cr_await"),
    (GeneratorType, "gi_frame", "gi_yieldfrom"),
    (AsyncGeneratorType, "ag_frame", "ag_await"),
)
"""Types of awaitables, with the attributes that hold their frame and what they await."""


def request_pipe(run_dir: Path, worker: str) -> Path:
    return socket_folders(run_dir)[0] / f"{worker}.request"


def stack_file(run_dir: Path, worker: str) -> Path:
    return run_dir / FOLDER / f"{worker}.txt"


def send_request(pipe: Path) -> None:
    """Write a request to a pipe; does nothing if it has no reader or is full."""
    with suppress(OSError):
        opened = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(opened, b".")
        finally:
            os.close(opened)


class StackDump:
    """This process's stack file, the thread that answers requests, and the signal handler."""

    def __init__(self, run_dir: Path, worker: str) -> None:
        """Raises OSError: the file cannot be written."""
        path = stack_file(run_dir, worker)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.unlink(missing_ok=True)
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._file = os.fdopen(opened, "w", encoding="utf-8")
        if SIGNAL is not None:
            # back in force after ``close``: a late signal must not kill the process
            signal.signal(SIGNAL, signal.SIG_IGN)
            faulthandler.register(SIGNAL, file=self._file, all_threads=True, chain=False)
        self._file.write(msgspec.json.encode(identify(os.getpid())).decode() + "\n")
        self._file.flush()
        self._size = self._head = os.fstat(opened).st_size
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._answering: tuple[threading.Thread, int] | None = None
        """The thread that answers, and the number of the pipe that it reads from."""
        # a file system without pipes leaves the signal
        with suppress(OSError, ConfigError):
            pipe = request_pipe(run_dir, worker)
            ensure_private_folder(pipe.parent)
            pipe.unlink(missing_ok=True)
            os.mkfifo(pipe, 0o600)
            # read and write: with a writer of its own the pipe never reports end of file
            requests = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
            thread = threading.Thread(target=self._answer, args=(requests,), name="stacks", daemon=True)
            thread.start()
            self._answering = thread, requests

    def _answer(self, requests: int) -> None:
        while os.read(requests, _MANY) and not self._is_closed:
            with suppress(OSError, ValueError), self._lock:
                self._write([*_threads(), *_tail(self._loop)])

    def _write(self, lines: Iterable[str]) -> None:
        """Append lines; first truncate a file that is too long."""
        if os.fstat(self._file.fileno()).st_size > _MAX_BYTES:
            os.ftruncate(self._file.fileno(), self._head)
        self._file.write("".join(f"{line}\n" for line in lines))
        self._file.flush()
        self._size = os.fstat(self._file.fileno()).st_size

    def poll(self, loop: asyncio.AbstractEventLoop) -> None:
        """Complete a dump that a signal has begun. Call it from a thread other than the loop's.
        Errors are left for the next call, since heartbeats must go on."""
        self._loop = loop
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._complete(loop)
        # ValueError: the file is closed
        except (OSError, ValueError):
            pass
        finally:
            self._lock.release()

    def _complete(self, loop: asyncio.AbstractEventLoop) -> None:
        size = os.fstat(self._file.fileno()).st_size
        if size == self._size:
            return
        # wait until the handler, which writes line by line, is done
        for _ in range(_MOST_LOOKS):
            before, size = size, self._grown(size)
            if size == before:
                break
        self._write(_tail(loop))

    def _grown(self, size: int) -> int:
        time.sleep(_MOMENT_S)
        return max(size, os.fstat(self._file.fileno()).st_size)

    def close(self) -> None:
        """Stop answering, and ignore the signal from now on. The pipe stays: it may already belong
        to a successor of the same name."""
        self._is_closed = True
        if self._answering is not None:
            thread, requests = self._answering
            os.write(requests, b".")
            thread.join(_END_S)
            # the number may be another file's as soon as it is closed, so only once nobody reads from it
            if not thread.is_alive():
                os.close(requests)
        if SIGNAL is not None:
            faulthandler.unregister(SIGNAL)
        self._file.close()


def _threads() -> Iterator[str]:
    """Yield the calls of all threads but this one, in ``faulthandler``'s format."""
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
        # RuntimeError: the set changed while it was listed
        with suppress(RuntimeError):
            return asyncio.all_tasks(loop)
    return set()


def _awaits(awaited: Any) -> list[FrameType]:
    """Return the frames along a chain of awaits, innermost first."""
    frames = list[FrameType]()
    while len(frames) < _MAX_DEPTH:
        for kind, frame_of, next_of in _AWAITABLE:
            if isinstance(awaited, kind):
                frame: FrameType | None = getattr(awaited, frame_of)
                awaited = getattr(awaited, next_of)
                break
        else:
            # a future, a C iterator, or nothing
            break
        if frame is not None:
            frames.append(frame)
    return frames[::-1]
