"""Claims about similarity: odd workers are named, bursts, pauses and odd hosts are not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.fleet.peers.frame import Frame
from pipeline.fleet.peers.groups import medians_and_nearer
from pipeline.fleet.peers.thresholds import NO_THRESHOLDS, Tuning
from pipeline.fleet.peers.watcher import Watch
from tests.pipeline.fleet.peers.fleets import LEVELS, findings, fleet, named

METRIC = {name: at for at, name in enumerate(LEVELS)}


def scale(metric: str, factor: float, *workers: int, begin_s: float = 150.0, end_s: float = 1e9):
    """Return a change that multiplies a metric of some workers, or of all, from a time on."""

    def change(time_s: float, values: np.ndarray) -> None:
        if begin_s <= time_s < end_s:
            values[list(workers) if workers else slice(None), METRIC[metric]] *= factor

    return change


@pytest.mark.parametrize(
    ("metric", "factor", "kind"),
    [("service_ratio", 1.6, "slow"), ("tokens_per_s", 0.5, "slow"), ("cpu", 0.4, "odd"), ("heat", 1.6, "odd")],
)
def test_a_worker_that_leaves_its_peers_is_named(metric: str, factor: float, kind: str) -> None:
    # heat has no meaning here, and needs more past and more time
    begin_s = 300.0 if metric == "heat" else 150.0
    found = findings(fleet(seconds=int(begin_s) + 210, change=scale(metric, factor, 5, begin_s=begin_s)))
    assert [(one.worker, one.kind, one.metric) for one in found] == [("generator-5", kind, metric)]
    assert begin_s <= found[0].alarm_s <= begin_s + 180.0
    assert abs(found[0].since_s - begin_s) <= 25.0
    assert metric in found[0].sentence


def test_a_good_direction_is_no_oddity() -> None:
    assert named(fleet(seconds=360, change=scale("tokens_per_s", 2.0, 5))) == []


def test_a_burst_of_45_seconds_blames_no_worker() -> None:
    assert named(fleet(seconds=400, change=scale("service_ratio", 4.0, 5, end_s=195.0))) == []


@pytest.mark.parametrize(("num", "blamed"), [(16, ["generator-3"]), (2000, [])])
def test_an_unusual_first_minute_misleads_a_small_fleet_and_not_a_large_one(num: int, blamed: list[str]) -> None:
    def change(time_s: float, values: np.ndarray) -> None:
        values[3, 0] *= 1.0 if time_s < 60.0 else 1.3

    found = findings(fleet(num, seconds=160, levels={"heat": 40.0}, change=change))
    assert [one.worker for one in found] == blamed


@pytest.mark.parametrize(("share", "blamed"), [(Tuning().burst_share, []), (0.5, ["generator-3"])])
def test_a_noisy_burst_of_one_worker_of_many_moves_the_median_and_is_no_evidence(
    share: float, blamed: list[str]
) -> None:
    def change(time_s: float, values: np.ndarray) -> None:
        values[3, 0] *= 3.0 if 180.0 <= time_s < 230.0 else 1.0

    # only the slow view, and it needs little
    tuning = Tuning(burst_share=share, fast_limit=1e6, slow_limit=10.0, slow_persistence_s=10.0)
    frames = fleet(80, seconds=340, levels={"heat": 40.0}, change=change, noise=0.35)
    assert [one.worker for one in findings(frames, Watch(tuning, NO_THRESHOLDS))] == blamed


def test_what_most_values_exceed_lies_nearer_to_nought_than_their_median() -> None:
    values = np.array([[9, 1, 2, 8, 3, 7, np.nan, 4, 6, 5], [-3, -1, 0, 1, 2, -2, 3, 4, -4, np.nan]], np.float32)
    middle, nearer = medians_and_nearer(np.concatenate([values, -values, values * np.nan]), 0.25)
    assert middle.tolist()[:4] == [5.0, 0.0, -5.0, 0.0]
    assert nearer.tolist()[:4] == [3.0, 0.0, -3.0, 0.0]
    assert np.isnan(middle[4]) and np.isnan(nearer[4])


def test_a_pause_of_the_whole_role_blames_no_worker() -> None:
    assert named(fleet(seconds=400, change=scale("tokens_per_s", 0.0, end_s=300.0))) == []


def test_a_change_of_many_workers_is_common_and_blames_none() -> None:
    assert named(fleet(10, seconds=400, change=scale("service_ratio", 3.0, 0, 1, 2, 3))) == []


def test_a_host_that_was_always_different_is_not_blamed() -> None:
    assert named(fleet(seconds=400, change=scale("cpu", 1.8, 5, begin_s=0.0))) == []


def test_a_doubled_load_blames_no_host_that_was_always_different() -> None:
    def change(time_s: float, values: np.ndarray) -> None:
        values[5, METRIC["cpu"]] *= 1.6
        if time_s >= 150.0:
            values[:, METRIC["cpu"]] *= 2.0

    assert named(fleet(seconds=400, change=change)) == []


def test_a_worker_that_becomes_like_its_peers_is_not_blamed() -> None:
    assert named(fleet(seconds=400, change=scale("heat", 0.6, 5, begin_s=0.0, end_s=150.0))) == []


def test_two_workers_that_fail_together_are_both_named() -> None:
    found = named(fleet(16, seconds=360, change=scale("service_ratio", 2.0, 3, 11)))
    assert sorted(found) == [("generator-11", "slow"), ("generator-3", "slow")]


def test_a_worker_is_named_once() -> None:
    assert len(named(fleet(seconds=800, change=scale("service_ratio", 2.0, 5)))) == 1


def test_a_lone_worker_is_judged_by_its_own_past() -> None:
    found = findings(fleet(1, seconds=400, change=scale("service_ratio", 2.0, 0, begin_s=200.0)))
    assert [(one.worker, one.kind) for one in found] == [("generator-0", "slow")]
    assert named(fleet(1, seconds=400)) == []


def test_of_two_workers_the_one_that_moved_is_named() -> None:
    assert named(fleet(2, seconds=400, change=scale("service_ratio", 2.0, 1))) == [("generator-1", "slow")]


def test_a_lone_worker_that_moves_with_the_fleet_is_not_blamed() -> None:
    roles = ("learner", *["generator"] * 6)
    assert named(fleet(7, seconds=400, roles=roles, change=scale("cpu", 2.0))) == []


def test_workers_are_compared_inside_their_role_only() -> None:
    def change(time_s: float, values: np.ndarray) -> None:
        values[4:, METRIC["heat"]] *= 3.0

    assert named(fleet(8, seconds=300, roles=["a"] * 4 + ["b"] * 4, change=change)) == []


def test_a_role_in_two_phases_blames_neither_phase() -> None:
    watch, found = Watch(), []
    for frame in fleet(12, seconds=400, change=scale("cpu", 0.3, 0, 1, 2)):
        phases = tuple("evaluation" if at < 3 and frame.time_s >= 150.0 else "training" for at in range(12))
        found += watch.tick(Frame(frame.time_s, frame.workers, frame.roles, frame.metrics, frame.values, phases))
    assert found == []


def test_workers_that_come_and_go_are_not_blamed_and_cost_others_nothing() -> None:
    watch, found = Watch(), []
    for frame in fleet(10, seconds=400, change=scale("service_ratio", 2.0, 5, begin_s=200.0)):
        there = [
            at for at in range(10) if not (at == 8 and frame.time_s < 120.0) and not (at == 2 and frame.time_s > 180.0)
        ]
        cut = Frame(
            frame.time_s, tuple(frame.workers[at] for at in there), tuple(frame.roles[at] for at in there),
            frame.metrics, frame.values[there],
        )  # fmt: skip
        found += watch.tick(cut)
    assert [(one.worker, one.kind) for one in found] == [("generator-5", "slow")]


@pytest.mark.parametrize("step_s", [2.0, 5.0, 15.0])
def test_the_interval_of_the_samples_does_not_matter(step_s: float) -> None:
    found = findings(fleet(seconds=600, step_s=step_s, change=scale("service_ratio", 2.0, 5, begin_s=300.0)))
    assert [one.worker for one in found] == ["generator-5"]
    assert found[0].alarm_s <= 300.0 + 130.0


@given(share=st.floats(0.0, 0.9), seed=st.integers(0, 1000))
@settings(max_examples=4, deadline=None)
def test_missing_samples_alone_alarm_nothing(share: float, seed: int) -> None:
    random = np.random.default_rng(seed)

    def change(time_s: float, values: np.ndarray) -> None:
        values[random.random(values.shape) < share] = np.nan
        if time_s > 100.0:
            values[3] = np.nan

    assert named(fleet(6, seconds=250, change=change, seed=seed)) == []


@given(order=st.permutations(range(8)), seed=st.integers(0, 1000))
@settings(max_examples=4, deadline=None)
def test_relabelling_workers_changes_nothing(order: list[int], seed: int) -> None:
    frames = list(fleet(8, seconds=260, change=scale("service_ratio", 2.0, 5, begin_s=120.0), seed=seed))
    other = [
        Frame(
            one.time_s, tuple(f"w{order.index(at)}" for at in order), one.roles, one.metrics, one.values[list(order)]
        )
        for one in frames
    ]  # fmt: skip
    plain, moved = findings(iter(frames)), findings(iter(other))
    assert [(one.alarm_s, one.score) for one in plain] == [(one.alarm_s, one.score) for one in moved]
    assert [order.index(int(one.worker.removeprefix("generator-"))) for one in plain] == [
        int(one.worker.removeprefix("w")) for one in moved
    ]


def scale_first(time_s: float, values: np.ndarray) -> None:
    values[5, 0] *= 2.0 if time_s >= 120.0 else 1.0


@given(exponent=st.integers(-20, 20), seed=st.integers(0, 1000))
@settings(max_examples=4, deadline=None)
def test_the_unit_of_an_unknown_metric_changes_nothing(exponent: int, seed: int) -> None:
    """Exactly, for powers of two: others round the samples themselves."""
    levels = {"heat": 40.0, "hum": 7.0}
    frames = list(fleet(8, seconds=240, levels=levels, change=scale_first, seed=seed))

    def scaled(one: Frame) -> Frame:
        values = one.values.copy()
        values[:, 0] *= np.float32(2.0**exponent)
        return Frame(one.time_s, one.workers, one.roles, one.metrics, values)

    plain, other = findings(iter(frames)), findings(scaled(one) for one in frames)
    assert [(one.worker, one.alarm_s, one.score) for one in plain] == [
        (one.worker, one.alarm_s, one.score) for one in other
    ]
    assert [one.worker for one in plain] == ["generator-5"]
