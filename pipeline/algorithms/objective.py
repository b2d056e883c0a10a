"""The loss of one optimiser step, on packed tokens: surrogate, off-policy weight, KL and entropy terms.

*Consumes* log-probs of the response tokens of whole rows, packed end to end [N]. *Produces* a loss and metrics for each token.
*Waits for* nothing. Used by a training backend in three lines:

    weights = objective.token_weights(samples)                    # once, from the whole mini-batch
    loss, metrics = objective.token_loss(logprobs=..., ...)       # for each micro-batch
    (loss * weights_of_this_micro_batch).sum().backward()         # times num_ranks where gradients are averaged

Three policies (2505.24298, section 5.2). *Behaviour* sampled the token, perhaps some versions ago and with other numerics.
*Proximal* is the learner at the start of the update; the surrogate clips around it. *Current* is being trained. The
importance mode says how behaviour is accounted for; none corrects the same gap twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Integer, Shaped
from torch import Tensor

from pipeline.algorithms.aggregation import Aggregation, row_weights
from pipeline.algorithms.importance import band_weights, importance_ratio, truncated_weights
from pipeline.algorithms.kl import KLEstimator, kl_estimate
from pipeline.algorithms.surrogate import TokenLoss, cispo_loss, clipped_loss, log_ratio, sequence_ratio
from pipeline.batching import TrainingSample


class Surrogate(StrEnum):
    """What is minimised at each token, before weights."""

    CLIP = "clip"
    """PPO's clipped ratio with decoupled bounds and dual clip: DAPO, GRPO, PPO."""
    GSPO = "gspo"
    """The clipped ratio of the whole response; no dual clip."""
    CISPO = "cispo"
    """A clipped weight on the log-prob; the gradient never vanishes."""


class Importance(StrEnum):
    """How the gap between behaviour and proximal policy is corrected. rho = proximal / behaviour, never differentiated."""

    NONE = "none"
    """Not at all: clip around the proximal policy with weight 1."""
    TIS = "tis"
    """Weight min(rho, cap) on the clipped loss: truncated importance sampling."""
    ICEPOP = "icepop"
    """Weight rho where floor <= rho <= cap, else 0."""
    DECOUPLED = "decoupled"
    """Weight rho, unbounded but for the clamp of its logarithm: decoupled PPO (2505.24298, eq. 4)."""
    BYPASS = "bypass"
    """The behaviour policy is the proximal one: clip around it, with no further weight, since the ratio holds rho already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Settings of the loss, and the loss."""

    clip_low: float = 0.2
    """eps_low"""
    clip_high: float = 0.28
    """eps_high"""
    dual_clip: float = 10.0
    """c above 1, or 0 for none"""
    surrogate: Surrogate = Surrogate.CLIP
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    norm_length: float = 1.0
    """Divisor of seq-mean-token-sum-norm."""
    importance: Importance = Importance.TIS
    importance_cap: float = 2.0
    importance_floor: float = 0.5
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = KLEstimator.K3
    entropy_coefficient: float = 0.0

    @property
    def needs_reference(self) -> bool:
        """Whether ``token_loss`` must be given reference log-probs."""
        return self.kl_coefficient > 0.0

    @property
    def needs_entropy(self) -> bool:
        """Whether ``token_loss`` must be given differentiable entropies."""
        return self.entropy_coefficient != 0.0

    @property
    def needs_old(self) -> bool:
        """Whether ``token_loss`` reads the proximal policy's log-probs; if not, they need not be computed."""
        return self.importance is not Importance.BYPASS

    def row_weights(self, num_loss_tokens: Integer[np.ndarray, " rows"]) -> Float[np.ndarray, " rows"]:
        """Return the weight of every loss token of each row of a whole mini-batch, float64."""
        return row_weights(num_loss_tokens, self.aggregation, norm_length=self.norm_length)

    def token_weights(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return float64 [R] for each sample of a whole mini-batch: what its token losses are multiplied by; 0 off the mask.

        The loss of the mini-batch is the sum of all products, however it is cut.
        """
        counts = np.array([np.count_nonzero(sample.loss_mask) for sample in samples], dtype=np.int64)
        weights = self.row_weights(counts)
        return [weight * sample.loss_mask for weight, sample in zip(weights, samples, strict=True)]

    def token_loss(
        self,
        *,
        logprobs: Float[Tensor, " tokens"],
        old_logprobs: Float[Tensor, " tokens"],
        behavior_logprobs: Float[Tensor, " tokens"],
        reference_logprobs: Float[Tensor, " tokens"] | None,
        entropy: Float[Tensor, " tokens"] | None,
        advantages: Float[Tensor, " tokens"],
        mask: Bool[Tensor, " tokens"],
        row_ids: Int[Tensor, " tokens"],
        num_rows: int,
    ) -> tuple[Float[Tensor, " tokens"], dict[str, Float[Tensor, " tokens"]]]:
        """Return the loss of each token, differentiable in ``logprobs`` and ``entropy``, and detached metrics of each.

        Loss and gradient are exactly 0 off the mask, whatever stands there. Multiply by ``token_weights`` and sum for the
        loss; sum a metric over all micro-batches and divide by the number of mask tokens for its mean.

        Args:
            logprobs: Under the current policy. Its dtype is that of the result.
            old_logprobs: Under the proximal policy; not read when ``needs_old`` is False.
            behavior_logprobs: As sampled.
            reference_logprobs: Under the frozen reference; required when ``needs_reference``.
            entropy: Of the current policy; required when ``needs_entropy``, else only a metric.
            advantages: A.
            mask: Tokens that carry loss.
            row_ids: Response of each token, 0 .. num_rows - 1. Rows are whole.
            num_rows: Responses in this micro-batch.

        Raises:
            ValueError: Reference log-probs or entropies are needed and absent.
        """
        zero = logprobs.new_zeros(())

        def on_mask(values: Shaped[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
            return values.to(logprobs.dtype).where(mask, zero)

        logprobs = on_mask(logprobs)
        behavior = on_mask(behavior_logprobs)
        proximal = on_mask(old_logprobs) if self.needs_old else behavior
        advantages = on_mask(advantages)
        exponent = log_ratio(logprobs, proximal)
        term = self._surrogate(logprobs, proximal, exponent, advantages, mask, row_ids, num_rows)
        rho = importance_ratio(proximal, behavior)
        weight = self._weight(rho)
        loss = term.loss * weight
        metrics = {
            "clip_fraction": term.clipped,
            "dual_clip_fraction": term.dual_clipped,
            "approx_kl": -exponent,
            "policy_ratio": exponent.exp(),
            "behavior_kl": behavior - proximal,
            "importance_ratio": rho,
            "importance_weight": weight,
            "importance_cut_fraction": weight != rho,
        }
        if reference_logprobs is not None:
            divergence = kl_estimate(logprobs, on_mask(reference_logprobs), self.kl_estimator)
            metrics["reference_kl"] = divergence
            if self.needs_reference:
                loss = loss + self.kl_coefficient * divergence
        elif self.needs_reference:
            raise ValueError(
                f"reference_logprobs is None, but kl_coefficient is {self.kl_coefficient}; give the reference policy's "
                "log-probs, or set the coefficient to 0"
            )
        if entropy is not None:
            entropy = on_mask(entropy)
            metrics["entropy"] = entropy
            if self.needs_entropy:
                loss = loss - self.entropy_coefficient * entropy
        elif self.needs_entropy:
            raise ValueError(
                f"entropy is None, but entropy_coefficient is {self.entropy_coefficient}; give the policy's entropies, or set "
                "the coefficient to 0"
            )
        return loss.where(mask, zero), {name: on_mask(value.detach()) for name, value in metrics.items()}

    def _surrogate(
        self,
        logprobs: Float[Tensor, " tokens"],
        proximal: Float[Tensor, " tokens"],
        exponent: Float[Tensor, " tokens"],
        advantages: Float[Tensor, " tokens"],
        mask: Bool[Tensor, " tokens"],
        row_ids: Int[Tensor, " tokens"],
        num_rows: int,
    ) -> TokenLoss:
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        match self.surrogate:
            case Surrogate.CLIP:
                return clipped_loss(exponent.exp(), advantages, **bounds, dual_clip=self.dual_clip)
            case Surrogate.GSPO:
                return clipped_loss(sequence_ratio(logprobs, proximal, mask, row_ids, num_rows), advantages, **bounds)
            case Surrogate.CISPO:
                return cispo_loss(logprobs, exponent.exp(), advantages, **bounds)

    def _weight(self, rho: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
        match self.importance:
            case Importance.NONE | Importance.BYPASS:
                return torch.ones_like(rho)
            case Importance.TIS:
                return truncated_weights(rho, self.importance_cap)
            case Importance.ICEPOP:
                return band_weights(rho, self.importance_floor, self.importance_cap)
            case Importance.DECOUPLED:
                return rho
