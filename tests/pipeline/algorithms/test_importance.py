"""Weights and masks over rows: levels, bounds, signs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pipeline.algorithms.divergence import behavior_divergence
from pipeline.algorithms.importance import (
    approximate_proximal,
    band_weights,
    correction_weights,
    importance_ratio,
    rejection_mask,
    truncated_weights,
)

OLD = torch.log(torch.tensor([0.8, 0.2, 0.5, 0.5], dtype=torch.float64))
BEHAVIOR = torch.log(torch.tensor([0.2, 0.8, 0.5, 0.4], dtype=torch.float64))
MASK = torch.ones(4, dtype=torch.bool)
ROWS = torch.tensor([0, 0, 1, 1])
PLACE = (OLD, BEHAVIOR, MASK, ROWS, 2)


def _close(got: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_ratios_are_proximal_over_behaviour() -> None:
    _close(importance_ratio(OLD, BEHAVIOR), [4.0, 0.25, 1.0, 1.25])


def test_truncation_bounds_from_above_alone_and_a_band_drops_both_sides() -> None:
    rho = importance_ratio(OLD, BEHAVIOR)
    _close(truncated_weights(rho, 2.0), [2.0, 0.25, 1.0, 1.25])
    _close(band_weights(rho, 0.5, 2.0), [0.0, 0.0, 1.0, 1.25])


def test_a_row_has_the_product_or_the_geometric_mean_of_its_ratios() -> None:
    _close(correction_weights(*PLACE, level="sequence", cap=9.0), [1.0, 1.0, 1.25, 1.25])
    _close(correction_weights(*PLACE, level="geometric", cap=9.0), [1.0, 1.0, math.sqrt(1.25), math.sqrt(1.25)])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_are_zero_off_the_mask(level: str) -> None:
    mask = torch.tensor([True, False, False, False])
    weights = correction_weights(OLD, BEHAVIOR, mask, ROWS, 2, level=level, cap=9.0, batch_normalize=True)
    assert weights[0] == 1.0  # divided by the mean over what is left: itself
    assert not weights[1:].any()


def test_weights_never_carry_a_gradient() -> None:
    old = OLD.clone().requires_grad_()
    assert not correction_weights(old, BEHAVIOR, MASK, ROWS, 2, level="sequence", cap=2.0).requires_grad


def test_k1_has_the_sign_of_behaviour_over_proximal() -> None:
    kept = rejection_mask(*PLACE, reduction="token", statistic="k1", upper=2.0)
    assert kept.tolist() == [True, False, True, True]


def test_one_token_can_reject_its_whole_row() -> None:
    kept = rejection_mask(*PLACE, reduction="seq_max", statistic="k2", upper=0.5)
    assert kept.tolist() == [False, False, True, True]


def test_a_mean_over_a_row_lets_opposite_tokens_cancel() -> None:
    kept = rejection_mask(*PLACE, reduction="seq_mean", statistic="k1", upper=1.01, lower=0.95)
    assert kept.tolist() == [True, True, False, False]


def test_an_approximated_proximal_policy_lies_between_behaviour_and_current() -> None:
    versions = torch.tensor([10, 9, 8, -1])
    for linear in (False, True):
        guess = approximate_proximal(BEHAVIOR, OLD, versions, current_version=10, linear=linear)
        torch.testing.assert_close(guess[[0, 1, 3]], BEHAVIOR[[0, 1, 3]], rtol=0.0, atol=1e-8)
    halfway = approximate_proximal(BEHAVIOR, OLD, versions, current_version=10)[2]
    assert halfway.item() == pytest.approx((BEHAVIOR[2].item() + OLD[2].item()) / 2)


def test_equal_policies_do_not_diverge() -> None:
    same = behavior_divergence(OLD, OLD, MASK, ROWS, 2)
    assert (same.kl, same.k3_kl, same.chi2_token, same.chi2_seq, same.ppl_ratio) == (0.0, 0.0, 0.0, 0.0, 1.0)


def test_a_divergence_over_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="mask of a divergence is empty"):
        behavior_divergence(OLD, BEHAVIOR, ~MASK, ROWS, 2)
