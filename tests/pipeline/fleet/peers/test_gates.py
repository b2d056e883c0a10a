"""Claims about what keeps a healthy worker from blame: each fails without its gate."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.fleet.peers.frame import Frame, metric
from pipeline.fleet.peers.groups import Groups
from pipeline.fleet.peers.past import Deviations, Floors, Past, believed
from pipeline.fleet.peers.similarity import Evidence
from pipeline.fleet.peers.thresholds import NO_THRESHOLDS, Tuning
from pipeline.fleet.peers.watcher import Watch
from tests.pipeline.fleet.peers.fleets import fleet, named

STEP = {"step_ms": 30.0}
LONE = ("learner", *["generator"] * 6)


def odd(*workers: int, begin_s: float = 150.0, by: float = 3.0, stagger_s: float = 0.0, column: int = 0):
    """Return a change by which workers deviate, one after the other."""

    def change(time_s: float, values: np.ndarray) -> None:
        for at, worker in enumerate(workers):
            if time_s >= begin_s + at * stagger_s:
                values[worker, column] *= by

    return change


@pytest.mark.parametrize(
    ("left", "apart", "moved", "bad", "size"),
    [
        (10.0, 9.0, 8.0, 0, 10.0),
        (-10.0, -9.0, -8.0, 0, 10.0),
        (10.0, 1.0, 9.0, 0, 2.0),
        (10.0, 9.0, 1.0, 0, 2.0),
        (10.0, -9.0, 8.0, 0, 0.0),
        (10.0, 9.0, -8.0, 0, 0.0),
        (10.0, 9.0, 8.0, -1, 0.0),
        (-10.0, -9.0, -8.0, -1, 10.0),
    ],
)
def test_a_deviation_is_believed_as_far_as_peers_and_past_bear_it(
    left: float, apart: float, moved: float, bad: int, size: float
) -> None:
    given = [np.array([[one]], np.float32) for one in (left, apart, moved, bad)]
    assert believed(*given).item() == size


def test_a_worker_whose_peers_move_away_has_not_moved_and_is_not_blamed() -> None:
    # two of three move, and come to be its reference
    assert ("generator-0", "odd") not in named(fleet(3, seconds=400, levels=STEP, change=odd(1, 2)))


def test_a_lone_worker_is_blamed_when_it_moves_alone_and_not_with_the_fleet() -> None:
    def all_twice(time_s: float, values: np.ndarray) -> None:
        values *= 2.0 if time_s >= 150.0 else 1.0

    assert named(fleet(7, seconds=400, levels=STEP, roles=LONE, change=all_twice)) == []
    assert named(fleet(7, seconds=400, levels=STEP, roles=LONE, change=odd(0, by=2.0))) == [("generator-0", "odd")]


def test_a_third_of_a_role_that_becomes_odd_one_by_one_is_common() -> None:
    assert named(fleet(10, seconds=330, levels=STEP, change=odd(0, 1, 2, 3, stagger_s=5.0))) == []


def test_more_workers_than_fail_at_once_are_common_in_a_large_role() -> None:
    assert named(fleet(40, seconds=330, levels=STEP, change=odd(0, 1, 2, 3, 4))) == []
    assert len(named(fleet(40, seconds=330, levels=STEP, change=odd(0, 1, 2)))) == 3


def test_while_an_oddity_is_common_the_evidence_neither_grows_nor_falls() -> None:
    groups, tuning = Groups.by(("r",) * 10), Tuning()
    evidence, floors = Evidence(tuning, NO_THRESHOLDS, 150.0, 70.0, 0.0), Floors([metric("heat")], tuning)
    evidence.align(("heat",), tuple("abcdefghij"), groups)
    none, all_of = np.zeros((1, 10), bool), np.ones((1, 10), bool)

    def judge(time_s: float, num_odd: int) -> list[float]:
        left, one = np.array([[10.0] * num_odd + [0.0] * (10 - num_odd)], np.float32), np.ones((1, 10), np.float32)
        evidence.judge(
            time_s, 1.0, Deviations(left, left, left, one, one), left, np.abs(left), groups, floors, all_of, none[0]
        )
        return [float(evidence.state[name][0, 0]) for name in ("evidence", "persisted_s")]

    alone = [judge(float(at), 1) for at in range(20)][-1]
    assert alone == [20 * 6.5, 20.0]
    assert [judge(20.0 + at, 4) for at in range(10)][-1] == alone
    assert judge(30.0, 0) == [20 * 6.5 - 3.5, 17.0]


def test_a_lone_worker_is_not_silent_when_most_of_the_fleet_is() -> None:
    workers, roles = ("a", *(f"b-{at}" for at in range(9))), ("one", *["many"] * 9)

    def seen(num_late: int) -> list[str]:
        watch, found = Watch(), list[str]()
        for at in range(60):
            ages = np.full((10, 1), 0.5, np.float32)
            ages[:num_late] = max(0.5, at - 30.0)
            found += [one.worker for one in watch.tick(Frame(float(at), workers, roles, ("heartbeat_age_s",), ages))]
        return found

    assert seen(10) == []
    assert seen(1) == ["a"]


def test_a_worker_with_larger_pieces_of_work_is_busy_and_not_odd() -> None:
    levels = {"oldest_age_s": 4.0, "service_ratio": 1.0, "gpu_util": 0.8, "cache_share": 0.3}

    def busy(age_by: float, ratio_by: float):
        def change(time_s: float, values: np.ndarray) -> None:
            if time_s >= 300.0:
                values[5] *= (age_by, ratio_by, 0.4, 3.0)

        return change

    assert named(fleet(8, seconds=520, levels=levels, change=busy(6.0, 1.0))) == []
    assert [name for name, _ in named(fleet(8, seconds=520, levels=levels, change=busy(1.0, 1.0)))] == ["generator-5"]
    assert named(fleet(8, seconds=520, levels=levels, change=busy(6.0, 3.0))) == [("generator-5", "slow")]


def test_a_worker_with_less_to_do_for_a_minute_is_idle_and_not_odd() -> None:
    def change(time_s: float, values: np.ndarray) -> None:
        values[5, 0] *= 0.5 if 200.0 <= time_s < 275.0 else 1.0

    sized = {"gpu_util": 0.8, "service_ratio": 1.0}
    assert named(fleet(8, seconds=360, levels=sized, change=change)) == []
    assert named(fleet(8, seconds=360, levels={"gpu_util": 0.8}, change=change)) == [("generator-5", "slow")]


def test_a_slow_ledger_makes_no_worker_of_a_small_role_odd() -> None:
    levels = {"ledger_rtt_ms": 1.0, "service_ratio": 1.0}

    def change(rtt_by: float):
        def changed(time_s: float, values: np.ndarray) -> None:
            if time_s >= 200.0:
                values[:, 0] *= rtt_by
                values[0, 1] *= 1.6

        return changed

    assert named(fleet(7, seconds=440, levels=levels, roles=LONE, change=change(30.0))) == []
    assert named(fleet(7, seconds=440, levels=levels, roles=LONE, change=change(1.0))) == [("generator-0", "slow")]


def test_noise_is_taken_to_grow_with_the_level_of_what_a_worker_is_compared_with() -> None:
    groups = Groups.by(LONE)
    past, floors = Past(Tuning()), Floors([metric("heat")], Tuning())
    past.state.align(("heat",), LONE)
    values = np.full((1, 7), 2.0, np.float32)
    past.learn(5.0, values, groups, np.zeros((1, 7), bool))
    swell = past.deviations(values * np.float32(50.0), groups, floors).swell
    assert swell.tolist() == [[50.0] * 7]
    assert past.deviations(values * np.float32(0.1), groups, floors).swell.tolist() == [[1.0] * 7]


def test_a_mean_is_believed_less_while_a_role_finishes_less_work() -> None:
    groups = Groups.by(("scorer",) * 6)
    past, floors = Past(Tuning()), Floors([metric("service_ratio"), metric("done")], Tuning())
    past.state.align(("service_ratio", "done"), tuple("abcdef"))
    values = np.stack([np.full(6, 1.0), np.full(6, 16.0)]).astype(np.float32)
    past.learn(5.0, values, groups, np.zeros((2, 6), bool))
    values[1] = 1.0
    assert past.deviations(values, groups, floors).swell.tolist() == [[4.0] * 6, [1.0] * 6]
    values[1, 1:] = 16.0
    assert past.deviations(values, groups, floors).swell[0, 0] == 1.0
