"""Advantages from a value model (GAE, length-adaptive GAE, EGAE for truncated windows), and the
value model's targets.

All arrays have one entry per token, in numpy and float64.

``V_t`` is the value of the state before token t: a causal model computes it at the preceding token.
Reading the value at the token itself would shift every delta by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from pipeline.algorithms.terms.advantage import discounted_sums, whiten_rows


def adaptive_lambda(length: int, *, alpha: float = 0.05, floor: float = 0.0) -> float:
    """Return ``lambda = 1 - 1 / (alpha l)``, at least ``floor``; GAE's weights then sum to ``alpha
    l``.

    VAPO (2504.05118, section 4.2). The paper has no floor, so its lambda is negative below ``l = 1
    / alpha``. Our floor is 0; T-PPO's port takes 0.95."""
    return max(1.0 - 1.0 / (alpha * length), floor)


def window_deltas(
    rewards: Float[np.ndarray, " tokens"], values: Float[np.ndarray, " tokens"], *, is_finished: bool, gamma: float
) -> Float[np.ndarray, " tokens"]:
    """Return the deltas of one window; its advantages are ``discounted_sums(deltas, gamma * lam)``.

    ``delta_j = r_j + gamma V_{j+1} - V_j``. After the last token of a finished response V is 0, as
    in GAE (1506.02438, eq. 16). After the last token of an unfinished window V is ``V_{n-1}``
    again, because the value model never saw that state. With gamma = 1 and no reward the last delta
    is then 0: EGAE, T-PPO (2506.15050)."""
    after = 0.0 if is_finished else float(values[-1])
    following = np.append(np.asarray(values[1:], dtype=np.float64), after)
    return rewards + gamma * following - values


def window_policy_mask(num_tokens: int, *, is_finished: bool, num_ignored: int) -> Bool[np.ndarray, " tokens"]:
    """Mark the tokens of a window that train the policy: all except the last ``num_ignored`` of an
    unfinished window, whose advantages are biased most by the truncation. T-PPO's port ignores 8."""
    last = num_tokens if is_finished else max(num_tokens - num_ignored, 0)
    return np.arange(num_tokens) < last


def whiten_windows(
    advantages: Sequence[Float[np.ndarray, " _"]],
    masks: Sequence[Bool[np.ndarray, " _"]],
    *,
    clamp: float = 10.0,
    min_std: float = 0.0,
) -> list[Float[np.ndarray, " _"]]:
    """Whiten over the policy's tokens of all windows together and clamp to ``+-clamp``; 0
    elsewhere.

    The loss must use the same masks: a token that was whitened but is outside would get ``-mean /
    std``. From T-PPO's port; the minimum std is ours (``whiten_rows``)."""
    return [np.clip(row, -clamp, clamp) for row in whiten_rows(advantages, masks, min_std=min_std)]


def lambda_targets(
    rewards: Float[np.ndarray, " tokens"], values: Float[np.ndarray, " tokens"], *, gamma: float, lam: float
) -> Float[np.ndarray, " tokens"]:
    """Return ``A_t + V_t`` of GAE over a finished response: the lambda-return from those values.

    At lambda = 1 the values cancel and the targets are Monte-Carlo returns, whatever the critic
    (VAPO, and T-PPO, whose port leaves gamma out). With gamma = 1 and one reward at the end, every
    target is that reward. Below 1 the reward fades with lambda^(T - t) and the critic learns from
    itself; PPO does so, and VAPO's decoupled GAE undoes it (VC-PPO, 2503.01491)."""
    if lam == 1.0:
        return discounted_sums(rewards, gamma)
    values = values.astype(np.float64)
    return discounted_sums(window_deltas(rewards, values, is_finished=True, gamma=gamma), gamma * lam) + values


def explained_variance(
    values: Float[np.ndarray, " tokens"], targets: Float[np.ndarray, " tokens"], weights: Float[np.ndarray, " tokens"]
) -> float:
    """Return ``1 - Var(G - V) / Var(G)`` under token weights: 1 is perfect, 0 no better than a
    constant, below 0 worse. Returns 0 if all targets are equal."""
    share = weights / weights.sum()

    def variance(of: Float[np.ndarray, " tokens"]) -> float:
        return float(share @ np.square(of - share @ of))

    total = variance(targets)
    if total <= 1e-12 * max(1.0, float(np.square(targets).max())):
        return 0.0
    return 1.0 - variance(targets - values) / total
