"""Puts published weights into a model, all of them or none, by their Hugging Face names.

Weights are not copied if their bytes are lasting and they have the model's type and device. The
model computes with them where they lie, which takes no time and, on one host, no memory. Other
weights are copied.

Everything is checked before anything is written. Tied tensors (usually ``lm_head.weight`` and the
embedding) are published once, under the name that owns them. A second name may be present, with the
same values."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workers.engines.model.check_weights import fit_weights
from workers.engines.model.weights_file import PublishedWeights


def replace_weights(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make ``tensors`` the parameters and persistent buffers of ``model``, cast to its own type.
    Raises WeightsRejected when they do not fit (:func:`fit_weights`): the model is as it was."""
    state = model.state_dict(keep_vars=True)
    chosen = fit_weights(state, tensors)
    is_lasting = isinstance(tensors, PublishedWeights) and tensors.is_lasting
    with torch.no_grad():
        for name, tensor in chosen.items():
            own = state[name]
            if is_lasting and tensor.dtype == own.dtype and tensor.device == own.device:
                own.data = tensor
            else:
                own.copy_(tensor)


@torch.no_grad()
def unserved_weights(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that ``model`` does not compute with, bit for bit once cast."""
    state = model.state_dict(keep_vars=True)
    chosen = fit_weights(state, tensors)
    return [name for name, tensor in chosen.items() if not _is_same(state[name].detach(), tensor.detach())]


def _is_same(own: torch.Tensor, published: torch.Tensor) -> bool:
    if own.data_ptr() == published.data_ptr() and own.dtype == published.dtype and own.device == published.device:
        return True
    wanted = published.to(device=own.device, dtype=own.dtype)
    # as bytes: weights that have diverged are the same although NaN is not equal to itself
    return torch.equal(
        own.contiguous().reshape(-1).view(torch.uint8), wanted.contiguous().reshape(-1).view(torch.uint8)
    )
