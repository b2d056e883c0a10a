"""Scoring gives each request what the frozen model alone would give it, in order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config.learning import DataSection, ModelSection
from pipeline.config.running import GenerationSection
from pipeline.config.schema import RunConfig
from protocol.errors import ConfigError, DataError, EngineError
from tests.workers.engines.tiny import make_samples, plain_logprobs, ragged, tiny_model
from workers.engines.scoring import ScoringEngine, ScoringRequest
from workers.engines.torch_scoring import TorchScoring, build_scoring
from workers.engines.torch_training import build_training


def requests(num: int = 15) -> list[ScoringRequest]:
    return [ScoringRequest(tokens, response) for tokens, response in ragged(np.random.default_rng(4), num)]


@pytest.mark.parametrize("micro_batch_tokens", [1, 90, 100_000])
def test_results_come_in_request_order_and_equal_those_of_each_alone(micro_batch_tokens: int) -> None:
    engine: ScoringEngine = TorchScoring(tiny_model(), temperature=0.7, micro_batch_tokens=micro_batch_tokens)
    plain = tiny_model()
    asked = requests()
    got = engine.logprobs(asked)
    assert len(got) == len(asked)
    for request, values in zip(asked, got, strict=True):
        with torch.no_grad():
            expected = plain_logprobs(plain, request.tokens, request.num_scored, 0.7)
        assert values.dtype == np.float32 and values.shape == (request.num_scored,)
        np.testing.assert_allclose(values, expected.numpy(), atol=1e-5)


def test_a_chunk_of_a_response_is_scored_as_in_the_whole_response() -> None:
    engine = TorchScoring(tiny_model(), temperature=1.0, micro_batch_tokens=256)
    tokens = np.random.default_rng(0).integers(2, 64, 60).astype(np.int32)
    whole, first, second = engine.logprobs(
        [ScoringRequest(tokens, 50), ScoringRequest(tokens[:40], 30), ScoringRequest(tokens, 20)]
    )
    np.testing.assert_allclose(np.concatenate([first, second]), whole, atol=1e-5)


def test_no_requests_have_no_results() -> None:
    assert TorchScoring(tiny_model(), temperature=1.0, micro_batch_tokens=64).logprobs([]) == []


def test_a_request_without_context_is_refused() -> None:
    engine = TorchScoring(tiny_model(), temperature=1.0, micro_batch_tokens=64)
    with pytest.raises(EngineError, match="at least one token must come before"):
        engine.logprobs([ScoringRequest(np.array([2, 3], dtype=np.int32), 2)])


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"temperature is 0\.0"):
        TorchScoring(tiny_model(), temperature=0.0, micro_batch_tokens=64)


def run_config(model: Path, **model_settings: str) -> RunConfig:
    return RunConfig(
        model=ModelSection(path=model, device="cpu", **model_settings),
        data=DataSection(train=(Path("train.jsonl"),)),
        generation=GenerationSection(temperature=0.8),
    )


def test_learner_and_reference_built_from_one_configuration_agree(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    config = run_config(tmp_path)
    learner = build_training(config, tmp_path)
    reference = build_scoring(config, tmp_path)
    samples = make_samples()
    scored = reference.logprobs([ScoringRequest(s.tokens, s.response_length) for s in samples])
    for left, right in zip(learner.response_logprobs(samples), scored, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)
    learner.snapshot()(tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "model" / "tokenizer.json").read_text() == "{}"


def test_warm_up_is_counted_in_updates_of_several_steps(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    config = run_config(tmp_path)
    learner = config.learner.model_copy(update={"warmup_updates": 5, "learning_rate": 1.0})
    algorithm = config.algorithm.model_copy(update={"num_minibatches": 4})
    backend = build_training(config.model_copy(update={"learner": learner, "algorithm": algorithm}), tmp_path)
    assert backend.learning_rate == pytest.approx(1 / 20)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    config = run_config(tmp_path / "nowhere")
    for build in (build_training, build_scoring):
        with pytest.raises(DataError, match="nowhere"):
            build(config, tmp_path / "nowhere")


def test_a_token_that_the_model_does_not_know_is_refused_in_words() -> None:
    engine = TorchScoring(tiny_model(), temperature=1.0, micro_batch_tokens=64)
    with pytest.raises(EngineError, match="give a reference model with the policy's vocabulary"):
        engine.logprobs([ScoringRequest(np.array([1, 2, 150000], np.int32), 1)])
