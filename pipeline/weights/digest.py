"""Digests of weights and files (``xxh3-128:<hex>``), and of the parts of a version.

The learner announces one digest: that of the list of all parts' digests. A host fetches the list from any
source, checks it against the announced digest, and then checks each part as it arrives, before using it or
passing it on. So a host need not trust relays, and wrong bytes stop at the first host.

``xxh3-128`` detects damage. With ``sha256`` (``weights.part_digest``) not even a permitted host can forge
bytes with the same digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from pipeline.process import work
from protocol.arrays import Buffer
from protocol.errors import WeightsDamaged

_READ_BYTES = 1 << 22
PART_BYTES: Final = 1 << 20
"""Small compared with a processor's cache, and with what a slow link carries within a heartbeat's interval."""

_ALGORITHMS: Final[dict[str, tuple[int, Callable[[Buffer], bytes]]]] = {
    "xxh3-128": (16, lambda data: xxhash.xxh3_128_digest(data)),
    "sha256": (32, lambda data: hashlib.sha256(data).digest()),
}
"""Name -> size of a digest in bytes, and its function."""


class Digest:
    """Digest of bytes that are added in pieces of any size."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Buffer | np.ndarray) -> None:
        self._state.update(memoryview(data))  # pyright: ignore[reportArgumentType] -- numpy's stubs lack the protocol on 3.11

    def __str__(self) -> str:
        return f"xxh3-128:{self._state.hexdigest()}"


def digest_buffer(data: Buffer | np.ndarray) -> str:
    digest = Digest()
    digest.update(data)
    return str(digest)


def digest_file(path: Path) -> str:
    digest = Digest()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            work.step()
    return str(digest)


class PartDigests:
    def __init__(self, num_bytes: int, part_bytes: int, algorithm: str, table: bytes) -> None:
        """``table`` contains all digests in order. Raises WeightsDamaged if its size is wrong."""
        self._num_bytes = num_bytes
        self._part_bytes = part_bytes
        self._algorithm = algorithm
        self._size, self._digest = _ALGORITHMS[algorithm]
        self.num_parts = -(-num_bytes // part_bytes)
        self.table = table
        if len(table) != self.num_parts * self._size:
            raise WeightsDamaged(f"{len(table)} bytes are not the digests of {self.num_parts} parts")

    @classmethod
    def of(cls, data: np.ndarray, part_bytes: int, algorithm: str) -> PartDigests:
        """Compute the digests of ``data``, uint8 [bytes of the version]."""
        _, digest = _ALGORITHMS[algorithm]
        parts = (memoryview(data[start : start + part_bytes]) for start in range(0, data.size, part_bytes))  # pyright: ignore[reportArgumentType] -- numpy's stubs lack the protocol on 3.11
        return cls(data.size, part_bytes, algorithm, b"".join(map(digest, parts)))

    @classmethod
    def read(cls, num_bytes: int, part_bytes: int, announced: str, table: bytes) -> PartDigests:
        """Return the digests in ``table``. Raises WeightsDamaged unless they match the announced digest."""
        algorithm = announced.partition(":")[0]
        if algorithm not in _ALGORITHMS:
            raise WeightsDamaged(
                f"the digests of parts use {algorithm!r}, expected one of {', '.join(_ALGORITHMS)}; run the same release "
                "on all hosts"
            )
        digests = cls(num_bytes, part_bytes, algorithm, table)
        if digests.digest != announced:
            raise WeightsDamaged(f"the digests of parts have digest {digests.digest}, expected {announced}")
        return digests

    @property
    def digest(self) -> str:
        """Digest of all digests, as announced."""
        return f"{self._algorithm}:{self._digest(self.table).hex()}"

    def matches(self, index: int, data: np.ndarray) -> bool:
        """Return whether ``data``, uint8 [bytes of the part], is part ``index``."""
        start = index * self._part_bytes
        is_whole = data.size == min(self._part_bytes, self._num_bytes - start)
        own = self.table[index * self._size : (index + 1) * self._size]
        return is_whole and self._digest(memoryview(data)) == own  # pyright: ignore[reportArgumentType] -- as above


def table_bytes(num_bytes: int, part_bytes: int, announced: str) -> int:
    """Return the size of a version's list of digests. Raises WeightsDamaged for an unknown algorithm."""
    algorithm = announced.partition(":")[0]
    if algorithm not in _ALGORITHMS or part_bytes <= 0:
        raise WeightsDamaged(
            f"a version with part digests {announced!r} of {part_bytes} bytes cannot be fetched; run the same release on "
            "all hosts"
        )
    return -(-num_bytes // part_bytes) * _ALGORITHMS[algorithm][0]
