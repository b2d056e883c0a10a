"""Clipped losses of each token: of a ratio (PPO), of a weight (CISPO), of a value.

Losses are not aggregated here, and the caller handles masked tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from pipeline.algorithms.terms.tokens import Flags, Floats


@runtime_checkable
class Bounds(Protocol):
    """Settings that have clip bounds."""

    @property
    def clip_low(self) -> float: ...

    @property
    def clip_high(self) -> float: ...


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss at each token, and where its gradient was cut off."""

    loss: Floats
    clipped: Flags
    """The ratio left [1 - eps_low, 1 + eps_high] on the side that the advantage pushes to."""
    dual_clipped: Flags
    """The dual clip bounds the loss of a negative advantage."""
    flagged: Flags | None = None
    """Tokens that guidance flags as errors; None without guidance."""


def clipped_loss(ratio: Floats, advantages: Floats, bounds: Bounds, dual_clip: float = 0.0) -> TokenLoss:
    """Return ``max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))``, at most ``-A c`` where A < 0.

    The gradient vanishes where A > 0 and r > 1 + eps_high, and where A < 0 and r < 1 - eps_low.
    With a dual clip (c > 1; 0 disables it) it also vanishes where A < 0 and r > c. Sources: PPO
    (1707.06347, eq. 7); decoupled bounds: DAPO (2503.14476, eq. 8); dual clip: 1912.09729, eq. 5."""
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - bounds.clip_low, 1.0 + bounds.clip_high)
    loss = torch.maximum(free, bounded)
    clipped = bounded > free
    if not dual_clip:
        return TokenLoss(loss, clipped, torch.zeros_like(clipped))
    ceiling = -advantages * dual_clip
    is_negative = advantages < 0
    dual_clipped = is_negative & (loss > ceiling)
    return TokenLoss(torch.where(is_negative, torch.minimum(loss, ceiling), loss), clipped, dual_clipped)


def clipped_weight_loss(logprobs: Floats, ratio: Floats, advantages: Floats, bounds: Bounds) -> TokenLoss:
    """Return ``-sg(clip(r, 1 - eps_low, 1 + eps_high)) A logp``, whose gradient never vanishes. The
    paper has no lower bound (eps_low = 1). CISPO (2506.13585, eq. 4 and 5)."""
    weight = ratio.detach().clamp(1.0 - bounds.clip_low, 1.0 + bounds.clip_high)
    outside = weight != ratio.detach()
    return TokenLoss(-weight * advantages * logprobs, outside, torch.zeros_like(outside))


def clipped_value_loss(values: Floats, old_values: Floats, targets: Floats, bounds: Bounds) -> TokenLoss:
    """Return ``max((V - R)^2, (clip(V, V_old - clip_low, V_old + clip_high) - R)^2) / 2`` per
    token.

    The gradient vanishes where the clipped error is larger and the value has left its interval.
    PPO's reference code; verl clips by 0.5 on both sides, T-PPO's port by 0.5 below and 0.6 above."""
    bounded = torch.clamp(values, old_values - bounds.clip_low, old_values + bounds.clip_high)
    free_error, bounded_error = (values - targets).square(), (bounded - targets).square()
    clipped = bounded_error > free_error
    return TokenLoss(0.5 * torch.maximum(free_error, bounded_error), clipped, torch.zeros_like(clipped))
