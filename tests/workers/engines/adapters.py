"""Adapters made by hand, without peft, on tiny models."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from workers.engines.model.adapter import Adapter
from workers.engines.training.trained_weights import TrainedModel, WholeForm

RANK = 4
SCALING = 2.0


def make_adapter(model: PreTrainedModel, *, seed: int = 0, size: float = 0.1) -> Adapter:
    """An adapter of all linear layers of the blocks, with numbers of about ``size``."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return size * torch.randn(*shape, generator=generator)

    layers = {
        name.removesuffix(".weight"): (drawn(RANK, tensor.shape[1]), drawn(tensor.shape[0], RANK))
        for name, tensor in TrainedModel(model, WholeForm(model, None)).tensors()
        if name.endswith("_proj.weight")
    }
    return Adapter(layers, SCALING, below=TrainedModel(model, WholeForm(model, None)).tensors)


def merged(adapter: Adapter) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter's model, by the formula."""
    found = {name: tensor.clone() for name, tensor in adapter.below()}
    for layer, (a, b) in adapter.layers.items():
        found[f"{layer}.weight"] += (b @ a) * adapter.scaling
    return found
