"""Claims about settings that save memory: they change no weight's type, and no number that they
must not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline.algorithms.batching import TrainingSample
from pipeline.config.schema import RunConfig
from tests.pipeline.op_config import op_config
from tests.rules import make_rule
from tests.workers.engines.generation_contract import bytes_of
from tests.workers.engines.tiny import VOCABULARY, make_samples, tiny_model
from tests.workers.engines.value.test_ranked_value import samples
from workers.engines.build import build_training_backend, build_value_engine
from workers.engines.model.loading import load_value_model
from workers.engines.model.optimizer import OptimizerSettings
from workers.engines.model.packed import PackedTokens
from workers.engines.model.weights_file import view_weights
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.scoring.torch import TorchScoring
from workers.engines.training.policy_gradient import ForwardSettings
from workers.engines.training.seam import StepResult, TrainingBackend
from workers.engines.training.torch import TorchTraining
from workers.engines.value.regression import ValueSettings
from workers.engines.value.seam import ValueSample, ValueStepResult
from workers.engines.value.torch import TorchValue

BACKENDS = ["torch", "fsdp2", "deepspeed"]
RATE = 1e-5
CPU = torch.device("cpu")


def config_of(folder: Path, *overrides: str, dtype: torch.dtype = torch.float32) -> RunConfig:
    """A run on a tiny model whose files have ``dtype``."""
    tiny_model(dtype=dtype, num_hidden_layers=4).save_pretrained(folder / "tiny")
    return op_config(
        folder,
        f"model.path={folder / 'tiny'}",
        f"learner.learning_rate={RATE}",
        "learner.warmup_updates=0",
        "learner.weight_decay=0.0",
        *overrides,
    )


def weights(backend: TrainingBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.tensors()}


def kept_bytes(step: Callable[[], StepResult | ValueStepResult]) -> int:
    """Return the bytes that a step's forward passes keep for their backward passes."""
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        assert step().applied
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpointing_keeps_less_for_the_backward_pass_and_makes_the_same_step(tmp_path: Path, backend: str) -> None:
    sizes: list[int] = []
    stepped: list[dict[str, torch.Tensor]] = []
    for setting in ("false", "true"):
        made = build_training_backend(
            config_of(tmp_path, f"model.gradient_checkpointing={setting}", f"learner.backend={backend}")
        )
        sizes.append(kept_bytes(partial(made.step, make_samples(), make_rule())))
        stepped.append(weights(made))
    assert sizes[1] < sizes[0] / 4
    for name, tensor in stepped[0].items():
        torch.testing.assert_close(stepped[1][name], tensor, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpointing_of_the_critic_keeps_less_and_learns_the_same_values(tmp_path: Path, backend: str) -> None:
    sizes: list[int] = []
    values: list[np.ndarray] = []
    asked = [ScoringRequest(sample.tokens, sample.response_length) for sample in samples(9)]
    for setting in ("false", "true"):
        settings = [f"value.gradient_checkpointing={setting}", f"value.backend={backend}", "value.learning_rate=0.01"]
        made = build_value_engine(config_of(tmp_path, "algorithm.name=ppo", "value.warmup_steps=0", *settings))
        # the head is 0 at first, and no gradient passes through it
        assert made.step(samples(0)).applied
        sizes.append(kept_bytes(partial(made.step, samples(1))))
        values.append(np.concatenate(made.values(asked)))
    assert sizes[1] < sizes[0] / 4
    assert np.abs(values[0]).max() > 0.01
    np.testing.assert_allclose(values[1], values[0], atol=1e-5)


@pytest.mark.parametrize("published", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_compute_has_fp32_masters_and_state_in_which_small_steps_add_up(
    tmp_path: Path, backend: str, published: str
) -> None:
    config = config_of(
        tmp_path, "model.dtype=bfloat16", f"weights.dtype={published}", f"learner.backend={backend}",
        dtype=torch.bfloat16,
    )  # fmt: skip
    made = build_training_backend(config)
    start = weights(made)
    assert {tensor.dtype for tensor in start.values()} == {torch.float32}
    for _ in range(8):
        assert made.step(make_samples(), make_rule()).applied
    name = "model.layers.0.mlp.down_proj.weight"
    moved = (weights(made)[name] - start[name]).abs()
    assert float(moved.median()) > 5 * RATE, "eight steps of about the learning rate"
    # a step is far less than half a place of bf16
    once = (start[name] + RATE).bfloat16() == start[name].bfloat16()
    assert float(once.float().mean()) > 0.8
    made.snapshot()(tmp_path / "checkpoint")
    files: dict[str, Any] = {
        **load_file(tmp_path / "checkpoint" / "model" / "model.safetensors"),
        **load_file(tmp_path / "checkpoint" / "optimizer.safetensors"),
    }
    assert {tensor.dtype for label, tensor in files.items() if not label.startswith("rng/")} == {torch.float32}
    sent = view_weights(bytes_of(made.publication()))
    assert {str(sent[name].dtype) for name in sent} == {f"torch.{published}"}


def counted(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> int:
    """Return how many tokens went through models while ``act`` ran."""
    sizes: list[int] = []
    at = PackedTokens.at

    def count(*args: Any) -> PackedTokens:
        packed = at(*args)
        sizes.append(packed.tokens.numel())
        return packed

    with monkeypatch.context() as patch:
        patch.setattr(PackedTokens, "at", count)
        act()
    return sum(sizes)


def grouped(num_groups: int = 3) -> list[TrainingSample]:
    """Make groups, with a prompt of 30 tokens each, in no order."""
    rng = np.random.default_rng(0)
    made = list[TrainingSample]()
    for number in range(num_groups):
        prompt = rng.integers(2, VOCABULARY, 30, dtype=np.int32)
        for member, sample in enumerate(make_samples(num=4)):
            response = rng.integers(2, VOCABULARY, sample.response_length, dtype=np.int32)
            tokens = np.concatenate([prompt, response])
            made.append(replace(sample, name=f"t.{number}.{member}", tokens=tokens, prompt_length=30))
    return [made[at] for at in rng.permutation(len(made))]


def test_a_step_computes_each_groups_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = grouped()
    responses = sum(sample.response_length for sample in samples)
    # one group a micro-batch
    backend = TorchTraining(tiny_model(), ForwardSettings(1.0, 30 + responses // 3), OptimizerSettings(1e-4))
    assert counted(monkeypatch, lambda: backend.step(samples, make_rule())) <= 3 * 30 + responses
    assert counted(monkeypatch, lambda: backend.response_logprobs(samples)) <= 3 * 30 + responses
    assert backend.environment()["prefixes"] == "shared", "the update log says how numbers were made"


def test_windows_of_a_response_take_the_tokens_of_one_pass_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    samples, num_tokens = list[TrainingSample](), 0
    for number, base in enumerate(make_samples(3)):
        whole = rng.integers(2, VOCABULARY, 20 + 64, dtype=np.int32)
        num_tokens += whole.size
        for window in range(8):
            row = np.resize(base.behavior_logprobs, 8)
            samples.append(
                TrainingSample(
                    name=f"t.{number}.0.{window}",
                    tokens=whole[: 20 + 8 * (window + 1)],
                    prompt_length=20 + 8 * window,
                    loss_mask=np.ones(8, np.bool_),
                    advantages=row,
                    behavior_logprobs=row,
                    versions=np.zeros(8, np.int32),
                )
            )
    backend = TorchTraining(tiny_model(), ForwardSettings(1.0, 100), OptimizerSettings(1e-4))
    assert counted(monkeypatch, lambda: backend.step(samples, make_rule())) == num_tokens


def test_reference_and_value_workers_compute_a_prompt_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [ScoringRequest(sample.tokens, sample.response_length) for sample in grouped(1)]
    wanted = 30 + sum(request.num_scored for request in asked)
    reference = TorchScoring(tiny_model(), temperature=1.0, micro_batch_tokens=wanted)
    assert counted(monkeypatch, lambda: reference.logprobs(asked)) == wanted
    tiny_model().save_pretrained(tmp_path / "m")
    model = load_value_model(tmp_path / "m", torch.float32, CPU)
    engine = TorchValue(model, ValueSettings(micro_batch_tokens=wanted), OptimizerSettings(1e-4))
    assert counted(monkeypatch, lambda: engine.values(asked)) == wanted
    responses = [
        ValueSample(f"t.0.{n}", one.tokens, 30, np.zeros(one.num_scored, np.float32), 1.0)
        for n, one in enumerate(asked)
    ]
    assert counted(monkeypatch, lambda: engine.step(responses)) == wanted
