"""The lock of an embedded server's folder, held by the server process itself for as long as it exists.

The starting process opens ``server.lock`` and locks it, and the server inherits the descriptor. The lock
belongs to that descriptor (flock(2)), so the kernel releases it when the server and all its forks have ended,
not when the server is slow or frozen, or the starting process is gone. The file is empty and never removed;
without its lock it means nothing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import LedgerUnavailable

LOCK_NAME = "server.lock"
_PROC = Path("/proc")


def take_lock(folder: Path) -> int | None:
    """Lock the folder; return the descriptor, which is not inheritable, or None when another process holds
    it.

    Raises LedgerUnavailable when the file cannot be created or its file system does not support locks."""
    path = folder / LOCK_NAME
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LedgerUnavailable(
                f"{path} cannot be opened: {error.strerror}; free space or fix permissions there"
            ) from error
        try:
            if not _try(descriptor, fcntl.LOCK_EX, path):
                os.close(descriptor)
                return None
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # the file was removed or replaced meanwhile, so this lock guards nothing
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Return whether a server or its starting process holds the folder. Writes nothing."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try(descriptor, fcntl.LOCK_SH, folder / LOCK_NAME)
    finally:
        os.close(descriptor)


@contextmanager
def no_server(folder: Path) -> Generator[bool]:
    """Keep servers from starting during the block; yield False when one is running. Writes nothing."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        # no release with locks ever started a server here
        yield True
        return
    try:
        yield _try(descriptor, fcntl.LOCK_SH, folder / LOCK_NAME)
    finally:
        os.close(descriptor)


def holders(folder: Path) -> list[int]:
    """Return the visible processes that have the lock file open; none without /proc."""
    try:
        wanted = (folder / LOCK_NAME).stat()
    except FileNotFoundError:
        return []
    return [pid for pid in _processes() if pid != os.getpid() and _has_open(pid, wanted)]


def _try(descriptor: int, kind: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise LedgerUnavailable(
            f"{path} cannot be locked: {error.strerror}. Without locks two servers could append to one file. Put "
            f"the run's folder on a file system that supports locks, or set ledger.url to your own server"
        ) from error
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _processes() -> Iterator[int]:
    with contextlib.suppress(OSError):
        yield from (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal())


def _has_open(pid: int, wanted: os.stat_result) -> bool:
    try:
        with os.scandir(_PROC / str(pid) / "fd") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if os.path.samestat(entry.stat(), wanted):
                        return True
    except OSError:
        # the process has ended or belongs to another user
        return False
    return False
