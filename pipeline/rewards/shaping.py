"""Turns a verdict into the reward that the learner maximises.

The parts of a RewardScore sum to its reward. Raw accuracy is passed through, because dynamic
sampling filters by it and never by the shaped reward."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from pipeline.config.training import RewardSection
from pipeline.rewards.verifier import Verdict
from protocol.trajectory import FinishReason, RewardScore


def soft_overlong_penalty(lengths: ArrayLike, *, max_tokens: int, cache_tokens: int, factor: float = 1.0) -> np.ndarray:
    """Return the penalty of each response, float64 [responses], between ``-factor`` and 0.

        P = 0                                         |y| <= L_max - L_cache
          = factor ((L_max - L_cache) - |y|) / L_cache   up to L_max
          = -factor                                   beyond

    Applied once, to a finished response's whole length (``lengths``, including the stop token).
    L_max is ``max_tokens``, L_cache is ``cache_tokens``. verl's penalty keeps falling beyond L_max,
    which a generator that stops there never reaches. DAPO (2503.14476, eq. 13). Raises ValueError
    unless ``cache_tokens`` is within 1 .. ``max_tokens``."""
    if not 1 <= cache_tokens <= max_tokens:
        limit = f"1 .. max_tokens ({max_tokens}): it is the last part of the length limit"
        raise ValueError(f"cache_tokens is {cache_tokens}; expected {limit}")
    excess = np.asarray(lengths, dtype=np.float64) - (max_tokens - cache_tokens)
    share = np.clip(excess / cache_tokens, 0.0, 1.0)
    return 0.0 - share * factor


def shape(
    config: RewardSection,
    verdict: Verdict,
    *,
    num_tokens: int,
    max_response_tokens: int,
    finish_reason: FinishReason,
    model_part: float | None = None,
    environment_part: float = 0.0,
    is_judged_by_environment: bool = False,
) -> RewardScore:
    """Return the score of one response. Its reward is ``wrong + accuracy * (correct - wrong)``,
    plus the verdict's own parts, plus ``model_part`` (the reward model's weighted score), plus the
    soft over-long penalty.

    An environment's own reward (``environment_part``) is added; it stands in place of the first term if the environment
    gave the verdict.

    With over-long filtering, a response cut at the limit is masked: it counts in its group's mean
    and std, but its tokens carry no loss. A response whose stop token is exactly at the limit is
    not cut."""
    parts = dict(verdict.parts)
    if not is_judged_by_environment:
        parts = {"correct": config.wrong + verdict.accuracy * (config.correct - config.wrong), **parts}
    if environment_part or is_judged_by_environment:
        parts["environment"] = environment_part
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
