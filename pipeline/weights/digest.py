"""Digests of weights and of files: ``xxh3-128:<hex>``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

from pipeline.process import work
from protocol.arrays import Buffer

_READ_BYTES = 1 << 22


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
