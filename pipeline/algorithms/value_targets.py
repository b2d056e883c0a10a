"""Targets of a value model's regression, a token each, and its explained variance, in float64."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from pipeline.algorithms.advantage import discounted_sums
from pipeline.algorithms.gae import window_deltas


def lambda_targets(
    rewards: Float[np.ndarray, " tokens"], values: Float[np.ndarray, " tokens"], *, gamma: float, lam: float
) -> Float[np.ndarray, " tokens"]:
    """Return ``A_t + V_t`` of GAE over a finished response: the lambda-return from those values.

    At lambda = 1 the values cancel and Monte-Carlo targets are left, whatever the critic (VAPO,
    T-PPO, whose port leaves gamma out). With gamma = 1 and a reward at the end every token then has
    that reward. Below 1 the reward fades with lambda^(T - t) and the critic learns from itself. PPO
    does so, and VAPO's decoupled GAE undoes it (VC-PPO, 2503.01491)."""
    if lam == 1.0:
        return discounted_sums(rewards, gamma)
    values = values.astype(np.float64)
    return discounted_sums(window_deltas(rewards, values, is_finished=True, gamma=gamma), gamma * lam) + values


def explained_variance(
    values: Float[np.ndarray, " tokens"], targets: Float[np.ndarray, " tokens"], weights: Float[np.ndarray, " tokens"]
) -> float:
    """Return ``1 - Var(G - V) / Var(G)`` under token weights: 1 is perfect, 0 no better than a
    constant, below 0 worse. Targets that are all alike give 0."""
    share = weights / weights.sum()

    def variance(of: Float[np.ndarray, " tokens"]) -> float:
        return float(share @ np.square(of - share @ of))

    total = variance(targets)
    if total <= 1e-12 * max(1.0, float(np.square(targets).max())):
        return 0.0
    return 1.0 - variance(targets - values) / total
