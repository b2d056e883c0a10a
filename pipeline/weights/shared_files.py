"""Files of weights that a writer fills and readers map: one copy on the host for all processes.

Allocating fresh pages takes several times as long as filling them, so a file without readers is filled again.
File locks, which the kernel releases when a process ends, decide when. A writer holds an exclusive lock while
it fills a file, and a shared one while the file is published. A reader holds a shared lock while it uses the
pages. A retired file is filled again only under the exclusive lock, that is without readers. Otherwise a new
file is created, and the old one's pages are freed with its last reader.

Readers map privately (copy on write), so they cannot change the file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from protocol.private import ensure_private_folder

NO_ROOM = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG})
"""Errors of a folder whose file system is full."""
_MAX_CACHED = 4
"""Mappings that a reader keeps: its version, the next one, and files to be filled again."""


@dataclass(slots=True)
class SharedFile:
    path: Path
    fd: int
    data: np.ndarray
    """The file's pages, uint8 [bytes of the file]."""

    def name(self, path: Path) -> None:
        """Rename the complete file to its public name. From then on it is read-only and may be mapped."""
        self.path.rename(path)
        self.path = path
        fcntl.flock(self.fd, fcntl.LOCK_SH)


class SharedFileWriter:
    """A folder of files that are filled, published, retired, and filled again."""

    def __init__(self, folder: Path) -> None:
        """Take over ``folder`` from earlier incarnations. Raises ConfigError if it belongs to another user."""
        self._folder = folder
        self._spare: SharedFile | None = None
        self._num_made = 0
        # an earlier incarnation may still be writing, under other names
        self._mark = secrets.token_hex(4)
        # the name is predictable: another user may have created it, or a link to our folder
        ensure_private_folder(folder)
        for leftover in folder.iterdir():
            # an earlier incarnation may be removing it right now
            leftover.unlink(missing_ok=True)

    def take(self, num_bytes: int) -> SharedFile:
        """Return a file of this size to fill, under a private name. Raises OSError without room."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.data.size == num_bytes and _lock(spare.fd, fcntl.LOCK_EX):
            return spare
        if spare is not None:
            _remove(spare)
        self._num_made += 1
        path = self._folder / f"{self._mark}-{self._num_made}.partial"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # fail here without room, since writing to a page without storage would kill the process
            os.posix_fallocate(fd, 0, num_bytes)
            return SharedFile(path, fd, np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8))
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise

    def retire(self, segment: SharedFile) -> None:
        """Remove a published file's name; the file is filled again once it has no readers."""
        if self._spare is not None:
            _remove(self._spare)
        self._num_made += 1
        path = self._folder / f"{self._mark}-{self._num_made}.retired"
        try:
            segment.path.rename(path)
        except FileNotFoundError:
            # removed by hand; its pages are freed with the last reader
            os.close(segment.fd)
            return
        segment.path = path
        self._spare = segment

    def forget(self, segment: SharedFile) -> None:
        """Close a published file whose name was reused. Its pages are freed with the last reader."""
        os.close(segment.fd)

    def discard(self, segment: SharedFile) -> None:
        _remove(segment)

    def close(self) -> None:
        """Delete the retired file."""
        if self._spare is not None:
            _remove(self._spare)
            self._spare = None


@dataclass(slots=True)
class MappedFile:
    path: Path
    fd: int
    data: np.ndarray
    """uint8 [bytes of the file]; writing to it does not change the file."""
    is_used: bool = False

    @property
    def lasting_path(self) -> Path:
        """A path for this user's other processes, valid until release even if the file is renamed."""
        return Path(f"/proc/{os.getpid()}/fd/{self.fd}")


class UnnamedFile:
    """A file without a name, for this host only: it is freed with its last mapping, even after a crash."""

    @classmethod
    def in_first_with_room(cls, folders: Sequence[Path], num_bytes: int) -> UnnamedFile:
        """Allocate in the first of these folders that has room. Raises OSError if none has."""
        *firsts, last = folders
        for folder in firsts:
            try:
                return cls(folder, num_bytes)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
        return cls(last, num_bytes)

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """Allocate in ``folder``. Raises OSError without room, ConfigError if it belongs to another user."""
        ensure_private_folder(folder)
        self._file = TemporaryFile(dir=folder)  # noqa: SIM115 -- held until close
        try:
            os.posix_fallocate(self._file.fileno(), 0, num_bytes)
            self.data = np.frombuffer(mmap.mmap(self._file.fileno(), num_bytes), np.uint8)
            """The file's pages, uint8 [bytes of the file]."""
        except BaseException:
            self._file.close()
            raise

    @property
    def lasting_path(self) -> Path:
        """A path for this user's other processes, valid until close."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")

    def close(self) -> None:
        """Close the file, so that it cannot be mapped any more. Arrays over it stay valid."""
        self._file.close()


class SharedFileReader:
    """The files that a process reads. Mappings are cached, since the same pages come back as new files."""

    def __init__(self) -> None:
        self._cached: dict[tuple[int, int], MappedFile] = {}

    def open(self, path: Path) -> MappedFile:
        """Map a published file, and keep it from being filled again until ``release``. Raises
        FileNotFoundError when it is gone or being filled again."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        mapped = self._cached.pop(key, None)
        if mapped is not None and mapped.data.size == status.st_size:
            os.close(fd)
            mapped.path = path
        elif status.st_size:
            mapped = MappedFile(path, fd, np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY), np.uint8))
        else:
            os.close(fd)
            raise FileNotFoundError(f"{path} is empty: it is being written, or was cut")
        self._cached[key] = mapped
        if not _lock(mapped.fd, fcntl.LOCK_SH):
            raise FileNotFoundError(f"{path} is being filled again: a newer version is published")
        mapped.is_used = True
        return mapped

    def release(self, mapped: MappedFile) -> None:
        """Let the writer have a file again; its array becomes invalid. Deleted files are unmapped."""
        fcntl.flock(mapped.fd, fcntl.LOCK_UN)
        mapped.is_used = False
        for key, other in list(self._cached.items()):
            if not other.is_used and (os.fstat(other.fd).st_nlink == 0 or len(self._cached) > _MAX_CACHED):
                self._forget(key)

    def forget(self, mapped: MappedFile) -> None:
        """Release a file and drop its mapping; the next ``open`` maps it again."""
        for key, other in list(self._cached.items()):
            if other is mapped:
                self._forget(key)

    def close(self) -> None:
        """Release everything. Arrays in use stay valid."""
        for key in list(self._cached):
            self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        # releases the lock; the mapping is freed with its last array
        os.close(self._cached.pop(key).fd)


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(segment: SharedFile) -> None:
    with contextlib.suppress(FileNotFoundError):
        segment.path.unlink()
    os.close(segment.fd)
