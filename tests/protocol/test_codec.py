"""The codec: every message comes back the same, and all other input is refused by name."""

from __future__ import annotations

import contextlib
import pickle  # noqa: TID251 -- to show that it is refused
import struct
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import decode, encode, encode_once, from_blob, to_blob
from protocol.errors import (
    ChecksumMismatch,
    MalformedMessage,
    MessageTooLarge,
    UnknownMessage,
    UnknownVersion,
    WireError,
)
from protocol.messages import FilePart, WeightsPart
from protocol.trajectory import (
    Guidance,
    GuidanceScore,
    Prompt,
    ReferenceScore,
    RewardScore,
    Score,
    Segment,
    TrajectoryChunk,
    ValueScore,
)
from tests.protocol.frames import LIMIT, body_of, forged, wire
from tests.protocol.samples import chunk, chunks, packed, request, same, samples


@given(chunks())
def test_a_chunk_survives_the_wire_and_the_ledger_bit_by_bit(original: TrajectoryChunk) -> None:
    frames = encode(original, sender="g", sequence=3, sent_s=1.5)
    message, envelope = decode(frames, max_bytes=LIMIT)
    assert same(message, original)
    assert (envelope.sender, envelope.sequence, envelope.sent_s, envelope.version) == ("g", 3, 1.5, 1)
    assert same(from_blob(to_blob(original), TrajectoryChunk), original)


@given(chunks())
def test_what_is_encoded_once_is_the_same_on_every_link_and_in_the_ledger(original: TrajectoryChunk) -> None:
    once = encode_once(original)
    for sequence in range(2):
        assert encode(once, sender="g", sequence=sequence, sent_s=1.5) == encode(
            original, sender="g", sequence=sequence, sent_s=1.5
        )
    assert to_blob(once) == to_blob(original)


@pytest.mark.parametrize("name", samples())
def test_everything_has_a_blob_form(name: str) -> None:
    original = samples()[name]
    assert same(from_blob(to_blob(original), type(original)), original)


def test_a_blob_can_be_read_as_any_of_a_union() -> None:
    score = from_blob(to_blob(RewardScore(reward=1.0, accuracy=1.0)), Score)  # type: ignore[arg-type]
    assert isinstance(score, RewardScore)


def test_a_blob_of_another_type_is_refused() -> None:
    with pytest.raises(UnknownMessage, match="reward"):
        from_blob(to_blob(RewardScore(reward=1.0, accuracy=1.0)), ReferenceScore)


@pytest.mark.parametrize("guidance", [None, Guidance(), Guidance(judge_text="2 is wrong")])
def test_a_reward_without_guidance_has_the_fields_that_it_always_had(guidance: Guidance | None) -> None:
    score = RewardScore(reward=1.0, accuracy=1.0, guidance=guidance)
    assert from_blob(to_blob(score), RewardScore) == score
    body = msgpack.unpackb(to_blob(score))["body"]
    assert list(body)[:5] == ["type", "reward", "accuracy", "parts", "masked"]
    assert list(body)[5:] == ([] if guidance is None else ["guidance"])


def test_guidance_of_two_lengths_is_neither_written_nor_read() -> None:
    def of(standard: int, judge: int) -> GuidanceScore:
        arrays = (np.zeros(size, np.float32) for size in (standard, judge))
        return GuidanceScore(standard_logprobs=next(arrays), judge_logprobs=next(arrays), guide_version="v")

    for standard, judge in ((3, 3), (3, 0), (0, 3), (0, 0)):
        assert from_blob(to_blob(of(standard, judge)), GuidanceScore).standard_logprobs.size == standard
    with pytest.raises(MalformedMessage, match="3 standard and 2 judge"):
        to_blob(of(3, 2))


def test_decoded_arrays_are_aligned_and_cannot_be_written() -> None:
    for decoded in (decode(wire(chunk(1000)), max_bytes=LIMIT)[0], from_blob(to_blob(chunk(1000)), TrajectoryChunk)):
        assert isinstance(decoded, TrajectoryChunk)
        for array in (decoded.tokens, decoded.behavior_logprobs, decoded.context_tokens, decoded.prompt.tokens):
            assert array.flags.aligned
            assert not array.flags.writeable


def test_empty_and_strided_arrays_travel() -> None:
    original = chunk(500, context_tokens=np.zeros(0, np.int32), tokens=np.arange(1000, dtype=np.int32)[::2])
    message, _ = decode(wire(original), max_bytes=LIMIT)
    assert isinstance(message, TrajectoryChunk)
    assert message.tokens.tolist() == list(range(0, 1000, 2))
    assert (message.context_tokens.size, message.context_tokens.dtype) == (0, np.dtype("<i4"))
    assert not message.context_tokens.flags.writeable
    part = WeightsPart(version=1, offset=0, total_bytes=9, data=np.arange(9, dtype=np.uint8)[::3])
    assert same(from_blob(to_blob(part), WeightsPart), part)


def test_bytes_of_weights_travel_apart_from_where_they_lie_to_where_they_are_read() -> None:
    version = np.arange(3000, dtype=np.uint16).view(np.uint8)
    part = WeightsPart(version=1, offset=1000, total_bytes=6000, data=version[1000:3000], apart=2000)
    *head, apart = wire(part)
    assert isinstance(apart, memoryview) and np.shares_memory(np.frombuffer(apart, np.uint8), version)
    assert sum(map(len, head)) < 300
    message, _ = decode([*head, apart], max_bytes=LIMIT)
    assert isinstance(message, WeightsPart) and same(message, part)
    assert np.shares_memory(message.data, version), "no end copies them"
    with pytest.raises(MessageTooLarge):
        decode([*head, apart], max_bytes=2000)


@pytest.mark.parametrize("apart", [None, b"", b"12", b"1234"])
def test_a_part_without_exactly_the_bytes_that_it_names_is_malformed(apart: bytes | None) -> None:
    frames = wire(WeightsPart(version=1, offset=0, total_bytes=9, data=np.arange(3, dtype=np.uint8), apart=3))
    with pytest.raises(MalformedMessage, match="a part with 0 bytes in its body"):
        decode(frames[:2] if apart is None else [*frames[:2], apart], max_bytes=LIMIT)
    whole = wire(WeightsPart(version=1, offset=0, total_bytes=9, data=np.arange(3, dtype=np.uint8)))
    with pytest.raises(MalformedMessage):
        decode([*whole, apart or b"123"], max_bytes=LIMIT)
    behind = WeightsPart(version=1, offset=8, total_bytes=9, data=np.arange(1, dtype=np.uint8), apart=1)
    with pytest.raises(MalformedMessage, match="not within a file of 9 bytes"):
        decode([*forged({"type": "weights_part", "version": 1, "offset": 8, "total_bytes": 9, "data:|u1": b"",
                         "apart": 2}, type_="weights_part"), b"12"], max_bytes=LIMIT)  # fmt: skip
    assert same(decode(wire(behind), max_bytes=LIMIT)[0], behind)


@pytest.mark.parametrize("cls", [Prompt, TrajectoryChunk, ReferenceScore, ValueScore, WeightsPart, FilePart])
def test_the_name_of_every_array_field_ends_in_its_dtype(cls: type) -> None:
    vectors = [field for field in msgspec.structs.fields(cls) if hasattr(field.type, "dtype")]
    assert vectors
    assert all(field.encode_name == f"{field.name}:{field.type.dtype.str}" for field in vectors)


def test_another_version_is_refused_whatever_else_changed() -> None:
    with pytest.raises(UnknownVersion, match="version 2"):
        decode(forged({}, version=2), max_bytes=LIMIT)
    with pytest.raises(UnknownVersion, match="version 9"):
        decode([packed({"version": 9, "sequence": "now text"}), b""], max_bytes=LIMIT)
    with pytest.raises(UnknownVersion):
        from_blob(packed({"version": 3, "content": b""}), TrajectoryChunk)


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_changed_bit_of_the_body_is_noticed(at: int, bit: int) -> None:
    head, body = wire(chunk())
    changed = bytearray(body)
    changed[at % len(changed)] ^= 1 << bit
    with pytest.raises(ChecksumMismatch):
        decode([head, bytes(changed)], max_bytes=LIMIT)


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(UnknownMessage, match="gradient"):
        decode(forged({"type": "gradient"}, type_="gradient"), max_bytes=LIMIT)
    # a score is for the ledger, no message
    with pytest.raises(UnknownMessage, match="reward"):
        decode(forged({"type": "reward", "reward": 1.0, "accuracy": 1.0}, type_="reward"), max_bytes=LIMIT)


@pytest.mark.parametrize("keep", [0, 1, 40, 400])
def test_a_truncated_body_is_malformed(keep: int) -> None:
    with pytest.raises(MalformedMessage):
        decode(forged(wire(chunk())[1][:keep]), max_bytes=LIMIT)


def test_missing_and_further_frames_are_malformed() -> None:
    frames = wire(chunk())
    for count in range(len(frames)):
        with pytest.raises(WireError):
            decode(frames[:count], max_bytes=LIMIT)
    for more in (1, 100):
        with pytest.raises(MalformedMessage, match="frames"):
            decode(frames + [b""] * more, max_bytes=LIMIT)


def test_a_pickle_is_refused_unopened() -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("a pickle was opened",))

    data = pickle.dumps(Trap())
    for frames in ([data], [data, data], forged(data)):
        with pytest.raises(MalformedMessage):
            decode(frames, max_bytes=LIMIT)
    with pytest.raises(MalformedMessage):
        from_blob(data, TrajectoryChunk)


def test_a_message_over_the_limit_is_refused_before_its_envelope_is_read() -> None:
    with pytest.raises(MessageTooLarge, match="1001 bytes"):
        decode([b"\xc1", b"x" * 1000], max_bytes=1000)
    decode(wire(chunk()), max_bytes=sum(map(len, wire(chunk()))))


BAD_ARRAYS = {
    "half an element": b"12345",
    "text": "1234",
    "empty text": "",
    "list of numbers": [1],
    "empty list": [],
    "number": 1,
    "truth": False,
    "map": {"dtype": "<i4"},
    "nothing": None,
    "extension": msgpack.ExtType(4, b"1234"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_an_array_that_is_not_whole_elements_in_bytes_is_malformed(name: str) -> None:
    body = body_of(chunk(1))
    decode(forged(body | {"tokens:<i4": b"1234"}), max_bytes=LIMIT)
    with pytest.raises(MalformedMessage):
        decode(forged(body | {"tokens:<i4": BAD_ARRAYS[name]}), max_bytes=LIMIT)


def test_an_array_under_another_dtype_is_not_taken_for_ours() -> None:
    body = body_of(chunk(1))
    body["tokens:<u4"] = body.pop("tokens:<i4")
    with pytest.raises(MalformedMessage, match="tokens:<i4"):
        decode(forged(body), max_bytes=LIMIT)


def test_what_is_told_of_a_body_quotes_little_of_it() -> None:
    body = body_of(chunk()) | {"finish_reason": "x" * 1_000_000}
    with pytest.raises(MalformedMessage) as told:
        decode(forged(body), max_bytes=LIMIT)
    assert len(str(told.value)) < 500


INCONSISTENT = {
    "segments that do not sum": {"segments": (Segment(1, 5), Segment(2, 94))},
    "an empty segment": {"segments": (Segment(1, 100), Segment(2, 0))},
    "a negative segment": {"segments": (Segment(1, 101), Segment(2, -1))},
    "too few log-probs": {"behavior_logprobs": np.zeros(99, np.float32)},
}
UNFIT_ARRAYS = {
    "log-probs in double precision": {"behavior_logprobs": np.zeros(100)},
    "long tokens": {"tokens": np.zeros(100, np.int64)},
    "context as objects": {"context_tokens": np.zeros(60, object)},
    "big-endian tokens": {"tokens": np.zeros(100, ">i4")},
    "tokens in rows": {"tokens": np.zeros((100, 1), np.int32)},
}


@pytest.mark.parametrize("name", INCONSISTENT)
def test_a_chunk_that_contradicts_itself_is_neither_written_nor_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = chunk(100, **INCONSISTENT[name])
    for write in (wire, to_blob):
        with pytest.raises(MalformedMessage):
            write(bad)
    with monkeypatch.context() as patch:
        patch.setattr("protocol.codec.check_consistency", lambda obj: None)
        frames, blob = wire(bad), to_blob(bad)
    with pytest.raises(MalformedMessage):
        decode(frames, max_bytes=LIMIT)
    with pytest.raises(MalformedMessage):
        from_blob(blob, TrajectoryChunk)


@pytest.mark.parametrize("name", UNFIT_ARRAYS)
def test_an_array_of_another_dtype_or_shape_is_never_written(name: str) -> None:
    for write in (wire, to_blob):
        with pytest.raises(MalformedMessage, match=r"dtype|dimensions"):
            write(chunk(100, **UNFIT_ARRAYS[name]))


def test_what_cannot_travel_is_refused_at_the_sender() -> None:
    for extra in ({"x": object()}, {"x": {1, 2}.__iter__()}, {"x": [np.zeros(2)]}, {"x": np.float32(1)}, {"x": 2**70}):
        prompt = Prompt(prompt_id="p", tokens=np.zeros(1, np.int32), text="", answer="", verifier="", extra=extra)
        with pytest.raises(MalformedMessage, match="cannot be encoded"):
            wire(chunk(1, prompt=prompt))
    with pytest.raises(UnknownMessage):
        encode(RewardScore(reward=1.0, accuracy=1.0), sender="", sequence=0, sent_s=0.0)  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_random_frames_raise_nothing_but_wire_errors(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames, max_bytes=1000)


@given(st.binary(max_size=400))
def test_a_random_body_with_a_right_checksum_raises_nothing_but_wire_errors(body: bytes) -> None:
    with pytest.raises(WireError):
        decode(forged(body), max_bytes=1000)
    with pytest.raises(WireError):
        from_blob(body, TrajectoryChunk)


@settings(max_examples=300)
@given(st.data())
def test_a_mutated_message_is_read_or_refused_and_never_crashes(data: st.DataObject) -> None:
    frames = wire(data.draw(st.sampled_from([chunk(), chunk(2), request()])))
    body = bytearray(frames[1])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        action = data.draw(st.sampled_from(["set", "delete", "insert"]))
        if action == "set":
            body[at] = data.draw(st.integers(0, 255))
        elif action == "delete" and len(body) > 1:
            del body[at]
        else:
            body.insert(at, data.draw(st.integers(0, 255)))
    type_ = msgpack.unpackb(frames[0])["type"]
    with contextlib.suppress(WireError):
        decode(forged(bytes(body), type_=type_), max_bytes=LIMIT)


@given(chunks(), st.integers(0, 2**63 - 1))
def test_the_plain_msgpack_package_reads_every_message(original: TrajectoryChunk, sequence: int) -> None:
    frames = encode(original, sender="g", sequence=sequence, sent_s=0.0)
    assert msgpack.unpackb(frames[0])["sequence"] == sequence
    body = msgpack.unpackb(frames[1], strict_map_key=False)
    assert body["prompt"]["text"] == original.prompt.text
    assert list(struct.unpack(f"<{original.tokens.size}i", body["tokens:<i4"])) == original.tokens.tolist()
    assert msgpack.unpackb(to_blob(original), strict_map_key=False)["body"]["worker"] == original.worker


def test_fields_that_a_newer_peer_appended_are_ignored() -> None:
    body = body_of(chunk()) | {"mood": "good", "moods:<i4": b"1234"}
    message, _ = decode(forged(body, hops=3), max_bytes=LIMIT)
    assert same(message, chunk())


def test_fields_that_an_older_peer_does_not_write_take_their_defaults() -> None:
    body = body_of(chunk(1))
    for name in ("response_text", "worker", "created_s"):
        del body[name]
    message, _ = decode(forged(body), max_bytes=LIMIT)
    assert isinstance(message, TrajectoryChunk)
    assert (message.response_text, message.worker, message.created_s) == (None, "", 0.0)


def test_a_body_of_another_type_than_its_envelope_says_is_malformed() -> None:
    with pytest.raises(MalformedMessage):
        decode(forged(msgspec.msgpack.encode(request()), type_="chunk"), max_bytes=LIMIT)
