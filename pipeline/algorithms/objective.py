"""The loss of one optimiser step, on packed tokens: surrogate, off-policy weight, KL, entropy and imitation terms.

*Consumes* log-probs of the response tokens of whole rows, packed end to end [N]. *Produces* a loss and metrics for each token.
*Waits for* nothing. Used by a training backend in three lines:

    weights = objective.token_weights(samples)                    # once, from the whole mini-batch
    loss, metrics = objective.token_loss(logprobs=..., ...)       # for each micro-batch
    (loss * weights_of_this_micro_batch).sum().backward()         # times num_ranks where gradients are averaged

Imitation (VAPO's positive-example loss) has a mask and a denominator of its own, made from the whole mini-batch in the same
way: ``imitation_weights`` and ``imitation_loss``.

Three policies (2505.24298, section 5.2). *Behaviour* sampled the token, perhaps some versions ago and with other numerics.
*Proximal* is the learner at the start of the update; the surrogate clips around it. *Current* is being trained. The
importance mode says how behaviour is accounted for; none corrects the same gap twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Real, Shaped
from torch import Tensor

from pipeline.algorithms.aggregation import Aggregation, row_weights
from pipeline.algorithms.importance import approximate_proximal, band_weights, importance_ratio, truncated_weights
from pipeline.algorithms.kl import KLEstimator, kl_estimate
from pipeline.algorithms.surrogate import TokenLoss, cispo_loss, clipped_loss, log_ratio, sequence_ratio
from pipeline.batching import TrainingSample

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig


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


class Proximal(StrEnum):
    """Where the proximal policy's log-probs come from."""

    RECOMPUTE = "recompute"
    """From a forward pass before the first step of an update; none is needed when it is the only step."""
    INTERPOLATE = "interpolate"
    """Guessed at each step between behaviour and current policy by their versions (AReaL): spares that pass."""


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
    proximal: Proximal = Proximal.RECOMPUTE
    proximal_version: int = 0
    """Of the learner at the start of the update, for interpolation; set by ``at``."""
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = KLEstimator.K3
    entropy_coefficient: float = 0.0
    imitation_coefficient: float = 0.0
    """mu of VAPO eq. 11."""

    @classmethod
    def from_config(cls, config: RunConfig) -> Objective:
        """Read the algorithm section of a run's configuration."""
        section = config.algorithm
        return cls(
            clip_low=section.clip_low,
            clip_high=section.clip_high,
            dual_clip=section.dual_clip,
            surrogate=Surrogate(section.surrogate),
            aggregation=Aggregation(section.loss_aggregation),
            norm_length=float(config.generation.max_response_tokens),
            importance=Importance(section.importance),
            importance_cap=section.importance_cap,
            importance_floor=section.importance_floor,
            proximal=Proximal(section.proximal),
            kl_coefficient=section.kl_coefficient,
            kl_estimator=KLEstimator(section.kl_estimator),
            entropy_coefficient=section.entropy_coefficient,
            imitation_coefficient=section.positive_nll_coefficient,
        )

    def at(self, policy_version: int) -> Objective:
        """Return the objective of the update that begins with ``policy_version``."""
        return replace(self, proximal_version=policy_version)

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
        return self.importance is not Importance.BYPASS and self.proximal is Proximal.RECOMPUTE

    def row_weights(self, num_loss_tokens: Real[np.ndarray, " rows"]) -> Float[np.ndarray, " rows"]:
        """Return the weight of every loss token of each row of a whole mini-batch, float64."""
        return row_weights(num_loss_tokens, self.aggregation, norm_length=self.norm_length)

    def token_weights(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return float64 [R] for each sample of a whole mini-batch: what its token losses are multiplied by; 0 off the mask.

        The loss of the mini-batch is the sum of all products, however it is cut.
        """
        counts = [
            np.count_nonzero(sample.loss_mask) if sample.counted_tokens is None else sample.counted_tokens
            for sample in samples
        ]
        weights = self.row_weights(np.array(counts, dtype=np.float64))
        return [weight * sample.loss_mask for weight, sample in zip(weights, samples, strict=True)]

    def imitation_weights(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return float64 [R] for each sample of a whole mini-batch: what its imitation losses are multiplied by.

        ``mu / number of imitation tokens`` on those tokens, 0 elsewhere: mu times the mean NLL. VAPO (2504.05118, eq. 10, 11).
        """
        masks = [np.zeros(s.response_length, np.bool_) if s.nll_mask is None else s.nll_mask for s in samples]
        weight = self.imitation_coefficient / max(1, sum(int(np.count_nonzero(mask)) for mask in masks))
        return [weight * mask for mask in masks]

    def imitation_loss(
        self, logprobs: Float[Tensor, " tokens"], mask: Bool[Tensor, " tokens"]
    ) -> Float[Tensor, " tokens"]:
        """Return ``-logp`` on the mask; loss and gradient are exactly 0 off it."""
        return -logprobs.where(mask, logprobs.new_zeros(()))

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
        versions: Int[Tensor, " tokens"] | None = None,
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
            versions: Policy version that sampled each token; required when the proximal policy is interpolated.

        Raises:
            ValueError: Reference log-probs, entropies or versions are needed and absent.
        """
        zero = logprobs.new_zeros(())

        def on_mask(values: Shaped[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
            return values.to(logprobs.dtype).where(mask, zero)

        logprobs = on_mask(logprobs)
        behavior = on_mask(behavior_logprobs)
        proximal = self._proximal(on_mask(old_logprobs), behavior, logprobs, versions)
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

    def _proximal(
        self,
        old: Float[Tensor, " tokens"],
        behavior: Float[Tensor, " tokens"],
        current: Float[Tensor, " tokens"],
        versions: Int[Tensor, " tokens"] | None,
    ) -> Float[Tensor, " tokens"]:
        if self.importance is Importance.BYPASS:
            return behavior
        if self.proximal is Proximal.RECOMPUTE:
            return old
        if versions is None:
            raise ValueError(
                "versions is None, but the proximal policy is interpolated between versions; give the version of each token, "
                "or set algorithm.proximal to recompute"
            )
        # the policy in training is on its way to the next version
        return approximate_proximal(behavior, current, versions, current_version=self.proximal_version + 1)

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
