"""Claims about the budgets of repairs over a restart of the supervisor: its own record has them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeline.config.operations import RecoverySection
from pipeline.fleet.repair.budgets import past_repairs
from pipeline.fleet.repair.escalation import Escalation, IncidentSign
from pipeline.fleet.repair.levels import Member, RepairLevel, StepOutcome
from pipeline.fleet.repair.records import StepRow, read_steps, repair_records
from protocol.ids import Role

WALL_S = 1_700_000_000.0
LIMITS = RecoverySection(
    policy="act", tolerate_s=10.0, steady_s=100.0, settle_s=150.0, max_repairs=3, incident_restarts=2,
    max_evictions=1, window_s=1000.0,
)  # fmt: skip
FLEET = {
    name: Member(Role(name.partition("-")[0]), "here", is_at_work=True)
    for name in ("learner", "generator-0", "generator-1", "generator-2")
}


class Host:
    """One supervisor after another over one record. Both clocks go on together."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.begin(0.0)

    def begin(self, now_s: float) -> None:
        """Start the next supervisor, whose monotonic clock is another."""
        rows = read_steps(self._run_dir)
        self.escalation = Escalation(LIMITS, 60.0, next_case=max((row.case for row in rows), default=0) + 1)
        self.escalation.recall(now_s, past_repairs(rows, WALL_S + now_s, LIMITS.window_s))
        assert self.escalation.tick(now_s, FLEET) == []

    def tick(self, now_s: float) -> list[tuple[RepairLevel, str]]:
        """Return the orders, and write the steps as the supervisor does."""
        orders = self.escalation.tick(now_s, FLEET)
        rows = [replace(one, at_s=WALL_S + now_s) for one in self.escalation.taken_steps()]
        repair_records(self._run_dir).append(*rows)
        return [(order.level, order.worker) for order in orders]

    def flap(self, now_s: float, worker: str = "generator-1") -> list[tuple[RepairLevel, str]]:
        """A loss, a start and ten seconds of work."""
        self.escalation.lost(now_s, worker, Role.GENERATOR, "killed by SIGKILL")
        self.escalation.started(now_s + 1.0, worker)
        self.escalation.works(now_s + 2.0, worker)
        return self.tick(now_s + 10.0)

    def suspect(self, now_s: float, number: int, worker: str = "generator-1") -> list[tuple[RepairLevel, str]]:
        """An incident that lasts longer than is tolerated, and ends with the restart."""
        sign = IncidentSign(number, worker, "hung", "no progress for 9 s")
        self.escalation.see_incidents(now_s, {number: sign})
        orders = self.tick(now_s + LIMITS.tolerate_s)
        self.escalation.see_incidents(now_s + 11.0, {})
        self.escalation.started(now_s + 12.0, worker)
        self.escalation.works(now_s + 13.0, worker)
        orders += self.tick(now_s + 13.0)
        return orders + self.tick(now_s + 114.0)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_worker_that_flaps_over_a_supervisors_restart_is_evicted_at_the_same_loss(host: Host, first: int) -> None:
    for number in range(first):
        assert host.flap(20.0 * number) == []
    host.begin(20.0 * first)
    for number in range(first, 3):
        assert host.flap(20.0 * number + 5.0) == []
    assert host.flap(90.0) == [(RepairLevel.EVICT, "generator-1")]


def test_a_worker_that_was_repaired_before_the_restart_has_all_its_repairs_again(host: Host) -> None:
    for number in range(3):
        host.flap(20.0 * number)
    assert host.tick(200.0) == []
    host.begin(210.0)
    assert host.flap(220.0) == []
    # it was not seen to be repaired, and has worked for longer than that takes
    host.flap(240.0)
    host.begin(400.0)
    assert host.flap(410.0) == host.flap(430.0) == host.flap(450.0) == []


def test_restarts_that_incidents_ordered_count_on_in_the_next_supervisor(host: Host) -> None:
    restart = [(RepairLevel.RESTART, "generator-1")]
    assert host.suspect(0.0, 1) == restart
    host.begin(150.0)
    assert host.suspect(160.0, 2) == restart
    host.begin(300.0)
    assert host.suspect(310.0, 3)[:1] == [(RepairLevel.EVICT, "generator-1")]


@pytest.mark.parametrize("is_restarted", [True, False])
def test_those_of_longer_ago_than_the_window_do_not(host: Host, is_restarted: bool) -> None:
    host.suspect(0.0, 1)
    host.suspect(160.0, 2)
    if is_restarted:
        host.begin(1100.0)
    assert (RepairLevel.RESTART, "generator-1") in host.suspect(1110.0, 3)


def test_the_budget_of_evictions_counts_on_in_the_next_supervisor(host: Host) -> None:
    for number in range(4):
        host.flap(15.0 * number)
    host.begin(100.0)
    orders = [order for number in range(4) for order in host.flap(100.0 + 15.0 * number, "generator-2")]
    assert orders and RepairLevel.EVICT not in {level for level, _ in orders}


@given(
    st.lists(
        st.tuples(st.sampled_from(RepairLevel), st.sampled_from(StepOutcome), st.floats(-50.0, 2000.0)), max_size=40
    )
)
def test_no_record_makes_more_of_a_budget_than_steps_it_has_in_the_window(
    steps: list[tuple[RepairLevel, StepOutcome, float]],
) -> None:
    rows = [
        StepRow(WALL_S - age_s, 1 + at % 3, f"generator-{at % 3}", "generator", level, outcome, "")
        for at, (level, outcome, age_s) in enumerate(sorted(steps, key=lambda step: -step[2]))
    ]
    found = past_repairs(rows, WALL_S, 1000.0)
    ages = [*found.evictions, *(age_s for times in found.restarts.values() for age_s in times)]
    recent = [(row.rung, row.outcome) for row in rows if WALL_S - row.at_s < 1000.0]
    assert all(0.0 <= age_s < 1000.0 for age_s in ages)
    assert len(found.evictions) == recent.count((RepairLevel.EVICT, StepOutcome.BEGUN))
    assert sum(found.losses.values()) <= recent.count((RepairLevel.ISOLATE, StepOutcome.DONE))
    assert all(list(times) == sorted(times, reverse=True) for times in found.restarts.values())
