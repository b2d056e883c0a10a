"""From a verdict to the reward that the learner maximises.

A RewardScore's parts sum to its reward. The raw accuracy passes through untouched: dynamic sampling
filters by it, never by the shaped reward."""

from __future__ import annotations

import numpy as np

from pipeline.config.learning import RewardSection
from pipeline.rewards.overlong import soft_overlong_penalty
from pipeline.rewards.verifier import Verdict
from protocol.trajectory import FinishReason, RewardScore


def shape(
    config: RewardSection,
    verdict: Verdict,
    *,
    num_tokens: int,
    max_response_tokens: int,
    finish_reason: FinishReason,
    model_part: float | None = None,
) -> RewardScore:
    """Return the score of one response. Its reward is ``wrong + accuracy * (correct - wrong)``,
    plus the verdict's own parts, plus ``model_part`` (the reward model's weighted score, where
    there is one), plus the soft over-long punishment.

    With over-long filtering, a response that was cut at the limit is masked. It counts in its
    group's mean and std, and its tokens carry no loss. A response that ends by its stop token
    exactly at the limit is not cut."""
    parts = {"correct": config.wrong + verdict.accuracy * (config.correct - config.wrong), **verdict.parts}
    if model_part is not None:
        parts["model"] = model_part
    if "soft" in config.overlong:
        limits = {"max_tokens": max_response_tokens, "cache_tokens": config.overlong_cache_tokens}
        penalty = soft_overlong_penalty(np.array([num_tokens]), **limits, factor=config.overlong_factor)
        parts["overlong"] = float(penalty[0])
    return RewardScore(
        reward=sum(parts.values()),
        accuracy=verdict.accuracy,
        parts=parts,
        masked="filter" in config.overlong and finish_reason is FinishReason.LENGTH,
    )
