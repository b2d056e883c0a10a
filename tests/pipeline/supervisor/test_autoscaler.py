"""Claims about the number of generators by demand, on runs that a model of learner, generators and
place makes. The clock is the model's."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.cli import headrace
from pipeline.config.runtime import FleetSection
from pipeline.fleet.state import Worker
from pipeline.fleet.status import RunSnapshot
from pipeline.preflight.checks import preflight
from pipeline.process.exit_codes import ExitCode
from pipeline.runtime.registry.contract import Drain, Fleet, WaitingFor
from pipeline.supervisor.autoscaler import (
    Autoscaler,
    Decision,
    DemandOutcome,
    GeneratorDemand,
    Reading,
    reading_of,
)
from pipeline.supervisor.fleet_edits import edit_fleet
from pipeline.supervisor.run_folder import run_lock
from protocol.errors import ConfigError
from protocol.ids import Incarnation, Role
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.op_config import op_config
from tests.pipeline.supervisor.supervised import Run

LOOK_S = 1.0
LIMITS = FleetSection(min_generators=1, max_generators=16, grow_after_s=30.0, shrink_after_s=300.0)


@dataclass
class Model:
    """A learner that computes for ``compute_s`` on units that generators make, one each in
    ``unit_s``; they may be ``ahead`` units ahead. A place has ``num_nodes`` and needs
    ``arrival_s``."""

    limits: FleetSection = LIMITS
    compute_s: float = 20.0
    units: float = 8.0
    unit_s: float = 10.0
    ahead: float = 8.0
    num_nodes: int = 100
    arrival_s: float = 5.0
    saturates_at: float = 1e9
    """Generators that the machine bears: more of them sample no more."""
    held_up: bool = False
    is_paused: bool = False
    """Whether an operator has paused admission: generators sample nothing new."""
    trickle: bool = False
    """Whether a third of the generators' time is a wait for scorers."""
    num_guests: int = 0
    wanted: int = 1
    now_s: float = 0.0
    decisions: list[tuple[float, Decision]] = field(default_factory=list[tuple[float, Decision]])
    ready: float = 0.0
    version: int = 0
    left_s: float = 0.0
    tokens: float = 0.0
    arrivals: list[float] = field(default_factory=lambda: [0.0])

    def __post_init__(self) -> None:
        self.autoscaler = Autoscaler(self.limits)
        self.arrivals = [0.0] * self.wanted

    @property
    def arrived(self) -> int:
        return self.num_guests + sum(at <= self.now_s for at in self.arrivals[: self.num_nodes])

    def reading(self) -> Reading:
        may_sample = self.ready < self.units + self.ahead and not self.is_paused
        busy = float(self.arrived if may_sample and not self.held_up else 0)
        return Reading(
            version=self.version,
            is_waiting=self.left_s <= 0.0,
            num_arrived=self.arrived,
            num_busy=busy,
            num_held_up=self.arrived if self.held_up or (self.trickle and self.now_s % 3 == 0) else 0,
            sampled={"all": self.tokens},
            num_guests=self.num_guests,
        )

    def step(self) -> Decision:
        self.now_s += LOOK_S
        made = 0.0
        if self.ready < self.units + self.ahead and not self.is_paused:
            made = min(self.arrived, self.saturates_at) * LOOK_S / self.unit_s * (0.1 if self.held_up else 1.0)
        self.ready += made
        self.tokens += 1000.0 * made
        if self.left_s > 0.0:
            self.left_s -= LOOK_S
            self.version += self.left_s <= 0.0
        if self.left_s <= 0.0 and self.ready >= self.units:
            self.ready -= self.units
            self.left_s = self.compute_s
        decision = self.autoscaler.evaluate(self.reading(), self.wanted, self.now_s, is_paused=self.is_paused)
        if decision.wanted != self.wanted:
            self.decisions.append((self.now_s, decision))
            self.set(decision.wanted)
        return decision

    def set(self, wanted: int) -> None:
        del self.arrivals[wanted:]
        self.arrivals += [self.now_s + self.arrival_s] * (wanted - len(self.arrivals))
        self.wanted = wanted

    def run(self, seconds: float) -> Decision:
        until_s = self.now_s + seconds
        while True:
            decision = self.step()
            assert self.limits.max_generators is not None
            assert self.limits.min_generators <= self.wanted <= self.limits.max_generators
            if self.now_s >= until_s:
                return decision

    @property
    def need(self) -> float:
        """Generators that keep the learner busy."""
        return self.units * self.unit_s / self.compute_s


def test_a_starved_learner_gets_as_many_generators_as_keep_it_busy() -> None:
    model = Model(compute_s=20.0, units=8.0, unit_s=10.0)
    decision = model.run(900.0)
    assert model.need == 4.0 and model.wanted in (4, 5)
    assert decision.outcome is DemandOutcome.ENOUGH
    _, first = model.decisions[0]
    assert first.outcome is DemandOutcome.GROW and first.wanted == 2, "at most twice as many at once"
    assert "the learner waits" in first.reason and "1 generators are 100% busy" in first.reason


def test_a_pause_of_admission_changes_no_number_and_leaves_no_trace() -> None:
    model = Model(wanted=4)
    model.run(600.0)
    assert (model.wanted, model.decisions) == (4, [])
    model.is_paused = True
    decision = model.run(3 * 3600.0)
    assert (decision.outcome, decision.reason) == (DemandOutcome.PAUSED, "an operator has paused admission")
    model.is_paused = False
    model.run(3600.0)
    assert model.decisions == [], "neither the pause nor the first update after it counts"


def test_the_first_units_after_a_pause_may_take_long_and_add_no_generator() -> None:
    autoscaler, now_s = Autoscaler(LIMITS), 0.0

    def look(version: int, *, is_waiting: bool, is_paused: bool = False) -> Decision:
        busy = 0.0 if is_paused else 2.0
        reading = Reading(version, is_waiting, num_arrived=2, num_busy=busy, num_held_up=0, sampled={})
        return autoscaler.evaluate(reading, 2, now_s, is_paused=is_paused)

    # a learner that computes for 20 s and never waits; a pause; then long responses
    for second in range(500):
        now_s += 1.0
        is_late = second >= 300
        decision = look(min(14, second // 20), is_waiting=is_late, is_paused=is_late and second < 400)
        assert decision.wanted == 2, (second, decision)


def test_idle_generators_are_drained_after_a_while_and_not_below_the_need() -> None:
    model = Model(wanted=12)
    model.run(299.0)
    assert model.decisions == []
    model.run(900.0)
    assert model.wanted in (4, 5)
    assert all(decision.outcome is DemandOutcome.SHRINK for _, decision in model.decisions)


@given(
    compute_s=st.floats(0.5, 120.0),
    unit_s=st.floats(1.0, 60.0),
    ahead=st.sampled_from([0.5, 4.0, 16.0]),
    start=st.integers(1, 16),
    arrival_s=st.floats(0.0, 60.0),
    num_nodes=st.integers(1, 20),
    saturates_at=st.sampled_from([3.0, 1e9]),
)
@settings(max_examples=8, deadline=None)
def test_under_constant_demand_the_number_settles_within_its_bounds(
    compute_s: float, unit_s: float, ahead: float, start: int, arrival_s: float, num_nodes: int, saturates_at: float
) -> None:
    model = Model(
        compute_s=compute_s,
        unit_s=unit_s,
        ahead=ahead,
        wanted=start,
        arrival_s=arrival_s,
        num_nodes=num_nodes,
        saturates_at=saturates_at,
    )
    model.run(3 * 3600.0)
    num_before = len(model.decisions)
    model.run(3 * 3600.0)
    assert len(model.decisions) - num_before <= 2, model.decisions
    assert num_before <= 14, model.decisions


@given(compute_s=st.floats(1.0, 60.0), unit_s=st.floats(10.0, 60.0), start=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_starvation_is_answered_within_a_bounded_time(compute_s: float, unit_s: float, start: int) -> None:
    model = Model(compute_s=compute_s, unit_s=unit_s, wanted=start)
    if model.need < 1.5 * start:
        return
    cycle_s = max(compute_s, model.units * unit_s / start)
    limit_s = 4 * LIMITS.grow_after_s + 4 * cycle_s + 5 * compute_s
    while not model.decisions and model.now_s < limit_s:
        model.step()
    assert model.decisions and model.decisions[0][1].wanted > start


def test_jobs_that_wait_for_a_node_are_not_requested_again() -> None:
    model = Model(unit_s=60.0, num_nodes=2, arrival_s=1.0, wanted=2)
    decision = model.run(2 * 3600.0)
    assert model.need == 24.0
    assert [one.wanted for _, one in model.decisions] == [4], "twice the arrived, once"
    assert decision.outcome is DemandOutcome.NOT_ARRIVED and "2 of 4 generators have not arrived" in decision.reason


def test_what_no_generator_could_mend_adds_none() -> None:
    model = Model(unit_s=60.0, held_up=True, wanted=3)
    decision = model.run(3600.0)
    assert model.decisions == [], "neither more, nor fewer for the time after it"
    assert decision.outcome is DemandOutcome.ENOUGH
    busy = Model(unit_s=60.0, wanted=3, trickle=True)
    assert busy.run(3600.0).outcome is DemandOutcome.HELD_UP and busy.decisions == []


def test_a_growth_after_which_no_more_is_sampled_is_taken_back() -> None:
    model = Model(unit_s=30.0, saturates_at=2.0, wanted=2)
    model.run(1200.0)
    assert [one.wanted for _, one in model.decisions[:2]] == [4, 2]
    assert "sampled" in model.decisions[1][1].reason
    assert len(model.decisions) <= 4
    model.run(2 * 3600.0)
    assert len(model.decisions) <= 6


def test_at_the_most_it_says_so() -> None:
    model = Model(limits=FleetSection(max_generators=3), unit_s=30.0)
    decision = model.run(1800.0)
    assert (model.wanted, decision.outcome) == (3, DemandOutcome.AT_MOST)
    assert "fleet.max_generators is 3" in decision.reason


def test_a_number_outside_of_the_bounds_is_brought_inside_at_once() -> None:
    for wanted, inside in ((40, 16), (0, 1)):
        model = Model(wanted=wanted)
        assert model.step().wanted == inside


def test_generators_of_other_hosts_count_and_are_never_drained() -> None:
    model = Model(num_guests=3)
    model.run(1800.0)
    assert model.wanted in (1, 2), "the need is 4, and 3 have joined"
    crowded = Model(num_guests=10, wanted=4)
    crowded.run(1800.0)
    assert crowded.wanted == 1


def test_a_slow_first_batch_is_no_reason_for_more() -> None:
    model = Model(unit_s=12.0, units=8.0, wanted=1, compute_s=500.0)
    model.run(96.0 + 499.0)
    assert model.decisions == []


def test_measurement_begins_anew_when_the_learner_was_away() -> None:
    model = Model(unit_s=30.0)
    model.run(20.0)
    away = Reading(-1, False, 1, 1.0, 0, {})
    decision = model.autoscaler.evaluate(away, model.wanted, model.now_s + 500.0)
    assert decision.outcome is DemandOutcome.MEASURING


def beat(worker: str, role: Role, at: WaitingFor, **more: object) -> Worker:
    fields = {"pid": 1, "host": "h", "at_s": 1.0, "started_s": 0.0, "progress": 1, "progress_at_s": 1.0} | more
    return Worker(who=Incarnation(role=role, worker=worker, epoch=1), waiting_for=at, **fields)  # type: ignore[arg-type]


def test_a_reading_counts_generators_with_weights_by_their_used_slots() -> None:
    version = {"policy_version": 3}
    beats = [
        beat("learner", Role.LEARNER, WaitingFor.INPUT, policy_version=4),
        beat(
            "generator-0",
            Role.GENERATOR,
            WaitingFor.COMPUTE,
            counters={"live": 2, "slots": 8, "sampled_tokens": 7},
            **version,
        ),
        beat("generator-1", Role.GENERATOR, WaitingFor.COMPUTE, **version),
        beat("generator-2", Role.GENERATOR, WaitingFor.CREDIT, counters={"live": 8, "slots": 8}, **version),
        beat("generator-hostb-x-0", Role.GENERATOR, WaitingFor.ROOM, **version),
        beat("generator-3", Role.GENERATOR, WaitingFor.STARTING),
        beat("generator-4", Role.GENERATOR, WaitingFor.COMPUTE, silent_s=1000.0, **version),
        beat("generator-5", Role.GENERATOR, WaitingFor.DRAINING, **version),
        beat("generator-6", Role.GENERATOR, WaitingFor.COMPUTE),
    ]
    reading = reading_of(beats, [f"generator-{number}" for number in range(8)])
    assert (reading.version, reading.is_waiting) == (4, True)
    assert (reading.num_arrived, reading.num_busy, reading.num_held_up, reading.num_guests) == (4, 1.25, 1, 1)
    assert reading.sampled["generator-0"] == 7
    assert reading_of([], []).version == -1


def seconds_to_a_shrink(model: Model) -> float:
    began_s, model.decisions = model.now_s, []
    while not model.decisions:
        model.step()
        assert model.now_s < began_s + 7200.0
    assert model.decisions[0][1].outcome is DemandOutcome.SHRINK
    return model.now_s - began_s


def test_a_growth_after_a_shrink_makes_the_next_shrink_later() -> None:
    model = Model(wanted=8)
    assert 300.0 < seconds_to_a_shrink(model) < 400.0
    model.unit_s *= 4.0
    model.decisions = []
    while not model.decisions:
        model.step()
    assert model.decisions[0][1].outcome is DemandOutcome.GROW
    model.unit_s /= 4.0
    assert 600.0 < seconds_to_a_shrink(model) < 700.0


pytestmark = pytest.mark.timeout(90)


def command(run: Run, *words: str) -> str:
    """Run a command beside the supervisor's loop, which has this thread."""
    with ThreadPoolExecutor(1) as beside:
        result = beside.submit(CliRunner().invoke, headrace, [*words, "--run", str(run.run_dir)]).result(60)
    assert result.exception is None, result.output
    return result.output


def test_a_starved_run_gets_generators_until_their_number_is_set_by_hand(tmp_path: Path) -> None:
    run = Run(tmp_path, "fleet.max_generators=3", "fleet.grow_after_s=0.2", "launch.poll_s=0.1", generator="busy")
    told: list[str] = []
    asked: list[str] = []

    def react(snapshot: RunSnapshot) -> None:
        names = sorted(beat.who.worker for beat in snapshot.workers if beat.who.role is Role.GENERATOR)
        if not asked and len(names) == 3:
            told.append(json.loads(command(run, "status", "--json"))["demand"])
            asked.append(command(run, "scale", "generator=1"))
        elif len(asked) == 1 and names == ["generator-0"]:
            told.append(json.loads(command(run, "status", "--json"))["demand"])
            asked.append(command(run, "scale", "generator=auto"))
        elif len(asked) == 2 and len(names) > 1:
            run.interrupt(snapshot)

    run.react = react
    with run_lock(run.run_dir):
        assert run.until_end().exit_code == ExitCode.OK
    assert (
        told[0].startswith("generators by demand (1 to 3): 3 wanted")
        and "since the learner waits 100% of its" in told[0]
    )
    assert told[1].startswith("generators by hand: 1 wanted") and "generator=auto" in told[1]
    assert "until `headrace scale generator=auto`" in asked[0] and "until" not in asked[1]


async def test_another_change_of_the_fleet_is_never_undone(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    demand = GeneratorDemand(op_config(tmp_path, "fleet.max_generators=4", "fleet.grow_after_s=1").fleet)
    seen = Fleet({Role.LEARNER: 1, Role.GENERATOR: 1, Role.REWARD: 1})
    await registry.set_fleet(seen)
    starved = [
        beat("learner", Role.LEARNER, WaitingFor.INPUT, policy_version=0),
        beat("generator-0", Role.GENERATOR, WaitingFor.COMPUTE, policy_version=0),
    ]
    for second in range(4):
        if (change := demand.decide(seen, starved, ["generator-0"], float(second))) is not None:
            seen = await edit_fleet(registry, change) or seen
    change = demand.decide(seen, starved, ["generator-0"], 5.0)
    assert change is not None
    drains = (Drain("reward-0", 1, is_replaced=True),)
    others = Fleet({**seen.counts, Role.REWARD: 2}, demand=seen.demand, drains=drains)
    await registry.set_fleet(others)
    after = await edit_fleet(registry, change)
    assert after is not None and after == await registry.fleet()
    assert after.counts == {Role.LEARNER: 1, Role.GENERATOR: 2, Role.REWARD: 2}
    assert after.drains == drains
    for number, is_by_hand in ((3, False), (1, True)):
        found = replace(others, counts={**others.counts, Role.GENERATOR: number}, is_by_hand=is_by_hand)
        assert change(found) == found


def test_limits_that_exclude_the_start_or_exceed_the_machine_are_refused(tmp_path: Path) -> None:
    for overrides in (("fleet.max_generators=2", "fleet.generator=3"), ("fleet.max_generators=9", "fleet.generator=0")):
        with pytest.raises(
            ConfigError, match=r"fleet\.generator is [03]; expected a number from fleet\.min_generators"
        ):
            op_config(tmp_path, *overrides)
    with pytest.raises(ConfigError, match="the fleet has 500002 workers"):
        preflight(op_config(tmp_path, "fleet.max_generators=500000"))
