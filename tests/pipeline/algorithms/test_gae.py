"""Advantages from a value model at the points where they are known in closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.algorithms.advantage import discounted_sums, terminal_rewards
from pipeline.algorithms.gae import adaptive_lambda, whiten_windows, window_deltas, window_policy_mask
from pipeline.algorithms.value_loss import clipped_value_loss
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
    term = clipped_value_loss(values, old, target, clip_low=0.5, clip_high=0.5)
    (gradient,) = torch.autograd.grad(term.loss.sum(), values)
    np.testing.assert_allclose(gradient.numpy(), [0.0, -0.6, -3.0])
    assert term.clipped.tolist() == [True, False, False]
