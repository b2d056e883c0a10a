"""The clipped regression of a value model to its targets; one loss a token, not yet aggregated."""

from __future__ import annotations

import torch

from pipeline.algorithms.rows import Floats
from pipeline.algorithms.surrogate import TokenLoss


def clipped_value_loss(
    values: Floats, old_values: Floats, targets: Floats, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """Return ``max((V - R)^2, (clip(V, V_old - clip_low, V_old + clip_high) - R)^2) / 2`` a token.

    The gradient vanishes where the clipped error is the larger and the value has left its interval.
    PPO's reference code; verl clips by 0.5 on both sides, T-PPO's port by 0.5 below and 0.6 above.
    """
    bounded = torch.clamp(values, old_values - clip_low, old_values + clip_high)
    free_error, bounded_error = (values - targets).square(), (bounded - targets).square()
    clipped = bounded_error > free_error
    return TokenLoss(0.5 * torch.maximum(free_error, bounded_error), clipped, torch.zeros_like(clipped))
