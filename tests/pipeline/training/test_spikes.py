"""A spike is a finite step far above the median of the last applied ones."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.training.spikes import LEAST, NO_LIMITS, NO_STEP, WINDOW, RecentSteps, StepLimits

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)
NORMS = st.floats(0.0, 1e6, allow_nan=False)
STEPS = st.lists(st.tuples(NUMBERS, NORMS), min_size=LEAST, max_size=2 * WINDOW)
FACTORS = st.floats(1.0, 100.0)


def steps_of(steps: list[tuple[float, float]]) -> RecentSteps:
    recent = RecentSteps()
    for loss, norm in steps:
        recent.add(loss, norm)
    return recent


@pytest.mark.parametrize("limits", [NO_LIMITS, NO_STEP, StepLimits(1.0, 1.0)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_step_that_is_not_finite_is_within_no_limits(limits: StepLimits, bad: float) -> None:
    assert not limits.allow(bad, 0.5)
    assert not limits.allow(0.5, bad)


@given(NUMBERS, NORMS)
def test_every_finite_step_is_allowed_without_limits_and_none_where_none_may_be(loss: float, norm: float) -> None:
    assert NO_LIMITS.allow(loss, norm)
    assert not NO_STEP.allow(loss, norm)


@given(STEPS, FACTORS)
def test_at_most_half_of_the_recent_steps_are_above_the_limit_of_either_number(
    steps: list[tuple[float, float]], factor: float
) -> None:
    limits = steps_of(steps).limits(factor)
    last = steps[-WINDOW:]
    assert 2 * sum(abs(loss) > limits.loss for loss, _ in last) <= len(last)
    assert 2 * sum(norm > limits.grad_norm for _, norm in last) <= len(last)


@given(STEPS, st.floats(1e-3, 1e3), FACTORS)
def test_limits_follow_the_scale_of_the_steps(steps: list[tuple[float, float]], scale: float, factor: float) -> None:
    limits = steps_of(steps).limits(factor)
    scaled = steps_of([(scale * loss, scale * norm) for loss, norm in steps]).limits(factor)
    assert scaled.loss == pytest.approx(scale * limits.loss)
    assert scaled.grad_norm == pytest.approx(scale * limits.grad_norm)


@given(STEPS, FACTORS)
def test_only_the_newest_steps_count_and_a_restart_forgets_none_of_them(
    steps: list[tuple[float, float]], factor: float
) -> None:
    recent = steps_of(steps)
    assert recent.limits(factor) == steps_of(steps[-WINDOW:]).limits(factor)
    again = RecentSteps()
    again.restore(json.loads(json.dumps(recent.state)))
    assert again.limits(factor) == recent.limits(factor) and again.state == recent.state


def test_a_step_above_the_factor_times_the_median_is_a_spike_by_either_number() -> None:
    limits = steps_of([(-2.0, 0.5)] * LEAST).limits(5.0)
    assert limits == StepLimits(10.0, 2.5)
    assert limits.allow(10.0, 2.5) and limits.allow(-10.0, 2.5)
    assert not limits.allow(-10.1, 1.0) and not limits.allow(1.0, 2.6)


def test_there_are_no_limits_at_factor_0_for_the_first_steps_and_about_a_median_of_0() -> None:
    assert steps_of([(1.0, 1.0)] * WINDOW).limits(0.0) == NO_LIMITS
    assert steps_of([(1.0, 1.0)] * (LEAST - 1)).limits(5.0) == NO_LIMITS
    assert steps_of([(0.0, 1.0)] * LEAST).limits(5.0) == StepLimits(math.inf, 5.0)
