"""The learner's published versions: the newest ones with their digests and deltas, and base weights.

Publishing and answering run on two threads. A version may be retired while an answer is made from it; then
the answer's digest does not match, and the requester fetches the newest version."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from pipeline.process import work
from pipeline.runtime.registry.contract import WeightsAnnouncement
from pipeline.weights.delta import encode
from pipeline.weights.digest import PART_BYTES, Digest, PartDigests, digest_buffer
from pipeline.weights.shared_files import NO_ROOM, SharedFile, SharedFileWriter
from pipeline.weights.tensorfile import Publication, read_contents
from protocol.endpoints import run_tag
from protocol.errors import UnknownMessage
from protocol.messages import BASE_VERSION, Message, WeightsPart, WeightsRequest

MAX_DELTA_SHARE = 4
"""A delta longer than the version's size divided by this is dropped."""

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- memory-backed storage; the folder made in it is private (0700)

_log = structlog.get_logger(__name__)


def weights_folder(run_dir: Path, *, shared_memory: bool) -> Path:
    """Return the folder for published weights: memory-backed if wanted and available."""
    if shared_memory and _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK):
        return _SHARED_MEMORY / run_tag(run_dir)
    return run_dir / "weights"


def fetched_folder(run_dir: Path, *, shared_memory: bool) -> Path:
    """Return the folder for weights fetched from another host, shared by all workers of this one."""
    folder = weights_folder(run_dir, shared_memory=shared_memory)
    return folder.with_name(f"{folder.name}-fetched")


def file_name(policy_version: int) -> str:
    return "base.safetensors" if policy_version == BASE_VERSION else f"v{policy_version:08d}.safetensors"


def weight_folders(run_dir: Path) -> list[Path]:
    """Return every folder on this host that may contain a run's weights. They are useless once the run has
    ended."""
    kinds = (weights_folder, fetched_folder)
    return [folder(run_dir, shared_memory=is_shared) for is_shared in (True, False) for folder in kinds]


@dataclass(frozen=True, slots=True)
class StoredWeights:
    policy_version: int
    segment: SharedFile
    digest: str
    parts: PartDigests | None = None
    """None if no other host fetches it."""

    @property
    def path(self) -> Path:
        return self.segment.path

    @property
    def num_bytes(self) -> int:
        return self.segment.data.size

    def is_intact(self) -> bool:
        """Return whether the bytes still match their digest."""
        return digest_buffer(self.segment.data) == self.digest


class WeightsStore:
    """The learner's newest ``keep`` versions, immutable while held, and the base weights of adapters."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        max_part_bytes: int,
        part_digest: str | None = None,
        part_bytes: int = PART_BYTES,
        instead: Path | None = None,
    ) -> None:
        """Publish into ``folder``, which is emptied. Raises ConfigError when it belongs to another user.

        ``instead`` is used from the first version on for which ``folder`` has no room. ``part_digest`` is the
        algorithm of the parts' digests for other hosts; None disables them."""
        self._part_digest = part_digest
        self._part_bytes = part_bytes
        self._folder = folder
        self._keep = keep
        self._max_part_bytes = max_part_bytes
        self._instead = None if instead == folder else instead
        self._writer = self._first = SharedFileWriter(folder)
        self._held: dict[int, StoredWeights] = {}
        self._deltas: dict[tuple[int, int], bytes | None] = {}

    def publish(self, policy_version: int, publication: Publication) -> StoredWeights:
        """Write and digest a version in one pass, name it, and retire the oldest. A held version is replaced,
        since it was damaged. Raises OSError without room."""
        segment = self._take(publication.num_bytes)
        try:
            digest = write_publication(segment.data, publication)
            algorithm = self._part_digest
            parts = None if algorithm is None else PartDigests.of(segment.data, self._part_bytes, algorithm)
            segment.name(self._folder / file_name(policy_version))
        except BaseException:
            self._writer.discard(segment)
            raise
        stored = StoredWeights(policy_version, segment, digest, parts)
        replaced, self._held[policy_version] = self._held.get(policy_version), stored
        if replaced is not None:
            self._writer.forget(replaced.segment)
        versions = sorted(self._held.keys() - {BASE_VERSION})
        for version in versions[: -self._keep]:
            segment = self._held.pop(version).segment
            if segment.path.parent == self._folder:
                self._writer.retire(segment)
            else:
                self._first.discard(segment)
        return stored

    def _take(self, num_bytes: int) -> SharedFile:
        try:
            return self._writer.take(num_bytes)
        except OSError as error:
            if error.errno not in NO_ROOM or self._instead is None:
                raise
            _log.warning(
                "weights_go_to_disk",
                reason=f"{self._folder} has no room for a version of {num_bytes / 1e6:,.0f} MB",
                folder=str(self._instead),
                action="give /dev/shm more (`docker run --shm-size=8g`), or set weights.shared_memory to false",
            )
        self._first.close()
        self._folder, self._instead = self._instead, None
        self._writer = SharedFileWriter(self._folder)
        return self._writer.take(num_bytes)

    def announcement(self, stored: StoredWeights, *, endpoint: str) -> WeightsAnnouncement:
        base = None if stored.policy_version == BASE_VERSION else self._held.get(BASE_VERSION)
        return WeightsAnnouncement(
            policy_version=stored.policy_version,
            digest=stored.digest,
            path=str(stored.path),
            num_bytes=stored.num_bytes,
            host=socket.gethostname(),
            endpoint=endpoint,
            base=base and self.announcement(base, endpoint=endpoint),
            part_bytes=self._part_bytes if stored.parts is not None else 0,
            parts_digest=stored.parts.digest if stored.parts is not None else "",
        )

    def close(self) -> None:
        """Close all versions. Their files remain for generators that are mapping them."""
        # a publication in another thread may still add one
        for stored in list(self._held.values()):
            self._writer.forget(stored.segment)
        self._held.clear()
        self._writer.close()

    def held(self, policy_version: int) -> StoredWeights | None:
        """Return a version; None when it is not, or no longer, held."""
        return self._held.get(policy_version)

    def answer(self, request: Message) -> WeightsPart:
        """Return a range of the delta from the held version if it is short, otherwise of the version, or of
        the digests of its parts.

        The part is empty when the version is gone. Making a delta takes about as long as reading both
        versions twice. Raises UnknownMessage for anything but a WeightsRequest."""
        if not isinstance(request, WeightsRequest):
            raise UnknownMessage(f"the weights endpoint got a {type(request).__name__}; it answers WeightsRequest only")
        stored = self._held.get(request.version)
        if stored is None or request.digest not in ("", stored.digest):
            return nothing(request)
        if request.wants_digests:
            table = b"" if stored.parts is None else stored.parts.table
            return range_of(request, np.frombuffer(table, np.uint8), base=-1, max_bytes=self._max_part_bytes)
        delta = None if request.base < 0 else self._delta(request.base, stored)
        if delta is not None:
            delta_bytes = np.frombuffer(delta, np.uint8)
            return range_of(request, delta_bytes, base=request.base, max_bytes=self._max_part_bytes)
        if request.base >= 0 and request.digest:
            return nothing(request)
        return range_of(request, stored.segment.data, base=-1, max_bytes=self._max_part_bytes)

    def _delta(self, base_version: int, stored: StoredWeights) -> bytes | None:
        """Return the delta between two held versions, which is made only once."""
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
    """Return the delta between two versions; None when it is too long."""
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
    """Write a publication into ``data``, uint8 [bytes], and return its digest."""
    digest = Digest()
    end = len(publication.head)
    data[:end] = np.frombuffer(publication.head, np.uint8)
    digest.update(publication.head)
    for block in publication.blocks:
        # first, so that the block is in the processor's cache for the copy
        digest.update(block)
        data[end : end + block.size] = block
        end += block.size
        work.step(block.size / data.size)
    if end != data.size:
        raise ValueError(f"a publication of {data.size} bytes yielded {end}")
    return str(digest)


def range_of(request: WeightsRequest, data: np.ndarray, *, base: int, max_bytes: int) -> WeightsPart:
    """Return the requested range of ``data``, uint8 [bytes]; empty when it is outside."""
    if not 0 <= request.offset < data.size or request.max_bytes <= 0:
        return nothing(request)
    part = data[request.offset : request.offset + min(request.max_bytes, max_bytes)]
    return WeightsPart(
        version=request.version,
        offset=request.offset,
        total_bytes=data.size,
        data=part,
        base=base,
        apart=part.size if request.apart else 0,
    )


def nothing(request: WeightsRequest, *, is_coming: bool = False) -> WeightsPart:
    return WeightsPart(
        version=request.version, offset=0, total_bytes=0, data=np.empty(0, np.uint8), is_coming=is_coming
    )
