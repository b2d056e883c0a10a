"""The account's content-addressed file cache: a file is fetched once for all runs on a host.

    <cache>/<digest>            a complete file, mode 0400
    <cache>/<digest>.partial    one being fetched, locked by its process

The cache is ``$XDG_CACHE_HOME/headrace/files``, by default below ``~/.cache``. Digests are checked
before each use; a damaged file is removed and fetched again. The partial file of a dead process is
continued."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import structlog

from pipeline.supervisor.joining.manifest import ManifestFile, digest_file
from protocol.errors import StorageFailed
from protocol.private import ensure_private_folder

_READ_BYTES: Final = 1 << 20

_log = structlog.get_logger(__name__)


class CachedFileDamaged(Exception):
    """A fetched file does not match its digest."""


class CachedFileBusy(Exception):
    """Another process is fetching the file; the message is its path."""


class FileCache:
    def __init__(self, folder: Path) -> None:
        """Create the folder. Raises ConfigError: it cannot be created, or others may access it."""
        ensure_private_folder(folder)
        self._folder = folder

    def path(self, digest: str) -> Path:
        return self._folder / digest.replace(":", "-")

    def find(self, file: ManifestFile) -> Path | None:
        """Return the file if it is complete and undamaged, which takes a full read; else None."""
        path = self.path(file.digest)
        try:
            if path.stat().st_size == file.num_bytes and digest_file(path) == file.digest:
                return path
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("cached_file_unreadable", path=str(path), reason=str(error))
        _log.warning("cached_file_damaged", path=str(path), place=file.place, action="fetched again")
        path.unlink(missing_ok=True)
        return None

    @contextlib.contextmanager
    def filling(self, file: ManifestFile) -> Iterator[PartialFile]:
        """Hold the partial file of this digest. Raises CachedFileBusy if another process does, and
        StorageFailed."""
        partial = self.path(file.digest + ".partial")
        with _on_disk(partial, file):
            held = _locked(partial)
        with held:
            filled = PartialFile(held, partial, self.path(file.digest), file)
            yield filled
            if not filled.num_bytes:
                partial.unlink(missing_ok=True)


class PartialFile:
    def __init__(self, held: IO[bytes], partial: Path, whole: Path, file: ManifestFile) -> None:
        self._held, self._partial, self._whole, self._file = held, partial, whole, file
        self._hasher = hashlib.sha256()
        held.seek(0)
        while data := held.read(_READ_BYTES):
            self._hasher.update(data)
        self.num_bytes = held.tell()
        """Bytes here so far, which is the offset of the next byte to fetch."""
        if self.num_bytes > file.num_bytes:
            self.restart()

    @property
    def is_whole(self) -> bool:
        return self.num_bytes == self._file.num_bytes

    def append(self, data: memoryview) -> None:
        with _on_disk(self._partial, self._file):
            left = data
            while left:
                left = left[self._held.write(left) :]
        self._hasher.update(data)
        self.num_bytes += len(data)

    def restart(self) -> None:
        self._held.seek(0)
        self._held.truncate()
        self._hasher, self.num_bytes = hashlib.sha256(), 0

    def finish(self) -> Path:
        """Turn it into the complete file. Raises CachedFileDamaged after a ``restart``, and
        StorageFailed."""
        got = f"sha256:{self._hasher.hexdigest()}"
        if got != self._file.digest:
            self.restart()
            raise CachedFileDamaged(f"{self._file.place} came with digest {got}, expected {self._file.digest}")
        with _on_disk(self._partial, self._file):
            os.fsync(self._held.fileno())
            os.fchmod(self._held.fileno(), 0o400)
            self._partial.replace(self._whole)
        return self._whole


def _locked(path: Path) -> IO[bytes]:
    """Open and lock the partial file at this path. Raises CachedFileBusy."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        # unbuffered: on a full disk, closing would fail again on the rest of a buffer
        file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        except FileNotFoundError:
            # its process has just completed and renamed it
            pass
        except BlockingIOError:
            file.close()
            raise CachedFileBusy(str(path)) from None
        file.close()


@contextlib.contextmanager
def _on_disk(path: Path, file: ManifestFile) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageFailed(
            f"{path.parent} cannot hold {file.place} of {file.num_bytes:,} bytes: {error.strerror}; make room there, or set "
            "XDG_CACHE_HOME to a folder with room"
        ) from error
