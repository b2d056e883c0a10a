"""Any message is legible, also one that nothing here can decode."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import encode, to_blob
from protocol.peek import peek, render
from tests.protocol.samples import chunk, packed, samples


def test_a_chunk_is_shown_with_its_arrays_described() -> None:
    shown = peek(encode(chunk(), sender="generator-0", sequence=7, sent_s=0.0))
    assert shown["envelope"]["sender"] == "generator-0"
    assert shown["checksum_ok"] is True
    assert shown["body"]["tokens:<i4"] == {"dtype": "<i4", "size": 100, "first": list(range(8))}
    assert shown["body"]["prompt"]["tokens:<i4"]["first"] == [5, 9, 150000]


@pytest.mark.parametrize("name", samples())
def test_every_blob_is_legible(name: str) -> None:
    message = samples()[name]
    shown = peek([to_blob(message)])
    assert shown["envelope"]["type"] == shown["body"]["type"] == type(message).__struct_config__.tag


def test_an_unknown_version_and_type_is_still_legible() -> None:
    body = {"dream:<f4": b"\0\0\x80\x3f\0\0\0\x40", "mood:blue": b"\x07", "7": 1}
    frames = [packed({"version": 99, "type": "dream", "mood": "calm"}), packed(body), b"a third frame"]
    shown = peek(frames)
    assert shown["envelope"]["mood"] == "calm"
    assert shown["body"]["dream:<f4"]["first"] == [1.0, 2.0]
    assert shown["body"]["mood:blue"] == {"num_bytes": 1, "hex": "07"}


def test_a_changed_message_is_shown_as_changed() -> None:
    frames = [bytes(frame) for frame in encode(chunk(), sender="g", sequence=0, sent_s=0.0)]
    assert peek([*frames[:-1], b"\0" * len(frames[-1])])["checksum_ok"] is False


@pytest.mark.parametrize("dtype", ["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"])
def test_every_common_dtype_is_shown_and_a_part_of_an_element_is_named(dtype: str) -> None:
    size = np.dtype(dtype).itemsize
    key = f"a:{dtype}"
    assert peek([packed({key: b"\0" * 2 * size})])["body"][key] == {"dtype": dtype, "size": 2, "first": [0, 0]}
    if size > 1:
        assert peek([packed({key: b"\0" * (size + 1)})])["body"][key]["bytes_left_over"] == 1


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_whatever_the_bytes_peek_shows_something(frames: list[bytes]) -> None:
    assert json.loads(render(frames))
    assert render([b"\x91" * 3000, b"\x91" * 3000])


def test_maps_as_keys_of_maps_do_not_grow_with_their_depth() -> None:
    shown = render([b"\x88" * 300 + b"\x01" * 5000])
    assert len(shown) < 1000
    nested = peek([b"\x81" * 60 + b"\xa1k" + b"\x01" * 60])
    assert nested["body"] == {"(dict)": 1}


def test_a_message_that_would_grow_a_hundredfold_is_not_unpacked() -> None:
    assert "unreadable" in peek([b"\xdd\x00\x3f\xff\xff" + b"\x80" * 0x3FFFFF])["body"]


def test_what_is_shown_moves_no_cursor() -> None:
    shown = render([packed({"a\x9b": "\x1b[2J\u202e"})])
    assert not set(shown) & set("\x1b\x9b\u202e")
    assert json.loads(shown)["body"] == {"a\x9b": "\x1b[2J\u202e"}


def test_peek_takes_little_memory_whatever_the_bytes() -> None:
    # 58 bytes: maps as keys of maps; their repr doubled at each level
    doubling = b"\x81" * 26 + b"\x00" * 32
    text = b"\xdb\x00\x1f\xff\xff" + b"a" * 0x1FFFFB + "😀".encode()
    for data, allowed in ((doubling, 1 << 20), (b"\x9f" + text * 15, 4 * 15 * len(text) + (20 << 20))):
        tracemalloc.start()
        try:
            shown = render([data])
            assert tracemalloc.get_traced_memory()[1] < allowed
        finally:
            tracemalloc.stop()
        assert len(shown) < 4_000_000


def test_a_long_text_is_cut_and_its_length_told() -> None:
    shown = peek([packed({"head": "h" * 200_000, "body": {"text": "t" * 200_000}})])
    assert shown["body"]["text"] == "t" * 100_000 + "... (200000 characters)"
    assert len(shown["envelope"]["head"]) < 101_000
