"""Put published weights into a model, all of them or none.

*Consumes* tensors by their Hugging Face names. *Produces* nothing but the model's new state. *Waits for* nothing.

Everything is checked before anything is written. Tied tensors (``lm_head.weight`` and the embedding, usually) are published
once, under the name that owns them; a second name may be present, if it says the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from protocol.errors import WeightsRejected


def replace_weights(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy ``tensors`` into the parameters and persistent buffers of ``model``, cast to the model's own type.

    Raises:
        WeightsRejected: Names are missing or unknown, a shape differs, floating and integer types are mixed up, or two names
            of one tied tensor disagree. The model is then as it was.
    """
    state = model.state_dict(keep_vars=True)
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
    with torch.no_grad():
        for name, tensor in chosen.items():
            state[name].copy_(tensor)


def _some(names: list[str]) -> str:
    if not names:
        return "none"
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
