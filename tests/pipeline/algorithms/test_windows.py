"""Successive batching trains every token exactly once and leaves no slot idle while there is work to begin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.algorithms.windows import ScheduledWindow, SuccessiveBatching, WindowResult
from tests.pipeline.algorithms.packed import some


def _play(schedule: SuccessiveBatching, lengths: list[int]) -> list[list[WindowResult]]:
    """Run until nothing is left."""
    steps: list[list[WindowResult]] = []
    while windows := schedule.fill(len(lengths)):
        steps.append(
            schedule.finish((w, min(w.limit, lengths[w.response]), lengths[w.response] <= w.limit) for w in windows)
        )
    return steps


@some
@given(st.lists(st.integers(1, 40), max_size=15), st.integers(1, 5), st.integers(1, 12), st.integers(1, 30))
def test_every_token_is_generated_once_and_every_response_finishes_once(
    lengths: list[int], num_slots: int, window: int, cap: int
) -> None:
    schedule = SuccessiveBatching(num_slots, window, cap)
    steps = _play(schedule, lengths)
    results = [result for step in steps for result in step]
    assert sum(r.num_policy_tokens for r in results) == sum(min(length, cap) for length in lengths)
    assert sum(r.num_value_tokens for r in results) == sum(min(length, cap) for length in lengths)
    assert sorted(r.window.response for r in results if r.is_finished) == list(range(len(lengths)))
    begun: set[int] = set()
    for step in steps:
        begun |= {r.window.response for r in step}
        assert len(step) == num_slots or len(begun) == len(lengths)
    for result in results:
        assert result.num_policy_tokens <= window
        assert result.lag == result.window.start // window
        assert result.is_eos == (result.is_finished and lengths[result.window.response] <= cap)


def test_unfinished_responses_come_before_new_ones() -> None:
    schedule = SuccessiveBatching(2, 4, 8)
    first = schedule.fill(3)
    schedule.finish([(first[0], 2, True), (first[1], 4, False)])
    assert schedule.fill(3) == [ScheduledWindow(1, 4, 8, 0), ScheduledWindow(2, 0, 4, 1)]


@pytest.mark.parametrize(("end", "is_eos"), [(0, True), (5, True), (3, False)])
def test_an_impossible_end_is_refused(end: int, is_eos: bool) -> None:
    schedule = SuccessiveBatching(1, 4, 8)
    with pytest.raises(ValueError, match="expected it to reach its limit"):
        schedule.finish([(schedule.fill(1)[0], end, is_eos)])
