"""Outcome advantages: zero sums, scale, and independence of groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.algorithms.terms.advantage import (
    discounted_sums,
    group_advantages,
    leave_one_out_advantages,
    terminal_rewards,
    whiten_rows,
)

REWARDS = st.lists(st.floats(-10.0, 10.0), min_size=2, max_size=12)


@given(groups=st.lists(REWARDS, min_size=1, max_size=4), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_advantages_sum_to_zero_in_every_group_in_whatever_order_responses_come(
    groups: list[list[float]], seed: int
) -> None:
    rewards = np.array([value for group in groups for value in group])
    ids = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    order = np.random.default_rng(seed).permutation(rewards.size)
    for advantages in (
        group_advantages(rewards[order], ids[order]),
        group_advantages(rewards[order], ids[order], normalize_std=False),
        leave_one_out_advantages(rewards[order], ids[order]),
    ):
        for group in range(len(groups)):
            assert advantages[ids[order] == group].sum() == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("num_right", "right", "wrong"), [(8, 0.968246, -0.968246), (1, 3.75, -0.25), (15, 0.25, -3.75)]
)
def test_sixteen_responses_have_the_advantages_of_the_paper(num_right: int, right: float, wrong: float) -> None:
    rewards = np.where(np.arange(16) < num_right, 1.0, -1.0)
    advantages = group_advantages(rewards, np.zeros(16, dtype=int))
    np.testing.assert_allclose(advantages[:num_right], right, rtol=4e-6)
    np.testing.assert_allclose(advantages[num_right:], wrong, rtol=4e-6)


def test_a_group_without_signal_has_no_advantage() -> None:
    assert not group_advantages(np.ones(4), np.zeros(4, dtype=int)).any()


def test_a_group_of_one_keeps_its_reward() -> None:
    alone = np.array([0.7])
    assert group_advantages(alone, np.array([0]))[0] == pytest.approx(0.7, rel=2e-6)
    assert leave_one_out_advantages(alone, np.array([0]))[0] == 0.7


def test_leave_one_out_is_the_reward_less_the_mean_of_the_others() -> None:
    advantages = leave_one_out_advantages(np.array([1.0, 2.0, 6.0]), np.zeros(3, dtype=int))
    np.testing.assert_allclose(advantages, [1.0 - 4.0, 2.0 - 3.5, 6.0 - 1.5])


@given(st.integers(0, 999))
@settings(deadline=None, max_examples=20)
def test_whitened_tokens_have_mean_0_and_variance_1_and_nothing_off_the_mask(seed: int) -> None:
    draw = np.random.default_rng(seed)
    values, mask = draw.normal(3.0, 5.0, (4, 9)), draw.random((4, 9)) < 0.7
    mask[0, :2] = True
    white = np.stack(whiten_rows([*values], [*mask]))
    assert white[mask].mean() == pytest.approx(0.0, abs=1e-9)
    assert white[mask].var(ddof=1) == pytest.approx(1.0, rel=1e-6)
    assert not white[~mask].any()


def test_fewer_than_two_tokens_are_not_whitened_into_nan() -> None:
    (white,) = whiten_rows([np.array([5.0, 5.0])], [np.array([True, False])])
    assert white.tolist() == [0.0, 0.0]


@given(st.lists(st.floats(-5.0, 5.0), min_size=1, max_size=30), st.floats(0.0, 1.0))
@settings(deadline=None, max_examples=50)
def test_discounted_sums_are_those_of_the_definition(values: list[float], decay: float) -> None:
    for given_decay in (decay, 1.0):
        by_hand = [sum(given_decay ** (k - t) * values[k] for k in range(t, len(values))) for t in range(len(values))]
        np.testing.assert_allclose(discounted_sums(np.array(values), given_decay), by_hand, rtol=1e-9, atol=1e-9)


def test_an_undiscounted_reward_at_the_end_is_the_return_of_every_token_to_the_bit() -> None:
    assert discounted_sums(terminal_rewards(0.3, 1000), 1.0).tolist() == [0.3] * 1000
