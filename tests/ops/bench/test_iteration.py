"""Choices of what runs next in an RL iteration: the planned period is reached, and the plan as priority is never worse
than the best choice without a plan by more than 2 %."""

from __future__ import annotations

import pytest

from ops.bench.iteration import DISTANCES, FILE, Processes, Virtual, choices, lengths, run
from pipeline.schedule.files import read_json
from pipeline.schedule.iteration import IterationFile, plan_iteration


@pytest.fixture(scope="module")
def file() -> IterationFile:
    return read_json(FILE, IterationFile)


@pytest.fixture(scope="module")
def plans():
    return {plan.staleness: plan for plan in plan_iteration(FILE)}


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("cv", [0.0, 0.3, 1.0])
def test_the_plan_as_priority_is_within_2_percent_of_the_best_other_choice(file, plans, distance: int, cv: float):
    plan, placement = plans.get(distance, plans[max(plans)]), file.placement("x", file.chunks, distance)
    spans = lengths(placement, cv, 1)
    found = {
        name: run(placement, Virtual(), key, spans, 300, hard=hard)
        for name, (key, hard) in choices(placement, plan).items()
    }
    best = min(period for name, period in found.items() if name not in ("hard", "plan"))
    assert found["plan"] <= 1.02 * best
    if not cv:
        assert found["plan"] == pytest.approx(plan.period.value, rel=0.01)
        assert found["hard"] == pytest.approx(plan.period.value, rel=0.01)


@pytest.mark.integration
def test_processes_run_every_block_and_take_at_least_the_planned_time(file, plans):
    placement = file.placement("x", file.chunks, 2)
    fleet = Processes(placement.num_devices)
    try:
        key, hard = choices(placement, plans[2])["plan"]
        found = run(placement, fleet, key, lengths(placement, 0.0, 0), 8, hard=hard)
    finally:
        fleet.close()
    assert 32.5 < found < 50
