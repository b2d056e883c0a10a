"""Divergence estimates from sampled tokens: sampler from learner, and KL(policy || reference).

Sampler metrics compare proximal (``old``) with behaviour log-probs, per token or per row, without
gradient. Token means are over the loss mask; row means are over rows with loss.

With ``d = logp - ref`` and samples from the policy, k1 and k3 have the right mean and k2 has the
right gradient; ``k1+`` and ``k3+`` combine the value of one with the gradient of the other. Source:
J. Schulman, "Approximating KL divergence" (2020); the clamps are verl's."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from pipeline.algorithms.batching import ROW_METRICS
from pipeline.algorithms.terms.ratio import MAX_LOG_RATIO, log_ratio
from pipeline.algorithms.terms.tokens import Floats, Ints, Mask, Tokens, row_mean, row_sum
from pipeline.config.learning import KLEstimator

MAX_K3 = 10.0
"""k3 is clamped to +-10, so its gradient is 0 for d below about -2.6 or above 11."""


def kl_estimate(logprobs: Floats, reference_logprobs: Floats, estimator: KLEstimator | str) -> Floats:
    """Estimate KL(policy || reference) per token, differentiable in ``logprobs``. Raises ValueError
    for an unknown estimator."""
    difference = logprobs - reference_logprobs
    match KLEstimator(estimator):
        case KLEstimator.K1:
            return difference
        case KLEstimator.ABS:
            return difference.abs()
        case KLEstimator.K2:
            return 0.5 * difference.square()
        case KLEstimator.K3:
            return _k3(difference)
        case KLEstimator.K1_STRAIGHT:
            return _straight_through(value=difference, gradient=0.5 * difference.square())
        case KLEstimator.K3_STRAIGHT:
            return _straight_through(value=_k3(difference), gradient=0.5 * difference.square())


def _k3(difference: Floats) -> Floats:
    negative = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (negative.exp() - negative - 1.0).clamp(-MAX_K3, MAX_K3)


def _straight_through(*, value: Floats, gradient: Floats) -> Floats:
    return gradient - gradient.detach() + value.detach()


_MAX_EXPONENT = 80.0
"""About the largest exponent whose exponential is finite in float32."""


def token_divergence(old_logprobs: Floats, behavior_logprobs: Floats) -> dict[str, Floats]:
    """Return per token: both log-probs, two estimates of KL(behaviour || proximal), and ``rho^2 -
    1``.

    ``behavior_kl`` is ``behaviour - old`` and may be negative; ``behavior_k3``, ``rho - 1 - log
    rho``, never is."""
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
    """Return per row: perplexities, and the squared product of its token ratios rho, minus 1.

    A row without tokens in the mask counts as log-prob 0, as in verl. ``sequence_chi2`` saturates at
    ``exp(+-40)``."""
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
