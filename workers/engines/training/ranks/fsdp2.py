"""Shards with torch's FSDP2: parameters are split by rows, and whole only while their layer
computes.

Every method that computes waits for the other ranks. Each transformer layer is one unit, and the
rest (embedding, last norm, head) another, so memory holds the whole weights of one layer and of the
rest. With tensor parallelism a layer's matrices are split over some of the ranks first, and by rows
over the others; everything else is split by rows over all ranks, so that no two keep copies. The
guarded optimisers of the single-process backend step the shards: AdamW is elementwise, while Muon's
matrix products and the gradient norm are computed over all ranks by torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.training.spikes import NO_LIMITS, StepLimits
from protocol.errors import EngineError
from workers.engines.model.checkpoint_files import STEP
from workers.engines.model.optimizer import AppliedStep, GuardedOptimizer, OptimizerSettings
from workers.engines.training.ranks.group import Group
from workers.engines.training.ranks.lending import ShareRange
from workers.engines.training.ranks.tensor import split_layer, whole_parts
from workers.engines.training.ranks.whole import WholeTensors


class Fsdp2Shards:
    averages_gradients = True

    def __init__(
        self,
        module: torch.nn.Module,
        model: torch.nn.Module,
        settings: OptimizerSettings,
        group: Group,
        embeddings: Collection[str] = (),
    ) -> None:
        """Shard ``model``, which is whole on every rank; ``module`` wraps it and is called.

        ``embeddings`` names the parameters whose rows are tokens. Raises EngineError when
        transformers marks no layers in the model."""
        layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
        if not layers:
            raise EngineError(
                f"{type(model).__name__} has no layers that FSDP2 can shard one by one; choose Qwen2, Qwen3 or Llama, or the "
                "torch backend"
            )
        for layer in layers:
            if group.tensor > 1:
                split_layer(layer, group.grid["tensor"])
                for part, is_of_heads in whole_parts(layer):
                    sharded = fully_shard(part, mesh=group.mesh)
                    if is_of_heads:
                        # to be summed over the ranks of a share, not averaged
                        sharded.set_gradient_divide_factor(float(group.num_shares))
                        # gloo cannot scale as it sums
                        sharded.set_force_sum_reduction_for_comms(True)
            fully_shard(layer, mesh=group.mesh if group.tensor == 1 else group.grid["data"])
        # otherwise the rest stays whole after a pass without gradients, and misses a load or step
        fully_shard(module, mesh=group.mesh, reshard_after_forward=True)
        self.module = module
        self._parameters = {name: cast("torch.nn.Parameter", value) for name, value in model.named_parameters()}
        self._buffers = dict(model.named_buffers())
        self._settings = settings
        trained = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        self._optimizer = GuardedOptimizer(trained, settings, embeddings)
        self._is_lead = group.is_lead
        self._starts = {name: _first_number(parameter) for name, parameter in self._parameters.items()}
        self._whole = WholeTensors(group)
        self.lends = group.tensor == 1

    @property
    def num_steps(self) -> int:
        return self._optimizer.num_steps

    def backward(self, loss: torch.Tensor, total: torch.Tensor | None) -> None:
        # the step checks whether it is finite
        del total
        loss.backward()

    def set_learning_rate(self, learning_rate: float) -> None:
        self._optimizer.set_learning_rate(learning_rate)

    def step(self, loss: float, limits: StepLimits = NO_LIMITS) -> AppliedStep:
        return self._optimizer.step(loss, limits)

    def clear(self) -> None:
        self._optimizer.clear()

    def weight(self, name: str) -> torch.Tensor | None:
        if name in self._buffers:
            return self._buffers[name]
        return self._gathered(name, self._parameters[name].detach())

    def kinds(self, name: str) -> Sequence[str]:
        return list(self._optimizer.state_of(name))

    def state(self, name: str, key: str) -> torch.Tensor | None:
        return self._gathered(name, self._optimizer.state_of(name)[key], key)

    def _gathered(self, name: str, tensor: torch.Tensor, key: str = "") -> torch.Tensor | None:
        if _is_split_twice(tensor):
            return cast("DTensor", tensor).full_tensor()
        return self._whole.on_lead(name, self.piece(name, key), tensor.shape, tensor.dtype)

    @torch.no_grad()
    def piece(self, name: str, key: str = "") -> ShareRange | None:
        """Return this rank's rows of a parameter or its state; rank 0 has what is not split."""
        tensor = self._optimizer.state_of(name)[key] if key else self._parameters[name].detach()
        if isinstance(tensor, DTensor):
            return ShareRange(self._starts[name], tensor.to_local().flatten())
        return ShareRange(0, tensor.flatten()) if self._is_lead else None

    @torch.no_grad()
    def put_weight(self, name: str, value: torch.Tensor) -> None:
        target = self._parameters[name] if name in self._parameters else self._buffers[name]
        target.copy_(_share(value, target))

    def begin_states(self, num_steps: int) -> None:
        self._optimizer.forget(num_steps)

    def put_state(self, name: str, key: str, value: torch.Tensor) -> None:
        parameter, state = self._parameters[name], self._optimizer.state_of(name)
        state[key] = value.to(parameter.device) if key == STEP else _share(value, parameter)


def _is_split_twice(tensor: torch.Tensor) -> bool:
    """Whether it is split over the ranks of a layer too, so that a rank's share is not one range of numbers."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.ndim > 1


def _first_number(parameter: torch.Tensor) -> int:
    """Return the offset of this rank's rows, in elements of the whole parameter."""
    if not isinstance(parameter, DTensor) or _is_split_twice(parameter):
        return 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0] * math.prod(parameter.shape[1:])


def _share(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copy this rank's share of ``value``, which is whole on every rank, split like ``like``."""
    value = value.to(like.device, like.dtype, copy=True)
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
