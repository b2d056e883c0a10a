"""AdamW with a warm-up for policy and value models. Its steps happen as a whole or not at all.

Gradients lie in the parameters. Loss and gradient norm are checked before the optimiser touches
anything. The optimiser's files allow an exact resume."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from pipeline.process import work
from workers.engines.model.checkpoint_files import (
    OptimizerState,
    TrainingState,
    read_optimizer,
    restore_optimizer,
    restore_rng,
    snapshot_optimizer,
)

if TYPE_CHECKING:
    from pipeline.config.learning import LearnerSection, ValueSection

GRADIENT = 0.95
"""About the gradient's share of an optimiser step's time, for progress marks."""


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW and its schedule."""

    learning_rate: float
    """Rate after the warm-up; it stays constant."""
    warmup_steps: int = 0
    """Optimiser steps; step k (from 1) of the warm-up has k / warmup_steps of the rate."""
    weight_decay: float = 0.0
    """Decoupled; on matrices only, never on norms and biases."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Longer gradients are scaled down to this global norm."""

    @classmethod
    def of(cls, section: LearnerSection | ValueSection, *, warmup_steps: int) -> OptimizerSettings:
        """Take the settings of a configuration's section."""
        return cls(
            learning_rate=section.learning_rate,
            warmup_steps=warmup_steps,
            weight_decay=section.weight_decay,
            betas=section.betas,
            eps=section.adam_eps,
            max_grad_norm=section.max_grad_norm,
        )

    def rate_after(self, num_steps: int) -> float:
        """Return the rate of the step that follows ``num_steps``: linear warm-up, then constant."""
        share = (num_steps + 1) / self.warmup_steps if self.warmup_steps else 1.0
        return self.learning_rate * min(1.0, share)


@dataclass(frozen=True, slots=True)
class AppliedStep:
    """The result of one step's gradients."""

    applied: bool
    """False when loss or gradient was not finite: parameters and state are then unchanged."""
    grad_norm: float
    """Before it was scaled down."""
    learning_rate: float


def make_adamw(parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    """Make the optimiser of ``parameters``, with weight decay on matrices only."""
    decayed = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    others = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


class GuardedOptimizer:
    """AdamW on named parameters."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerSettings) -> None:
        self._parameters = dict(parameters)
        self._settings = settings
        self._optimizer = make_adamw(self._parameters, settings)
        self.num_steps = 0
        """Steps applied since the start of the run, over resumes."""

    def step(self, loss: float) -> AppliedStep:
        """Step along the gradients that lie in the parameters, if they and ``loss`` are finite."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters.values() if p.grad is not None])
        # of gradients that are shared out among ranks
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        grad_norm = float(norm)
        work.step()
        learning_rate = self._settings.rate_after(self.num_steps)
        applied = math.isfinite(loss) and math.isfinite(grad_norm)
        if applied:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._settings.max_grad_norm, norm)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            work.step()
            self.num_steps += 1
        return AppliedStep(applied, grad_norm, learning_rate)

    def clear(self) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def state_of(self, name: str) -> dict[str, torch.Tensor]:
        """Return a parameter's state, to be read or changed; empty before its first step."""
        return self._optimizer.state[self._parameters[name]]

    def forget(self, num_steps: int) -> None:
        """Forget all state; ``num_steps`` steps have been taken."""
        self._optimizer.state.clear()
        self.num_steps = num_steps

    def snapshot(self) -> Callable[[Path], None]:
        """Copy state, random streams and step count; return a function that writes the copy."""
        return snapshot_optimizer(self._optimizer, self._parameters, self.num_steps)

    def read(self, folder: Path) -> OptimizerState:
        """Read a :meth:`snapshot`, and change nothing. Raises DataError naming the file."""
        return read_optimizer(self._parameters, folder)

    def restore(self, read: OptimizerState, state: TrainingState) -> None:
        """Put back the read state: the next step is then that of the uninterrupted run."""
        states, rng = read
        restore_optimizer(self._optimizer, self._parameters, states)
        restore_rng(rng)
        self.num_steps = state.num_steps
