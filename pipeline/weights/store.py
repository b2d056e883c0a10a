"""The learner's shelf: the newest versions, each with its digest, what changed between them, and
what is below them.

*Consumes* publications. *Produces* named files, announcements, and answers to other hosts. *Waits
for* the memory or the disk that the files are in.

Publishing and answering run on two threads. A version that is retired while an answer is made of it
gives an answer whose digest does not hold, and whoever asked then asks for the newest version.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.process import work
from pipeline.runtime.registry.contract import WeightsAnnouncement
from pipeline.weights.delta import encode
from pipeline.weights.digest import Digest, digest_buffer
from pipeline.weights.shared_files import SharedFile, SharedFileWriter
from pipeline.weights.tensorfile import Publication, read_contents
from protocol.endpoints import run_tag
from protocol.errors import UnknownMessage
from protocol.messages import BASE_VERSION, Message, WeightsPart, WeightsRequest

MAX_DELTA_SHARE = 4
"""A delta of more than one in so many of the version's own bytes is not worth its making."""

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- memory-backed storage; the folder made in it is private (0700)


def weights_folder(run_dir: Path, *, shared_memory: bool) -> Path:
    """Return the folder for published weights: memory-backed when asked for and present, else in
    the run's folder.
    """
    if shared_memory and _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK):
        return _SHARED_MEMORY / run_tag(run_dir)
    return run_dir / "weights"


def fetched_folder(run_dir: Path, *, shared_memory: bool) -> Path:
    """Return the folder in which a host's workers keep what they fetched from another one, each in
    a folder of its own.
    """
    folder = weights_folder(run_dir, shared_memory=shared_memory)
    return folder.with_name(f"{folder.name}-fetched")


def file_name(policy_version: int) -> str:
    """Return the name of a published file."""
    return "base.safetensors" if policy_version == BASE_VERSION else f"v{policy_version:08d}.safetensors"


def weight_folders(run_dir: Path) -> list[Path]:
    """Return every folder in which this host may hold weights of a run: of no worth once it has
    ended.
    """
    return [
        folder(run_dir, shared_memory=is_shared)
        for is_shared in (True, False)
        for folder in (weights_folder, fetched_folder)
    ]


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """One version on this host."""

    policy_version: int
    segment: SharedFile
    digest: str

    @property
    def path(self) -> Path:
        """Where others map it."""
        return self.segment.path

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.segment.data.size

    def is_intact(self) -> bool:
        """Whether the bytes are still those that were published."""
        return digest_buffer(self.segment.data) == self.digest


class WeightsStore:
    """The learner's published versions: the newest ``keep`` of them, immutable as long as they are
    held. If they are adapters, what is below them is published first, as BASE_VERSION, and stays.
    """

    def __init__(self, folder: Path, *, keep: int, max_part_bytes: int) -> None:
        """Publish into ``folder``, which is emptied. An answer has ``max_part_bytes`` at most,
        whatever a request asks for. Raises ConfigError when the folder is somebody else's."""
        self._folder = folder
        self._keep = keep
        self._max_part_bytes = max_part_bytes
        self._writer = SharedFileWriter(folder)
        self._held: dict[int, StoredWeights] = {}
        self._deltas: dict[tuple[int, int], bytes | None] = {}

    def publish(self, policy_version: int, publication: Publication) -> StoredWeights:
        """Write and digest a version in one pass, name it, and retire the oldest. Raises OSError
        when there is no room.

        A version that is held already is replaced, which is meant for one that was damaged.
        """
        segment = self._writer.take(publication.num_bytes)
        try:
            digest = write_publication(segment.data, publication)
            segment.name(self._folder / file_name(policy_version))
        except BaseException:
            self._writer.discard(segment)
            raise
        stored = StoredWeights(policy_version, segment, digest)
        replaced, self._held[policy_version] = self._held.get(policy_version), stored
        if replaced is not None:
            self._writer.forget(replaced.segment)
        versions = sorted(self._held.keys() - {BASE_VERSION})
        for version in versions[: -self._keep]:
            self._writer.retire(self._held.pop(version).segment)
        return stored

    def announcement(self, stored: StoredWeights, *, endpoint: str) -> WeightsAnnouncement:
        """Say where a stored version is, and what is below it."""
        base = None if stored.policy_version == BASE_VERSION else self._held.get(BASE_VERSION)
        return WeightsAnnouncement(
            policy_version=stored.policy_version,
            digest=stored.digest,
            path=str(stored.path),
            num_bytes=stored.num_bytes,
            host=socket.gethostname(),
            endpoint=endpoint,
            base=base and self.announcement(base, endpoint=endpoint),
        )

    def held(self, policy_version: int) -> StoredWeights | None:
        """Return a version, None when it is not held (any more)."""
        return self._held.get(policy_version)

    def answer(self, request: Message) -> WeightsPart:
        """Answer a request from another host: with a range of the delta from the version that it
        holds, when there is one and it is short; else with a range of the version itself; with an
        empty part when that is gone. Making a delta takes time: about that of reading both versions
        twice.

        Raises UnknownMessage for anything but a WeightsRequest.
        """
        if not isinstance(request, WeightsRequest):
            raise UnknownMessage(f"the weights endpoint got a {type(request).__name__}; it answers WeightsRequest only")
        stored = self._held.get(request.version)
        if stored is None:
            return _nothing(request)
        delta = None if request.base < 0 else self._delta(request.base, stored)
        if delta is not None:
            return self._range(request, np.frombuffer(delta, np.uint8), base=request.base)
        return self._range(request, stored.segment.data, base=-1)

    def _range(self, request: WeightsRequest, data: np.ndarray, *, base: int) -> WeightsPart:
        if not 0 <= request.offset < data.size or request.max_bytes <= 0:
            return _nothing(request)
        return WeightsPart(
            version=request.version,
            offset=request.offset,
            total_bytes=data.size,
            data=data[request.offset : request.offset + min(request.max_bytes, self._max_part_bytes)],
            base=base,
        )

    def _delta(self, base_version: int, stored: StoredWeights) -> bytes | None:
        """Return the delta between two held versions; it is made once."""
        base = self._held.get(base_version)
        if base is None or base_version >= stored.policy_version:
            return None
        pair = (base_version, stored.policy_version)
        if pair not in self._deltas:
            held = set(self._held)
            self._deltas = {key: delta for key, delta in self._deltas.items() if held.issuperset(key)}
            self._deltas[pair] = make_delta(base, stored)
        return self._deltas[pair]


def make_delta(base: StoredWeights, new: StoredWeights) -> bytes | None:
    """Return what leads from one version to another, None when it would not be worth it."""
    before, after = read_contents(base.segment.data), read_contents(new.segment.data)
    return encode(
        base.segment.data,
        new.segment.data,
        heads=(before.head_bytes, after.head_bytes),
        stride=after.stride,
        digests=(base.digest, new.digest),
        max_bytes=new.num_bytes // MAX_DELTA_SHARE,
    )


def write_publication(data: np.ndarray, publication: Publication) -> str:
    """Fill ``data``, uint8 [bytes], with a publication, and return its digest."""
    digest = Digest()
    end = len(publication.head)
    data[:end] = np.frombuffer(publication.head, np.uint8)
    digest.update(publication.head)
    for block in publication.blocks:
        # first: the copy then finds it in the processor's cache
        digest.update(block)
        data[end : end + block.size] = block
        end += block.size
        work.step(block.size / data.size)
    if end != data.size:
        raise ValueError(f"a publication of {data.size} bytes yielded {end}")
    return str(digest)


def _nothing(request: WeightsRequest) -> WeightsPart:
    """Answer that a range is not to be had: of an empty file no other offset is true."""
    return WeightsPart(version=request.version, offset=0, total_bytes=0, data=np.empty(0, np.uint8))
