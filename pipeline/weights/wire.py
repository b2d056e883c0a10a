"""Weights from another host, in ranges over ZeroMQ: of a delta if possible, else of the version.

Parts have at most ``max_part_bytes``, and one is requested at a time. All allocations are bounded
by the announcement in the ledger, never by a peer's numbers. If a delta's result does not match the
announced digest, the whole version is fetched (a *refresh*)."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from pipeline.runtime.registry.contract import WeightsAnnouncement
from pipeline.weights.delta import apply
from pipeline.weights.digest import Digest
from pipeline.weights.shared_files import SharedFile, SharedFileWriter
from pipeline.weights.store import MAX_DELTA_SHARE, fetched_folder, file_name
from pipeline.weights.tensorfile import read_contents
from protocol.channel import Requester
from protocol.errors import WeightsDamaged, WeightsRejected
from protocol.messages import WeightsPart, WeightsRequest
from protocol.private import ensure_private_folder

_STILL_S = 60.0
"""An unlocked folder unchanged for this long is a dead worker's."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Base:
    """A held version, as the start of a delta."""

    policy_version: int
    digest: str
    data: np.ndarray
    """uint8 [bytes of the version]"""


@dataclass(slots=True)
class FetchCounts:
    """Counts of one version's transfer."""

    num_bytes: int = 0
    num_deltas: int = 0
    num_refreshes: int = 0
    """Whole versions fetched after a failed delta."""


class FetchFolder:
    """One worker's folder of fetched versions: memory-backed where the host has such storage.

    The folder is locked while the worker lives. A worker that starts removes the folders of killed
    ones, after a delay: a folder that is just being made is not locked yet."""

    def __init__(self, run_dir: Path, name: str, *, shared_memory: bool) -> None:
        """Make the folder ``name``, of that worker; remove dead ones. ConfigError if not ours."""
        parent = fetched_folder(run_dir, shared_memory=shared_memory)
        ensure_private_folder(parent)
        self._folder = parent / name
        for folder in parent.iterdir():
            if folder != self._folder:
                _remove_if_dead(folder)
        self._writer = SharedFileWriter(self._folder)
        self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # a frozen earlier incarnation may hold the lock: as good
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._held: SharedFile | None = None

    def take(self, num_bytes: int) -> SharedFile:
        """Return a file to fill. Raises OSError when there is no room."""
        return self._writer.take(num_bytes)

    def keep(self, segment: SharedFile, policy_version: int) -> Path:
        """Name a verified file, and retire the one before. The same version is replaced."""
        path = self._folder / file_name(policy_version)
        segment.name(path)
        before, self._held = self._held, segment
        if before is not None and before.path == path:
            self._writer.forget(before)
        elif before is not None:
            self._writer.retire(before)
        return segment.path

    def discard(self, segment: SharedFile) -> None:
        """Give up a file with wrong bytes."""
        self._writer.discard(segment)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)


def _remove_if_dead(folder: Path) -> None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if time.time() - os.fstat(fd).st_mtime > _STILL_S:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(fd)


class WireFetch:
    """The transfer of one version."""

    def __init__(
        self, announcement: WeightsAnnouncement, requester: Requester, *, max_part_bytes: int, timeout_s: float
    ) -> None:
        """Fetch the announced version from ``requester``; ``timeout_s`` limits each part."""
        self._wanted = announcement
        self._requester = requester
        self._max_part_bytes = max_part_bytes
        self._timeout_s = timeout_s
        self.received = FetchCounts()

    async def fetch(self, folder: FetchFolder, base: Base | None) -> Path:
        """Return the file of the wanted version, verified.

        Raises FileNotFoundError when a newer version is announced, WeightsDamaged by its digest,
        WeightsRejected for contradictory answers, DeadlineExceeded by a part, OSError by the disk.
        """
        segment = await asyncio.to_thread(folder.take, self._wanted.num_bytes)
        try:
            await self._fill(segment, base)
            return folder.keep(segment, self._wanted.policy_version)
        except BaseException:
            folder.discard(segment)
            raise

    async def _fill(self, segment: SharedFile, base: Base | None) -> None:
        first = await self._ask(0, -1 if base is None else base.policy_version)
        if base is not None and first.base == base.policy_version:
            if await self._build(segment, base, first):
                return
            self.received.num_refreshes += 1
            first = await self._ask(0, -1)
        await self._copy(segment, first)

    async def _build(self, segment: SharedFile, base: Base, part: WeightsPart) -> bool:
        """Build the version from a delta that begins with ``part``; return whether it is right."""
        total = part.total_bytes
        if total > self._wanted.num_bytes // MAX_DELTA_SHARE:
            raise WeightsRejected(
                f"a delta of {total} bytes was offered for a version of {self._wanted.num_bytes} bytes"
            )
        delta = bytearray(total)
        place = 0
        while True:
            delta[place : place + part.data.size] = part.data.data
            place += part.data.size
            if place >= total:
                break
            part = await self._ask(place, base.policy_version)
            if part.base != base.policy_version or part.total_bytes != total:
                raise FileNotFoundError(f"the delta from version {base.policy_version} was dropped during the transfer")
        self.received.num_deltas += 1
        try:
            digest = await asyncio.to_thread(_apply, memoryview(delta), base, segment.data)
        except WeightsDamaged as error:
            digest = str(error)
        if digest == self._wanted.digest:
            return True
        wanted = self._wanted
        _log.warning(
            "weights_delta_refused",
            version=wanted.policy_version, base=base.policy_version, got=digest, expected=wanted.digest,
        )  # fmt: skip
        return False

    async def _copy(self, segment: SharedFile, part: WeightsPart) -> None:
        """Copy the whole version from ``part`` on. Raises WeightsDamaged if the digest differs."""
        digest = Digest()
        place = 0
        while True:
            if part.base != -1 or part.total_bytes != segment.data.size:
                raise WeightsRejected(
                    f"version {self._wanted.policy_version} has {segment.data.size} bytes by its announcement, "
                    f"{part.total_bytes} by the learner"
                )
            digest.update(part.data)
            segment.data[place : place + part.data.size] = part.data
            place += part.data.size
            if place == segment.data.size:
                break
            part = await self._ask(place, -1)
        if str(digest) != self._wanted.digest:
            raise WeightsDamaged(
                f"version {self._wanted.policy_version} came with digest {digest}, expected {self._wanted.digest}"
            )

    async def _ask(self, offset: int, base: int) -> WeightsPart:
        version = self._wanted.policy_version
        part = await self._requester.request(
            WeightsRequest(version=version, offset=offset, max_bytes=self._max_part_bytes, base=base),
            timeout_s=self._timeout_s,
        )
        if not isinstance(part, WeightsPart) or part.version != version:
            raise WeightsRejected(f"requested bytes {offset}.. of version {version}, got a {type(part).__name__}")
        if part.data.size == 0:
            raise FileNotFoundError(f"the learner no longer holds version {version}; take the newest announcement")
        if part.offset != offset or part.data.size > min(self._max_part_bytes, part.total_bytes - offset):
            raise WeightsRejected(
                f"requested bytes from {offset} of version {version}, got {part.data.size} from {part.offset} of "
                f"{part.total_bytes}"
            )
        self.received.num_bytes += part.data.size
        return part


def _apply(delta: memoryview, base: Base, out: np.ndarray) -> str:
    """Build a version; return its digest. Raises WeightsDamaged for a bad delta or another base."""
    prelude, digest = apply(delta, base.data, out, head_bytes=read_contents(base.data).head_bytes)
    if prelude.base_digest != base.digest:
        raise WeightsDamaged(f"a delta from {prelude.base_digest} was offered for {base.digest}")
    return digest
