"""One fixed example of everything that travels, and strategies that make others."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
from hypothesis import strategies as st

from protocol.codec import Storable
from protocol.ids import ChunkId, TrajectoryId
from protocol.messages import BASE_VERSION, FilePart, FileRequest, WeightsPart, WeightsRequest
from protocol.trajectory import (
    FinishReason,
    GivenSpan,
    Guidance,
    GuidanceScore,
    Prompt,
    ReferenceScore,
    RewardScore,
    Segment,
    TrajectoryChunk,
    Turn,
    TurnRequest,
    ValueScore,
)


def chunk(num_tokens: int = 100, *, member: int = 3, **changes: Any) -> TrajectoryChunk:
    fields: dict[str, Any] = {
        "id": ChunkId(TrajectoryId("t", 12, member), 1),
        "prompt": Prompt(
            prompt_id="train:17",
            tokens=np.array([5, 9, 150000], np.int32),
            text="2+3=",
            answer="5",
            verifier="arithmetic",
            extra={"level": 2, "source": ["a", "b"]},
        ),
        "context_tokens": np.arange(60, dtype=np.int32),
        "tokens": np.arange(num_tokens, dtype=np.int32),
        "behavior_logprobs": -np.arange(num_tokens, dtype=np.float32) / 8,
        "segments": (Segment(7, num_tokens),),
        "finish_reason": FinishReason.WINDOW,
        "worker": "generator-0#3",
        "created_s": 1750000000.25,
    }
    return TrajectoryChunk(**fields | changes)


def opening_chunk(**changes: Any) -> TrajectoryChunk:
    nothing = {"context_tokens": np.empty(0, np.int32), "segments": (Segment(7, 0),)}
    return chunk(0, id=ChunkId(TrajectoryId("t", 12, 3), 0), finish_reason=FinishReason.TURN, **nothing | changes)


def ended_turn() -> Turn:
    return Turn(tokens=np.empty(0, np.int32), is_done=True, is_truncated=True, reward=0.5, accuracy=0.25)


def request(offset: int = 0) -> WeightsRequest:
    return WeightsRequest(version=4, offset=offset, max_bytes=1 << 20)


def packed(obj: object) -> bytes:
    """Return ``msgpack.packb``'s bytes; the library declares no result."""
    data = msgpack.packb(obj)
    assert isinstance(data, bytes)
    return data


def samples() -> dict[str, Storable]:
    return {
        "chunk": chunk(),
        "opening_chunk": opening_chunk(),
        "environment_chunk": chunk(
            given=(GivenSpan(0, 4), GivenSpan(50, 10)),
            asked=TurnRequest(state=b"\x81\xa1n\x02", sequence=1),
            finish_reason=FinishReason.TURN,
        ),
        "ended_chunk": chunk(finish_reason=FinishReason.TURN, turn=ended_turn()),
        "weights_request": request(4096),
        "weights_part": WeightsPart(
            version=4, offset=8, total_bytes=600, data=np.arange(500, dtype=np.uint16).astype(np.uint8)
        ),
        "weights_base_request": WeightsRequest(version=BASE_VERSION, offset=0, max_bytes=1 << 20),
        "weights_delta_request": WeightsRequest(version=4, offset=0, max_bytes=1 << 20, base=3),
        "weights_delta_part": WeightsPart(
            version=4, offset=0, total_bytes=9, data=np.arange(9, dtype=np.uint8), base=3
        ),
        "weights_apart_request": WeightsRequest(version=4, offset=0, max_bytes=1 << 20, apart=True),
        "weights_apart_part": WeightsPart(
            version=4, offset=8, total_bytes=600, data=np.arange(9, dtype=np.uint8), apart=9
        ),
        "file_request": FileRequest(digest="sha256:" + "0f" * 32, offset=8, max_bytes=1 << 20),
        "file_part": FilePart(
            digest="sha256:" + "0f" * 32, offset=8, total_bytes=600, data=np.arange(9, dtype=np.uint8)
        ),
        "weights_digests_request": WeightsRequest(
            version=4, offset=0, max_bytes=1 << 20, digest="xxh3-128:00ff", wants_digests=True
        ),
        "weights_coming_part": WeightsPart(
            version=4, offset=0, total_bytes=0, data=np.empty(0, np.uint8), is_coming=True
        ),
        "reward": RewardScore(reward=0.75, accuracy=1.0, parts={"correct": 1.0, "overlong": -0.25}, masked=True),
        "reference": ReferenceScore(logprobs=-np.arange(100, dtype=np.float32)),
        "reward_with_guidance": RewardScore(
            reward=-1.0,
            accuracy=0.0,
            guidance=Guidance(gold_text="13", judge_text="step 3 says 14, should be 13", absent="cut"),
        ),
        "guidance": GuidanceScore(
            standard_logprobs=np.linspace(-1.0, 0.0, 5, dtype=np.float32),
            judge_logprobs=np.linspace(-0.5, 0.0, 5, dtype=np.float32),
            guide_version="0f1e2d",
            absent="a reason",
        ),
        "guidance_of_a_right_response": GuidanceScore(
            standard_logprobs=np.linspace(-1.0, 0.0, 5, dtype=np.float32),
            judge_logprobs=np.empty(0, np.float32),
            guide_version="0f1e2d",
        ),
        "value": ValueScore(values=np.arange(3, dtype=np.float32), value_version=2),
        "turn": Turn(
            tokens=np.arange(9, dtype=np.int32),
            text="<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n",
            replaces=True,
            asks=TurnRequest(state=b"\x81\xa1n\x03", sequence=2, max_tokens=50, stop_strings=("\n\n",)),
            counts={"calls_ok": 1},
        ),
        "turn_that_ends": ended_turn(),
    }


def same(one: object, other: object) -> bool:
    """Whether two values agree, arrays bit by bit (NaN included)."""
    if isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray)
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    fields = getattr(one, "__struct_fields__", None)
    if fields is not None:
        return type(one) is type(other) and all(same(getattr(one, name), getattr(other, name)) for name in fields)
    return bool(one == other)


TEXT = st.text(max_size=40)
LANES = st.just("t") | st.integers(0, 10**6).map("e{}".format)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@st.composite
def chunks(draw: st.DrawFn) -> TrajectoryChunk:
    lengths = draw(st.lists(st.integers(1, 200), max_size=30))
    size = sum(lengths)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return TrajectoryChunk(
        id=ChunkId(
            TrajectoryId(draw(LANES), draw(st.integers(0, 2**40)), draw(st.integers(0, 512))), draw(st.integers(0, 99))
        ),
        prompt=Prompt(
            prompt_id=draw(TEXT),
            tokens=rng.integers(-(2**31), 2**31, draw(st.integers(0, 100)), dtype=np.int32),
            text=draw(TEXT),
            answer=draw(TEXT),
            verifier=draw(TEXT),
            extra=draw(st.dictionaries(TEXT, PLAIN, max_size=4)),
        ),
        context_tokens=rng.integers(0, 2**31, draw(st.integers(0, 100)), dtype=np.int32),
        tokens=rng.integers(0, 2**31, size, dtype=np.int32),
        # every bit pattern
        behavior_logprobs=rng.integers(0, 2**32, size, dtype=np.uint32).view(np.float32),
        segments=tuple(Segment(draw(st.integers(0, 2**31)), length) for length in lengths),
        finish_reason=draw(
            st.sampled_from([reason for reason in FinishReason if size or reason is not FinishReason.TURN])
        ),
        response_text=draw(st.none() | TEXT),
        worker=draw(TEXT),
        created_s=draw(st.floats(allow_nan=False)),
    )
