"""Claims about the rule on memory: a leak is named, and other growth is not."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.fleet.peers.frame import Finding
from tests.pipeline.fleet.peers.fleets import Change, findings, fleet

LEVELS = {"rss_bytes": 8e9}


def watched(change: Change, *, seconds: int = 320, step_s: float = 1.0, num: int = 8) -> list[Finding]:
    return findings(fleet(num, seconds=seconds, step_s=step_s, levels=LEVELS, change=change, noise=0.0))


def leak(rate: float, *workers: int):
    def change(time_s: float, values: np.ndarray) -> None:
        values[list(workers), 0] += rate * max(0.0, time_s - 200.0)

    return change


@pytest.mark.parametrize(("step_s", "num"), [(1.0, 8), (1.0, 1), (15.0, 8)])
def test_a_leak_of_five_megabytes_a_second_is_named_within_two_minutes(step_s: float, num: int) -> None:
    found = watched(leak(5e6, 0), step_s=step_s, num=num, seconds=400)[:1]
    assert [(one.worker, one.kind, one.metric) for one in found] == [("generator-0", "leak", "rss_bytes")]
    assert found[0].alarm_s <= 320.0
    assert abs(found[0].since_s - 200.0) <= 60.0
    assert "grown steadily" in found[0].sentence


def test_a_large_fleet_waits_longer_for_a_leak_of_one_worker() -> None:
    small, large = (watched(leak(8e6, 0), num=num, seconds=330)[0].alarm_s for num in (8, 1024))
    assert small + 10.0 <= large <= 320.0


def test_memory_that_jumps_once_is_no_leak() -> None:
    def change(time_s: float, values: np.ndarray) -> None:
        values[0, 0] += 4e8 * (time_s >= 200.0)

    assert [one for one in watched(change, seconds=262) if "steadily" in one.sentence] == []


def test_memory_that_grows_for_the_whole_role_is_no_leak() -> None:
    assert watched(leak(6e6, *range(8))) == []


def test_growth_is_counted_above_that_of_the_peers() -> None:
    def change(time_s: float, values: np.ndarray) -> None:
        leak(4e6, *range(8))(time_s, values)
        leak(1e6, 0)(time_s, values)

    assert watched(change) == []


def test_memory_that_rises_and_falls_in_turn_is_no_leak() -> None:
    def change(time_s: float, values: np.ndarray) -> None:
        values[0, 0] += 6e6 * (time_s % 75.0)

    assert [one for one in watched(change, seconds=700) if "steadily" in one.sentence] == []


def test_memory_that_a_lone_worker_takes_at_its_first_large_work_is_no_leak() -> None:
    def change(time_s: float, values: np.ndarray) -> None:
        values[0, 0] += 6e9 * (time_s >= 250.0)

    assert watched(change, seconds=700, num=1) == []


@pytest.mark.parametrize("onset_s", [30.0, 75.0, 120.0])
def test_a_leak_that_begins_in_a_workers_first_minutes_is_named(onset_s: float) -> None:
    def change(time_s: float, values: np.ndarray) -> None:
        values[0, 0] += 2e7 * max(0.0, time_s - onset_s)

    found = watched(change, seconds=240)
    assert [(one.worker, one.kind) for one in found] == [("generator-0", "leak")]
    assert found[0].alarm_s <= max(165.0, onset_s + 90.0)


def test_memory_that_is_filled_for_ninety_seconds_at_the_start_is_no_leak() -> None:
    def change(time_s: float, values: np.ndarray) -> None:
        values[0, 0] += 2e7 * min(90.0, max(0.0, time_s - 50.0))

    assert [one for one in watched(change, seconds=400) if "steadily" in one.sentence] == []


def test_after_a_leak_that_was_named_and_ended_the_next_one_is_named_too() -> None:
    def change(time_s: float, values: np.ndarray) -> None:
        values[0, 0] += 2e7 * (min(70.0, max(0.0, time_s - 150.0)) + max(0.0, time_s - 340.0))

    found = [one for one in watched(change, seconds=420) if "steadily" in one.sentence]
    assert [(one.worker, 150.0 < one.alarm_s < 225.0) for one in found] == [
        ("generator-0", True),
        ("generator-0", False),
    ]
    assert found[1].alarm_s <= 410.0
