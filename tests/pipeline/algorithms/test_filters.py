"""Groups are judged whole, by raw accuracy, and the sampling loop takes them in the order of arrival."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.algorithms.filters import (
    DynamicSampling,
    FinishedMember,
    GroupVerdict,
    RunningSignal,
    SamplingState,
    has_signal,
    judge_group,
)

RIGHT, WRONG = 1.0, 0.0


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [([1.0, 1.0], False), ([0.0, 0.0], False), ([1.0, 0.0], True), ([0.5, 0.5], False), ([1.0], True)],
)
def test_a_group_has_signal_when_its_members_differ_in_accuracy(accuracies: list[float], expected: bool) -> None:
    assert has_signal(accuracies) is expected


def test_age_is_judged_before_signal() -> None:
    members = [FinishedMember(0, 5, RIGHT), FinishedMember(3, 3, RIGHT)]
    assert judge_group(members, eta=4).verdict is GroupVerdict.EVICT_STALE
    assert judge_group(members, eta=5).verdict is GroupVerdict.EVICT_UNINFORMATIVE


def test_age_runs_from_the_oldest_token_to_the_slowest_member() -> None:
    judgement = judge_group([FinishedMember(2, 2, RIGHT), FinishedMember(1, 6, WRONG)], eta=5)
    assert (judgement.ready_version, judgement.age, judgement.verdict) == (6, 5, GroupVerdict.TRAIN)


BATCHES = st.lists(st.lists(st.lists(st.sampled_from([RIGHT, WRONG]), min_size=2, max_size=2), max_size=4), max_size=6)


@given(BATCHES, st.integers(1, 5), st.integers(0, 4))
def test_the_loop_keeps_groups_with_signal_and_takes_the_first_of_them(
    batches: list[list[list[float]]], num_wanted: int, max_batches: int
) -> None:
    loop = DynamicSampling[tuple[int, int]](num_wanted, max_batches)
    with_signal: list[tuple[int, int]] = []
    for b, batch in enumerate(batches):
        if loop.state is not SamplingState.SAMPLING:
            break
        groups = [((b, g), accuracies) for g, accuracies in enumerate(batch)]
        with_signal += [uid for uid, accuracies in groups if len(set(accuracies)) > 1]
        loop.offer(groups)
    assert loop.kept == with_signal
    if len(with_signal) >= num_wanted:
        assert loop.state is SamplingState.FULL
        assert loop.batch == with_signal[:num_wanted]
        assert loop.batch + loop.surplus == with_signal
    else:
        assert loop.batch == []
        is_over = max_batches and loop.num_generation_batches >= max_batches
        assert loop.state is (SamplingState.HOPELESS if is_over else SamplingState.SAMPLING)


def test_a_loop_that_is_over_takes_nothing_more() -> None:
    loop = DynamicSampling[int](1)
    assert loop.offer([(0, [RIGHT, WRONG])]) is SamplingState.FULL
    with pytest.raises(ValueError, match="full"):
        loop.offer([(1, [RIGHT, WRONG])])
    assert loop.batch == [0]


def test_a_running_signal_may_come_and_go_as_members_finish() -> None:
    running = RunningSignal[str]()
    running.observe("a", [])
    assert running.with_signal() == []
    running.observe("a", [1.0])
    assert running.with_signal() == []
    running.observe("a", [-1.0])
    running.observe("b", [1.0, -1.0])
    assert running.with_signal() == ["a", "b"]
