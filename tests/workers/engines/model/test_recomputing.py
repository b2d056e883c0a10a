"""Recomputed layers: the same gradients to the last bit, and as many bytes less as are planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.algorithms.prefixes import SharedPrefixes
from pipeline.preflight.device_memory import device_need
from pipeline.preflight.memory_needs import shape_of
from tests.pipeline.op_config import op_config
from tests.rules import make_rule
from tests.workers.engines.tiny import make_samples, tiny_model
from workers.engines.model.layers import recompute_layers
from workers.engines.model.optimizer import OptimizerSettings
from workers.engines.training.policy_gradient import ForwardSettings
from workers.engines.training.torch import TorchTraining

LAYERS = 4
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 640, "num_hidden_layers": LAYERS}


def training(recomputed: bool | int, dtype: torch.dtype = torch.float32, **forward: Any) -> TorchTraining:
    return TorchTraining(
        tiny_model("qwen2", dtype, **WIDE),
        ForwardSettings(1.0, 100_000, **forward),
        OptimizerSettings(1e-3, eps=1e-6),
        gradient_checkpointing=recomputed,
    )


@pytest.mark.parametrize("recomputed", [1, LAYERS - 1, True])
def test_gradients_of_recomputed_layers_are_the_same_to_the_last_bit(recomputed: bool | int) -> None:
    kept, less = training(False, torch.float64), training(recomputed, torch.float64)
    for seed in range(2):
        one, other = kept.step(make_samples(seed=seed), make_rule()), less.step(make_samples(seed=seed), make_rule())
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    weights = dict(kept.tensors())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in less.tensors())


def test_the_first_layers_are_recomputed_and_more_of_them_on_demand() -> None:
    backend = training(2)
    layers: list[Any] = list(backend._model.model.layers)

    def recomputing() -> list[bool]:
        return [layer.gradient_checkpointing and layer.training for layer in layers]

    assert recomputing() == [True, True, False, False]
    assert not any(module.training for layer in layers for module in layer.children()), "dropout stays off"
    assert not recompute_layers(backend._model, 2) and not recompute_layers(backend._model, 0)
    assert recompute_layers(backend._model) and recomputing() == [True] * LAYERS
    assert not recompute_layers(backend._model), "there is nothing left to save"


def kept_bytes(backend: TorchTraining, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the bytes that a step's forward pass keeps for its backward pass, weights apart."""
    weights = {tuple(parameter.shape) for parameter in backend._model.parameters()}
    weights |= {shape[::-1] for shape in weights}
    kept: dict[int, torch.Tensor] = {}
    found: list[int] = []
    backward = torch.Tensor.backward

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def counted(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
        backward(loss, *args, **kwargs)

    with monkeypatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        patch.setattr(torch.Tensor, "backward", counted)
        backend.step(make_samples(16), make_rule())
    return found[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_recomputing_saves_is_what_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """The plan is from the same to a quarter above: that much is left for what a pass itself takes."""
    autocast = torch.bfloat16 if dtype == "bfloat16" else None
    shape = shape_of(tiny_model("qwen2", **WIDE).config.to_dict(), 1)
    assert shape is not None
    need = device_need(op_config(tmp_path, f"model.dtype={dtype}"), shape)
    tokens = SharedPrefixes.of([sample.tokens for sample in make_samples(16)]).num_tokens
    kept = [kept_bytes(training(recomputed, autocast=autocast), monkeypatch) for recomputed in (0, 1, 3)]
    for recomputed, less in ((1, kept[1]), (3, kept[2])):
        planned = tokens * (need.per_token() - need.per_token(recomputed))
        assert 1.0 <= planned / (kept[0] - less) < 1.25
