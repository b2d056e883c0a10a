"""How far the sampler is from the learner, when it runs ahead or on another engine.

The metrics are made from proximal (``old``) and behaviour log-probs, one entry a token or one a
row; nothing is differentiated. A mean over tokens is over the loss mask, a mean over rows over those
with loss."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from pipeline.algorithms.batching import ROW_METRICS
from pipeline.algorithms.rows import Floats, Ints, Mask, Tokens, row_mean, row_sum
from pipeline.algorithms.surrogate import MAX_LOG_RATIO, log_ratio

_MAX_EXPONENT = 80.0
"""The largest exponent whose exponential is finite in float32, in round numbers."""


def token_divergence(old_logprobs: Floats, behavior_logprobs: Floats) -> dict[str, Floats]:
    """Return each token's log-probs, two estimates of KL(behaviour || proximal), and ``rho^2 - 1``.

    ``behavior_kl`` is ``behaviour - old`` and may be negative; ``behavior_k3`` is
    ``rho - 1 - log rho``, which never is."""
    z = (old_logprobs - behavior_logprobs).detach()
    return {
        "proximal_logprob": old_logprobs,
        "behavior_logprob": behavior_logprobs,
        "behavior_kl": -z,
        "behavior_k3": z.clamp(max=_MAX_EXPONENT).exp() - 1.0 - z,
        "behavior_chi2": (2.0 * log_ratio(old_logprobs, behavior_logprobs)).exp() - 1.0,
    }


def row_divergence(
    old_logprobs: Tokens, behavior_logprobs: Tokens, mask: Mask, row_ids: Ints, num_rows: int
) -> dict[str, Float[Tensor, " rows"]]:
    """Return metrics of each row: perplexities, and the squared product of its rho, minus 1.

    A row without a token of the mask counts as one of log-prob 0, as in verl. ``sequence_chi2``
    saturates at ``exp(+-40)``."""
    proximal = row_mean(old_logprobs.detach(), mask, row_ids, num_rows)
    behavior = row_mean(behavior_logprobs.detach(), mask, row_ids, num_rows)
    gap = behavior - proximal
    product = row_sum((old_logprobs - behavior_logprobs).detach(), mask, row_ids, num_rows)
    values = (
        (-proximal).exp(),
        -proximal,
        (-behavior).exp(),
        -behavior,
        gap,
        gap.abs(),
        gap.exp(),
        (2.0 * product.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp() - 1.0,
    )
    return dict(zip(ROW_METRICS, values, strict=True))
