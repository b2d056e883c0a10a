"""Claims about the regression targets of a value model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.algorithms.advantage import terminal_rewards
from pipeline.algorithms.value_targets import explained_variance, lambda_targets

NUMBERS = st.floats(-5.0, 5.0)


@given(rewards=st.lists(NUMBERS, min_size=1, max_size=40), gamma=st.floats(0.0, 1.0), critic=st.floats(-9.0, 9.0))
def test_monte_carlo_targets_are_the_discounted_rewards_to_go_whatever_the_critic(
    rewards: list[float], gamma: float, critic: float
) -> None:
    num_tokens = len(rewards)
    by_hand = [sum(gamma ** (k - t) * rewards[k] for k in range(t, num_tokens)) for t in range(num_tokens)]
    got = lambda_targets(np.array(rewards), np.full(num_tokens, critic), gamma=gamma, lam=1.0)
    np.testing.assert_allclose(got, by_hand, rtol=1e-9, atol=1e-9)


@given(st.lists(st.tuples(NUMBERS, st.integers(1, 5)), min_size=2, max_size=30))
def test_a_perfect_value_explains_everything_and_a_constant_nothing(rows: list[tuple[float, int]]) -> None:
    targets = np.array([target for target, _ in rows])
    weights = np.array([weight for _, weight in rows], dtype=np.float64)
    if np.ptp(targets) < 1e-3:
        return
    assert explained_variance(targets, targets, weights) == pytest.approx(1.0)
    assert explained_variance(np.full_like(targets, 3.0), targets, weights) == pytest.approx(0.0, abs=1e-9)
    assert explained_variance(-targets, targets, weights) == pytest.approx(-3.0)


def test_alike_targets_leave_nothing_to_explain() -> None:
    assert explained_variance(np.array([0.5, -0.5]), np.array([1.0, 1.0]), np.ones(2)) == 0.0


def test_a_token_of_twice_the_weight_counts_as_two() -> None:
    values, targets = np.array([0.1, 0.9, 0.4]), np.array([0.0, 1.0, 1.0])
    doubled = explained_variance(values[[0, 1, 1, 2]], targets[[0, 1, 1, 2]], np.ones(4))
    assert explained_variance(values, targets, np.array([1.0, 2.0, 1.0])) == pytest.approx(doubled)


@given(
    reward=NUMBERS,
    values=st.lists(NUMBERS, min_size=1, max_size=30),
    gamma=st.floats(0.0, 1.0),
    lam=st.floats(0.0, 1.0),
)
def test_lambda_targets_are_advantage_plus_value(reward: float, values: list[float], gamma: float, lam: float) -> None:
    given_values = np.array(values)
    advantage, following, by_hand = 0.0, 0.0, list[float]()
    rewards = terminal_rewards(reward, len(values))
    for r, value in zip(rewards[::-1], values[::-1], strict=True):
        advantage = r + gamma * following - value + gamma * lam * advantage
        following = value
        by_hand.append(advantage + value)
    got = lambda_targets(rewards, given_values, gamma=gamma, lam=lam)
    np.testing.assert_allclose(got, by_hand[::-1], rtol=1e-9, atol=1e-9)


def test_at_lambda_one_a_bad_critic_cannot_spoil_its_own_targets() -> None:
    bad, rewards = np.array([100.0, -100.0, 7.0]), terminal_rewards(1.0, 3)
    np.testing.assert_array_equal(lambda_targets(rewards, bad, gamma=1.0, lam=1.0), np.ones(3))
    assert lambda_targets(rewards, bad, gamma=1.0, lam=0.5)[0] < 0.0
