"""Guidance of single tokens as learning rules read it: its constants, and its columns. Numpy only.

A response has one of three kinds. *Right*: log-probs under the standard prompt alone. *Wrong*:
those, and log-probs under the judge prompt. *Unguided*: none, which is a state and no error. So the
columns of a response imply its verdict. The losses are in ``guided_loss``."""

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
    """Constants of the guided losses; defaults as published (NLFT, 2412.20382, and its code)."""

    standard_threshold: float = 0.95
    """tau: a token of more standard probability has a weight above 1."""
    standard_power: float = 0.6
    bonus_power: float = 5.0
    judge_ratio: float = 1.5
    """A token is flagged where its judge probability is above this multiple of the others."""
    min_judge_probability: float = 0.01
    max_flagged_share: float = 0.06
    """Where more of a wrong response is flagged, its other tokens have no loss."""
    unflagged_power: float = 0.5
    loss_scale: float = 10.0
    nll_coefficient: float = 1.0
    """Of the plain imitation loss of right responses, beside the weighted one."""
    clusters: bool = False
    cluster_power: float = 0.3
    cluster_distance: float = 0.4
    """Largest cosine distance between a token and the cluster beside it."""
    dissimilar_clusters: bool = False
    """``cluster_distance`` is the smallest distance instead, as in the public code."""

    @classmethod
    def of(cls, section: GuidanceSection) -> GuidanceSettings:
        """Read a run's guidance section."""
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
    """The guidance of the last tokens of one response, as a training sample has it."""

    standard_logprobs: np.ndarray | None = None
    """float32 [tokens]; None without guidance."""
    judge_logprobs: np.ndarray | None = None
    """float32 [tokens], of a wrong response alone."""

    @property
    def is_absent(self) -> bool:
        """Whether the response has no guidance."""
        return self.standard_logprobs is None

    @property
    def is_judged(self) -> bool:
        """Whether they speak of a wrong response."""
        return self.judge_logprobs is not None


UNGUIDED = GuidedColumns()


def guided_columns(guidance: GuidanceScore, score: RewardScore, num_tokens: int) -> GuidedColumns:
    """Return the columns of the last ``num_tokens`` of a response, by its verdict. A wrong response
    without either log-probs has none."""
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
    """Whether a finished response is worth imitating: right before any shaping, and not under
    over-long filtering (VAPO, 2504.05118, 4.3.2). T-PPO's port: the score must be above 0."""
    return score.accuracy > RIGHT_ACCURACY and not score.masked
