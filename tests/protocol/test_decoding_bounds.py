"""No bytes take more memory or time to decode than a bound that grows with their length."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from protocol import limits
from protocol.codec import decode, from_blob
from protocol.errors import (
    MalformedMessage,
    MessageTooLarge,
    WireError,
)
from protocol.limits import FREE_BODY_BYTES, MAX_TEXT_BYTES, check_values
from protocol.trajectory import Prompt, TrajectoryChunk
from tests.protocol.frames import LIMIT, body_of, forged, to_blob_of, wire
from tests.protocol.samples import chunk, chunks, packed, same


@pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\xdf\x00\x00\x00\x01\x01"])
@pytest.mark.parametrize("before", [b"", b"\x81\xa3new", b"\x81\xa6prompt\x81\xa5extra\x81\xa1x"])
def test_a_hundred_thousand_levels_are_refused(opener: bytes, before: bytes) -> None:
    with pytest.raises((MalformedMessage, MessageTooLarge)):
        decode(forged(before + opener * 100_000 + b"\xc0"), max_bytes=LIMIT)


def test_deep_extra_columns_are_refused_and_shallow_ones_pass() -> None:
    def nested(levels: int) -> TrajectoryChunk:
        value: Any = 1
        for _ in range(levels):
            value = [value]
        return chunk(
            1,
            prompt=Prompt(
                prompt_id="p", tokens=np.zeros(1, np.int32), text="", answer="", verifier="", extra={"x": value}
            ),
        )

    assert same(decode(wire(nested(60)), max_bytes=LIMIT)[0], nested(60))
    with pytest.raises(MalformedMessage, match="deep"):
        wire(nested(64))
    body = body_of(nested(60))
    body["prompt"]["extra"] = {"x": nested(64).prompt.extra}
    with pytest.raises(MalformedMessage, match="deep"):
        decode(forged(body), max_bytes=LIMIT)


def test_extra_columns_that_hold_themselves_are_refused() -> None:
    loop: list[Any] = []
    loop += [loop, loop]
    prompt = Prompt(prompt_id="p", tokens=np.zeros(1, np.int32), text="", answer="", verifier="", extra={"x": loop})
    with pytest.raises(MalformedMessage, match="deep"):
        wire(chunk(1, prompt=prompt))


def test_claims_of_a_thousand_million_elements_are_refused_without_allocating() -> None:
    for bomb in (b"\xdd\x3f\xff\xff\xff", b"\xdf\x3f\xff\xff\xff", b"\xc6\x3f\xff\xff\xff"):
        with pytest.raises(MalformedMessage):
            decode(forged(b"\x81\xa7context" + bomb), max_bytes=LIMIT)


BOMBS = {
    "empty maps": b"\x81\xa6prompt\x81\xa5extra\x81\xa1x\xdd\x00\x3f\xff\xff" + b"\x80" * 0x3FFFFF,
    "empty lists": b"\x81\xa6prompt\x81\xa5extra\x81\xa1x\xdd\x00\x3f\xff\xff" + b"\x90" * 0x3FFFFF,
    "numbers": b"\x81\xa6prompt\x81\xa5extra\x81\xa1x\xdd\x00\x3f\xff\xff" + b"\x01" * 0x3FFFFF,
    "empty maps, of a prompt that a second one replaces": b"\x82\xa6prompt\x81\xa5extra\x81\xa1x\xdd\x00\x3f\xff\xff"
    + b"\x80" * 0x3FFFFF
    + b"\xa6prompt\x80",
    "half a million claimed, none there": b"\x81\xa6prompt\x81\xa5extra\x81\xa1x\xdd\x00\x07\xff\xff",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_message_that_would_grow_a_hundredfold_is_refused_before_it_grows(name: str) -> None:
    frames, blob = forged(BOMBS[name]), to_blob_of(BOMBS[name])
    for read in (lambda: decode(frames, max_bytes=1 << 23), lambda: from_blob(blob, TrajectoryChunk)):
        tracemalloc.start()
        try:
            with pytest.raises((MessageTooLarge, MalformedMessage)):
                read()
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def extra_of(value: bytes) -> bytes:
    """Return the body of a chunk with one extra column, which is MessagePack already."""
    return msgspec.msgpack.encode(
        body_of(chunk()) | {"prompt": body_of(chunk())["prompt"] | {"extra": {"x": msgspec.Raw(value)}}}
    )


def many(item: bytes, count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + item * count


def padded(item: bytes, count: int) -> bytes:
    """So many items beside so many bytes that the values of the body are counted."""
    return b"\x92" + many(item, count) + b"\xc6" + FREE_BODY_BYTES.to_bytes(4, "big") + bytes(FREE_BODY_BYTES)


GREEDY = {
    "empty maps": b"\x80",
    "empty lists": b"\x90",
    "lists of one": b"\x91\x01",
    "lists in lists": b"\x91\x91\x91\x91\x80",
    "maps of one": b"\x81\x00\x01",
    "maps in maps": b"\x81\x00" * 50 + b"\x80",
    "maps in maps, by text": b"\x81\xa0" * 50 + b"\x80",
    "maps of six": b"\x86" + b"".join(bytes([n, 0x80]) for n in range(6)),
    "maps of a hundred": b"\xde\x00\x64" + b"".join(b"\xce\xff\xff\xff" + bytes([n, 0x80]) for n in range(100)),
    "small numbers": b"\x01",
    "numbers": b"\xcf" + b"\x7f" * 8,
    "wide characters": "😀".encode().join([b"\xa4", b""]),
    "narrow characters": b"\xa2\xc3\xa9",
    "extensions": b"\xd4\x05\x00",
    "times": b"\xd6\xff\x01\x02\x03\x04",
    "bytes": b"\xc4\x01a",
}
"""Values that take far more memory than they have bytes."""


def taken_by_decoding(body: bytes) -> int:
    """Return the memory that decoding a chunk's body takes at its highest."""
    frames = forged(body)
    tracemalloc.start()
    try:
        with contextlib.suppress(WireError):
            decode(frames, max_bytes=1 << 27)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def most_accepted(item: bytes, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many items are accepted, found at a hundredth of the limit."""
    low, high = 1, 1 << 14
    with monkeypatch.context() as patched:
        patched.setattr(limits, "MAX_VALUES_BYTES", limits.MAX_VALUES_BYTES // 100)
        while high - low > 1:
            middle = (low + high) // 2
            try:
                check_values(memoryview(padded(item, middle)))
                low = middle
            except MessageTooLarge:
                high = middle
    return 98 * low


@pytest.mark.parametrize("kind", GREEDY)
def test_decoding_takes_at_most_four_times_the_bytes_and_ten_megabytes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = GREEDY[kind]
    # too few to be counted
    few = many(item, (FREE_BODY_BYTES - 1000) // len(item))
    most = padded(item, most_accepted(item, monkeypatch))
    check_values(memoryview(most))
    for body in (extra_of(few), extra_of(most)):
        assert taken_by_decoding(body) < 4 * len(body) + 10_000_000


def test_text_with_one_wide_character_stays_within_the_same_bound() -> None:
    text = b"a" * (MAX_TEXT_BYTES - 4) + "😀".encode()
    texts = many(b"\xdb" + len(text).to_bytes(4, "big") + text, 31)
    body = extra_of(texts)
    assert len(body) > 60 << 20
    assert 2 * len(body) < taken_by_decoding(body) < 4 * len(body) + 10_000_000
    longer = text + b"a"
    with pytest.raises(MessageTooLarge, match="a text of"):
        decode(forged(extra_of(b"\xdb" + len(longer).to_bytes(4, "big") + longer)), max_bytes=LIMIT)


def test_sixteen_megabytes_of_empty_maps_take_no_time_and_no_memory() -> None:
    body = extra_of(many(b"\x80", 1 << 24))
    frames = forged(body)
    before = time.process_time()
    with pytest.raises(MessageTooLarge):
        decode(frames, max_bytes=1 << 26)
    # it took 12 s and more; a digest of 16 MB takes 5 ms
    assert time.process_time() - before < 0.5
    assert taken_by_decoding(body) < 1 << 20


def test_sixty_four_megabytes_are_decoded_within_a_second_of_processor_time() -> None:
    text = b"a" * (MAX_TEXT_BYTES - 4) + "😀".encode()
    body = extra_of(many(b"\xdb" + len(text).to_bytes(4, "big") + text, 31))
    frames = forged(body)
    before = time.process_time()
    decode(frames, max_bytes=1 << 26)
    assert time.process_time() - before < 1.0


def test_no_message_is_sent_that_every_receiver_would_refuse() -> None:
    prompt = Prompt(
        prompt_id="p", tokens=np.zeros(1, np.int32), text="", answer="", verifier="", extra={"x": [{}] * 200_000}
    )
    with pytest.raises(MessageTooLarge, match="extra columns"):
        wire(chunk(1, prompt=prompt))


def test_an_envelope_over_its_limit_is_refused_unread() -> None:
    head, body = wire(chunk())
    decode([head, body], max_bytes=LIMIT)
    wide = packed(msgpack.unpackb(head) | {"more": "x" * 1024})
    with pytest.raises(MalformedMessage, match="at most 1024"):
        decode([wide, body], max_bytes=LIMIT)


def test_large_extra_columns_of_few_values_pass() -> None:
    extra = {"tests": ["1 2 3\n" * 50_000, b"x" * 300_000, *range(60_000)], "map": {str(n): n for n in range(20_000)}}
    prompt = Prompt(prompt_id="p", tokens=np.zeros(1, np.int32), text="", answer="", verifier="", extra=extra)
    assert same(decode(wire(chunk(1, prompt=prompt)), max_bytes=LIMIT)[0], chunk(1, prompt=prompt))


@settings(deadline=None)
@given(chunks())
def test_the_count_of_values_reads_every_message_that_can_be_written(original: TrajectoryChunk) -> None:
    # long enough to be counted; the bytes after it are not
    body = memoryview(bytes(wire(original)[1]) + bytes(FREE_BODY_BYTES))
    check_values(body)
