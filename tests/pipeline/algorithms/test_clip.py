"""Where clipped losses are flat, where they are bounded, and where they agree."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.algorithms.terms.clip import clipped_loss, clipped_weight_loss
from pipeline.algorithms.terms.ratio import log_ratio, sequence_ratio
from pipeline.config.learning import ClipSettings
from tests.pipeline.algorithms.packed import some

LOW, HIGH, DUAL = 0.2, 0.28, 3.0
BOUNDS = ClipSettings(clip_low=LOW, clip_high=HIGH)
RATIOS = st.floats(0.01, 20.0)
ADVANTAGES = st.floats(-4.0, 4.0)


def _loss_and_slope(ratio: float, advantage: float, dual_clip: float = DUAL) -> tuple[float, float]:
    r = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([advantage], dtype=torch.float64)
    loss = clipped_loss(r, a, BOUNDS, dual_clip).loss
    (slope,) = torch.autograd.grad(loss.sum(), r)
    return loss.item(), slope.item()


@some
@given(ratio=RATIOS, advantage=ADVANTAGES)
def test_the_gradient_is_zero_exactly_where_the_clips_say(ratio: float, advantage: float) -> None:
    edges = (1.0 - LOW, 1.0 + HIGH, DUAL)
    if any(math.isclose(ratio, edge, rel_tol=1e-9) for edge in edges):
        return
    _, slope = _loss_and_slope(ratio, advantage)
    is_flat = (
        advantage == 0.0
        or (advantage > 0.0 and ratio > 1.0 + HIGH)
        or (advantage < 0.0 and (ratio < 1.0 - LOW or ratio > DUAL))
    )
    assert slope == (0.0 if is_flat else -advantage)


@some
@given(ratio=RATIOS, advantage=st.floats(-4.0, -1e-6), dual_clip=st.floats(1.01, 10.0))
def test_the_dual_clip_bounds_the_loss_of_negative_advantages(ratio: float, advantage: float, dual_clip: float) -> None:
    loss, _ = _loss_and_slope(ratio, advantage, dual_clip)
    free, _ = _loss_and_slope(ratio, advantage, 0.0)
    assert loss <= -advantage * dual_clip * (1 + 1e-12)
    assert loss <= free
    assert loss >= -advantage * (1.0 - LOW) * (1 - 1e-12)


@some
@given(ratio=RATIOS, advantage=st.floats(0.0, 4.0))
def test_the_dual_clip_leaves_positive_advantages_alone(ratio: float, advantage: float) -> None:
    assert _loss_and_slope(ratio, advantage, DUAL) == _loss_and_slope(ratio, advantage, 0.0)


@some
@given(ratio=RATIOS, advantage=ADVANTAGES)
def test_clipping_only_ever_makes_the_loss_larger(ratio: float, advantage: float) -> None:
    loss, _ = _loss_and_slope(ratio, advantage, 0.0)
    assert loss >= -advantage * ratio - 1e-12


def test_clip_flags_name_the_cut_tokens() -> None:
    ratio = torch.tensor([1.5, 0.5, 5.0, 1.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    term = clipped_loss(ratio, advantages, BOUNDS, DUAL)
    assert term.clipped.tolist() == [True, True, False, False]
    assert term.dual_clipped.tolist() == [False, False, True, False]


def test_the_log_ratio_is_clamped_so_that_no_ratio_overflows() -> None:
    huge = log_ratio(torch.tensor([500.0, -500.0]), torch.zeros(2))
    assert huge.tolist() == [20.0, -20.0]
    assert huge.exp().isfinite().all()


def _rows(*lengths: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return ids, torch.ones(ids.numel(), dtype=torch.bool)


@some
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_gspo_gives_every_token_of_a_row_the_geometric_mean_ratio(lengths: list[int], seed: int) -> None:
    ids, mask = _rows(*lengths)
    generator = torch.Generator().manual_seed(seed)
    new = torch.randn(ids.numel(), dtype=torch.float64, generator=generator).requires_grad_()
    old = new.detach() + 0.1 * torch.randn(ids.numel(), dtype=torch.float64, generator=generator)
    ratio = sequence_ratio(new, old, mask, ids, len(lengths))
    for row in range(len(lengths)):
        mean = (new - old)[ids == row].mean().exp()
        torch.testing.assert_close(ratio[ids == row], mean.expand(lengths[row]))
    (gradient,) = torch.autograd.grad(ratio.sum(), new)
    # each token's own
    torch.testing.assert_close(gradient, ratio)


@some
@given(ratio=RATIOS, advantage=ADVANTAGES)
def test_the_gradient_of_cispo_never_vanishes_for_a_nonzero_advantage(ratio: float, advantage: float) -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    value = torch.tensor([ratio], dtype=torch.float64)
    a = torch.tensor([advantage], dtype=torch.float64)
    loss = clipped_weight_loss(logprobs, value, a, BOUNDS).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    expected = -advantage * min(max(ratio, 1.0 - LOW), 1.0 + HIGH)
    assert gradient.item() == pytest.approx(expected)
