"""The contract of every scoring engine around a model: the results are those of the frozen model
for each request alone, in order."""

from __future__ import annotations

import abc
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from pipeline.process.work import Meter, listening
from protocol.errors import ConfigError, EngineError
from tests.workers.engines.tiny import plain_logprobs, ragged, tiny_model
from workers.engines.scoring.seam import ScoringEngine, ScoringRequest


class ScoringContract(abc.ABC):
    """Subclass with ``make_engine``."""

    budgets: ClassVar[tuple[int, ...]] = (1, 90, 100_000)
    """Tokens of one forward that are tried."""
    atol: ClassVar[float] = 1e-5
    """Largest difference to transformers' own forward in fp32, in nats."""

    @abc.abstractmethod
    def make_engine(self, model: PreTrainedModel, *, temperature: float, micro_batch_tokens: int) -> ScoringEngine:
        """Make an engine around a model that it may keep."""

    @pytest.mark.parametrize("tied", [True, False])
    def test_results_come_in_request_order_and_equal_those_of_each_alone(self, tied: bool) -> None:
        plain = tiny_model(tie_word_embeddings=tied)
        asked = [ScoringRequest(tokens, response) for tokens, response in ragged(np.random.default_rng(4), 15)]
        for budget in self.budgets:
            model = tiny_model(tie_word_embeddings=tied)
            engine = self.make_engine(model, temperature=0.7, micro_batch_tokens=budget)
            got = engine.logprobs(asked)
            assert len(got) == len(asked)
            for request, values in zip(asked, got, strict=True):
                with torch.no_grad():
                    expected = plain_logprobs(plain, request.tokens, request.num_scored, 0.7)
                assert values.dtype == np.float32 and values.shape == (request.num_scored,)
                np.testing.assert_allclose(values, expected.numpy(), atol=self.atol)

    def test_a_chunk_of_a_response_is_scored_as_in_the_whole_response(self) -> None:
        engine = self.make_engine(tiny_model(), temperature=1.0, micro_batch_tokens=256)
        tokens = np.random.default_rng(0).integers(2, 64, 60).astype(np.int32)
        whole, first, second = engine.logprobs(
            [ScoringRequest(tokens, 50), ScoringRequest(tokens[:40], 30), ScoringRequest(tokens, 20)]
        )
        np.testing.assert_allclose(np.concatenate([first, second]), whole, atol=self.atol)
        again = engine.logprobs([ScoringRequest(tokens, 50)])
        np.testing.assert_allclose(again[0], whole, atol=self.atol)

    def test_no_requests_have_no_results(self) -> None:
        assert self.make_engine(tiny_model(), temperature=1.0, micro_batch_tokens=256).logprobs([]) == []

    def test_a_request_without_context_is_refused_and_the_next_one_is_scored(self) -> None:
        engine = self.make_engine(tiny_model(), temperature=1.0, micro_batch_tokens=256)
        good = ScoringRequest(np.array([2, 3], dtype=np.int32), 1)
        with pytest.raises(EngineError, match="at least one token must precede"):
            engine.logprobs([good, ScoringRequest(np.array([2, 3], dtype=np.int32), 2)])
        assert engine.logprobs([good])[0].shape == (1,)

    def test_a_token_that_the_model_does_not_know_is_refused_in_words(self) -> None:
        engine = self.make_engine(tiny_model(), temperature=1.0, micro_batch_tokens=256)
        with pytest.raises(EngineError, match="give a reference model with the policy's vocabulary"):
            engine.logprobs([ScoringRequest(np.array([1, 2, 150000], np.int32), 1)])

    def test_a_temperature_of_zero_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"temperature is 0\.0"):
            self.make_engine(tiny_model(), temperature=0.0, micro_batch_tokens=256)

    def test_a_batch_tells_of_its_pieces_while_it_is_scored(self) -> None:
        engine = self.make_engine(tiny_model(), temperature=1.0, micro_batch_tokens=90)
        asked = [ScoringRequest(tokens, response) for tokens, response in ragged(np.random.default_rng(4), 15)]
        meter = Meter()
        with listening(meter), meter.task("scoring"):
            engine.logprobs(asked)
            assert meter.report().steps >= 3
            assert meter.report().share == pytest.approx(1.0)
