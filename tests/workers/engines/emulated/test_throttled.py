"""A paced engine is the engine that it holds back: the same windows, no sooner than the emulated
device would have them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import pytest

from tests.workers.engines.emulated.test_emulated import TestEmulatedEngine, weights
from tests.workers.engines.generation_contract import GenerationContract, drain, request
from workers.engines.emulated.throttled import throttled
from workers.engines.generation.seam import GenerationEngine


class TestPacedEngine(GenerationContract):
    def bare(
        self, *, num_slots: int, stop: Iterable[int] = (1,), kv_policy: Literal["keep", "recompute"] = "keep"
    ) -> GenerationEngine:
        inner = TestEmulatedEngine().bare(num_slots=num_slots, stop=stop, kv_policy=kv_policy)
        return throttled(inner, decode_base_s=1e-6, decode_slot_s=1e-6)

    def weights(self, version: int) -> Mapping[str, Any]:
        return weights(version)

    def published(self, version: int) -> np.ndarray:
        return TestEmulatedEngine().published(version)


def test_a_turn_lasts_as_long_as_its_steps_and_sequences_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    # the real engine needs no time at all
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    monkeypatch.setattr(time, "monotonic", lambda: 5.0 + sum(slept))
    inner = TestEmulatedEngine().bare(num_slots=4)
    engine = throttled(inner, decode_base_s=0.02, decode_slot_s=0.001)
    engine.load_weights(weights(0), 0)
    for number in range(3):
        engine.submit(request(number))
    drain(engine)
    stats = engine.stats()
    assert stats.num_decode_steps > 0
    assert sum(slept) == pytest.approx(0.02 * stats.num_decode_steps + 0.001 * stats.num_sampled_tokens)
