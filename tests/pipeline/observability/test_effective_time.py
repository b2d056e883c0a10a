"""The share of a run's time that became updates, on made runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.observability.effective_time import EffectiveTime, UpSpan, effective_time
from pipeline.observability.start_record import EndRow, RunStart, StartRow, up_spans

HOUR_S = 3600.0


def every(step_s: float, until_s: float, *, begin_s: float = 0.0) -> list[float]:
    return [begin_s + step_s * (i + 1) for i in range(int((until_s - begin_s) / step_s))]


def test_a_run_without_a_fault_is_effective_all_the_time():
    time = effective_time(every(10, 2 * HOUR_S), [UpSpan(0.0, 2 * HOUR_S)])
    assert time is not None
    assert (time.by_steps, time.lowest_hour, time.last_hour, time.usual_s) == pytest.approx((1, 1, 1, 10), abs=0.003)


def test_a_standstill_and_repeated_updates_cost_their_time():
    # six minutes of two hours: five without an update, one with updates that are made again
    updates = [*every(10, 3000), *every(10, 2 * HOUR_S, begin_s=3360)]
    time = effective_time(updates, [UpSpan(0.0, 2 * HOUR_S)])
    assert time is not None
    assert time.by_steps == pytest.approx(0.95, abs=0.003)
    assert time.lowest_hour == pytest.approx(0.90, abs=0.004)
    assert time.last_hour == pytest.approx(1.0, abs=0.003)


def test_a_run_that_makes_no_update_any_more_loses_its_last_hour():
    time = effective_time(every(10, HOUR_S), [UpSpan(0.0, 3 * HOUR_S)])
    assert time is not None
    assert (time.by_steps, time.last_hour, time.lowest_hour) == pytest.approx((1 / 3, 0.0, 0.0), abs=0.003)


def test_time_between_a_persons_stop_and_the_next_start_counts_for_nothing():
    updates = [*every(10, HOUR_S), *every(10, 10 * HOUR_S + HOUR_S, begin_s=10 * HOUR_S)]
    starts = [
        RunStart(StartRow(0.0), EndRow(HOUR_S, "stopping")),
        RunStart(StartRow(10 * HOUR_S), None),
    ]
    time = effective_time(updates, up_spans(starts, 11 * HOUR_S))
    assert time is not None
    assert (time.up_s, time.by_steps, time.lowest_hour) == pytest.approx((2 * HOUR_S, 1, 1), abs=0.004)


def test_time_after_a_crash_of_the_supervisor_is_time_up():
    starts = [RunStart(StartRow(0.0), None), RunStart(StartRow(1500.0), None)]
    assert up_spans(starts, 2000.0) == [UpSpan(0.0, 1500.0), UpSpan(1500.0, 2000.0)]
    assert up_spans([RunStart(StartRow(5.0), EndRow(9.0, "finished"))], 7.0) == [UpSpan(5.0, 7.0)]
    assert up_spans([], 7.0) == []


@pytest.mark.parametrize("updates", [[], [1.0], [1.0, 2.0]])
def test_few_updates_have_no_ratio(updates: list[float]):
    assert effective_time(updates, [UpSpan(0.0, 9.0)]) is None
    assert effective_time([1.0, 2.0, 3.0], []) is None


@given(st.lists(st.floats(0.5, 50.0), min_size=3, max_size=60), st.floats(0.0, 5000.0), st.floats(-1e6, 1e6))
def test_a_longer_standstill_never_helps_and_the_clocks_zero_does_not_matter(
    steps: list[float], still_s: float, zero_s: float
):
    updates = [zero_s + sum(steps[: i + 1]) for i in range(len(steps))]
    before = effective_time(updates, [UpSpan(zero_s, updates[-1])])
    after = effective_time(updates, [UpSpan(zero_s, updates[-1] + still_s)])
    assert before is not None and after is not None
    assert after.by_steps <= before.by_steps + 1e-9
    assert (after.lowest_hour is None) is (after.last_hour is None) is (after.up_s < HOUR_S)
    if after.lowest_hour is not None and after.last_hour is not None:
        assert 0.0 <= after.lowest_hour <= after.last_hour + 1e-9


def test_the_three_shares_are_one_sentence_and_the_hour_is_left_out_of_a_short_run():
    short = EffectiveTime(0.971, None, None, 10.0, 600.0)
    assert short.in_words() == "effective time: 97.1 % by steps"
    long = EffectiveTime(0.971, 0.9, 0.96, 10.0, 2 * HOUR_S, 0.41)
    assert long.in_words() == "effective time: 97.1 % by steps (last hour 96.0 %), 41.0 % by device"
    struck = EffectiveTime(0.9, None, None, 10.0, 600.0, None, {"detect_s": 30.0, "replace_s": 0.1, "repeat_s": 10.0})
    assert struck.in_words().endswith("90.0 % by steps; workers under repair 40 s: detect 75 %, repeat 25 %")
