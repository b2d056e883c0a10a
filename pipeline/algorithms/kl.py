"""Estimators of KL(policy || reference) from one sampled token's log-probs.

With ``d = logp - ref``, under samples of the policy k1 and k3 have the right mean and k2 has the
right gradient; ``k1+`` and ``k3+`` take the value of one and the gradient of the other. Source: J.
Schulman, "Approximating KL divergence" (2020); the clamps are verl's."""

from __future__ import annotations

from pipeline.algorithms.objective import KLEstimator
from pipeline.algorithms.rows import Floats

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
"""k3 is clamped to +-10, which also ends its gradient for d below about -2.6 or above 11."""


def kl_estimate(logprobs: Floats, reference_logprobs: Floats, estimator: KLEstimator | str) -> Floats:
    """Estimate KL(policy || reference) a token, differentiable in ``logprobs``, or ValueError."""
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
