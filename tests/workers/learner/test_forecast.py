"""Requests are rare, and yet in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.learner.forecast import Forecast


@given(st.floats(0.5, 200.0), st.integers(1, 500))
def test_at_a_steady_rate_few_polls_notice_the_last_unit_within_the_least_pause(rate: float, needed: int) -> None:
    forecast = Forecast(least_s=0.02, most_s=0.1)
    now, asked = 0.0, 0
    done_s = needed / rate
    while (ready := int(now * rate)) < needed:
        now += forecast.pause_s(now, num_ready=ready, num_needed=needed)
        asked += 1
    assert now - done_s <= 0.1
    assert asked <= 12 + done_s / 0.1 + 2.0 / rate / 0.02
    if rate >= 50.0:
        assert now - done_s <= 0.04, "with many units, it is known when the last one comes"


def test_while_nothing_comes_questions_grow_rarer() -> None:
    forecast = Forecast(least_s=0.02, most_s=0.1)
    pauses = [forecast.pause_s(now, num_ready=3, num_needed=8) for now in (0.0, 0.1, 0.5, 0.8, 5.0)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.02, 0.1)


def test_units_that_are_dropped_begin_a_new_forecast() -> None:
    forecast = Forecast(least_s=0.02, most_s=0.1)
    forecast.pause_s(0.0, num_ready=5, num_needed=8)
    forecast.pause_s(1.0, num_ready=7, num_needed=8)
    assert forecast.pause_s(1.1, num_ready=2, num_needed=8) == 0.02


def test_polls_grow_rarer_too_when_enough_are_ready_and_another_wait_goes_on() -> None:
    forecast = Forecast(least_s=0.02, most_s=0.1)
    forecast.pause_s(0.0, num_ready=0, num_needed=8)
    pauses = [forecast.pause_s(now, num_ready=9, num_needed=8) for now in (0.3, 0.5, 0.8, 5.0)]
    assert pauses == pytest.approx([0.03, 0.05, 0.08, 0.1])
