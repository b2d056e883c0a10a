"""The engine of recorded responses: it reads them window by window. The engine inside of it samples
for evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.emulated.generation import EmulatedEngine
from ops.emulated.law import LengthLaw, TokenLaw
from ops.emulated.weights import TENSOR, make_tensor, publish_tensors
from pipeline.data.responses import RecordedResponse
from pipeline.weights.tensorfile import Publication
from protocol.errors import EngineError, WeightsRejected
from protocol.trajectory import FinishReason, Segment
from tests.workers.engines.generation_contract import EMPTY, GenerationContract, bytes_of, continued, request
from tests.workers.engines.tiny import VOCABULARY
from workers.engines.generation.recorded import RecordedEngine
from workers.engines.generation.seam import GenerationEngine, WindowRequest

LAW = LengthLaw("lognormal", median_tokens=14.0, tail=0.8)


def emulated_weights(version: int) -> Mapping[str, Any]:
    return {TENSOR: make_tensor(f"{version:016x}", 8)}


def emulated(num_slots: int, stop: Iterable[int] = (1,)) -> EmulatedEngine:
    tokens = TokenLaw.of(VOCABULARY, stop)
    return EmulatedEngine(
        num_slots=num_slots, lengths=LAW, tokens=tokens, vocabulary=VOCABULARY, positions=512, num_weights=8
    )


class TestEngineInside(GenerationContract):
    """A request without a recorded response is sampled as without this engine."""

    def bare(
        self, *, num_slots: int, stop: Iterable[int] = (1,), kv_policy: Literal["keep", "recompute"] = "keep"
    ) -> GenerationEngine:
        return RecordedEngine(1, emulated(num_slots, stop))

    def weights(self, version: int) -> Mapping[str, Any]:
        return emulated_weights(version)

    def published(self, version: int) -> np.ndarray:
        return bytes_of(publish_tensors(emulated_weights(version).items()))


def recorded(size: int, reason: FinishReason = FinishReason.STOP) -> RecordedResponse:
    return RecordedResponse(np.arange(2, 2 + size, dtype="<i4"), reason)


def reading(number: int = 0, *, of: RecordedResponse, window: int = 24) -> WindowRequest:
    return replace(request(number, window=window), recorded=of)


def ready(sampling: GenerationEngine | None = None) -> RecordedEngine:
    engine = RecordedEngine(4, sampling)
    engine.load_weights({} if sampling is None else emulated_weights(0), 0)
    return engine


@given(size=st.integers(1, 40), window=st.integers(1, 41), reason=st.sampled_from(["stop", "length"]))
def test_the_windows_of_a_response_are_all_of_it_in_order(size: int, window: int, reason: str) -> None:
    of, engine = recorded(size, FinishReason(reason)), ready()
    asked, read = reading(of=of, window=window), list[int]()
    while True:
        engine.submit(asked)
        assert engine.stats().num_live == 1
        (got,) = engine.advance(1)
        assert got.tokens.size <= window
        assert got.tokens.dtype == np.int32
        assert got.behavior_logprobs.tolist() == [0.0] * got.tokens.size
        read += got.tokens.tolist()
        if got.finish_reason.is_final:
            break
        assert got.finish_reason is FinishReason.WINDOW
        asked = continued(asked, got)
    assert got.finish_reason is of.finish_reason
    assert read == of.tokens.tolist()
    assert engine.stats().num_sampled_tokens == size
    assert engine.stats().num_decode_steps == -(-size // window), "a turn that reads is a step"


def test_a_window_has_the_version_that_is_served_as_it_is_read() -> None:
    engine = ready()
    engine.submit(reading(of=recorded(3)))
    engine.load_weights({}, 7)
    (window,) = engine.advance(1)
    assert window.segments == (Segment(7, 3),)
    assert engine.policy_version == 7


def test_recorded_windows_come_at_once_beside_what_is_sampled() -> None:
    engine = ready(emulated(4))
    engine.submit(request(0))
    engine.submit(reading(1, of=recorded(30)))
    engine.submit(reading(2, of=recorded(5)))
    assert engine.stats().num_live == 3
    assert [window.tokens.size for window in engine.advance(1)] == [24, 5]
    assert engine.stats().num_live == 1, "the model goes on with the evaluation"
    assert [window.trajectory for window in engine.advance(64)] == [request(0).trajectory]


def test_a_cut_forgets_what_was_not_read_and_reads_none_of_it_later() -> None:
    engine = ready()
    engine.submit(reading(0, of=recorded(5)))
    assert engine.cut() == []
    engine.submit(reading(1, of=recorded(5)))
    engine.forget(reading(1, of=recorded(5)).trajectory)
    assert engine.advance(1) == []
    assert engine.stats().num_sampled_tokens == 0


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (request(), "has no held-out prompts"),
        (reading(of=recorded(41)), "has 41 tokens, but at most 40"),
        (replace(reading(of=recorded(3)), response_tokens=np.array([9], np.int32)), "has changed since the run began"),
        (
            replace(reading(of=recorded(1)), response_tokens=np.array([2], np.int32)),
            "are not the start of its recorded response",
        ),
        (replace(reading(of=recorded(3)), prompt_tokens=EMPTY), "an empty prompt"),
    ],
)
def test_requests_that_cannot_be_read_are_refused(asked: WindowRequest, words: str) -> None:
    engine = ready()
    with pytest.raises(EngineError, match=words):
        engine.submit(asked)
    assert engine.stats().num_live == 0


def test_a_response_is_live_once_and_only_after_a_first_version() -> None:
    engine, asked = RecordedEngine(4), reading(of=recorded(3))
    engine.submit(asked)
    with pytest.raises(EngineError, match="is live already"):
        engine.submit(asked)
    with pytest.raises(EngineError, match="before its first weights"):
        engine.advance(1)


def test_without_a_model_there_are_no_weights_to_take(tmp_path: Path) -> None:
    engine, data = RecordedEngine(4), np.zeros(8, np.uint8)
    assert engine.view_weights(data, tmp_path) == {}
    assert engine.unserved({}) == []
    with pytest.raises(WeightsRejected, match="an engine without a model"):
        _: Publication = engine.merge_weights(data, data, "00", dtype="float32")
