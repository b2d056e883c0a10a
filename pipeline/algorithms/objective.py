# ruff: noqa: S105  levels named after tokens are not secrets
"""Settings of the loss of one optimiser step, and the weight of every token.

Numpy only: the terms of the loss need torch and are in ``pipeline.algorithms.loss``, which
processes that only prepare samples never load. A training backend uses both in three lines:

    weights = objective.token_weights(samples)                    # once, from the whole mini-batch
    losses, metrics = token_loss(objective, logprobs=..., ...)    # for each micro-batch
    (losses * weights_of_this_micro_batch).sum().backward()       # times num_ranks where gradients are averaged

Imitation (VAPO's positive-example loss) has its own mask and denominator, computed from the whole
mini-batch in the same way: ``imitation_weights`` and ``loss.imitation_loss``.

Three policies (2505.24298, section 5.2). *Behaviour* sampled the token, perhaps some versions ago
and with other numerics. *Proximal* is the learner at the start of the update; the surrogate clips
around it. *Current* is being trained. The importance mode sets how the gap between the first two is
corrected; no mode corrects it twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Real

from pipeline.algorithms.batching import TrainingSample
from pipeline.algorithms.guidance import PUBLISHED, GuidanceSettings
from pipeline.algorithms.terms.aggregation import Aggregation, row_weights

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig


class Surrogate(StrEnum):
    """The loss of each token, before weighting."""

    CLIP = "clip"
    """PPO's clipped ratio with decoupled bounds and dual clip: DAPO, GRPO, PPO."""
    GSPO = "gspo"
    """The clipped ratio of the whole response, without dual clip."""
    CISPO = "cispo"
    """Log-probs under a clipped weight; the gradient never vanishes."""
    NLFT = "nlft"
    """Weights and flags from guidance, as published; the advantage's sign is the verdict."""
    NLFT_FIRST = "nlft-first"
    """The same, but with one flag per wrong response, on its first error."""
    NLL = "nll"
    """``-logp``, whatever the advantage."""


class Importance(StrEnum):
    """How the gap rho = proximal / behaviour is corrected. rho carries no gradient."""

    NONE = "none"
    """No correction: clip around the proximal policy with weight 1."""
    TIS = "tis"
    """Weight min(rho, cap) on the clipped loss: truncated importance sampling."""
    ICEPOP = "icepop"
    """Weight rho where floor <= rho <= cap, else 0."""
    DECOUPLED = "decoupled"
    """Weight rho, bounded only by the clamp of its logarithm: decoupled PPO (2505.24298, 5.2)."""
    BYPASS = "bypass"
    """Clip around the behaviour policy with weight 1: the ratio already contains rho."""


class ImportanceLevel(StrEnum):
    """Which tokens share one rho. A row is a sample: a response, or a window of one."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    """The product over the row's loss tokens."""
    GEOMETRIC = "geometric"
    """The geometric mean over the row's loss tokens."""


class Rejection(StrEnum):
    """The quantity that decides whether a token or row is rejected, with z = log rho."""

    NONE = "none"
    RATIO = "ratio"
    """``exp(z)``"""
    K1 = "k1"
    """``-z``, compared with the logarithms of the bounds, which are ratios of behaviour to proximal (verl)."""
    K2 = "k2"
    """``z^2 / 2``"""
    K3 = "k3"
    """``exp(z) - 1 - z``"""
    K3_REVERSE = "k3-reverse"
    """``exp(-z) - 1 + z`` (AReaL)"""


class RejectionLevel(StrEnum):
    """What the quantity is taken over: each token, or a row, which is rejected as a whole."""

    TOKEN = "token"
    SUM = "seq-sum"
    MEAN = "seq-mean"
    MAX = "seq-max"


class Proximal(StrEnum):
    """Where the proximal policy's log-probs come from."""

    RECOMPUTE = "recompute"
    """From a forward pass before an update's first step; skipped if the update has only one step."""
    INTERPOLATE = "interpolate"
    """Estimated between behaviour and current policy by their versions (AReaL), which saves that pass."""
    INTERPOLATE_LINEAR = "interpolate-linear"
    """The same, between probabilities rather than log-probs."""


class KLEstimator(StrEnum):
    """Which KL estimate is added to the loss, with d = logp - ref."""

    K1 = "k1"
    """``d``"""
    K2 = "k2"
    """``d^2 / 2``"""
    K3 = "k3"
    """``exp(-d) - 1 + d``"""
    ABS = "abs"
    """``|d|``"""
    K1_STRAIGHT = "k1+"
    """value of k1, gradient of k2"""
    K3_STRAIGHT = "k3+"
    """value of k3, gradient of k2"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    clip_low: float = 0.2
    """eps_low"""
    clip_high: float = 0.28
    """eps_high"""
    dual_clip: float = 10.0
    """c > 1; 0 disables it"""
    surrogate: str = Surrogate.CLIP
    """A :class:`Surrogate`, or the import path of your own."""
    aggregation: str = Aggregation.TOKEN_MEAN
    """An :class:`Aggregation`, or the import path of your own."""
    norm_length: float = 1.0
    """Divisor of seq-mean-token-sum-norm."""
    importance: Importance = Importance.TIS
    importance_cap: float = 2.0
    importance_floor: float = 0.5
    importance_level: ImportanceLevel = ImportanceLevel.TOKEN
    importance_normalize: bool = False
    """Divide weights by their mean over the whole mini-batch."""
    rejection: Rejection = Rejection.NONE
    rejection_level: RejectionLevel = RejectionLevel.TOKEN
    rejection_upper: float = math.inf
    rejection_lower: float | None = None
    proximal: Proximal = Proximal.RECOMPUTE
    proximal_version: int = 0
    """The learner's version at the start of the update, for interpolation; set by ``at``."""
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = KLEstimator.K3
    entropy_coefficient: float = 0.0
    imitation_coefficient: float = 0.0
    """mu of VAPO, section 4.3.2."""
    guidance: GuidanceSettings = PUBLISHED
    mixes_guidance: bool = False
    """Multiply each advantage by its token's credit (``guided_loss.token_credit``)."""

    @classmethod
    def from_config(cls, config: RunConfig) -> Objective:
        section = config.algorithm
        return cls(
            clip_low=section.clip_low,
            clip_high=section.clip_high,
            dual_clip=section.dual_clip,
            surrogate=section.surrogate,
            aggregation=section.loss_aggregation,
            norm_length=float(config.generation.max_response_tokens),
            importance=Importance(section.importance),
            importance_cap=section.importance_cap,
            importance_floor=section.importance_floor,
            importance_level=ImportanceLevel(section.importance_level),
            importance_normalize=section.importance_normalize,
            rejection=Rejection(section.rejection),
            rejection_level=RejectionLevel(section.rejection_level),
            rejection_upper=math.inf if section.rejection_upper is None else section.rejection_upper,
            rejection_lower=section.rejection_lower,
            proximal=Proximal(section.proximal),
            kl_coefficient=section.kl_coefficient,
            kl_estimator=KLEstimator(section.kl_estimator),
            entropy_coefficient=section.entropy_coefficient,
            imitation_coefficient=section.positive_nll_coefficient,
            guidance=GuidanceSettings.of(config.guidance) if config.needs_guidance else PUBLISHED,
            mixes_guidance=section.guidance == "mix",
        )

    def at(self, policy_version: int) -> Objective:
        """Return the objective of the update that starts from ``policy_version``."""
        return replace(self, proximal_version=policy_version)

    @property
    def reads_versions(self) -> bool:
        """Whether ``token_loss`` uses policy versions, whose differences it takes as numbers of updates."""
        return self.importance is not Importance.BYPASS and self.proximal is not Proximal.RECOMPUTE

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient > 0.0

    @property
    def reads_rows(self) -> bool:
        """Whether a token's loss may depend on other tokens of its row: ``token_loss`` is then given
        whole rows only. A surrogate of one's own may read anything of the row."""
        return (
            self.surrogate not in (Surrogate.CLIP, Surrogate.CISPO, Surrogate.NLL)
            or self.importance_level is not ImportanceLevel.TOKEN
            or (self.rejection is not Rejection.NONE and self.rejection_level is not RejectionLevel.TOKEN)
            or self.mixes_guidance
        )

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coefficient != 0.0

    @property
    def needs_states(self) -> bool:
        """Whether ``token_loss`` needs the policy's hidden states, for clusters."""
        return self.guidance.clusters and self.surrogate in (Surrogate.NLFT, Surrogate.NLFT_FIRST)

    @property
    def needs_old(self) -> bool:
        """Whether ``token_loss`` needs the proximal policy's log-probs."""
        return self.importance is not Importance.BYPASS and self.proximal is Proximal.RECOMPUTE

    @property
    def needs_old_first(self) -> bool:
        """Whether the whole mini-batch needs proximal log-probs before the first of its losses."""
        return self.importance_normalize

    def row_weights(self, num_loss_tokens: Real[np.ndarray, " rows"]) -> Float[np.ndarray, " rows"]:
        """Return the weight of every loss token of each row of a whole mini-batch, float64."""
        return row_weights(num_loss_tokens, self.aggregation, norm_length=self.norm_length)

    def token_weights(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return the factors of each sample's token losses, float64 [R], from a whole mini-batch; 0
        off the mask. The mini-batch's loss is the sum of all products, however it is cut."""
        counts = [
            np.count_nonzero(sample.loss_mask) if sample.counted_tokens is None else sample.counted_tokens
            for sample in samples
        ]
        weights = self.row_weights(np.array(counts, dtype=np.float64))
        return [weight * sample.loss_mask for weight, sample in zip(weights, samples, strict=True)]

    def imitation_weights(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return the factors of each sample's imitation losses, float64 [R]: ``mu / number of
        imitation tokens in the mini-batch`` on those tokens, 0 elsewhere (VAPO, section 4.3.2)."""
        masks = [np.zeros(s.response_length, np.bool_) if s.nll_mask is None else s.nll_mask for s in samples]
        weight = self.imitation_coefficient / max(1, sum(int(np.count_nonzero(mask)) for mask in masks))
        return [weight * mask for mask in masks]
