"""Shares by torch's FSDP2: parameters are cut by rows, and whole only while their layer computes.

Every method that computes waits for the other ranks. Each transformer layer is a unit of its own.
The rest (embedding, last norm, head) is one more. So memory holds the whole weights of one layer
and of that rest. The same guarded optimisers as in one process step the shares. AdamW's arithmetic
is by element. Muon's products, by torch, are over all ranks, and so is the gradient's norm."""

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


class Fsdp2Shards:
    """A share of a model, as :class:`workers.engines.training.ranks.sharded.Shards`."""

    averages_gradients = True
    lends = True

    def __init__(
        self,
        module: torch.nn.Module,
        model: torch.nn.Module,
        settings: OptimizerSettings,
        group: Group,
        embeddings: Collection[str] = (),
    ) -> None:
        """Cut ``model``, whole on every rank, into shares; ``module`` around it is called.
        ``embeddings`` names parameters whose rows are tokens. Raises EngineError when the model has
        no layers that transformers calls its own."""
        layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
        if not layers:
            raise EngineError(
                f"{type(model).__name__} has no layers that can be cut into shares one by one; choose Qwen2, Qwen3 or "
                "Llama, or the torch backend"
            )
        for layer in layers:
            fully_shard(layer, mesh=group.mesh)
        # without this the rest stays whole after a pass without gradients, and a load or a step
        # would not be seen
        fully_shard(module, mesh=group.mesh, reshard_after_forward=True)
        self.module = module
        self._parameters = {name: cast("torch.nn.Parameter", value) for name, value in model.named_parameters()}
        self._buffers = dict(model.named_buffers())
        self._settings = settings
        trained = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        self._optimizer = GuardedOptimizer(trained, settings, embeddings)
        self._is_lead = group.is_lead
        self._starts = {name: _first_number(parameter) for name, parameter in trained.items()}

    @property
    def num_steps(self) -> int:
        """Optimiser steps applied since the start of the run, over resumes."""
        return self._optimizer.num_steps

    def backward(self, loss: torch.Tensor, total: torch.Tensor | None) -> None:
        """Add the gradient of a micro-batch's loss, averaged over ranks, to the shares of it."""
        # whether it is finite is seen in the step
        del total
        loss.backward()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Step at another rate after the warm-up from now on."""
        self._optimizer.set_learning_rate(learning_rate)

    def step(self, loss: float, limits: StepLimits = NO_LIMITS) -> AppliedStep:
        """Step along the gradients, if they and the whole batch's ``loss`` are finite, and within
        ``limits``."""
        return self._optimizer.step(loss, limits)

    def clear(self) -> None:
        """Forget the gradients."""
        self._optimizer.clear()

    def weight(self, name: str) -> torch.Tensor:
        """Return a whole parameter or buffer."""
        return _whole(self._parameters[name] if name in self._parameters else self._buffers[name])

    def kinds(self, name: str) -> Sequence[str]:
        """Return the kinds of a trained parameter's state after a step."""
        return list(self._optimizer.state_of(name))

    def state(self, name: str, key: str) -> torch.Tensor:
        """Return a parameter's whole optimiser state of one kind."""
        return _whole(self._optimizer.state_of(name)[key])

    @torch.no_grad()
    def piece(self, name: str, key: str = "") -> ShareRange | None:
        """Return this rank's rows of a parameter, or of its state; rank 0 has what is not cut."""
        tensor = self._optimizer.state_of(name)[key] if key else self._parameters[name].detach()
        if isinstance(tensor, DTensor):
            return ShareRange(self._starts[name], tensor.to_local().flatten())
        return ShareRange(0, tensor.flatten()) if self._is_lead else None

    @torch.no_grad()
    def put_weight(self, name: str, value: torch.Tensor) -> None:
        """Set a parameter or buffer from its whole value."""
        target = self._parameters[name] if name in self._parameters else self._buffers[name]
        target.copy_(_share(value, target))

    def begin_states(self, num_steps: int) -> None:
        """Forget all optimiser state."""
        self._optimizer.forget(num_steps)

    def put_state(self, name: str, key: str, value: torch.Tensor) -> None:
        """Set a parameter's optimiser state of one kind from its whole value."""
        parameter, state = self._parameters[name], self._optimizer.state_of(name)
        state[key] = value.to(parameter.device) if key == STEP else _share(value, parameter)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _first_number(parameter: torch.Tensor) -> int:
    """Return the place of this rank's first number in the whole parameter, which is cut by rows."""
    if not isinstance(parameter, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0] * math.prod(parameter.shape[1:])


def _share(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of this rank's share of ``value``, whole on every rank, cut like ``like``."""
    value = value.to(like.device, like.dtype, copy=True)
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
