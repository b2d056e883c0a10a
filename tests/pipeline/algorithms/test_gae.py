"""Advantages from a value model at the points where they are known in closed form.

Claims about the regression targets of a value model.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.algorithms.terms.advantage import discounted_sums, terminal_rewards
from pipeline.algorithms.terms.clip import clipped_value_loss
from pipeline.algorithms.terms.gae import (
    adaptive_lambda,
    explained_variance,
    lambda_targets,
    whiten_windows,
    window_deltas,
    window_policy_mask,
)
from pipeline.config.learning import ClipSettings
from tests.pipeline.algorithms.packed import some

VALUES = np.array([0.1, 0.2, 0.4, 0.3])
NOTHING = np.zeros(4)
SEEDS = st.integers(0, 2**32 - 1)


@some
@given(SEEDS)
def test_with_lambda_1_a_finished_responses_advantage_is_its_return_less_the_value(seed: int) -> None:
    draw = np.random.default_rng(seed)
    values, reward = draw.normal(size=6), draw.normal()
    deltas = window_deltas(terminal_rewards(reward, 6), values, is_finished=True, gamma=1.0)
    np.testing.assert_allclose(discounted_sums(deltas, 1.0), reward - values, atol=1e-12)


def test_windows_have_the_advantages_of_the_worked_example() -> None:
    open_deltas = window_deltas(NOTHING, VALUES, is_finished=False, gamma=1.0)
    np.testing.assert_allclose(open_deltas, [0.1, 0.2, -0.1, 0.0], atol=1e-12)
    np.testing.assert_allclose(discounted_sums(open_deltas, 0.95), [0.19975, 0.105, -0.1, 0.0], atol=1e-12)
    done = window_deltas(np.array([0.0, 0.0, 0.0, 1.0]), VALUES, is_finished=True, gamma=1.0)
    np.testing.assert_allclose(discounted_sums(done, 0.95), [0.7999125, 0.73675, 0.565, 0.7], atol=1e-12)


@some
@given(SEEDS, st.floats(0.0, 1.0))
def test_a_constant_value_model_gives_an_unfinished_window_no_advantage(seed: int, lam: float) -> None:
    values = np.full(5, np.random.default_rng(seed).normal())
    deltas = window_deltas(np.zeros(5), values, is_finished=False, gamma=1.0)
    assert not discounted_sums(deltas, lam).any()


def test_the_reward_of_an_unfinished_window_is_kept_in_its_last_delta() -> None:
    deltas = window_deltas(np.array([0.0, 0.0, 0.0, -0.3]), VALUES, is_finished=False, gamma=0.5)
    assert deltas[-1] == pytest.approx(-0.3 + 0.5 * 0.3 - 0.3)


def test_only_unfinished_windows_lose_their_tail() -> None:
    assert window_policy_mask(4, is_finished=False, num_ignored=2).tolist() == [True, True, False, False]
    assert window_policy_mask(4, is_finished=False, num_ignored=0).all()
    assert window_policy_mask(4, is_finished=True, num_ignored=2).all()
    assert not window_policy_mask(1, is_finished=False, num_ignored=8).any()


def test_lambda_adapts_to_length_and_stays_above_its_floor() -> None:
    assert [adaptive_lambda(length) for length in (1, 20, 1000)] == pytest.approx([0.0, 0.0, 0.98])
    assert adaptive_lambda(1, floor=-np.inf) == pytest.approx(-19.0)
    assert [adaptive_lambda(length, floor=0.95) for length in (1, 20, 1000)] == pytest.approx([0.95, 0.95, 0.98])


def test_whitened_windows_are_bounded_and_zero_where_nothing_is_trained() -> None:
    advantages = np.zeros(400)
    advantages[0] = 1e6
    mask = np.ones(400, dtype=bool)
    mask[-1] = False
    (white,) = whiten_windows([advantages], [mask], clamp=10.0)
    assert white.max() == 10.0
    assert white[-1] == 0.0


def test_the_value_loss_is_flat_once_a_value_has_left_its_interval_for_the_better() -> None:
    values = torch.tensor([0.9, 0.4, -2.0], dtype=torch.float64, requires_grad=True)
    old, target = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    term = clipped_value_loss(values, old, target, ClipSettings(clip_low=0.5, clip_high=0.5))
    (gradient,) = torch.autograd.grad(term.loss.sum(), values)
    np.testing.assert_allclose(gradient.numpy(), [0.0, -0.6, -3.0])
    assert term.clipped.tolist() == [True, False, False]


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
