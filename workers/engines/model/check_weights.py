"""Whether published weights are a model's: names, shapes, types, and tied tensors that agree.

Every engine checks this before it writes anything. The model's state may be on ``meta``, where
there are only shapes. Tensors are named as in Hugging Face models."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from protocol.errors import WeightsRejected


def fit_weights(state: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the published tensor for every name of ``state`` that owns one; of tied, the first.

    ``state`` is ``model.state_dict(keep_vars=True)``: tied names hold the same object. Tied tensors
    are published once, or under both names with the same values. Raises WeightsRejected for missing
    or unknown names, shapes that differ, floating and integer types mixed up, or unequal tied ones.
    """
    owners: dict[int, str] = {}
    for name, tensor in state.items():
        owners.setdefault(id(tensor), name)
    names = {name: owners[id(tensor)] for name, tensor in state.items()}
    unknown = sorted(set(tensors) - set(names))
    chosen: dict[str, torch.Tensor] = {}
    for name, owner in names.items():
        if name not in tensors:
            continue
        if owner in chosen and not torch.equal(chosen[owner], tensors[name]):
            raise WeightsRejected(
                f"{name} and {owner} are one tensor in this model, but differ in the published weights; "
                "publish a tied tensor once"
            )
        chosen.setdefault(owner, tensors[name])
    missing = sorted(set(names.values()) - set(chosen))
    if unknown or missing:
        raise WeightsRejected(
            f"published weights do not name what this model has: missing {_some(missing)}; unknown {_some(unknown)}; "
            "learner and generators must load the same architecture"
        )
    for name, tensor in chosen.items():
        own = state[name]
        if tensor.shape != own.shape:
            raise WeightsRejected(
                f"{name} has shape {tuple(tensor.shape)}, expected {tuple(own.shape)}; "
                "learner and generators must load the same architecture"
            )
        if tensor.is_floating_point() != own.is_floating_point():
            raise WeightsRejected(f"{name} has type {tensor.dtype}, expected one that casts to {own.dtype}")
    return chosen


def _some(names: list[str]) -> str:
    if not names:
        return "none"
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
