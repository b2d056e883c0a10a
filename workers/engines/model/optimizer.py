"""A guarded optimiser for policy and value models. Its steps happen as a whole or not at all.

Gradients lie in the parameters. Loss and gradient norm are checked before the optimiser touches
anything. The optimiser's files allow an exact resume."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from pipeline.process import work
from pipeline.training.spikes import NO_LIMITS, StepLimits
from protocol.errors import DataError
from workers.engines.model.checkpoint_files import (
    TRAINING_FILE,
    TRAINING_FORMAT,
    OptimizerState,
    TrainingState,
    read_optimizer,
    restore_rng,
    restored_state,
    snapshot_optimizer,
    sort_optimizer,
)
from workers.engines.model.optimizers import make_optimizers
from workers.engines.model.rate_decay import CONSTANT, RateDecay

if TYPE_CHECKING:
    from pipeline.config.learning import LearnerSection, ValueSection

GRADIENT = 0.95
"""About the gradient's share of an optimiser step's time, for progress marks."""


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """An optimiser and its schedule."""

    learning_rate: float
    """Rate after the warm-up."""
    warmup_steps: int = 0
    """Optimiser steps; step k (from 1) of the warm-up has k / warmup_steps of the rate."""
    weight_decay: float = 0.0
    """Decoupled; on matrices only, never on norms and biases."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Longer gradients are scaled down to this global norm."""
    name: str = "adamw-fused"
    """Of ``optimizers``."""
    decay: RateDecay = CONSTANT
    """After the warm-up."""
    no_decay: tuple[str, ...] = ()
    """Patterns of the names of matrices without weight decay."""

    @classmethod
    def of(
        cls,
        section: LearnerSection | ValueSection,
        *,
        warmup_steps: int,
        name: str = "adamw-fused",
        decay: RateDecay = CONSTANT,
        no_decay: tuple[str, ...] = (),
    ) -> OptimizerSettings:
        """Take the settings of a configuration's section."""
        return cls(
            name=name,
            decay=decay,
            no_decay=no_decay,
            learning_rate=section.learning_rate,
            warmup_steps=warmup_steps,
            weight_decay=section.weight_decay,
            betas=section.betas,
            eps=section.adam_eps,
            max_grad_norm=section.max_grad_norm,
        )

    def rate_after(self, num_steps: int) -> float:
        """Return the rate of the step that follows ``num_steps``: linear warm-up, then decay."""
        share = (num_steps + 1) / self.warmup_steps if self.warmup_steps else 1.0
        return self.learning_rate * min(1.0, share) * self.decay.share_after(num_steps - self.warmup_steps)

    def training_state(self, num_steps: int) -> TrainingState:
        """Return what a checkpoint after ``num_steps`` records of optimiser and schedule."""
        # fused or not, its state is the same
        family = "adamw" if self.name == "adamw-fused" else self.name
        return TrainingState(TRAINING_FORMAT, num_steps, optimizer=family, schedule=str(self.decay))

    def check_state(self, state: TrainingState, folder: Path) -> None:
        """Raise DataError, naming the file, when another optimiser or schedule wrote ``state``."""
        own = self.training_state(state.num_steps)
        for what, got, expected in (
            ("optimizer", state.optimizer, own.optimizer),
            ("schedule", state.schedule, own.schedule),
        ):
            if got != expected:
                raise DataError(
                    f"{folder / TRAINING_FILE} is of {what} {got}, expected {expected}; set learner.{what} and its lengths as "
                    "they were, or start a new run with model.path at this checkpoint's model"
                )


@dataclass(frozen=True, slots=True)
class AppliedStep:
    """The result of one step's gradients."""

    applied: bool
    """False when loss or gradient was not finite, or above its limit: parameters and state are then
    unchanged."""
    grad_norm: float
    """Before it was scaled down."""
    learning_rate: float


class GuardedOptimizer:
    """Optimisers on named parameters, stepped together."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        settings: OptimizerSettings,
        embeddings: Collection[str] = (),
    ) -> None:
        """Step ``parameters``; ``embeddings`` names those whose rows are tokens."""
        self._parameters = dict(parameters)
        self._settings = settings
        self._optimizers = make_optimizers(self._parameters, settings, embeddings)
        self._owners = {
            id(parameter): optimizer
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self.num_steps = 0
        """Steps applied since the start of the run, over resumes."""

    def set_learning_rate(self, learning_rate: float) -> None:
        """Step at another rate after the warm-up from now on; state and step count stay."""
        self._settings = replace(self._settings, learning_rate=learning_rate)

    def step(self, loss: float, limits: StepLimits = NO_LIMITS) -> AppliedStep:
        """Step along the gradients that lie in the parameters, if they and ``loss`` are finite and
        within ``limits``."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters.values() if p.grad is not None])
        # of gradients that are shared out among ranks
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        grad_norm = float(norm)
        work.step()
        learning_rate = self._settings.rate_after(self.num_steps)
        applied = limits.allow(loss, grad_norm)
        if applied:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._settings.max_grad_norm, norm)
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                optimizer.step()
            work.step()
            self.num_steps += 1
        return AppliedStep(applied, grad_norm, learning_rate)

    def clear(self) -> None:
        """Forget the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_of(self, name: str) -> dict[str, torch.Tensor]:
        """Return a parameter's state, to be read or changed; empty before its first step."""
        parameter = self._parameters[name]
        return self._owners[id(parameter)].state[parameter]

    def forget(self, num_steps: int) -> None:
        """Forget all state; ``num_steps`` steps have been taken."""
        for optimizer in self._optimizers:
            optimizer.state.clear()
        self.num_steps = num_steps

    @property
    def states(self) -> dict[str, dict[str, torch.Tensor | int]]:
        """Live state by parameter name; empty before a parameter's first step."""
        return {name: self._owners[id(value)].state.get(value, {}) for name, value in self._parameters.items()}

    @property
    def training_state(self) -> TrainingState:
        """Optimiser and schedule at this moment, as a checkpoint records them."""
        return self._settings.training_state(self.num_steps)

    def snapshot(self) -> Callable[[Path], None]:
        """Copy state, random streams and step count; return a function that writes the copy."""
        return snapshot_optimizer(self.states, self.training_state)

    def read(self, folder: Path, state: TrainingState) -> OptimizerState:
        """Read a :meth:`snapshot`, and change nothing. Raises DataError naming the file."""
        self._settings.check_state(state, folder)
        return read_optimizer(self._shapes, folder)

    def sort(self, tensors: Mapping[str, torch.Tensor], state: TrainingState, path: Path) -> OptimizerState:
        """Return the state that ``path`` has as tensors, and change nothing. Raises DataError."""
        self._settings.check_state(state, path)
        return sort_optimizer(tensors, self._shapes, path)

    @property
    def _shapes(self) -> dict[str, torch.Size]:
        return {name: value.shape for name, value in self._parameters.items()}

    def restore(self, read: OptimizerState, state: TrainingState) -> None:
        """Put back the read state: the next step is then that of the uninterrupted run."""
        states, rng = read
        self.forget(state.num_steps)
        for name, kept in states.items():
            parameter = self._parameters[name]
            owner = self._owners[id(parameter)]
            owner.state[parameter] = restored_state(kept, parameter.device, fused=bool(owner.defaults.get("fused")))
        restore_rng(rng)
