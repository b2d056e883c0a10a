# ruff: noqa: S105  modes and levels named after tokens are not secrets
"""Weights and masks for the gap between the policy that sampled and the policy at the start of the update.

*Consumes* proximal (``old``) and behaviour log-probs, one entry a token. *Produces* weights, masks and metrics, none of them
differentiable. *Waits for* nothing.

``rho = proximal / behaviour``. It corrects staleness and the numerics of another engine. Weights multiply the clipped token
loss; denominators stay unweighted. Token-level weights suit partial rollouts: a product over a row that spans several
versions saturates at ``exp(+-20)``.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pipeline.algorithms.rows import row_counts, row_max, row_mean, row_sum
from pipeline.algorithms.surrogate import MAX_LOG_RATIO, log_ratio


class Level(StrEnum):
    """What one weight belongs to."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    """The product over a row, at each of its tokens."""
    GEOMETRIC = "geometric"
    """The geometric mean over a row, at each of its tokens."""


class Statistic(StrEnum):
    """What a rejection looks at; z is the log of rho, and k1 has the sign of behaviour minus proximal."""

    RATIO = "ratio"
    """``exp(z)``"""
    K1 = "k1"
    """``-z``"""
    K2 = "k2"
    """``z^2 / 2``"""
    K3 = "k3"
    """``exp(z) - 1 - z``"""


class Reduction(StrEnum):
    """Over what a rejection's statistic is taken."""

    TOKEN = "token"
    SUM = "seq_sum"
    MEAN = "seq_mean"
    MAX = "seq_max"


def importance_ratio(
    old_logprobs: Float[Tensor, "*tokens"], behavior_logprobs: Float[Tensor, "*tokens"]
) -> Float[Tensor, "*tokens"]:
    """Return ``rho = exp(clamp(old - behaviour, -20, 20))`` at each token, without gradient."""
    return log_ratio(old_logprobs, behavior_logprobs).detach().exp()


def sequence_importance_ratio(
    old_logprobs: Float[Tensor, " tokens"],
    behavior_logprobs: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    row_ids: Int[Tensor, " tokens"],
    num_rows: int,
) -> Float[Tensor, " rows"]:
    """Return ``exp(clamp(sum_t (old - behaviour), -20, 20))`` of each row, without gradient."""
    total = row_sum((old_logprobs - behavior_logprobs).detach(), mask, row_ids, num_rows)
    return total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def geometric_importance_ratio(
    old_logprobs: Float[Tensor, " tokens"],
    behavior_logprobs: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    row_ids: Int[Tensor, " tokens"],
    num_rows: int,
) -> Float[Tensor, " rows"]:
    """Return ``exp(mean_t (old - behaviour))`` of each row, clamped like the others, without gradient."""
    mean = row_mean((old_logprobs - behavior_logprobs).detach(), mask, row_ids, num_rows)
    return mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated_weights(rho: Float[Tensor, "*shape"], cap: float) -> Float[Tensor, "*shape"]:
    """Return ``min(rho, cap)``: truncated importance sampling (TIS); verl's cap is 2."""
    return rho.clamp(max=cap)


def band_weights(rho: Float[Tensor, "*shape"], floor: float, cap: float) -> Float[Tensor, "*shape"]:
    """Return rho where ``floor <= rho <= cap`` and 0 elsewhere: IcePop; usual band 0.5 to 5."""
    return rho.where((rho >= floor) & (rho <= cap), torch.zeros_like(rho))


def correction_weights(
    old_logprobs: Float[Tensor, " tokens"],
    behavior_logprobs: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    row_ids: Int[Tensor, " tokens"],
    num_rows: int,
    *,
    level: Level | str,
    cap: float,
    floor: float | None = None,
    batch_normalize: bool = False,
) -> Float[Tensor, " tokens"]:
    """Return TIS weights (IcePop's when a floor is given) of tokens or of whole rows; 0 off the mask.

    Batch normalisation divides by the mean weight, over tokens or over rows. It makes a weight depend on the rest of the
    batch, so a caller that uses it must pass the whole mini-batch.
    """

    def bound(rho: Tensor) -> Tensor:
        return truncated_weights(rho, cap) if floor is None else band_weights(rho, floor, cap)

    if Level(level) is Level.TOKEN:
        weights = bound(importance_ratio(old_logprobs, behavior_logprobs)).where(mask, old_logprobs.new_zeros(()))
        mean = weights.sum() / mask.sum().clamp(min=1).to(weights.dtype)
    else:
        ratio = sequence_importance_ratio if Level(level) is Level.SEQUENCE else geometric_importance_ratio
        rows = bound(ratio(old_logprobs, behavior_logprobs, mask, row_ids, num_rows))
        weights = rows[row_ids].where(mask, rows.new_zeros(()))
        present = row_counts(mask, row_ids, num_rows) > 0
        mean = rows[present].mean() if present.any() else rows.new_ones(())
    return weights / mean if batch_normalize and mean > 0 else weights


def rejection_mask(
    old_logprobs: Float[Tensor, " tokens"],
    behavior_logprobs: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    row_ids: Int[Tensor, " tokens"],
    num_rows: int,
    *,
    reduction: Reduction | str,
    statistic: Statistic | str,
    upper: float,
    lower: float | None = None,
) -> Bool[Tensor, " tokens"]:
    """Return the mask without the tokens, or the whole rows, whose divergence is out of bounds.

    Args:
        old_logprobs: Under the proximal policy.
        behavior_logprobs: As sampled.
        mask: Tokens to judge and to keep.
        row_ids: Row of each token.
        num_rows: Rows.
        reduction: Judge each token by itself, or a row by the sum, mean or maximum over its tokens.
        statistic: What is compared. For k1 the bounds are ratios of behaviour to proximal (their logarithms are compared).
        upper: Largest value kept.
        lower: Smallest value kept; none when absent.
    """
    values = _statistic(log_ratio(old_logprobs, behavior_logprobs).detach(), Statistic(statistic))
    if Statistic(statistic) is Statistic.K1:
        upper = float(torch.tensor(upper, dtype=torch.float64).log())
        lower = None if lower is None else float(torch.tensor(lower, dtype=torch.float64).log())
    match Reduction(reduction):
        case Reduction.TOKEN:
            judged = values
        case Reduction.SUM:
            judged = row_sum(values, mask, row_ids, num_rows)[row_ids]
        case Reduction.MEAN:
            judged = row_mean(values, mask, row_ids, num_rows)[row_ids]
        case Reduction.MAX:
            judged = row_max(values, mask, row_ids, num_rows)[row_ids]
    keep = judged <= upper
    return mask & keep if lower is None else mask & keep & (judged >= lower)


def _statistic(z: Float[Tensor, "*shape"], statistic: Statistic) -> Float[Tensor, "*shape"]:
    match statistic:
        case Statistic.RATIO:
            return z.exp()
        case Statistic.K1:
            return -z
        case Statistic.K2:
            return 0.5 * z.square()
        case Statistic.K3:
            return z.exp() - 1.0 - z


def approximate_proximal(
    behavior_logprobs: Float[Tensor, "*tokens"],
    logprobs: Float[Tensor, "*tokens"],
    versions: Int[Tensor, "*tokens"],
    *,
    current_version: int,
    linear: bool = False,
) -> Float[Tensor, "*tokens"]:
    """Guess the proximal policy's log-probs, between behaviour and current, without another forward pass.

    ``a = clamp((v - 1 - v_b) / (v - v_b), 0, 1)``, 0 where the current version sampled or the version is negative (not
    sampled); log-linear: ``b + a (theta - b)``; linear: ``log((1 - a) e^b + a e^theta + 1e-10)``. As in AReaL (2505.24298).
    """
    lag = (current_version - versions).to(logprobs.dtype)
    share = ((lag - 1.0) / lag.where(lag != 0, lag.new_ones(()))).clamp(0.0, 1.0)
    share = share.where((lag != 0) & (versions >= 0), share.new_zeros(()))
    behavior, current = behavior_logprobs, logprobs.detach()
    if not linear:
        return behavior + share * (current - behavior)
    return ((1.0 - share) * behavior.exp() + share * current.exp() + 1e-10).log()
