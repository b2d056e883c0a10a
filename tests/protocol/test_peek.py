"""Any message is legible, also one that nothing here can decode."""

from __future__ import annotations

import json

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.arrays import DTYPES
from protocol.codec import encode, to_blob
from protocol.peek import peek, render
from tests.protocol.samples import chunk, samples


def test_a_chunk_is_shown_with_its_arrays_described() -> None:
    shown = peek(encode(chunk(), sender="generator-0", sequence=7, sent_s=0.0))
    assert shown["envelope"]["sender"] == "generator-0"
    assert shown["checksum_ok"] is True
    tokens = shown["body"]["tokens"]
    assert (tokens["dtype"], tokens["shape"], tokens["first"]) == ("<i4", [100], list(range(8)))
    assert shown["body"]["prompt"]["tokens"]["first"] == [5, 9, 150000]


@pytest.mark.parametrize("name", samples())
def test_every_blob_is_legible(name: str) -> None:
    shown = peek([to_blob(samples()[name])])
    assert shown["envelope"]["type"] == name == shown["body"]["type"]


def test_an_unknown_version_and_type_is_still_legible() -> None:
    body = {"dream": ["<f4", [2], 0], "7": 1}
    frames = [
        msgpack.packb({"version": 99, "type": "dream", "mood": "calm"}),
        msgpack.packb(body),
        b"\0\0\x80\x3f\0\0\0\x40",
    ]
    shown = peek(frames)
    assert shown["envelope"]["mood"] == "calm"
    assert shown["body"]["dream"]["first"] == [1.0, 2.0]


def test_a_changed_message_is_shown_as_changed() -> None:
    frames = [bytes(frame) for frame in encode(chunk(), sender="g", sequence=0, sent_s=0.0)]
    assert peek([*frames[:-1], b"\0" * len(frames[-1])])["checksum_ok"] is False


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_that_travels_is_shown(dtype: str) -> None:
    size = DTYPES[dtype].itemsize
    assert peek([msgpack.packb({"a": [dtype, [2], b"\0" * 2 * size]})])["body"]["a"]["first"] == [0, 0]


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_whatever_the_bytes_peek_shows_something(frames: list[bytes]) -> None:
    assert json.loads(render(frames))
    assert render([b"\x91" * 3000, b"\x91" * 3000])
