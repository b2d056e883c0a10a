"""Token-level guidance as learning rules see it: its constants and columns. Numpy only.

A response is *right* (it has log-probs under the standard prompt only), *wrong* (it also has
log-probs under the judge prompt), or *unguided* (it has neither, which is no error). So the columns
of a response imply its verdict. The losses are in ``guided_loss``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from protocol.trajectory import RewardScore

if TYPE_CHECKING:
    from pipeline.config.rewards import GuidanceSection
    from protocol.trajectory import GuidanceScore


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidanceSettings:
    """Constants of the guided losses. Defaults as published (NLFT, 2412.20382, and its code)."""

    standard_threshold: float = 0.95
    """tau: tokens with a higher standard probability get a weight above 1."""
    standard_power: float = 0.6
    bonus_power: float = 5.0
    judge_ratio: float = 1.5
    """A token is flagged if its judge probability exceeds its other probabilities by this factor."""
    min_judge_probability: float = 0.01
    max_flagged_share: float = 0.06
    """If more of a wrong response is flagged, its other tokens have no loss."""
    unflagged_power: float = 0.5
    loss_scale: float = 10.0
    nll_coefficient: float = 1.0
    """Coefficient of the plain imitation loss of right responses, added to the weighted one."""
    clusters: bool = False
    cluster_power: float = 0.3
    cluster_distance: float = 0.4
    """Largest cosine distance between a token and the cluster that it joins."""
    dissimilar_clusters: bool = False
    """Treat ``cluster_distance`` as the smallest distance instead, as the public code does."""

    @classmethod
    def of(cls, section: GuidanceSection) -> GuidanceSettings:
        return cls(
            standard_threshold=section.standard_threshold,
            standard_power=section.standard_power,
            bonus_power=section.bonus_power,
            judge_ratio=section.judge_ratio,
            min_judge_probability=section.min_judge_probability,
            max_flagged_share=section.max_flagged_share,
            unflagged_power=section.unflagged_power,
            loss_scale=section.loss_scale,
            nll_coefficient=section.nll_coefficient,
            clusters=section.clusters,
            cluster_power=section.cluster_power,
            cluster_distance=section.cluster_distance,
            dissimilar_clusters=section.dissimilar_clusters,
        )


PUBLISHED = GuidanceSettings()


@dataclass(frozen=True, slots=True)
class GuidedColumns:
    """The guidance of the last tokens of a response, as stored in a training sample."""

    standard_logprobs: np.ndarray | None = None
    """float32 [tokens]; None without guidance."""
    judge_logprobs: np.ndarray | None = None
    """float32 [tokens]; only for wrong responses."""

    @property
    def is_absent(self) -> bool:
        return self.standard_logprobs is None

    @property
    def is_judged(self) -> bool:
        """Whether this is a wrong response with a judgment."""
        return self.judge_logprobs is not None


UNGUIDED = GuidedColumns()


def guided_columns(guidance: GuidanceScore, score: RewardScore, num_tokens: int) -> GuidedColumns:
    """Return the guidance of the last ``num_tokens`` of a response, according to its verdict. A
    wrong response that lacks either kind of log-probs is unguided."""
    if not guidance.standard_logprobs.size or not num_tokens:
        return UNGUIDED
    standard = guidance.standard_logprobs[-num_tokens:].astype(np.float32, copy=False)
    if is_right(score):
        return GuidedColumns(standard)
    if not guidance.judge_logprobs.size:
        return UNGUIDED
    return GuidedColumns(standard, guidance.judge_logprobs[-num_tokens:].astype(np.float32, copy=False))


RIGHT_ACCURACY = 0.5
"""Raw accuracy above which a response is right. VAPO does not give its threshold; verifiers here
give 0 or 1."""


def is_right(score: RewardScore) -> bool:
    """Return whether a response is worth imitating: its accuracy before shaping is above 0.5, and
    over-long filtering does not mask it (VAPO, 2504.05118, 4.3.2). T-PPO's port wants a score above
    0."""
    return score.accuracy > RIGHT_ACCURACY and not score.masked
