"""Advantages from outcomes: how much better a response did than its group.

*Consumes* rewards of finished responses. *Produces* one advantage a response, or one a token. *Waits for* nothing; numpy only,
float64 inside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Shaped

GROUP_EPSILON = 1e-6
"""Added to a group's std (verl); TRL and others add 1e-4."""
WHITEN_EPSILON = 1e-8
"""Added to a batch's variance (verl)."""


def group_advantages(
    rewards: Float[np.ndarray, " responses"],
    groups: Shaped[np.ndarray, " responses"],
    *,
    normalize_std: bool = True,
    epsilon: float = GROUP_EPSILON,
) -> Float[np.ndarray, " responses"]:
    """Return ``(R_i - mean_g) / (std_g + epsilon)`` for each response i of group g, float64.

    The std is unbiased. A group of one member has mean 0 and std 1. Without ``normalize_std`` only the mean is taken off
    (Dr.GRPO, 2503.20783). Sources: GRPO (2402.03300, section 4.1.2), DAPO (2503.14476, eq. 9).

    Args:
        rewards: One reward a response.
        groups: Which group each response belongs to; any labels, in any order.
        normalize_std: Whether to divide by the std.
        epsilon: Added to the std.
    """
    values = np.asarray(rewards, dtype=np.float64)
    advantages = np.empty_like(values)
    for members in _members(groups):
        own = values[members]
        if own.size == 1:
            advantages[members] = own / (1.0 + epsilon) if normalize_std else own
            continue
        centred = own - own.mean()
        advantages[members] = centred / (own.std(ddof=1) + epsilon) if normalize_std else centred
    return advantages


def leave_one_out_advantages(
    rewards: Float[np.ndarray, " responses"], groups: Shaped[np.ndarray, " responses"]
) -> Float[np.ndarray, " responses"]:
    """Return ``R_i`` minus the mean of the other members of its group, float64; a group of one keeps its reward.

    RLOO (2402.14740, section 3.3).
    """
    values = np.asarray(rewards, dtype=np.float64)
    advantages = values.copy()
    for members in _members(groups):
        size = members.size
        if size > 1:
            advantages[members] = (values[members] - values[members].mean()) * size / (size - 1)
    return advantages


def whiten_rows(
    rows: Sequence[Float[np.ndarray, " _"]],
    masks: Sequence[Bool[np.ndarray, " _"]],
    *,
    epsilon: float = WHITEN_EPSILON,
    min_std: float = 0.0,
) -> list[Float[np.ndarray, " _"]]:
    """Return ``(x - mean) / sqrt(var + epsilon)`` over the tokens of all masks, 0 elsewhere; the variance is unbiased.

    Fewer than two tokens have no variance: they become 0. Sums over rows are exact, so that the order of the rows changes no
    bit of the result.

    Args:
        rows: Values, one array a response.
        masks: Tokens that count.
        epsilon: Added to the variance.
        min_std: Where the std is below, only the mean is taken away: a batch of nearly equal values is noise, and would
            become noise of unit size.
    """
    kept = [np.asarray(row, dtype=np.float64)[mask] for row, mask in zip(rows, masks, strict=True)]
    count = sum(row.size for row in kept)
    if count < 2:
        return [np.zeros(row.shape, dtype=np.float64) for row in rows]
    mean = math.fsum(float(row.sum()) for row in kept) / count
    variance = math.fsum(float(np.square(row - mean).sum()) for row in kept) / (count - 1)
    scale = math.sqrt(variance + epsilon) if math.sqrt(variance) >= min_std else 1.0
    return [np.where(mask, (row - mean) / scale, 0.0) for row, mask in zip(rows, masks, strict=True)]


def whiten(
    values: Float[np.ndarray, "*tokens"], mask: Bool[np.ndarray, "*tokens"], *, epsilon: float = WHITEN_EPSILON
) -> Float[np.ndarray, "*tokens"]:
    """Return ``whiten_rows`` of a padded array of any shape."""
    (white,) = whiten_rows([values.reshape(-1)], [mask.reshape(-1)], epsilon=epsilon)
    return white.reshape(values.shape)


def group_baseline_advantages(
    rewards: Float[np.ndarray, " responses"],
    groups: Shaped[np.ndarray, " responses"],
    mask: Bool[np.ndarray, "responses tokens"],
) -> Float[np.ndarray, "responses tokens"]:
    """Return ``R_i - mean_g`` at each token, whitened over the batch's tokens: REINFORCE++ with baseline (2501.03262)."""
    centred = group_advantages(rewards, groups, normalize_std=False)
    return whiten(np.broadcast_to(centred[:, None], mask.shape), mask)


def reward_to_go(
    rewards: Float[np.ndarray, "responses tokens"], mask: Bool[np.ndarray, "responses tokens"], *, gamma: float = 1.0
) -> Float[np.ndarray, "responses tokens"]:
    """Return ``G_t = r_t + gamma G_{t+1}``, reset after every masked position."""
    returns = np.zeros(rewards.shape, dtype=np.float64)
    following = np.zeros(rewards.shape[0], dtype=np.float64)
    for t in range(rewards.shape[1] - 1, -1, -1):
        following = rewards[:, t] + gamma * following
        returns[:, t] = following
        following = following * mask[:, t]
    return returns


def _members(groups: Shaped[np.ndarray, " responses"]) -> list[np.ndarray]:
    """Return the indices of each group's members, ascending."""
    _, inverse = np.unique(groups, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    return np.split(order, np.cumsum(np.bincount(inverse))[:-1])
