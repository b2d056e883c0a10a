"""Tensor parallelism: the matrices of each layer split over ranks that compute the same tokens.

The split is Megatron's (1909.08053): queries, keys, values and the first half of the MLP by columns, so each
rank has whole heads; what follows by rows, with one sum over the ranks. torch's DTensor does the exchange."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from protocol.errors import ConfigError

_BY_COLUMNS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
_BY_ROWS = frozenset({"o_proj", "down_proj"})
_OF_HEADS = frozenset({"q_norm", "k_norm"})


def split_layer(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Split a layer's matrices, in place. Raises ConfigError, before anything has changed, for a layer of another
    make or with heads that the ranks of ``mesh`` do not divide."""
    plan: dict[str, ParallelStyle] = {}
    head_dim = next((cast("int", part.head_dim) for part in layer.modules() if hasattr(part, "head_dim")), 1)
    for name, part in layer.named_modules():
        kind = name.rpartition(".")[-1]
        if kind in _BY_COLUMNS | _BY_ROWS and isinstance(part, nn.Linear):
            plan[name] = ColwiseParallel() if kind in _BY_COLUMNS else RowwiseParallel()
            of_heads = head_dim if kind in ("q_proj", "k_proj", "v_proj") else 1
            split = part.out_features if kind in _BY_COLUMNS else part.in_features
            if split % of_heads or split // of_heads % mesh.size():
                what = "heads" if of_heads > 1 else "columns" if kind in _BY_COLUMNS else "rows"
                raise ConfigError(
                    f"{name} has {split // of_heads} {what}, which {mesh.size()} ranks cannot share evenly; set "
                    f"tensor_parallel to a divisor of {split // of_heads}"
                )
        elif any(True for _ in part.parameters(recurse=False)) and not _is_norm(part, kind, head_dim):
            raise ConfigError(
                f"{type(layer).__name__} has {name}, a {type(part).__name__} that tensor parallelism does not know; "
                "set tensor_parallel to 1, or choose Qwen2, Qwen3 or Llama"
            )
    # it advises against whole tensors, which the files need
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    parallelize_module(layer, mesh, plan)
    for name in dict.fromkeys(each.rpartition(".")[0] for each in plan if each.rpartition(".")[-1] in _BY_COLUMNS):
        layer.get_submodule(name).register_forward_pre_hook(partial(_share_input, mesh), with_kwargs=True)


def _share_input(
    mesh: DeviceMesh, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make the states that several matrices read one distributed tensor, so that their gradients are added before they
    are summed over the ranks: once, not once for each matrix."""
    states = args[0] if args else kwargs["hidden_states"]
    shared = DTensor.from_local(states, mesh, [Replicate()], run_check=False)
    return ((shared, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": shared})


def whole_parts(layer: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield what is not split, and whether each rank of a split has only its own heads' part of the gradient."""
    for name, part in layer.named_modules():
        kind = name.rpartition(".")[-1]
        if kind not in _BY_COLUMNS | _BY_ROWS and any(True for _ in part.parameters(recurse=False)):
            yield part, kind in _OF_HEADS


def _is_norm(part: nn.Module, kind: str, head_dim: int) -> bool:
    sizes = [parameter.shape for parameter in part.parameters(recurse=False)]
    if not kind.endswith("norm") or any(len(size) != 1 for size in sizes):
        return False
    return kind not in _OF_HEADS or all(size[0] == head_dim for size in sizes)
