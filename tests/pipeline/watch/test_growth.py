"""Claims about the rule on memory: a leak is named, and other growth is not."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.watch.findings import Finding
from tests.pipeline.watch.fleets import Change, findings, fleet

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
