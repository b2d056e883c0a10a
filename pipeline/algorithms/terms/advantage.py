"""Advantages computed from rewards (relative to the group), whitening, and discounted sums.

Numpy only; float64 internally."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Shaped

GROUP_EPSILON = 1e-6
"""Added to a group's std (verl); TRL adds 1e-4."""
WHITEN_EPSILON = 1e-8
"""Added to a batch's variance (verl)."""


def group_advantages(
    rewards: Float[np.ndarray, " responses"], groups: Shaped[np.ndarray, " responses"], *, normalize_std: bool = True
) -> Float[np.ndarray, " responses"]:
    """Return ``(R_i - mean_g) / (std_g + 1e-6)`` for each response i of group g, float64.

    The std is unbiased. A group of one member has mean 0 and std 1. Without ``normalize_std`` only
    the mean is subtracted (Dr.GRPO, 2503.20783). Group labels can be any values in any order.
    Sources: GRPO (2402.03300, section 4.1.2), DAPO (2503.14476, eq. 9)."""
    values = np.asarray(rewards, dtype=np.float64)
    advantages = np.empty_like(values)
    for members in _indices_by_group(groups):
        own = values[members]
        if own.size == 1:
            advantages[members] = own / (1.0 + GROUP_EPSILON) if normalize_std else own
            continue
        centred = own - own.mean()
        advantages[members] = centred / (own.std(ddof=1) + GROUP_EPSILON) if normalize_std else centred
    return advantages


def leave_one_out_advantages(
    rewards: Float[np.ndarray, " responses"], groups: Shaped[np.ndarray, " responses"]
) -> Float[np.ndarray, " responses"]:
    """Return ``R_i`` minus the mean of the other members of its group, float64. In a group of one
    the advantage is the reward itself. RLOO (2402.14740, section 3.3)."""
    values = np.asarray(rewards, dtype=np.float64)
    advantages = values.copy()
    for members in _indices_by_group(groups):
        size = members.size
        if size > 1:
            advantages[members] = (values[members] - values[members].mean()) * size / (size - 1)
    return advantages


def whiten_rows(
    rows: Sequence[Float[np.ndarray, " _"]], masks: Sequence[Bool[np.ndarray, " _"]], *, min_std: float = 0.0
) -> list[Float[np.ndarray, " _"]]:
    """Return ``(x - mean) / sqrt(var + 1e-8)`` over the tokens in the mask of all rows, and 0
    elsewhere. The variance is unbiased.

    With fewer than two tokens all become 0. Sums over rows are exact, so the order of the rows does
    not change a bit of the result. If the std is below ``min_std``, only the mean is subtracted:
    such a batch is noise, and dividing would blow the noise up to unit size."""
    kept = [np.asarray(row, dtype=np.float64)[mask] for row, mask in zip(rows, masks, strict=True)]
    count = sum(row.size for row in kept)
    if count < 2:
        return [np.zeros(row.shape, dtype=np.float64) for row in rows]
    mean = math.fsum(float(row.sum()) for row in kept) / count
    variance = math.fsum(float(np.square(row - mean).sum()) for row in kept) / (count - 1)
    scale = math.sqrt(variance + WHITEN_EPSILON) if math.sqrt(variance) >= min_std else 1.0
    return [np.where(mask, (row - mean) / scale, 0.0) for row, mask in zip(rows, masks, strict=True)]


def terminal_rewards(reward: float, num_tokens: int) -> Float[np.ndarray, " tokens"]:
    """Return per-token rewards of a finished response, float64: all of ``reward`` at the last token."""
    rewards = np.zeros(num_tokens, dtype=np.float64)
    rewards[-1:] = reward
    return rewards


def discounted_sums(values: Float[np.ndarray, " tokens"], decay: float) -> Float[np.ndarray, " tokens"]:
    """Return ``S_t = sum_{j >= t} decay^(j - t) x_j``, float64: discounted returns, or GAE from its deltas."""
    if decay == 1.0:
        return np.cumsum(values[::-1], dtype=np.float64)[::-1].copy()
    backwards: list[float] = []
    following = 0.0
    for value in reversed(values.tolist()):
        following = value + decay * following
        backwards.append(following)
    return np.array(backwards[::-1], dtype=np.float64)


def _indices_by_group(groups: Shaped[np.ndarray, " responses"]) -> list[np.ndarray]:
    _, inverse = np.unique(groups, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    return np.split(order, np.cumsum(np.bincount(inverse))[:-1])
