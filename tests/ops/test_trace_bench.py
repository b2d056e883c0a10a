"""Claims about the emulated fleets: their faults are found, their controls blame no worker."""

from __future__ import annotations

import pytest

from ops.bench.table import Share
from ops.bench.trace.faults import FAULTS, inject
from ops.bench.trace.model import EmulatedFleet
from ops.bench.trace.sampling import record
from ops.bench.trace.scoring import Answer, answer


def run(kind: str, seed: int) -> Answer:
    fleet = EmulatedFleet(14, seed)
    truth = inject(fleet, kind, earliest_s=45, latest_s=50)
    tables = record(fleet, 100.0 if kind in FAULTS else 80.0)
    return answer(tables, truth, 14, seed)


@pytest.mark.parametrize("kind", ["hung worker", "killed worker", "edge cut", "learner waits for disk", "judge down"])
def test_a_fault_is_named_first(kind: str) -> None:
    found = run(kind, 77)
    assert found.is_top1, found


@pytest.mark.parametrize("kind", ["a person pauses", "scale down", "evaluation"])
def test_a_negative_control_blames_nobody(kind: str) -> None:
    found = run(kind, 78)
    assert not found.has_false, found


def test_one_seed_makes_one_fleet() -> None:
    first, second = (record(EmulatedFleet(14, 5), 20.0) for _ in range(2))
    assert first == second
    assert record(EmulatedFleet(14, 6), 20.0) != first


def test_wilson_intervals_are_the_known_ones() -> None:
    low, high = Share(291, 300).interval
    assert (round(low, 3), round(high, 3)) == (0.944, 0.984)
