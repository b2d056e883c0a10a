"""Choices of what runs next in an RL iteration: the planned period is reached, and the plan as priority is never worse
than the best choice without a plan by more than 2 %."""

from __future__ import annotations

import pytest

from ops.bench.iteration import DISTANCES, FILE, Processes, Step, Virtual, choices, lengths, run
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


class Noting(Processes):
    """Notes what the processes say they have done."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.done: list[Step] = []

    def wait(self) -> tuple[list[Step], float]:
        steps, now = super().wait()
        self.done += steps
        return steps, now


@pytest.mark.integration
def test_processes_run_every_block_of_every_iteration_once_and_after_what_it_waits_for(file, plans):
    placement = file.placement("x", file.chunks, 2)
    fleet = Noting(placement.num_devices)
    try:
        key, hard = choices(placement, plans[2])["plan"]
        run(placement, fleet, key, lambda _: 0.1, 8, hard=hard)
    finally:
        fleet.close()
    assert sorted(fleet.done) == sorted((block.name, i) for block in placement.blocks for i in range(8))
    at = {step: place for place, step in enumerate(fleet.done)}
    for each in placement.dependencies:
        assert all(at[each.before, i - each.distance] < at[each.after, i] for i in range(each.distance, 8))
