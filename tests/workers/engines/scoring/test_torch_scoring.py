"""Scoring in plain torch keeps the scoring contract, and agrees with the learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from pipeline.config.runtime import GenerationSection
from pipeline.config.schema import RunConfig
from pipeline.config.training import DataSection, ModelSection
from protocol.errors import DataError
from tests.rules import make_rule
from tests.workers.engines.scoring_contract import ScoringContract
from tests.workers.engines.tiny import make_samples, tiny_model
from workers.engines.scoring.seam import ScoringEngine, ScoringRequest
from workers.engines.scoring.torch import TorchScoring, build_scoring
from workers.engines.training.torch import build_training


class TestTorchScoring(ScoringContract):
    def make_engine(self, model: PreTrainedModel, *, temperature: float, micro_batch_tokens: int) -> ScoringEngine:
        return TorchScoring(model, temperature=temperature, micro_batch_tokens=micro_batch_tokens)


def run_config(model: Path, **model_settings: Any) -> RunConfig:
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
    assert backend.step(make_samples(), make_rule()).learning_rate == pytest.approx(1 / 20)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    config = run_config(tmp_path / "nowhere")
    for build in (build_training, build_scoring):
        with pytest.raises(DataError, match="nowhere"):
            build(config, tmp_path / "nowhere")
