"""Claims about the digests of a version's parts."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from pipeline.weights.digest import PartDigests, table_bytes
from protocol.errors import WeightsDamaged

DATA = np.random.default_rng(0).integers(0, 256, 2500, dtype=np.uint8)


def test_under_sha256_each_part_has_the_sha256_of_its_bytes_and_the_list_has_one() -> None:
    digests = PartDigests.of(DATA, 1000, "sha256")
    parts = [DATA[:1000], DATA[1000:2000], DATA[2000:]]
    assert digests.table == b"".join(hashlib.sha256(part.tobytes()).digest() for part in parts)
    assert digests.digest == f"sha256:{hashlib.sha256(digests.table).hexdigest()}"


@pytest.mark.parametrize("algorithm", ["xxh3-128", "sha256"])
def test_a_part_matches_with_all_its_bytes_in_its_place_alone(algorithm: str) -> None:
    made = PartDigests.of(DATA, 1000, algorithm)
    digests = PartDigests.read(DATA.size, 1000, made.digest, made.table)
    assert len(made.table) == table_bytes(DATA.size, 1000, made.digest)
    assert digests.matches(0, DATA[:1000]) and digests.matches(2, DATA[2000:])
    assert not digests.matches(1, DATA[:1000])
    assert not digests.matches(2, DATA[2000:-1])
    for place in (0, 999):
        changed = DATA[:1000].copy()
        changed[place] ^= 1
        assert not digests.matches(0, changed)


def test_a_list_that_is_not_the_announced_one_is_refused() -> None:
    made = PartDigests.of(DATA, 1000, "xxh3-128")
    with pytest.raises(WeightsDamaged, match="the digests of parts have digest"):
        PartDigests.read(DATA.size, 1000, made.digest, made.table[:-1] + b"\0")
    with pytest.raises(WeightsDamaged, match="are not the digests of 3 parts"):
        PartDigests.read(DATA.size, 1000, made.digest, made.table[:-1])
    with pytest.raises(WeightsDamaged, match="run the same release"):
        PartDigests.read(DATA.size, 1000, "md5:00", made.table)
    with pytest.raises(WeightsDamaged, match="run the same release"):
        table_bytes(DATA.size, 1000, "")
