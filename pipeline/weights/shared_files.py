"""Files of weights that a writer fills and readers map: one copy on the host, however many
processes use it.

*Consumes* bytes, or a path. *Produces* arrays over the file's own pages. *Waits for* nothing: a
lock that is not free at once is an answer.

Fresh pages cost several times what filling them costs, so a file that nobody needs any more is
filled again. Who may do so is kept by the kernel's file locks, which go when their process does: a
writer holds an exclusive lock while it fills a file and a shared one while the file is published; a
reader holds a shared one as long as it uses the pages. A writer takes a retired file only if it
gets the exclusive lock, that is if nobody reads it; else it makes a new file, and the old one's
pages go with its last reader.

Readers map privately (copy on write), so nothing that they do reaches the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from protocol.private import ensure_private_folder

_MAX_CACHED = 4
"""Mappings that a reader keeps: of the version it serves, the next one, and those that will be
filled again.
"""


@dataclass(slots=True)
class SharedFile:
    """A writer's file."""

    path: Path
    fd: int
    data: np.ndarray
    """uint8 [bytes of the file], its pages."""

    def name(self, path: Path) -> None:
        """Give the file its public name, complete as it now is: others may read it, and nobody
        writes it.
        """
        self.path.rename(path)
        self.path = path
        fcntl.flock(self.fd, fcntl.LOCK_SH)


class SharedFileWriter:
    """A folder of files that are filled, published, retired, and filled again."""

    def __init__(self, folder: Path) -> None:
        """Take over ``folder``, ours alone; what is left in it is of an earlier incarnation, and
        nobody is told of it any more.

        Raises ConfigError when the folder is somebody else's.
        """
        self._folder = folder
        self._spare: SharedFile | None = None
        self._num_made = 0
        # what an earlier incarnation still makes has other names
        self._mark = secrets.token_hex(4)
        # its name can be guessed: another user may have made it, or a link to ours
        ensure_private_folder(folder)
        for leftover in folder.iterdir():
            # its last breath may have taken it away just now
            leftover.unlink(missing_ok=True)

    def take(self, num_bytes: int) -> SharedFile:
        """Return a file of this size to fill, under a name that nobody is told. Raises OSError when
        there is no room.
        """
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
            os.posix_fallocate(
                fd, 0, num_bytes
            )  # here it fails when there is no room; a page that is missing later kills
            return SharedFile(path, fd, np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8))
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise

    def retire(self, segment: SharedFile) -> None:
        """Take a published file back: nobody new finds it, and it is filled again once nobody reads
        it.
        """
        if self._spare is not None:
            _remove(self._spare)
        self._num_made += 1
        path = self._folder / f"{self._mark}-{self._num_made}.retired"
        try:
            segment.path.rename(path)
        except FileNotFoundError:  # somebody removed it by hand; its pages go with their last reader
            os.close(segment.fd)
            return
        segment.path = path
        self._spare = segment

    def forget(self, segment: SharedFile) -> None:
        """Give up a published file whose name another one has taken: its pages go with their last
        reader.
        """
        os.close(segment.fd)

    def discard(self, segment: SharedFile) -> None:
        """Give up a file that was not published."""
        _remove(segment)


@dataclass(slots=True)
class MappedFile:
    """A file's pages as a reader sees them."""

    path: Path
    fd: int
    data: np.ndarray
    """uint8 [bytes of the file]; writable without effect on the file."""
    is_used: bool = False

    @property
    def lasting_path(self) -> Path:
        """A path to the file for other processes of this user, good until it is released, whatever
        its name is by then.
        """
        return Path(f"/proc/{os.getpid()}/fd/{self.fd}")


class UnnamedFile:
    """A file without a name, gone with its last map, however its process ends: for what is made
    here and served here.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """Take room where ``folder`` is, which is made if need be. Raises OSError when there is
        none, and ConfigError when the folder is somebody else's."""
        ensure_private_folder(folder)
        self._file = TemporaryFile(dir=folder)  # noqa: SIM115 -- held until close
        try:
            os.posix_fallocate(self._file.fileno(), 0, num_bytes)
            self.data = np.frombuffer(mmap.mmap(self._file.fileno(), num_bytes), np.uint8)
            """uint8 [bytes of the file], its pages."""
        except BaseException:
            self._file.close()
            raise

    @property
    def lasting_path(self) -> Path:
        """A path to the file for other processes of this user, good until it is closed."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")

    def close(self) -> None:
        """Let nobody else map the file. Arrays that are still used stay what they are."""
        self._file.close()


class SharedFileReader:
    """The files that a process reads. Their mappings are kept, for the same pages come again under
    other names.
    """

    def __init__(self) -> None:
        self._cached: dict[tuple[int, int], MappedFile] = {}

    def open(self, path: Path) -> MappedFile:
        """Map a published file and keep its writer from filling it again, until ``release``.

        Raises FileNotFoundError when it is gone, or is being filled again.
        """
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
        """Let the writer have a file back: its array must not be used any more. Mappings of removed
        files are forgotten.
        """
        fcntl.flock(mapped.fd, fcntl.LOCK_UN)
        mapped.is_used = False
        for key, other in list(self._cached.items()):
            if not other.is_used and (os.fstat(other.fd).st_nlink == 0 or len(self._cached) > _MAX_CACHED):
                self._forget(key)

    def forget(self, mapped: MappedFile) -> None:
        """Release a file and its mapping, so that the next ``open`` sees the file's
        pages afresh.
        """
        for key, other in list(self._cached.items()):
            if other is mapped:
                self._forget(key)

    def close(self) -> None:
        """Release everything. Arrays that are still used stay what they are."""
        for key in list(self._cached):
            self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        # with its lock; the mapping goes with the last array over it
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
