"""Fetches a manifest's files from the run's host into the account's cache: once for all runs on a host.

    <cache>/<digest>            a complete file, mode 0400
    <cache>/<digest>.partial    one being fetched, locked by its process

The cache is ``$XDG_CACHE_HOME/headrace/files``, by default below ``~/.cache``. Digests are checked
before each use; a damaged file is removed and fetched again. A part may take ``_PART_S``, a first
connection ``_REACH_S``. Long transfers show progress on standard error.

A partly fetched file, of a dead process too, is continued. If its digest then does not match, it is
fetched once more from the start. A second mismatch means that the file was changed on the run's host
after the run was started.

``FileServer``, on the run's host, serves ranges of a manifest's files: a request names a digest, and
only files with a digest in the manifest are served. The requester checks the whole file."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

import numpy as np
import structlog

from pipeline.process.progress_bar import ProgressBar, progress
from pipeline.supervisor.joining.manifest import ManifestFile, digest_file
from protocol.channel import Requester
from protocol.errors import ConfigError, DataError, DeadlineExceeded, StorageFailed, UnknownMessage
from protocol.hosts import own_address
from protocol.log_limiter import LogLimiter
from protocol.messages import FilePart, FileRequest, Message
from protocol.printable import printable_line
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


_PART_S: Final = 30.0
_REACH_S: Final = 10.0
_TRY_S: Final = 1.0
_POLL_S: Final = 0.05
_OTHERS_S: Final = 3600.0
"""How long to wait for another process of this host that fetches the same file."""
_MB: Final = 1e6


async def fetch_files(
    files: Sequence[ManifestFile], cache: FileCache, requester: Requester, endpoint: str, *, max_part_bytes: int
) -> dict[str, Path]:
    """Return the cached file of each digest, after fetching those that are missing.

    Raises:
        ConfigError: the run's host cannot be reached, or does not permit this one.
        DataError: it no longer has such a file.
        StorageFailed: the disk is full."""
    wanted, found = {file.digest: file for file in files}, dict[str, Path]()
    cached = [file for file in wanted.values() if cache.path(file.digest).exists()]
    with progress("verifying cached files", total=sum(file.num_bytes for file in cached) / _MB, unit="MB") as bar:
        for file in cached:
            bar.detail(printable_line(file.place))
            if (path := await asyncio.to_thread(cache.find, file)) is not None:
                found[file.digest] = path
            bar.advance(file.num_bytes / _MB)
    missing = [file for file in wanted.values() if file.digest not in found]
    if missing:
        started = time.monotonic()
        with progress("fetching the run's files", unit="MB") as bar:
            fetch = _Fetch(missing, cache, requester, endpoint, max_part_bytes, bar)
            found |= {file.digest: await fetch.file(file) for file in missing}
        num_bytes = sum(file.num_bytes for file in missing)
        _log.info("files_fetched", num_bytes=num_bytes, seconds=round(time.monotonic() - started, 3))
    return found


class _Fetch:
    def __init__(
        self,
        missing: Sequence[ManifestFile],
        cache: FileCache,
        requester: Requester,
        endpoint: str,
        max_part_bytes: int,
        bar: ProgressBar,
    ) -> None:
        self._cache, self._requester, self._endpoint, self._max_part_bytes = cache, requester, endpoint, max_part_bytes
        self._bar, self._num_done = bar, 0
        self._left = {file.digest: file.num_bytes for file in missing}
        """Bytes to come. A file may be partly here, be fetched twice, or be fetched by another process."""

    async def file(self, file: ManifestFile) -> Path:
        async with self._held(file) as partial:
            # another process may have fetched it meanwhile
            if (path := await asyncio.to_thread(self._cache.find, file)) is not None:
                self._show(file, 0)
                return path
            for _ in range(2):
                await self._fill(file, partial)
                try:
                    return await asyncio.to_thread(partial.finish)
                except CachedFileDamaged as error:
                    _log.warning("fetched_file_damaged", reason=str(error))
        raise DataError(
            f"{file.place} is not the file that the run was started with: its digest is not {file.digest}. It was changed on "
            "the run's host since; put the old content back, or start the run again"
        )

    @contextlib.asynccontextmanager
    async def _held(self, file: ManifestFile) -> AsyncIterator[PartialFile]:
        """Wait until no other process holds the partial file, then hold it. Polls in the event loop, so
        that an interrupt ends the wait. Raises ConfigError at the deadline."""
        deadline, partial, holding = time.monotonic() + _OTHERS_S, None, self._cache.filling(file)
        while partial is None:
            try:
                partial = await asyncio.to_thread(holding.__enter__)
            except CachedFileBusy as busy:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"{busy} is still being fetched by another process after {_OTHERS_S:g} s; end that process, or try "
                        "again"
                    ) from None
                self._bar.detail(f"another process fetches {printable_line(file.place)}")
                await asyncio.sleep(_POLL_S)
                holding = self._cache.filling(file)
        try:
            yield partial
        finally:
            await asyncio.to_thread(holding.__exit__, None, None, None)

    async def _fill(self, file: ManifestFile, partial: PartialFile) -> None:
        self._show(file, file.num_bytes - partial.num_bytes)
        while not partial.is_whole:
            request = FileRequest(digest=file.digest, offset=partial.num_bytes, max_bytes=self._max_part_bytes)
            part = await _ask(self._requester, self._endpoint, request)
            if part.data.size == 0 or part.total_bytes != file.num_bytes:
                raise DataError(
                    f"the run's host at {self._endpoint} no longer has {file.place} as the run was started with it: expected "
                    f"{file.num_bytes:,} bytes, got {part.total_bytes:,}; put it back there, or start the run again"
                )
            if part.offset != partial.num_bytes or part.data.size > self._max_part_bytes:
                raise DataError(
                    f"requested bytes from {partial.num_bytes} of {file.place}, got {part.data.size} from {part.offset}; is "
                    f"{self._endpoint} the run's host?"
                )
            await asyncio.to_thread(partial.append, part.data.data)
            self._num_done += part.data.size
            self._show(file, file.num_bytes - partial.num_bytes)

    def _show(self, file: ManifestFile, num_bytes_left: int) -> None:
        self._left[file.digest] = num_bytes_left
        self._bar.detail(printable_line(file.place))
        self._bar.reach(self._num_done / _MB, (self._num_done + sum(self._left.values())) / _MB)


async def _ask(requester: Requester, endpoint: str, request: FileRequest) -> FilePart:
    """Send a request and return the answer. Raises ConfigError if the host cannot be reached or
    answers something else."""
    deadline = time.monotonic() + _PART_S
    while True:
        # nothing is sent before the handshake, so retrying early is safe
        timeout_s = _TRY_S if requester.unreached_s() else _PART_S
        try:
            part = await requester.request(request, timeout_s=timeout_s)
        except DeadlineExceeded:
            unreached_s = requester.unreached_s()
            if unreached_s >= _REACH_S or time.monotonic() > deadline:
                raise ConfigError(_unreached(endpoint, unreached_s)) from None
            continue
        if not isinstance(part, FilePart) or part.digest != request.digest:
            raise ConfigError(f"{endpoint} answered a {type(part).__name__}; is it the run's host?")
        return part


def _unreached(endpoint: str, unreached_s: float) -> str:
    here = f"{socket.gethostname()} ({own_address()})"
    if unreached_s:
        return (
            f"the run's host serves files at {endpoint}, which cannot be reached from {here}: no handshake for "
            f"{unreached_s:.0f} s. Open wire.ports in its firewall, or set wire.advertise_host to an address that this host "
            "reaches; or it does not permit this host's key"
        )
    return f"the run's host at {endpoint} is connected to {here}, but sent no data for {_PART_S:g} s; check its load"


class FileServer:
    """Answers requests for files, which ``answer_requests`` receives."""

    def __init__(self, served: Mapping[str, Path], *, max_part_bytes: int) -> None:
        """``served``: file by digest. Parts have at most ``max_part_bytes``."""
        self._served = served
        self._max_part_bytes = max_part_bytes
        self._log_limiter = LogLimiter()

    def answer_now(self, request: Message) -> None:
        """Reading takes time. Raises UnknownMessage: not a file request."""
        if not isinstance(request, FileRequest):
            raise UnknownMessage(f"a {type(request).__name__} was sent to a file server; expected a FileRequest")

    async def answer_later(self, request: Message) -> FilePart:
        assert isinstance(request, FileRequest)
        return await asyncio.to_thread(self._part, request)

    def _part(self, request: FileRequest) -> FilePart:
        """Return a part of a file, empty if the file is not served or is gone."""
        path = self._served.get(request.digest)
        data, total = b"", 0
        if path is not None:
            try:
                with path.open("rb") as file:
                    total = os.fstat(file.fileno()).st_size
                    wanted = min(request.max_bytes, self._max_part_bytes)
                    data = os.pread(file.fileno(), wanted, request.offset)
            except OSError as error:
                if (num_silent := self._log_limiter.due(str(path), "unreadable")) is not None:
                    _log.error("file_not_served", path=str(path), reason=str(error), num_not_logged=num_silent)
                data, total = b"", 0
        # the file may have become shorter than the offset
        offset = min(request.offset, total)
        return FilePart(
            digest=request.digest, offset=offset, total_bytes=total, data=np.frombuffer(data, dtype=np.uint8)
        )
