"""How far the sampler is from the learner: the numbers to watch when sampling runs ahead or on another engine.

*Consumes* proximal (``old``) and behaviour log-probs. *Produces* scalars. *Waits for* nothing; nothing is differentiated.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from pipeline.algorithms.importance import importance_ratio, sequence_importance_ratio
from pipeline.algorithms.rows import row_mean


@dataclass(frozen=True, slots=True)
class BehaviorDivergence:
    """Divergence of the behaviour policy from the proximal one. Perplexities are means over rows."""

    kl: float
    """mean of ``behaviour - old``: estimates KL(behaviour || proximal), and may be negative"""
    k3_kl: float
    """mean of ``rho - 1 - log rho``, rho not clamped: the same quantity, never negative"""
    training_ppl: float
    training_log_ppl: float
    rollout_ppl: float
    rollout_log_ppl: float
    log_ppl_diff: float
    """mean over rows of rollout minus training, in mean log-prob"""
    log_ppl_abs_diff: float
    log_ppl_diff_max: float
    log_ppl_diff_min: float
    ppl_ratio: float
    """mean over rows of training perplexity over rollout perplexity"""
    chi2_token: float
    """mean of ``rho^2``, minus 1"""
    chi2_seq: float
    """mean over rows of the squared product of rho, minus 1; each product saturates at exp(+-20)"""


def behavior_divergence(
    old_logprobs: Float[Tensor, " tokens"],
    behavior_logprobs: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    row_ids: Int[Tensor, " tokens"],
    num_rows: int,
) -> BehaviorDivergence:
    """Measure the gap over the tokens of the mask. A row without any counts as one of log-prob 0, as in verl.

    Raises:
        ValueError: The mask is empty.
    """
    if not mask.any():
        raise ValueError("the mask of a divergence is empty; expected at least 1 token: skip the measurement")
    old, behavior = old_logprobs.detach(), behavior_logprobs.detach()
    rho = importance_ratio(old, behavior)[mask]
    z = (old - behavior)[mask]
    training = row_mean(old, mask, row_ids, num_rows)
    rollout = row_mean(behavior, mask, row_ids, num_rows)
    difference = training - rollout
    product = sequence_importance_ratio(old, behavior, mask, row_ids, num_rows)
    return BehaviorDivergence(
        kl=float((behavior - old)[mask].mean()),
        k3_kl=float((z.exp() - 1.0 - z).mean()),
        training_ppl=float((-training).exp().mean()),
        training_log_ppl=float((-training).mean()),
        rollout_ppl=float((-rollout).exp().mean()),
        rollout_log_ppl=float((-rollout).mean()),
        log_ppl_diff=float((-difference).mean()),
        log_ppl_abs_diff=float(difference.abs().mean()),
        log_ppl_diff_max=float((-difference).max()),
        log_ppl_diff_min=float((-difference).min()),
        ppl_ratio=float((-difference).exp().mean()),
        chi2_token=float(rho.square().mean()) - 1.0,
        chi2_seq=float(product.square().mean()) - 1.0,
    )
