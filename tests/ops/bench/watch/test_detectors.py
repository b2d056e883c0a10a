"""The baselines, their thresholds, and what is run."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ops.bench.watch.__main__ import planned
from ops.bench.watch.baselines import (
    DistanceDetector,
    HeartbeatDetector,
    MahalanobisDetector,
    Persistence,
    TimeoutDetector,
    sums_of_distances,
)
from ops.bench.watch.cases import SINGLE, Case
from ops.bench.watch.contenders import check_distinct, check_windows_distinct, threshold
from ops.bench.watch.evaluation import run_case, run_cases
from ops.bench.watch.levels import Levels
from ops.bench.watch.page import page
from ops.bench.watch.vae import METRICS, Denoise, train
from pipeline.watch.frame import Frame
from protocol.errors import ConfigError

WORKERS = tuple(f"w{place}" for place in range(6))


def frame(
    now: float, values: np.ndarray, metrics: tuple[str, ...] = ("cpu", "done"), workers: tuple[str, ...] = WORKERS
) -> Frame:
    return Frame(now, workers, ("reward",) * len(workers), metrics, values.astype(np.float32))


def test_sums_of_distances_equal_those_of_all_pairs() -> None:
    values = np.random.default_rng(0).normal(size=(3, 7, 2))
    values[:, 3] = values[:, 4]
    pairs = np.abs(values[:, :, None] - values[:, None, :]).sum(axis=2)
    np.testing.assert_allclose(sums_of_distances(values), pairs, rtol=1e-5)


def test_counters_become_rates_and_gaps_keep_the_last_level() -> None:
    levels = Levels(2)
    table = np.zeros((6, 2))
    for now, (cpu, done) in enumerate([(1.0, 10.0), (2.0, 13.0), (math.nan, 19.0)]):
        table[:] = (cpu, done)
        levels.add(frame(float(now), table.copy()))
    window = levels.window(np.arange(6))
    assert window[:, 0].tolist() == [[2.0, 3.0], [2.0, 6.0]]


def test_levels_follow_workers_that_come_and_go_by_their_names() -> None:
    levels = Levels(2)
    table = np.column_stack([np.arange(6.0), 5.0 * np.arange(6.0)])
    levels.add(frame(0.0, table))
    names = ("w4", "new", "w1")
    levels.add(frame(1.0, np.array([[4.0, 27.0], [9.0, 100.0], [1.0, 8.0]]), workers=names))
    window = levels.window(np.arange(3))
    assert window[1].tolist() == [[4.0, 7.0], [9.0, 5.0], [1.0, 3.0]]


@pytest.mark.parametrize("make", [DistanceDetector, MahalanobisDetector])
def test_a_similarity_baseline_names_the_worker_that_stays_away_from_its_peers(make: type) -> None:
    rng = np.random.default_rng(1)
    detector = make(3.0)
    named = []
    for now in range(300):
        table = np.column_stack([rng.normal(1.0, 0.02, 6), now * np.full(6, 3.0)])
        if now >= 150:
            table[2, 0] += 1.0
        named += detector.tick(frame(float(now), table), float(now))
    assert [alarm.worker for alarm in named] == ["w2"]
    # no sooner than the candidate has stayed for a minute
    assert 205.0 <= named[0].time_s <= 225.0


def test_a_candidate_that_changes_begins_anew() -> None:
    held = Persistence(3)
    assert [held.add(*look) for look in [("a", 5.0), ("a", 4.0), ("b", 9.0), ("a", 5.0), ("a", 3.0), ("a", 6.0)]] == [
        0.0, 0.0, 0.0, 0.0, 0.0, 3.0,
    ]  # fmt: skip


def test_timeouts_give_a_learner_five_minutes_and_idle_workers_for_ever() -> None:
    detector = TimeoutDetector()
    metrics = ("heartbeat_age_s", "progress", "in_flight")
    rows = np.array([[0.5, 7.0, 1.0], [0.5, 7.0, 1.0], [0.5, 7.0, 0.0]], dtype=np.float32)
    named = [
        (alarm.worker, now)
        for now in range(400)
        for alarm in detector.tick(
            Frame(float(now), ("g", "l", "i"), ("generator", "learner", "generator"), metrics, rows), float(now)
        )
    ]
    assert named == [("g", 61), ("l", 301)]


def test_a_threshold_is_exceeded_by_two_windows_of_a_hundred() -> None:
    levels = [float(number) for number in range(100)]
    limit = threshold(levels)
    assert sum(level > limit for level in levels) == 2
    assert threshold([3.0, 9.0, 5.0]) == 9.0


def test_two_rows_that_do_the_same_are_refused() -> None:
    check_distinct({"a": lambda: HeartbeatDetector(4.0), "b": TimeoutDetector})
    with pytest.raises(ConfigError, match="no row"):
        check_distinct({"a": lambda: HeartbeatDetector(4.0), "b": lambda: HeartbeatDetector(4.01)})


def test_windows_that_begin_alike_are_refused() -> None:
    plan = planned("test", 8, 4)
    check_windows_distinct(plan)
    with pytest.raises(ConfigError, match="seeds of their own"):
        check_windows_distinct([_Alike("test", "regimes", 8, "leak", 0)])


class _Alike(Case):
    """A window whose seed forgets the split."""

    def random(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng(0)


def test_a_heartbeat_finds_a_killed_worker_and_no_slow_one() -> None:
    makes = {"heartbeat": lambda: HeartbeatDetector(4.0)}
    found, levels = run_case(Case("dev", "regimes", 8, "killed", 0), makes)
    assert found["heartbeat"].num_found == 1
    assert 3.0 <= found["heartbeat"].delays_s[0] <= 5.0
    assert levels["heartbeat"] > 4.0
    missed, _ = run_case(Case("dev", "regimes", 8, "slow x2", 0), makes)
    assert missed["heartbeat"].delays_s == (math.inf,)


def test_no_window_is_begun_after_the_time_and_the_page_shows_what_ran() -> None:
    plan = planned("dev", 8, 26)
    assert [case.label for case in plan if case.label in SINGLE].count("leak") == 2
    times = iter([0.0, 1.0, 2.0, 99.0])
    outcomes = run_cases(plan, {"watch": lambda: HeartbeatDetector(4.0)}, max_s=10.0, clock=lambda: next(times))
    assert len(outcomes["watch"]) == 2
    single = sum(case.label in SINGLE for case in plan[:2])
    text = page({"command": "headrace bench watch"}, outcomes, {})
    assert f"8 workers: {single} with one fault" in text


def test_denoisers_learn_to_give_windows_back_without_their_noise() -> None:
    models, error = train(num_steps=60, num_windows=1, ticks=200)
    assert error < 0.1
    rng = np.random.default_rng(0)
    clean = np.full((8, 4, len(METRICS)), 0.5, dtype=np.float32)
    noisy = clean + rng.normal(0.0, 0.2, clean.shape).astype(np.float32)
    denoised = Denoise(models)(noisy, METRICS)
    assert denoised.shape == noisy.shape
    assert denoised.std(axis=0).mean() < noisy.std(axis=0).mean()
    with pytest.raises(ValueError, match="these models are of"):
        Denoise(models)(noisy, ("cpu",))
