"""Entropy of next-token distributions, and log-probs of chosen tokens.

*Consumes* logits, already divided by the sampling temperature. *Produces* one value a position. *Waits for* nothing.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def entropy_from_logits(logits: Float[Tensor, "*tokens vocabulary"]) -> Float[Tensor, "*tokens"]:
    """Return ``H = logsumexp(z) - sum softmax(z) z`` in nats."""
    return torch.logsumexp(logits, dim=-1) - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)


def logprobs_from_logits(
    logits: Float[Tensor, "*tokens vocabulary"], targets: Int[Tensor, "*tokens"]
) -> Float[Tensor, "*tokens"]:
    """Return the log-prob of each target: ``z[target] - logsumexp(z)``."""
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)
