"""Fetches a manifest's files from the run's host into the cache.

All digests are checked. A part may take ``_PART_S``, a first connection ``_REACH_S``. Long
transfers show progress on standard error.

A partly fetched file is continued. If its digest then does not match, it is fetched once more from
the start. A second mismatch means that the file was changed on the run's host after the run was
started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import structlog

from pipeline.process.progress_bar import ProgressBar, progress
from pipeline.supervisor.joining.file_cache import CachedFileBusy, CachedFileDamaged, FileCache, PartialFile
from pipeline.supervisor.joining.manifest import ManifestFile
from protocol.channel import Requester, Responder
from protocol.errors import ConfigError, DataError, DeadlineExceeded, UnknownMessage
from protocol.hosts import own_address
from protocol.log_limiter import LogLimiter
from protocol.messages import FilePart, FileRequest, Message
from protocol.printable import printable_line

_PART_S: Final = 30.0
_REACH_S: Final = 10.0
_TRY_S: Final = 1.0
_POLL_S: Final = 0.05
_OTHERS_S: Final = 3600.0
"""How long to wait for another process of this host that fetches the same file."""
_MB: Final = 1e6

_log = structlog.get_logger(__name__)


async def fetch_files(
    files: Sequence[ManifestFile], cache: FileCache, requester: Requester, endpoint: str, *, max_part_bytes: int
) -> dict[str, Path]:
    """Return the cached file of each digest, after fetching those that are missing.

    Raises:
        ConfigError: the run's host cannot be reached, or does not permit this one.
        DataError: it no longer has such a file.
        StorageFailed: the disk is full."""
    wanted = {file.digest: file for file in files}
    found = await _verified([file for file in wanted.values() if cache.path(file.digest).exists()], cache)
    missing = [file for file in wanted.values() if file.digest not in found]
    if not missing:
        return found
    started = time.monotonic()
    with progress("fetching the run's files", unit="MB") as bar:
        left = _BytesLeft(missing, bar)
        for file in missing:
            found[file.digest] = await _fetch(file, cache, requester, endpoint, max_part_bytes, left)
    num_bytes = sum(file.num_bytes for file in missing)
    _log.info("files_fetched", num_bytes=num_bytes, seconds=round(time.monotonic() - started, 3))
    return found


async def _verified(files: Sequence[ManifestFile], cache: FileCache) -> dict[str, Path]:
    found: dict[str, Path] = {}
    with progress("verifying cached files", total=sum(file.num_bytes for file in files) / _MB, unit="MB") as bar:
        for file in files:
            bar.detail(printable_line(file.place))
            path = await asyncio.to_thread(cache.find, file)
            if path is not None:
                found[file.digest] = path
            bar.advance(file.num_bytes / _MB)
    return found


class _BytesLeft:
    """Counts bytes done and left for the progress bar. A file may be partly here, be fetched twice,
    or be fetched by another process."""

    def __init__(self, missing: Sequence[ManifestFile], bar: ProgressBar) -> None:
        self._left = {file.digest: file.num_bytes for file in missing}
        self._done, self._bar = 0, bar

    def waits(self, file: ManifestFile) -> None:
        self._bar.detail(f"another process fetches {printable_line(file.place)}")

    def update(self, file: ManifestFile, num_bytes_left: int, *, came: int = 0) -> None:
        self._left[file.digest] = num_bytes_left
        self._done += came
        self._bar.detail(printable_line(file.place))
        self._bar.reach(self._done / _MB, (self._done + sum(self._left.values())) / _MB)


async def _fetch(
    file: ManifestFile, cache: FileCache, requester: Requester, endpoint: str, max_part_bytes: int, left: _BytesLeft
) -> Path:
    holding, partial = await _held(file, cache, left)
    try:
        # another process may have fetched it meanwhile
        if (path := await asyncio.to_thread(cache.find, file)) is not None:
            left.update(file, 0)
            return path
        for _ in range(2):
            left.update(file, file.num_bytes - partial.num_bytes)
            await _fill(partial, file, requester, endpoint, max_part_bytes, left)
            try:
                return await asyncio.to_thread(partial.finish)
            except CachedFileDamaged as error:
                _log.warning("fetched_file_damaged", reason=str(error))
        raise DataError(
            f"{file.place} is not the file that the run was started with: its digest is not {file.digest}. It was changed on "
            "the run's host since; put the old content back, or start the run again"
        )
    finally:
        await asyncio.to_thread(holding.__exit__, None, None, None)


async def _held(
    file: ManifestFile, cache: FileCache, left: _BytesLeft
) -> tuple[contextlib.AbstractContextManager[PartialFile], PartialFile]:
    """Wait until no other process holds the partial file, then hold it. Polls in the event loop, so
    that an interrupt ends the wait. Raises ConfigError at the deadline."""
    deadline = time.monotonic() + _OTHERS_S
    while True:
        holding = cache.filling(file)
        try:
            return holding, await asyncio.to_thread(holding.__enter__)
        except CachedFileBusy as busy:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{busy} is still being fetched by another process after {_OTHERS_S:g} s; end that process, or try again"
                ) from None
        left.waits(file)
        await asyncio.sleep(_POLL_S)


async def _fill(
    partial: PartialFile,
    file: ManifestFile,
    requester: Requester,
    endpoint: str,
    max_part_bytes: int,
    left: _BytesLeft,
) -> None:
    while not partial.is_whole:
        request = FileRequest(digest=file.digest, offset=partial.num_bytes, max_bytes=max_part_bytes)
        part = await _ask(requester, endpoint, request)
        if part.data.size == 0 or part.total_bytes != file.num_bytes:
            raise DataError(
                f"the run's host at {endpoint} no longer has {file.place} as the run was started with it: expected "
                f"{file.num_bytes:,} bytes, got {part.total_bytes:,}; put it back there, or start the run again"
            )
        if part.offset != partial.num_bytes or part.data.size > max_part_bytes:
            raise DataError(
                f"requested bytes from {partial.num_bytes} of {file.place}, got {part.data.size} from {part.offset}; is "
                f"{endpoint} the run's host?"
            )
        await asyncio.to_thread(partial.append, part.data.data)
        left.update(file, file.num_bytes - partial.num_bytes, came=part.data.size)


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


# Serves ranges of a manifest's files, on the run's host.
#
# A request names a digest, and only files with a digest in the manifest are served. The requester
# checks the whole file.

_SERVE_TIMEOUT_S = 0.5


class FileServer:
    def __init__(self, served: Mapping[str, Path], *, max_part_bytes: int) -> None:
        """``served``: file by digest. Parts have at most ``max_part_bytes``."""
        self._served = served
        self._max_part_bytes = max_part_bytes
        self._log_limiter = LogLimiter()

    async def serve(self, responder: Responder, until: asyncio.Event) -> None:
        while not until.is_set():
            try:
                await responder.serve_one(self._answer, timeout_s=_SERVE_TIMEOUT_S)
            except UnknownMessage as error:
                # a peer's mistake must not end the server
                if (num_silent := self._log_limiter.due("", "request")) is not None:
                    _log.warning("file_request_refused", reason=str(error), num_not_logged=num_silent)

    async def _answer(self, request: Message) -> FilePart:
        return await asyncio.to_thread(self.answer, request)

    def answer(self, request: Message) -> FilePart:
        """Return a part of a file, empty if the file is not served or is gone. Raises
        UnknownMessage: not a file request."""
        if not isinstance(request, FileRequest):
            raise UnknownMessage(f"a {type(request).__name__} was sent to a file server; expected a FileRequest")
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
