"""Digests of weights and of files (``xxh3-128:<hex>``), and of the parts of a version.

The learner announces one digest: of the list of all parts' digests. A host fetches that list from
any source and compares it with the announced digest. Then it checks each part as it arrives, before
it uses the part or passes it on. So a host trusts no relay, and wrong bytes stop at the first host.

``xxh3-128`` finds damage. With ``sha256`` (``weights.part_digest``) a permitted host cannot forge
bytes of the same digest, either."""

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
"""Small beside a processor's cache, and beside what a slow link carries in a heartbeat's time."""

_ALGORITHMS: Final[dict[str, tuple[int, Callable[[Buffer], bytes]]]] = {
    "xxh3-128": (16, lambda data: xxhash.xxh3_128_digest(data)),
    "sha256": (32, lambda data: hashlib.sha256(data).digest()),
}
"""Name -> bytes of a digest, and its function."""


class Digest:
    """A digest of bytes added in pieces of any size."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Buffer | np.ndarray) -> None:
        """Add the next bytes."""
        self._state.update(memoryview(data))  # pyright: ignore[reportArgumentType] -- numpy's stubs lack the protocol on 3.11

    def __str__(self) -> str:
        return f"xxh3-128:{self._state.hexdigest()}"


def digest_buffer(data: Buffer | np.ndarray) -> str:
    """Return the digest of bytes in memory."""
    digest = Digest()
    digest.update(data)
    return str(digest)


def digest_file(path: Path) -> str:
    """Return the digest of a file's bytes."""
    digest = Digest()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            work.step()
    return str(digest)


class PartDigests:
    """The digests of a version's parts."""

    def __init__(self, num_bytes: int, part_bytes: int, algorithm: str, table: bytes) -> None:
        """``table``: all digests in order. Raises WeightsDamaged if its size is not theirs."""
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
        """Return the digests of ``data``, uint8 [bytes of the version]."""
        _, digest = _ALGORITHMS[algorithm]
        parts = (memoryview(data[start : start + part_bytes]) for start in range(0, data.size, part_bytes))  # pyright: ignore[reportArgumentType] -- numpy's stubs lack the protocol on 3.11
        return cls(data.size, part_bytes, algorithm, b"".join(map(digest, parts)))

    @classmethod
    def read(cls, num_bytes: int, part_bytes: int, announced: str, table: bytes) -> PartDigests:
        """Return the digests in ``table``. Raises WeightsDamaged unless they are the announced."""
        algorithm = announced.partition(":")[0]
        if algorithm not in _ALGORITHMS:
            raise WeightsDamaged(
                f"parts have digests by {algorithm!r}, expected one of {', '.join(_ALGORITHMS)}; run the same release "
                "everywhere"
            )
        digests = cls(num_bytes, part_bytes, algorithm, table)
        if digests.digest != announced:
            raise WeightsDamaged(f"the digests of parts have digest {digests.digest}, expected {announced}")
        return digests

    @property
    def digest(self) -> str:
        """Digest of all digests, as it is announced."""
        return f"{self._algorithm}:{self._digest(self.table).hex()}"

    def matches(self, index: int, data: np.ndarray) -> bool:
        """Return whether ``data``, uint8 [bytes of the part], is the part ``index``."""
        start = index * self._part_bytes
        is_whole = data.size == min(self._part_bytes, self._num_bytes - start)
        own = self.table[index * self._size : (index + 1) * self._size]
        return is_whole and self._digest(memoryview(data)) == own  # pyright: ignore[reportArgumentType] -- as above


def table_bytes(num_bytes: int, part_bytes: int, announced: str) -> int:
    """Return the size of a version's list of digests. Raises WeightsDamaged: unknown algorithm."""
    algorithm = announced.partition(":")[0]
    if algorithm not in _ALGORITHMS or part_bytes <= 0:
        raise WeightsDamaged(
            f"a version with digests of parts {announced!r} of {part_bytes} bytes cannot be fetched; run the same release "
            "everywhere"
        )
    return -(-num_bytes // part_bytes) * _ALGORITHMS[algorithm][0]
