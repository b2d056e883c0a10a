"""Ids become parts of ledger keys and file names, so nothing passes for one that a ledger could not
have given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import decode
from protocol.errors import MalformedMessage
from protocol.ids import ChunkId, TrajectoryId, is_worker_name
from tests.protocol.frames import body_of, forged
from tests.protocol.samples import chunk, packed


@given(st.sampled_from(["t", "e0", "e17"]), st.integers(0, 10**15 - 1), st.integers(0, 512), st.integers(0, 99))
def test_an_id_survives_its_text(lane: str, group: int, member: int, index: int) -> None:
    name = ChunkId(TrajectoryId(lane, group, member), index)
    assert ChunkId.parse(str(name)) == name
    assert name.is_well_formed


@pytest.mark.parametrize(
    "text",
    [
        "", "t", "t.1", "t.1.2", "x.1.2.3", "e.1.2.3", "t.1.2.3.4", "t.-1.2.3", "t.1_0.2.3", " t.1.2.3", "t.1.2.3\n",
        "t.1.2.\u0663", "t.\u0661.2.3", "t.1.2.3}", "t:dead.1.2.3", "../t.1.2.3", "t.1.2." + "9" * 99,
    ],
)  # fmt: skip
def test_what_is_no_chunk_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        ChunkId.parse(text)


@given(st.text(max_size=30))
def test_whatever_parses_is_well_formed(text: str) -> None:
    for candidate in (text, f"t.{text}.0.0", f"{text}.1.2.3"):
        try:
            found = ChunkId.parse(candidate)
        except ValueError:
            continue
        assert found.is_well_formed


LANES = ["", "x", "T", "tt", "e", "e-1", "t}:{other", "t\x00", "../../etc", "t.1", "e" + "1" * 40]


@pytest.mark.parametrize("lane", LANES)
def test_a_message_whose_id_would_reach_another_key_is_malformed(lane: str) -> None:
    body = body_of(chunk(1))
    decode(forged(body), max_bytes=1 << 20)
    body["id"]["trajectory"]["lane"] = lane
    with pytest.raises(MalformedMessage, match="chunk id"):
        decode(forged(packed(body)), max_bytes=1 << 20)


@pytest.mark.parametrize("part", ["group", "member"])
@pytest.mark.parametrize("number", [-1, 2**53, 2**63 - 1])
def test_a_number_that_the_ledger_cannot_count_with_is_malformed(part: str, number: int) -> None:
    body = body_of(chunk(1))
    body["id"]["trajectory"][part] = number
    with pytest.raises(MalformedMessage):
        decode(forged(packed(body)), max_bytes=1 << 20)


def test_a_worker_is_named_by_a_plain_word() -> None:
    assert all(map(is_worker_name, ["learner", "generator-0", "generator-far", "reward.host-7_a"]))
    for name in ("", ".", "..", "../x", "a/b", "-x", "a b", "a\n", "a{b}", "x" * 65, "a\x1b[2J"):
        assert not is_worker_name(name)
