"""Published policy versions as files: written once, digested, kept for a while, fetched and verified before use.

*Consumes* a function that writes a weight file (learner), or an announcement (generator). *Produces* a file whose digest is
known to match. *Waits for* the learner's answers when the file is on another host, each with a deadline.

On one host a version travels as a file map: the learner writes it once, in memory-backed storage where there is some, and
every generator maps the same pages. Other hosts ask for ranges of at most ``max_part_bytes`` over ZeroMQ, so that no message
grows with the model. Either way a generator serves a version only after the digest of the whole file has matched.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from pipeline.runtime.registry import WeightsAnnouncement
from protocol.channel import Requester
from protocol.endpoints import ensure_private_folder
from protocol.errors import UnknownMessage, WeightsRejected
from protocol.messages import Message, WeightsPart, WeightsRequest

_READ_BYTES = 1 << 22
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- memory-backed storage; the folder made in it is private (0700)


def digest_file(path: Path) -> str:
    """Return ``xxh3-128:<hex>`` of a file's bytes."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            state.update(block)
    return f"xxh3-128:{state.hexdigest()}"


def weights_folder(run_dir: Path, *, shared_memory: bool) -> Path:
    """Return the folder for published weights: memory-backed when asked for and present, else in the run's folder."""
    if shared_memory and _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK):
        tag = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:16]
        return _SHARED_MEMORY / f"headrace-{os.getuid()}-{tag}"
    return run_dir / "weights"


def remove_weights(run_dir: Path) -> None:
    """Remove published weights once nobody serves them; a checkpoint holds the model."""
    for shared in (True, False):
        shutil.rmtree(weights_folder(run_dir, shared_memory=shared), ignore_errors=True)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """One version on this host."""

    policy_version: int
    path: Path
    digest: str
    num_bytes: int


class WeightsStore:
    """The learner's published versions: the newest ``keep`` of them, immutable once named."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._held: dict[int, StoredWeights] = {}
        ensure_private_folder(
            folder
        )  # its name can be guessed: another user may have made it, or a link to something of ours
        for leftover in folder.iterdir():  # of an earlier incarnation: nobody is told of them any more
            leftover.unlink()

    def publish(self, policy_version: int, write: Callable[[Path], None]) -> StoredWeights:
        """Let ``write`` fill a new file, digest it, name it, and forget the oldest versions."""
        path = self._folder / f"v{policy_version:08d}.safetensors"
        partial = path.with_suffix(".partial")
        write(partial)
        partial.chmod(0o400)
        stored = StoredWeights(policy_version, path, digest_file(partial), partial.stat().st_size)
        partial.rename(path)
        self._held[policy_version] = stored
        while len(self._held) > self._keep:
            self._held.pop(min(self._held)).path.unlink(missing_ok=True)
        return stored

    def announcement(self, stored: StoredWeights, *, endpoint: str) -> WeightsAnnouncement:
        """Say where a stored version is."""
        return WeightsAnnouncement(
            policy_version=stored.policy_version,
            digest=stored.digest,
            path=str(stored.path),
            num_bytes=stored.num_bytes,
            host=socket.gethostname(),
            endpoint=endpoint,
        )

    def answer(self, request: Message) -> WeightsPart:
        """Answer a request from another host with a range of a held version, or with an empty part when it is gone.

        Raises UnknownMessage for anything but a WeightsRequest.
        """
        if not isinstance(request, WeightsRequest):
            raise UnknownMessage(f"the weights endpoint got a {type(request).__name__}; it answers WeightsRequest only")
        stored = self._held.get(request.version)
        if stored is None or not 0 <= request.offset < stored.num_bytes or request.max_bytes <= 0:
            return _nothing(request)
        try:
            with stored.path.open("rb") as file:
                file.seek(request.offset)
                data = file.read(min(request.max_bytes, _READ_BYTES))
        except FileNotFoundError:  # forgotten between the look and the opening: publishing runs on another thread
            return _nothing(request)
        return WeightsPart(
            version=request.version,
            offset=request.offset,
            total_bytes=stored.num_bytes,
            data=np.frombuffer(data, np.uint8),
        )


def _nothing(request: WeightsRequest) -> WeightsPart:
    """Answer that a range is not to be had: of an empty file no other offset is true."""
    return WeightsPart(version=request.version, offset=0, total_bytes=0, data=np.empty(0, np.uint8))


def local_file(announcement: WeightsAnnouncement) -> Path | None:
    """Return the announced file when this host can map it and it is what was announced, else None."""
    path = Path(announcement.path)
    try:
        if path.stat().st_size != announcement.num_bytes:
            return None
        return path if digest_file(path) == announcement.digest else None
    except OSError:
        return None


def fetch_folder(run_dir: Path, worker: str) -> Path:
    """Make and return the folder into which a worker fetches weights from another host."""
    folder = run_dir / "fetched" / worker
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


async def fetch_file(
    announcement: WeightsAnnouncement, requester: Requester, folder: Path, *, max_part_bytes: int, timeout_s: float
) -> Path:
    """Fetch an announced version from another host in bounded parts and verify it.

    Raises:
        WeightsRejected: the learner no longer holds the version, or the digest does not match; the file is removed.
        DeadlineExceeded: one part took longer than ``timeout_s``.
    """
    path = folder / f"v{announcement.policy_version:08d}.fetched"
    version = announcement.policy_version
    try:
        with path.open("wb") as file:
            while (offset := file.tell()) < announcement.num_bytes:
                part = await requester.request(
                    WeightsRequest(version=version, offset=offset, max_bytes=max_part_bytes), timeout_s=timeout_s
                )
                if not isinstance(part, WeightsPart) or part.version != version:
                    raise WeightsRejected(
                        f"asked for bytes {offset}.. of version {version}, got a {type(part).__name__}"
                    )
                if part.total_bytes != announcement.num_bytes or part.data.size == 0:
                    raise WeightsRejected(
                        f"version {version} has {announcement.num_bytes} bytes by its announcement, {part.total_bytes} by the "
                        f"learner: it was replaced meanwhile; take the newest announcement"
                    )
                if part.offset != offset:
                    raise WeightsRejected(
                        f"asked for bytes from {offset} of version {version}, got those from {part.offset}"
                    )
                file.write(part.data.data)
        if (digest := await asyncio.to_thread(digest_file, path)) != announcement.digest:
            raise WeightsRejected(
                f"version {version} has digest {digest}, expected {announcement.digest}; fetch it again"
            )
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path
