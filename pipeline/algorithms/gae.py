"""Advantages from a value model: GAE, its length-adaptive form, and EGAE for truncated windows.

*Consumes* values of the states before each token, and rewards. *Produces* advantages and value targets, one a token. *Waits
for* nothing; numpy only, float64 inside.

``V_t`` belongs to the state before token t: a causal model computes it at the preceding token. A value read at the token
itself would shift every delta by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float

from pipeline.algorithms.advantage import whiten_rows

Bootstrap = Literal["same", "next"]
"""What stands for the value after an unfinished window: the last one again (T-PPO), or the value model's own (our option)."""


def gae(
    rewards: Float[np.ndarray, "rows tokens"],
    values: Float[np.ndarray, "rows tokens"],
    mask: Bool[np.ndarray, "rows tokens"],
    *,
    gamma: float,
    lam: float | Float[np.ndarray, " rows"],
) -> Float[np.ndarray, "rows tokens"]:
    """Return ``A_t = sum_k (gamma lambda)^k delta_{t+k}`` with ``delta_t = r_t + gamma V_{t+1} - V_t``; 0 off the mask.

    The value after the last token is 0: rows are finished responses. Masked positions (padding, the output of tools) are
    skipped: value and advantage of the next token of the mask are carried over them. GAE (1506.02438, eq. 16).

    Args:
        rewards: One a token; usually 0 but at the last.
        values: V_t.
        mask: Tokens of the policy.
        gamma: Discount.
        lam: lambda, for all rows or for each.
    """
    num_rows, num_tokens = rewards.shape
    decay = gamma * np.broadcast_to(np.asarray(lam, dtype=np.float64), (num_rows,))
    advantages = np.zeros((num_rows, num_tokens), dtype=np.float64)
    next_value, next_advantage = np.zeros(num_rows), np.zeros(num_rows)
    for t in range(num_tokens - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + decay * next_advantage
        next_value = np.where(mask[:, t], values[:, t], next_value)
        next_advantage = np.where(mask[:, t], advantage, next_advantage)
        advantages[:, t] = np.where(mask[:, t], advantage, 0.0)
    return advantages


def adaptive_lambda(
    lengths: Float[np.ndarray, "*rows"], *, alpha: float | Float[np.ndarray, "*rows"] = 0.05, floor: float | None = 0.0
) -> Float[np.ndarray, "*rows"]:
    """Return ``lambda = 1 - 1 / (alpha l)``, so that the weights of GAE's sum add up to ``alpha l``.

    VAPO (2504.05118, section 4.2). The paper has no floor, and lambda is negative below ``l = 1 / alpha``; 0, ours, is always
    sensible, T-PPO's port takes 0.95. None leaves the paper's formula.
    """
    lam = 1.0 - 1.0 / (alpha * np.asarray(lengths, dtype=np.float64))
    return lam if floor is None else np.maximum(lam, floor)


def window_deltas(
    rewards: Float[np.ndarray, " tokens"],
    values: Float[np.ndarray, " tokens"],
    *,
    is_finished: bool,
    gamma: float,
    next_value: float | None = None,
) -> Float[np.ndarray, " tokens"]:
    """Return EGAE's deltas of one window.

    ``delta_j = r_j + gamma V_{j+1} - V_j``. After the last token of a finished response V is 0. After that of an unfinished
    window it is ``V_{n-1}`` again, the state never having been fed to the value model, so that with gamma = 1 and no reward
    the last delta is 0; or ``next_value`` when given (not T-PPO). T-PPO (2506.15050).
    """
    after = 0.0 if is_finished else float(values[-1]) if next_value is None else next_value
    following = np.append(np.asarray(values[1:], dtype=np.float64), after)
    return rewards + gamma * following - values


def egae(deltas: Float[np.ndarray, " tokens"], *, gamma: float, lam: float) -> Float[np.ndarray, " tokens"]:
    """Return ``A_t = sum_{j >= t} (gamma lambda)^(j - t) delta_j`` over one window. T-PPO (2506.15050)."""
    decay = gamma * lam
    backwards: list[float] = []
    following = 0.0
    for delta in reversed(deltas.tolist()):
        following = delta + decay * following
        backwards.append(following)
    return np.array(backwards[::-1], dtype=np.float64)


def window_policy_mask(num_tokens: int, *, is_finished: bool, num_ignored: int) -> Bool[np.ndarray, " tokens"]:
    """Mark the tokens of a window that train the policy: all, but for the last ones of an unfinished window.

    Their advantages are the most biased by the truncation. T-PPO's port ignores 8.
    """
    last = num_tokens if is_finished else max(num_tokens - num_ignored, 0)
    return np.arange(num_tokens) < last


def whiten_windows(
    advantages: Sequence[Float[np.ndarray, " _"]],
    masks: Sequence[Bool[np.ndarray, " _"]],
    *,
    clamp: float = 10.0,
    min_std: float = 0.0,
) -> list[Float[np.ndarray, " _"]]:
    """Whiten over the tokens that train the policy, in all windows together, then bound to ``+-clamp``; 0 elsewhere.

    The mask of the loss must be the same: a token left out of it but whitened would get ``-mean / std``. T-PPO's port; the
    least std is ours (``whiten_rows``).
    """
    return [np.clip(row, -clamp, clamp) for row in whiten_rows(advantages, masks, min_std=min_std)]
