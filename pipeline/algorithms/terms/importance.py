"""Weights and masks that correct for the gap between the sampling policy and the learner's at the
update's start.

``rho = proximal / behaviour`` at each token. It corrects both staleness and numerical differences
between engines. Nothing here is differentiable. Weights multiply the clipped token loss;
denominators stay unweighted. Partial rollouts want token-level weights: a product over a row that
spans several versions saturates at ``exp(+-20)``."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.algorithms.terms.ratio import MAX_LOG_RATIO, log_ratio
from pipeline.algorithms.terms.tokens import Floats, Ints, Mask, Tokens, row_counts, row_max, row_mean, row_sum
from pipeline.config.learning import Importance, ImportanceLevel, Rejection, RejectionLevel, SampledSettings


def importance_ratio(old_logprobs: Floats, behavior_logprobs: Floats) -> Floats:
    """Return ``rho = exp(clamp(old - behaviour, -20, 20))`` of each token, without gradient."""
    return log_ratio(old_logprobs, behavior_logprobs).detach().exp()


def behavior_ratio(
    level: ImportanceLevel, old_logprobs: Tokens, behavior_logprobs: Tokens, mask: Mask, row_ids: Ints, num_rows: int
) -> Tokens:
    """Return the rho of each token, or of its row, without gradient. log rho is clamped to +-20."""
    if level is ImportanceLevel.TOKEN:
        return importance_ratio(old_logprobs, behavior_logprobs)
    over_row = row_sum if level is ImportanceLevel.SEQUENCE else row_mean
    rows = over_row((old_logprobs - behavior_logprobs).detach(), mask, row_ids, num_rows)
    return rows.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()[row_ids]


def correction_weights(settings: SampledSettings, rho: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the factor of the clipped loss, given rho.

    TIS: ``min(rho, cap)``; verl's cap is 2. IcePop: rho where ``floor <= rho <= cap``, else 0; its
    usual band is 0.5 to 5."""
    match settings.importance:
        case Importance.NONE | Importance.BYPASS:
            return torch.ones_like(rho)
        case Importance.TIS:
            return rho.clamp(max=settings.importance_cap)
        case Importance.ICEPOP:
            floor, cap = settings.importance_floor, settings.importance_cap
            return rho.where((rho >= floor) & (rho <= cap), torch.zeros_like(rho))
        case Importance.DECOUPLED:
            return rho


def mean_weight(
    settings: SampledSettings, old_logprobs: Tokens, behavior_logprobs: Tokens, mask: Mask, row_ids: Ints, num_rows: int
) -> float:
    """Return the mean weight over tokens in the mask (or over rows, if rows share one), or 1 if it is
    0.

    Needs all tokens of a mini-batch at once: averaging over micro-batches would be another
    estimator."""
    rho = behavior_ratio(settings.importance_level, old_logprobs, behavior_logprobs, mask, row_ids, num_rows)
    weights = correction_weights(settings, rho)
    if settings.importance_level is ImportanceLevel.TOKEN:
        mean = weights.where(mask, weights.new_zeros(())).sum() / mask.sum().clamp(min=1)
    else:
        present = row_counts(mask, row_ids, num_rows) > 0
        mean = row_mean(weights, mask, row_ids, num_rows).sum() / present.sum().clamp(min=1)
    return float(mean) or 1.0


def rejection_mask(
    settings: SampledSettings, old_logprobs: Tokens, behavior_logprobs: Tokens, mask: Mask, row_ids: Ints, num_rows: int
) -> Mask:
    """Mark the tokens to keep: those whose divergence, or whose row's, is within the bounds."""
    if settings.rejection is Rejection.NONE:
        return torch.ones_like(mask)
    values = _divergence(log_ratio(old_logprobs, behavior_logprobs).detach(), settings.rejection)
    upper, lower = settings.rejection_upper, settings.rejection_lower
    assert upper is not None, "the settings check it"
    if settings.rejection is Rejection.K1:
        upper, lower = math.log(upper), None if lower is None else math.log(lower)
    match settings.rejection_level:
        case RejectionLevel.TOKEN:
            judged = values
        case RejectionLevel.SUM:
            judged = row_sum(values, mask, row_ids, num_rows)[row_ids]
        case RejectionLevel.MEAN:
            judged = row_mean(values, mask, row_ids, num_rows)[row_ids]
        case RejectionLevel.MAX:
            judged = row_max(values, mask, row_ids, num_rows)[row_ids]
    kept = judged <= upper
    return kept if lower is None else kept & (judged >= lower)


def _divergence(z: Float[Tensor, "*shape"], rejection: Rejection) -> Float[Tensor, "*shape"]:
    match rejection:
        case Rejection.RATIO:
            return z.exp()
        case Rejection.K1:
            return -z
        case Rejection.K2:
            return 0.5 * z.square()
        case Rejection.K3:
            return z.exp() - 1.0 - z
        case Rejection.K3_REVERSE:
            return (-z).exp() - 1.0 + z
        case Rejection.NONE:
            return torch.zeros_like(z)


def approximate_proximal(
    behavior_logprobs: Floats,
    logprobs: Floats,
    versions: Int[Tensor, "*tokens"],
    *,
    current_version: int,
    linear: bool = False,
) -> Floats:
    """Estimate the proximal log-probs from behaviour and current ones, without another forward
    pass.

    ``a = clamp((v - 1 - v_b) / (v - v_b), 0, 1)``, and 0 where the current version sampled the
    token or the version is negative (not sampled). Log-linear: ``b + a (theta - b)``; linear:
    ``log((1 - a) e^b + a e^theta + 1e-10)``. As in AReaL (2505.24298)."""
    lag = (current_version - versions).to(logprobs.dtype)
    share = ((lag - 1.0) / lag.where(lag != 0, lag.new_ones(()))).clamp(0.0, 1.0)
    share = share.where((lag != 0) & (versions >= 0), share.new_zeros(()))
    behavior, current = behavior_logprobs, logprobs.detach()
    if not linear:
        return behavior + share * (current - behavior)
    return ((1.0 - share) * behavior.exp() + share * current.exp() + 1e-10).log()
