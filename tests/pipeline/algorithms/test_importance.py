"""Weights and rejections over tokens and rows: levels, bounds, signs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pipeline.algorithms.terms.importance import (
    approximate_proximal,
    behavior_ratio,
    correction_weights,
    importance_ratio,
    mean_weight,
    rejection_mask,
)
from pipeline.algorithms.terms.kl import row_divergence, token_divergence
from pipeline.config.learning import Importance, ImportanceLevel, Rejection, RejectionLevel, SampledSettings

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
    _close(correction_weights(SampledSettings(importance_cap=2.0), rho), [2.0, 0.25, 1.0, 1.25])
    band = SampledSettings(importance=Importance.ICEPOP, importance_floor=0.5, importance_cap=2.0)
    _close(correction_weights(band, rho), [0.0, 0.0, 1.0, 1.25])


def test_a_row_has_the_product_or_the_geometric_mean_of_its_ratios() -> None:
    _close(behavior_ratio(ImportanceLevel.SEQUENCE, *PLACE), [1.0, 1.0, 1.25, 1.25])
    root = math.sqrt(1.25)
    _close(behavior_ratio(ImportanceLevel.GEOMETRIC, *PLACE), [1.0, 1.0, root, root])


def test_tokens_off_the_mask_have_no_part_in_their_rows_ratio() -> None:
    mask = torch.tensor([True, False, True, True])
    _close(behavior_ratio(ImportanceLevel.SEQUENCE, OLD, BEHAVIOR, mask, ROWS, 2), [4.0, 4.0, 1.25, 1.25])


@pytest.mark.parametrize(("level", "mean"), [("token", (2.0 + 0.25 + 1.0 + 1.25) / 4), ("sequence", (1.0 + 1.25) / 2)])
def test_the_mean_weight_is_over_tokens_or_over_the_rows_that_share_one(level: str, mean: float) -> None:
    settings = SampledSettings(importance_cap=2.0, importance_level=ImportanceLevel(level))
    assert mean_weight(settings, *PLACE) == pytest.approx(mean, rel=1e-12)
    old, behavior = (torch.cat([x, x.new_full((1,), -9.0)]) for x in (OLD, BEHAVIOR))
    off = torch.tensor([True] * 4 + [False])
    rows = torch.tensor([0, 0, 1, 1, 2])
    assert mean_weight(settings, old, behavior, off, rows, 3) == pytest.approx(mean, rel=1e-12)


def test_a_mean_weight_of_zero_divides_nothing() -> None:
    settings = SampledSettings(importance=Importance.ICEPOP, importance_floor=90.0, importance_cap=99.0)
    assert mean_weight(settings, *PLACE) == 1.0


def _kept(rejection: Rejection, level: RejectionLevel, upper: float, lower: float | None = None) -> list[bool]:
    settings = SampledSettings(rejection=rejection, rejection_level=level, rejection_upper=upper, rejection_lower=lower)
    return rejection_mask(settings, *PLACE).tolist()


def test_nothing_is_rejected_unless_it_is_asked_for() -> None:
    assert rejection_mask(SampledSettings(rejection_upper=1e-9), *PLACE).all()


def test_a_ratio_is_kept_between_its_bounds() -> None:
    assert _kept(Rejection.RATIO, RejectionLevel.TOKEN, 1.2, 0.5) == [False, False, True, False]


def test_k1_has_the_sign_of_behaviour_over_proximal() -> None:
    assert _kept(Rejection.K1, RejectionLevel.TOKEN, 2.0) == [True, False, True, True]


def test_k3_and_its_reverse_look_at_the_gap_from_either_side() -> None:
    assert _kept(Rejection.K3, RejectionLevel.TOKEN, 1.0) == [False, True, True, True]
    assert _kept(Rejection.K3_REVERSE, RejectionLevel.TOKEN, 1.0) == [True, False, True, True]


def test_one_token_can_reject_its_whole_row() -> None:
    assert _kept(Rejection.K2, RejectionLevel.MAX, 0.5) == [False, False, True, True]


def test_a_mean_or_a_sum_over_a_row_lets_opposite_tokens_cancel() -> None:
    assert _kept(Rejection.K1, RejectionLevel.MEAN, 1.01, 0.95) == [True, True, False, False]
    assert _kept(Rejection.K1, RejectionLevel.SUM, 1.01, 0.95) == [True, True, False, False]
    assert _kept(Rejection.K1, RejectionLevel.MEAN, 1.01, 0.85) == [True, True, True, True]
    assert _kept(Rejection.K1, RejectionLevel.SUM, 1.01, 0.85) == [True, True, False, False]


def test_an_approximated_proximal_policy_lies_between_behaviour_and_current() -> None:
    versions = torch.tensor([10, 9, 8, -1])
    for linear in (False, True):
        guess = approximate_proximal(BEHAVIOR, OLD, versions, current_version=10, linear=linear)
        torch.testing.assert_close(guess[[0, 1, 3]], BEHAVIOR[[0, 1, 3]], rtol=0.0, atol=1e-8)
    halfway = approximate_proximal(BEHAVIOR, OLD, versions, current_version=10)[2]
    assert halfway.item() == pytest.approx((BEHAVIOR[2].item() + OLD[2].item()) / 2)


def test_equal_policies_do_not_diverge() -> None:
    tokens, rows = token_divergence(OLD, OLD), row_divergence(OLD, OLD, MASK, ROWS, 2)
    for name in ("behavior_kl", "behavior_k3", "behavior_chi2"):
        assert not tokens[name].any()
    for name in ("log_perplexity_gap", "log_perplexity_gap_abs", "sequence_chi2"):
        assert not rows[name].any()
    _close(rows["perplexity_ratio"], [1.0, 1.0])


def test_policies_without_a_common_token_have_a_divergence_that_is_a_number() -> None:
    """An average over an update must not be lost to one token."""
    apart = token_divergence(torch.zeros(1), torch.full((1,), -300.0))
    assert all(values.isfinite().all() for values in apart.values())
