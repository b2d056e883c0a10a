"""Claims about the explicit rules: each is found, and not without cause."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pipeline.fleet.peers.frame import Finding, Frame
from pipeline.fleet.peers.watcher import Watch

NUM = 8
Cell = Callable[[int, float], float]


def watched(columns: dict[str, Cell], seconds: int = 120, num: int = NUM, step_s: float = 1.0) -> list[Finding]:
    """Return what a fleet shows whose metrics are functions of worker and time."""
    workers = tuple(f"reward-{at}" for at in range(num))
    watch, found = Watch(), list[Finding]()
    for at in range(int(seconds / step_s)):
        time_s = at * step_s
        values = np.array([[cell(one, time_s) for cell in columns.values()] for one in range(num)], np.float32)
        found += watch.tick(Frame(time_s, workers, ("reward",) * num, tuple(columns), values))
    return found


def only(found: list[Finding]) -> Finding:
    """Return the one finding."""
    assert len(found) == 1, found
    return found[0]


def one_of(bad: float, good: float, since_s: float = 60.0) -> Cell:
    """Return a level that is bad in worker 3 from a time on."""
    return lambda worker, time_s: bad if worker == 3 and time_s >= since_s else good


def count(bad: float, good: float, since_s: float = 60.0) -> Cell:
    """Return a counter whose rate is bad in worker 3 from a time on."""
    return lambda worker, time_s: good * time_s + ((bad - good) * max(0.0, time_s - since_s) if worker == 3 else 0.0)


def test_a_silent_worker_is_named_within_six_seconds() -> None:
    found = only(watched({"heartbeat_age_s": lambda worker, at: max(0.5, at - 60.0) if worker == 3 else 0.5}))
    assert (found.worker, found.kind, found.since_s) == ("reward-3", "silent", 60.0)
    assert found.alarm_s <= 66.0
    assert found.sentence == "no heartbeat for 6.0 s; the limit is 5.0 s"


def test_heartbeats_of_a_slow_table_are_judged_by_their_usual_age() -> None:
    ages: dict[str, Cell] = {"heartbeat_age_s": lambda worker, at: 7.0 + worker}
    assert watched(ages, seconds=600, step_s=15.0) == []


def test_a_worker_that_holds_work_and_finishes_none_is_hung() -> None:
    stuck = {"done": count(0.0, 1.0), "in_flight": lambda worker, at: 4.0}
    found = only(watched(stuck))
    assert (found.worker, found.kind) == ("reward-3", "hung")
    assert found.alarm_s <= 72.0
    assert "no progress for" in found.sentence
    assert "the limit of this role is 8 s" in found.sentence


def test_a_worker_without_work_is_idle_and_not_hung() -> None:
    assert watched({"done": count(0.0, 1.0), "in_flight": one_of(0.0, 4.0)}, seconds=100) == []


@pytest.mark.parametrize("counter", ["progress", "steps"])
def test_progress_inside_one_long_piece_of_work_is_no_hang(counter: str) -> None:
    long_piece = {"done": count(0.0, 1.0), counter: count(5.0, 5.0), "in_flight": lambda worker, at: 4.0}
    assert [one for one in watched(long_piece, seconds=100) if one.kind == "hung"] == []


def test_a_role_with_long_pauses_is_not_hung_in_one_of_them() -> None:
    paused: dict[str, Cell] = {
        "done": lambda worker, at: float((at + 5 * worker) // 30),
        "in_flight": lambda worker, at: 4.0,
    }
    assert watched(paused, seconds=300) == []


def test_no_worker_is_hung_when_the_whole_role_stands_still() -> None:
    still: dict[str, Cell] = {
        "done": lambda worker, at: min(at, 60.0 + worker) if at < 100.0 else at,
        "in_flight": lambda worker, at: 4.0,
    }
    assert watched(still) == []


def test_time_without_samples_is_no_pause_of_a_role() -> None:
    lost = lambda worker, at: 12.0 * worker <= at < 12.0 * worker + 7.0  # noqa: E731
    work: dict[str, Cell] = {
        "done": lambda worker, at: np.nan if lost(worker, at) else count(0.0, 3.0, since_s=120.0)(worker, at),
        "in_flight": lambda worker, at: 4.0,
    }
    found = only(watched(work, seconds=160))
    assert (found.worker, found.kind) == ("reward-3", "hung")
    assert found.alarm_s <= 130.0


def test_a_main_loop_that_stands_still_is_a_hang_though_work_often_pauses_as_long() -> None:
    def steps(turns: Cell) -> dict[str, Cell]:
        done: Cell = lambda worker, at: float((min(at, 120.0) if worker == 3 else at) // 9.0)  # noqa: E731
        return {"done": done, "turns": turns, "in_flight": lambda worker, at: 4.0}

    found = only(watched(steps(count(0.0, 20.0, since_s=120.0)), seconds=132))
    assert (found.worker, found.kind) == ("reward-3", "hung")
    assert watched(steps(count(20.0, 20.0)), seconds=132) == []


def test_a_burst_of_errors_of_one_worker_is_named_within_ten_seconds() -> None:
    found = only(watched({"errors": count(3.0, 0.0)}))
    assert (found.worker, found.kind) == ("reward-3", "errors")
    assert found.alarm_s <= 70.0
    assert "errors a second" in found.sentence


def test_errors_that_the_whole_role_has_blame_no_worker() -> None:
    assert watched({"errors": lambda worker, at: 2.0 * max(0.0, at - 60.0)}) == []


def test_a_few_errors_are_no_finding() -> None:
    assert watched({"errors": lambda worker, at: float(worker == 3) * (at // 40.0)}, seconds=300) == []


def test_refused_messages_of_one_worker_are_named_within_ten_seconds() -> None:
    found = only(watched({"refused": count(1.0, 0.0)}))
    assert (found.worker, found.kind) == ("reward-3", "refused")
    assert found.alarm_s <= 65.0


def test_a_restarted_counter_is_no_error() -> None:
    assert watched({"errors": lambda worker, at: 50.0 if worker != 3 or at < 60.0 else 0.0}) == []


def test_a_policy_that_stays_behind_is_stale() -> None:
    found = only(watched({"version_lag": lambda worker, at: 1.0 + (worker == 3) * max(0.0, (at - 60.0) // 10.0)}))
    assert (found.worker, found.kind) == ("reward-3", "stale")
    assert "the limit is 3" in found.sentence


def test_a_policy_that_is_behind_for_a_moment_is_not_stale() -> None:
    assert watched({"version_lag": lambda worker, at: 9.0 if worker == 3 and 60.0 <= at < 63.0 else 1.0}) == []


def test_a_nearly_full_disk_is_named() -> None:
    found = only(watched({"disk_free_share": one_of(0.03, 0.6)}, seconds=80))
    assert (found.worker, found.kind) == ("reward-3", "disk")
    assert found.sentence == "3.0% of its disk is free; the limit is 5%"


def test_a_disk_that_fills_within_minutes_is_named_before_it_is_full() -> None:
    free: dict[str, Cell] = {
        "disk_free_bytes": lambda worker, at: 4e11 - (1e9 * max(0.0, at - 60.0) if worker == 3 else 0.0)
    }
    found = [one for one in watched(free, seconds=200) if "full in about" in one.sentence]
    assert only(found).worker == "reward-3"
    assert found[0].alarm_s < 160.0


def test_a_checkpoint_that_is_written_fills_no_disk() -> None:
    free: dict[str, Cell] = {"disk_free_bytes": lambda worker, at: 4e11 - 1e9 * (at % 40.0 if worker == 3 else 0.0)}
    assert watched(free, seconds=200) == []


def test_two_workers_of_a_role_with_one_disk_are_one_finding_and_not_a_common_one() -> None:
    filling = lambda worker, at: 4e11 - 1e9 * max(0.0, at - 60.0)  # noqa: E731
    free: dict[str, Cell] = {
        "disk_free_bytes": lambda worker, at: filling(worker, at) if worker < 3 else 3e11 + 1e10 * worker
    }
    found = [one for one in watched(free, seconds=200) if "full in about" in one.sentence]
    assert only(found).worker == "reward-0"


def test_a_disk_that_most_workers_have_blames_none_of_them() -> None:
    assert watched({"disk_free_bytes": lambda worker, at: 4e11 - 1e9 * max(0.0, at - 60.0)}, seconds=200) == []


def test_a_clock_that_differs_from_the_fleet_is_named() -> None:
    found = only(watched({"clock_ahead_ms": one_of(-400.0, 20.0)}))
    assert (found.worker, found.kind) == ("reward-3", "clock")
    assert "differs by 420 ms" in found.sentence


def test_a_host_with_a_wrong_clock_is_one_finding_though_it_has_a_third_of_a_role() -> None:
    workers = tuple(f"{role}-{at}" for role in ("reward", "generator") for at in range(10 if role == "reward" else 40))
    roles = tuple(name.split("-")[0] for name in workers)
    watch, found, draw = Watch(), list[Finding](), np.random.default_rng(0)
    for second in range(120):
        ahead = draw.normal(0.0, 2.0, (50, 1)).astype(np.float32)
        ahead[:4] -= 10.0 * max(0, second - 60)
        found += watch.tick(Frame(float(second), workers, roles, ("clock_ahead_ms",), ahead))
    assert only(found).worker in workers[:4]


def test_a_heartbeat_that_waited_for_a_stopped_ledger_is_no_slow_clock() -> None:
    """Nothing is read for eight seconds; then one worker's next heartbeat takes three more."""
    workers, watch, found = tuple(f"reward-{at}" for at in range(NUM)), Watch(), list[Finding]()
    for time_s in [*range(60), *range(68, 80)]:
        values = np.array([[20.0, 0.5]] * NUM, np.float32)
        if 68 <= time_s < 72:
            values[3] = [-1900.0, 0.5 + time_s - 68]
        names = ("clock_ahead_ms", "heartbeat_age_s")
        found += watch.tick(Frame(float(time_s), workers, ("reward",) * NUM, names, values))
    assert found == []


def test_a_heartbeat_that_a_slow_ledger_delays_is_no_slow_clock() -> None:
    slow: dict[str, Cell] = {"clock_ahead_ms": one_of(-600.0, 20.0), "ledger_rtt_ms": one_of(500.0, 2.0)}
    assert [one for one in watched(slow) if one.kind == "clock"] == []
    skewed = slow | {"ledger_rtt_ms": one_of(100.0, 2.0)}
    assert [one.worker for one in watched(skewed) if one.kind == "clock"] == ["reward-3"]


def test_a_clock_is_judged_by_fresh_heartbeats_between_old_ones() -> None:
    ages: Cell = lambda worker, at: 0.5 + at % 2  # noqa: E731
    found = only(watched({"clock_ahead_ms": one_of(-400.0, 20.0), "heartbeat_age_s": ages}))
    assert found.kind == "clock" and found.alarm_s <= 75.0


def test_a_reader_whose_own_clock_is_wrong_blames_no_worker() -> None:
    assert watched({"clock_ahead_ms": lambda worker, at: 5000.0 + worker}) == []


def test_a_loss_that_is_not_finite_is_named_at_once() -> None:
    found = only(watched({"loss": one_of(np.inf, 0.4)}, num=4))
    assert (found.worker, found.kind, found.alarm_s) == ("reward-3", "numeric", 60.0)


@pytest.mark.parametrize(("steps", "expected"), [(1, 0), (2, 1)])
def test_a_gradient_norm_is_named_at_its_second_large_step(steps: int, expected: int) -> None:
    norms: dict[str, Cell] = {
        "grad_norm": lambda worker, at: 9.0 + at / 1000 if worker == 3 and 60 <= at < 60 + steps else 1.0 + at / 1000
    }
    assert len(watched(norms, num=4)) == expected


def test_a_finding_is_made_again_after_the_worker_was_well() -> None:
    flapping: Cell = lambda worker, at: 400.0 if worker == 3 and (at // 30.0) % 2 else 0.0  # noqa: E731
    assert [one.alarm_s for one in watched({"clock_ahead_ms": flapping})] == [34.0, 94.0]


def test_a_table_of_unknown_metrics_has_no_rules() -> None:
    assert watched({"heat": one_of(np.inf, 1.0)}, seconds=100) == []
