"""From a configuration to engines: every setting arrives where it acts. None of those given here is
a default."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.algorithms.batching import TrainingSample
from pipeline.config.data_sets import EvaluationSection
from pipeline.config.learning import LearnerSection, ValueSection, algorithm_settings
from pipeline.config.runtime import GenerationSection
from pipeline.config.schema import RunConfig
from pipeline.config.training import ModelSection, ReferenceSection
from protocol.errors import ConfigError
from tests.pipeline.op_config import op_config
from tests.pipeline.runtime.fakes import small_config
from tests.pipeline.runtime.test_prepared import OTHER
from tests.rules import make_rule
from tests.workers.engines.tiny import plain_logprobs
from workers.engines.generation.local.engine import build_local
from workers.engines.generation.vllm.build import check_counts
from workers.engines.model.loading import load_model
from workers.engines.model.optimizer import OptimizerSettings, RateDecay
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.scoring.torch import build_scoring
from workers.engines.training.policy_gradient import ForwardSettings
from workers.engines.training.torch import build_training, forward_settings, optimizer_settings
from workers.engines.value.regression import ValueSettings
from workers.engines.value.torch import value_optimizer_settings, value_settings

MODEL = Path(__file__).resolve().parents[3] / "ops" / "demo" / "tiny_model"
CPU = torch.device("cpu")
TEMPERATURE = 0.6


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    adam = {"weight_decay": 0.02, "betas": (0.8, 0.95), "adam_eps": 1e-6, "max_grad_norm": 0.5}
    sections = {
        "model": ModelSection(path=MODEL, dtype="bfloat16", device="cpu"),
        "algorithm": algorithm_settings(name="ppo", num_minibatches=4, gamma=0.97),
        "generation": GenerationSection(
            temperature=TEMPERATURE, num_slots=5, kv_policy="recompute", stop_token_ids=(9,), device="cpu"
        ),
        "reference": ReferenceSection(micro_batch_tokens=64, device="cpu"),
        "learner": LearnerSection(learning_rate=3e-5, warmup_updates=3, micro_batch_tokens=77, **adam),
        "value": ValueSection(
            learning_rate=4e-5,
            warmup_steps=7,
            micro_batch_tokens=88,
            gae_lambda=0.9,
            clip_low=0.25,
            clip_high=0.75,
            dtype="bfloat16",
            **adam,
        ),
    }
    return small_config(tmp_path).model_copy(update=sections)


def test_the_policy_is_scored_at_the_sampling_temperature_and_warmed_up_by_steps(
    config: RunConfig,
) -> None:
    assert forward_settings(config, CPU) == ForwardSettings(TEMPERATURE, 77, torch.bfloat16)
    assert optimizer_settings(config) == OptimizerSettings(
        learning_rate=3e-5, warmup_steps=12, weight_decay=0.02, betas=(0.8, 0.95), eps=1e-6, max_grad_norm=0.5
    )


def test_optimiser_schedule_and_exceptions_reach_the_learner_in_steps(config: RunConfig) -> None:
    given = {
        "optimizer": "muon",
        "schedule": "warmup-stable-decay",
        "schedule_updates": 20,
        "decay_updates": 5,
        "final_rate_share": 0.1,
        "no_decay": ("lm_head.*",),
    }
    config = config.model_copy(
        update={
            "learner": config.learner.model_copy(update=given),
            "run": config.run.model_copy(update={"num_updates": 30}),
        }
    )
    found = optimizer_settings(config)
    assert (found.name, found.no_decay) == ("muon", ("lm_head.*",))
    assert (found.warmup_steps, found.decay) == (12, RateDecay("warmup-stable-decay", 48, 20, 0.1))


def test_frozen_parameters_are_not_trained(config: RunConfig) -> None:
    frozen = config.learner.model_copy(update={"freeze": ("model.layers.0.*",), "warmup_updates": 0})
    config = config.model_copy(update={"learner": frozen, "model": ModelSection(path=MODEL, device="cpu")})
    backend = build_training(config, MODEL)
    before = {name: tensor.clone() for name, tensor in backend.tensors()}
    ones = np.ones(4, np.float32)
    tokens = np.array([5, 6, 7, 8, 20, 21, 22], np.int32)
    sample = TrainingSample("t.0.0", tokens, 3, np.ones(4, np.bool_), ones, ones * -3, np.zeros(4, np.int32))
    assert backend.step([sample], make_rule()).applied
    moved = {name for name, tensor in backend.tensors() if not torch.equal(tensor, before[name])}
    assert moved and moved == {name for name in before if not name.startswith("model.layers.0.")}


def test_the_critic_is_regressed_with_the_runs_discount_lambda_and_bounds(config: RunConfig) -> None:
    assert value_settings(config, CPU) == ValueSettings(
        micro_batch_tokens=88, gamma=0.97, gae_lambda=0.9, bounds=config.value, autocast=torch.bfloat16
    )
    assert value_optimizer_settings(config) == OptimizerSettings(
        learning_rate=4e-5, warmup_steps=7, weight_decay=0.02, betas=(0.8, 0.95), eps=1e-6, max_grad_norm=0.5
    )


def test_learner_and_reference_agree_with_the_model_at_the_sampling_temperature(config: RunConfig) -> None:
    config = config.model_copy(update={"model": ModelSection(path=MODEL, device="cpu")})
    tokens = np.array([5, 6, 7, 8, 20, 21, 22], np.int32)
    plain = plain_logprobs(load_model(MODEL, torch.float32, CPU), tokens, 4, TEMPERATURE).detach().numpy()
    zeros = np.zeros(4, np.float32)
    sample = TrainingSample("t.0.0", tokens, 3, np.ones(4, np.bool_), zeros, zeros, np.zeros(4, np.int32))
    (learner,) = build_training(config, MODEL).response_logprobs([sample])
    (reference,) = build_scoring(config, MODEL).logprobs([ScoringRequest(tokens, 4)])
    np.testing.assert_allclose(learner, plain, atol=1e-5)
    np.testing.assert_allclose(reference, plain, atol=1e-5)


def test_the_local_engine_has_the_runs_slots_stop_tokens_and_cache_policy(config: RunConfig) -> None:
    engine = build_local(config, MODEL)
    assert engine.num_slots == 5
    assert engine._kv_policy == "recompute"
    assert 9 in np.flatnonzero(engine._is_stop)


def test_penalties_of_a_response_are_refused_where_vllm_counts_by_window(config: RunConfig) -> None:
    sets = [{"name": "a", "files": ["x"], "repetition_penalty": 1.2, "min_p": 0.1}]
    check_counts(config.model_copy(update={"evaluation": EvaluationSection.model_validate({"sets": sets})}))
    sets[0]["frequency_penalty"] = 0.5
    with pytest.raises(ConfigError, match=r"evaluation.sets a.frequency_penalty is 0.5.*set it to 0"):
        check_counts(config.model_copy(update={"evaluation": EvaluationSection.model_validate({"sets": sets})}))


@pytest.mark.parametrize(
    "schedule", [[], ["learner.schedule=cosine", "learner.schedule_updates=4", "learner.warmup_updates=1"]]
)
def test_of_all_that_may_change_in_a_run_the_rate_alone_is_in_a_learner_s_part(
    tmp_path: Path, schedule: list[str]
) -> None:
    given = ["reference.always=true", *schedule]
    former = optimizer_settings(op_config(tmp_path, *given))
    for key, value in OTHER.items():
        now = optimizer_settings(op_config(tmp_path, *given, f"{key}={value}"))
        # a learner sets it by itself: a standby's part may have the former one
        assert replace(now, learning_rate=former.learning_rate) == former, key
