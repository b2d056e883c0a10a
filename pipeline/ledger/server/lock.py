"""The lock of an embedded server's folder: held by the server process itself, for exactly as long
as it is there.

*Consumes* the folder. *Produces* the right to start a server there, or the word that there is one.
*Waits for* nothing.

A starter opens ``server.lock`` and locks it, and the server inherits that very descriptor. The lock
is the descriptor's (flock(2)), so the kernel releases it when the server, and all that it forked,
is really gone; not when it is slow, frozen, or forgotten by whoever started it. The file says
nothing and is never removed: one that lies about means nothing without its lock.
"""

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
    """Lock the folder; return the descriptor that holds it, not yet inheritable, or None when
    another holds the lock.

    Raises:
        LedgerUnavailable: the lock's file cannot be made, or its file system has no locks.
    """
    path = folder / LOCK_NAME
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LedgerUnavailable(
                f"{path} cannot be opened: {error.strerror}; make room or give rights there"
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
        # the file was removed or replaced meanwhile: what was locked guards nothing
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a server, or its starter, holds the folder now. Writes nothing."""
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
    """Keep servers from starting while the block runs; yields False when there is one. Writes
    nothing.
    """
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        # no server was ever started here by a release that locks
        yield True
        return
    try:
        yield _try(descriptor, fcntl.LOCK_SH, folder / LOCK_NAME)
    finally:
        os.close(descriptor)


def holders(folder: Path) -> list[int]:
    """Return the processes that have the lock's file open, as far as this user may see; none where
    there is no /proc.
    """
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
            f"{path} cannot be locked: {error.strerror}. Without locks two servers could append to one file: put the run's "
            "folder on a file system that has them, or set ledger.url to a server of your own"
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
    except OSError:  # it has ended, or is another user's
        return False
    return False
