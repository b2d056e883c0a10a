"""Claims about deltas: lossless for any bytes, short after an optimiser's step, harmless with any
content."""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.weights import delta as codec
from pipeline.weights.delta import STRIDES, apply, encode
from pipeline.weights.digest import digest_buffer
from protocol.errors import WeightsDamaged
from tests.pipeline.weights.versions import numbers, stepped


def bytes_of(data: bytes | np.ndarray) -> np.ndarray:
    return np.frombuffer(bytes(data), np.uint8)


def made(base: np.ndarray, new: np.ndarray, heads: tuple[int, int] = (0, 0), stride: int = 2) -> bytes:
    digests = (digest_buffer(base), digest_buffer(new))
    delta = encode(base, new, heads=heads, stride=stride, digests=digests, max_bytes=1 << 40)
    assert delta is not None
    return delta


def applied(delta: bytes, base: np.ndarray, size: int, head: int = 0) -> np.ndarray:
    out = np.zeros(size, np.uint8)
    prelude, digest = apply(memoryview(delta), base, out, head_bytes=head)
    assert digest == digest_buffer(out)
    assert prelude.base_digest == digest_buffer(base)
    return out


@st.composite
def pairs(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    """A body, its next version, and a head."""
    size = draw(st.integers(0, 3000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = rng.integers(0, 256, size, dtype=np.uint8)
    new = base.copy()
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, size))
        stop = draw(st.integers(start, min(size, start + draw(st.integers(0, size)))))
        new[start:stop] = rng.integers(0, 256, stop - start, dtype=np.uint8)
    chance = draw(st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]))
    mask = rng.random(size) < chance
    new[mask] += np.uint8(1)
    return base.tobytes(), new.tobytes(), draw(st.binary(max_size=20))


@given(pairs(), st.binary(max_size=20), st.sampled_from(STRIDES), st.sampled_from([64, 1024, 1 << 20]))
@settings(deadline=None, max_examples=100)
def test_a_delta_gives_back_every_byte_of_any_version(
    pair: tuple[bytes, bytes, bytes], base_head: bytes, stride: int, block: int
) -> None:
    before, after, head = pair
    base, new = bytes_of(base_head + before), bytes_of(head + after)
    with pytest.MonkeyPatch.context() as patch:
        # many blocks, one, and a part of one
        patch.setattr(codec, "BLOCK_BYTES", block)
        delta = made(base, new, (len(base_head), len(head)), stride)
        np.testing.assert_array_equal(applied(delta, base, new.size, len(base_head)), new)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 100_000])
def test_gaps_of_every_length_are_kept(gap: int) -> None:
    base = np.zeros(2 * (gap + 2), np.uint8)
    new = base.copy()
    new[0], new[2 * (gap + 1)] = 7, 9
    np.testing.assert_array_equal(applied(made(base, new), base, new.size), new)


def test_bf16_numbers_with_three_percent_changed_take_at_most_a_tenth_of_the_bytes() -> None:
    before = numbers(0, 500_000)
    after = stepped(before, 1)
    base, new = before.view(np.uint8), after.view(np.uint8)
    assert 1 < new.size / len(made(base, new)) / 10 < 4


def test_a_version_that_is_all_new_is_not_worth_a_delta() -> None:
    base, new = numbers(0).view(np.uint8), np.random.default_rng(3).integers(0, 256, 40_000, dtype=np.uint8)
    arguments = {"heads": (0, 0), "stride": 2, "digests": ("", "")}
    assert encode(base, new, max_bytes=new.size // 2, **arguments) is None
    assert encode(base, new[:-2], max_bytes=1 << 40, **arguments) is None, "bodies of two sizes"


def test_whether_a_delta_is_worth_it_is_seen_in_a_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "BLOCK_BYTES", 1024)
    base = numbers(0).view(np.uint8)
    dense = np.random.default_rng(3).integers(0, 256, base.size, dtype=np.uint8)
    looked: list[int] = []
    planes = codec._planes
    monkeypatch.setattr(codec, "_planes", lambda *arguments: looked.append(1) or planes(*arguments))
    arguments = {"heads": (0, 0), "stride": 2, "digests": ("", ""), "max_bytes": base.size // 4}
    assert encode(base, dense, **arguments) is None
    assert len(looked) < 20
    sparse = stepped(numbers(0), 1).view(np.uint8)
    delta = encode(base, sparse, **arguments)
    assert delta is not None
    np.testing.assert_array_equal(applied_any(delta, base), sparse)


def applied_any(delta: bytes, base: np.ndarray) -> np.ndarray:
    out = np.zeros(base.size, np.uint8)
    apply(memoryview(delta), base, out, head_bytes=0)
    return out


def test_bytes_that_never_change_cost_a_255th_at_most() -> None:
    base = numbers(0, 500_000).view(np.uint8)
    new = base.copy()
    new[-2] ^= 1
    assert len(made(base, new)) < base.size / 255


@given(st.integers(0, 2**32), st.data())
@settings(deadline=None, max_examples=100)
def test_a_damaged_delta_is_refused_or_shows_in_the_digest(seed: int, data: st.DataObject) -> None:
    before = numbers(seed % 7, 2000)
    base, new = before.view(np.uint8), stepped(before, seed).view(np.uint8)
    good = made(base, new)
    damaged = bytearray(good)
    kind = data.draw(st.sampled_from(["flip", "cut", "tail", "numbers"]))
    place = data.draw(st.integers(0, len(good) - 4))
    match kind:
        case "flip":
            damaged[place] ^= data.draw(st.integers(1, 255))
        case "cut":
            del damaged[place:]
        case "tail":
            damaged += b"\0"
        case _:
            damaged[place : place + 4] = struct.pack("<I", data.draw(st.integers(0, 2**32 - 1)))
    out = np.zeros(new.size, np.uint8)
    try:
        prelude, digest = apply(memoryview(damaged), base, out, head_bytes=0)
    except WeightsDamaged:
        return
    assert digest == digest_buffer(out)
    same = bool((out == new).all())
    assert (digest == digest_buffer(new)) is same
    # only the prelude's digests were changed
    if same and bytes(damaged) != good:
        assert (prelude.base_digest, prelude.digest) != (digest_buffer(base), digest_buffer(new))


def test_a_delta_of_other_places_or_another_size_is_refused_before_any_write() -> None:
    base, new = numbers(0).view(np.uint8), numbers(1).view(np.uint8)
    delta = memoryview(made(base, new))
    for size, head in ((new.size + 2, 0), (new.size, 8)):
        with pytest.raises(WeightsDamaged, match="is not one from"):
            apply(delta, base, np.zeros(size, np.uint8), head_bytes=head)
    with pytest.raises(WeightsDamaged, match="was applied to one of"):
        apply(delta, base[:-2], np.zeros(new.size, np.uint8), head_bytes=0)


@pytest.mark.parametrize("field", [{"stride": 3}, {"num_bytes": -5}, {"format": 9}, {"tail": b"x"}])
def test_a_prelude_that_makes_no_sense_is_refused(field: dict[str, object]) -> None:
    base = numbers(0).view(np.uint8)
    delta = made(base, base)
    size = struct.unpack_from("<I", delta)[0]
    told = msgspec.msgpack.decode(delta[4 : 4 + size]) | field
    text = msgspec.msgpack.encode(told)
    with pytest.raises(WeightsDamaged, match="fetch the whole version"):
        apply(memoryview(struct.pack("<I", len(text)) + text + delta[4 + size :]), base, base.copy(), head_bytes=0)
