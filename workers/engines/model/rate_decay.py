"""How the learning rate falls after the warm-up, by transformers' schedules.

    linear                 1 - x, over x = the share of the fall that is past
    cosine                 (1 + cos(pi x)) / 2
    warmup-stable-decay    1 for the stable part, then 1 - sqrt(x) (Haegele et al., 2405.18392)

Each ends at ``final_share`` and stays there. A schedule is a function of the steps taken alone, so
its state in a checkpoint is their number and its own name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from transformers.optimization import get_wsd_schedule

_FORMS: Final = {"linear": "linear", "cosine": "cosine", "warmup-stable-decay": "1-sqrt"}


@dataclass(frozen=True, slots=True)
class RateDecay:
    """A schedule's part after the warm-up. Lengths are optimiser steps."""

    kind: str = "constant"
    stable_steps: int = 0
    decay_steps: int = 0
    final_share: float = 0.0
    """Of the learning rate."""

    def share_after(self, num_steps: int) -> float:
        """Return the share of the rate for the step after ``num_steps`` since the warm-up."""
        return 1.0 if self.kind == "constant" else _share_by_step(self)(max(0, num_steps))

    def __str__(self) -> str:
        if self.kind == "constant":
            return self.kind
        return f"{self.kind} ({self.stable_steps} + {self.decay_steps} steps, to {self.final_share:g})"


CONSTANT: Final = RateDecay()
"""The rate stays as it is after the warm-up."""


@cache
def _share_by_step(decay: RateDecay) -> Callable[[int], float]:
    # the schedule is read as a function: the optimiser that steps the weights is another
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    schedule = get_wsd_schedule(
        optimizer,
        num_warmup_steps=0,
        num_stable_steps=decay.stable_steps,
        num_decay_steps=decay.decay_steps,
        decay_type=_FORMS[decay.kind],
        min_lr_ratio=decay.final_share,
    )
    return schedule.lr_lambdas[0]
