"""Claims about the desired fleet against the present one."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.fleet import Action, FleetPlan, Phase, RestartPolicy, Verb, worker_name
from pipeline.runtime.exit_codes import ExitCode
from protocol.ids import Role

POLICY = RestartPolicy(max_restarts=3, window_s=60.0, backoff_s=1.0, drain_timeout_s=10.0)


def _plan(**counts: int) -> FleetPlan:
    plan = FleetPlan(POLICY)
    assert plan.want({Role(role): count for role, count in counts.items()}, 0.0) == []
    return plan


def _names(actions: list[Action], verb: Verb) -> list[str]:
    return [action.worker for action in actions if action.verb is verb]


def test_every_wanted_worker_is_started_once() -> None:
    plan = _plan(learner=1, generator=2)
    assert _names(plan.due(0.0), Verb.START) == ["learner", "generator-0", "generator-1"]
    assert plan.due(1.0) == []


def test_scaling_down_drains_the_highest_numbers_and_forgets_them_when_gone() -> None:
    plan = _plan(generator=3)
    plan.due(0.0)
    assert _names(plan.want({Role.GENERATOR: 1}, 1.0), Verb.DRAIN) == ["generator-1", "generator-2"]
    plan.exited("generator-2", ExitCode.OK, 2.0)
    plan.exited("generator-1", ExitCode.OK, 2.0)
    assert [w.name for w in plan.workers] == ["generator-0"]


def test_a_drain_past_its_deadline_is_killed() -> None:
    plan = _plan(generator=1)
    plan.due(0.0)
    plan.want({Role.GENERATOR: 0}, 5.0)
    assert plan.due(14.9) == []
    assert _names(plan.due(15.0), Verb.KILL) == ["generator-0"]


def test_a_dead_worker_is_started_again_after_a_growing_pause() -> None:
    plan = _plan(generator=1)
    plan.due(0.0)
    plan.exited("generator-0", -9, 0.0)
    assert plan.due(0.9) == []
    assert _names(plan.due(1.0), Verb.START) == ["generator-0"]
    plan.exited("generator-0", -9, 1.0)
    assert plan.due(2.9) == []
    assert _names(plan.due(3.0), Verb.START) == ["generator-0"]


def test_deaths_over_the_budget_within_the_period_fail_the_fleet() -> None:
    plan = _plan(reward=1)
    now = 0.0
    for _ in range(POLICY.max_restarts + 1):
        now += 10.0
        plan.due(now)
        plan.exited("reward-0", 1, now)
    assert plan.failure is not None
    assert plan.failure.worker == "reward-0"
    assert plan.due(now + 100.0) == []


def test_rare_deaths_never_exhaust_the_budget() -> None:
    plan = _plan(reward=1)
    for day in range(50):
        plan.due(day * 100.0)
        plan.exited("reward-0", 1, day * 100.0)
    assert plan.failure is None


def test_an_exit_that_no_restart_mends_fails_the_fleet_at_once() -> None:
    plan = _plan(learner=1)
    plan.due(0.0)
    plan.exited("learner", ExitCode.CONFIG, 1.0)
    assert plan.failure is not None
    assert plan.failure.exit_code == ExitCode.CONFIG


def test_a_learner_that_is_done_is_not_started_again() -> None:
    plan = _plan(learner=1)
    plan.due(0.0)
    plan.exited("learner", ExitCode.OK, 1.0)
    assert plan.failure is None
    assert plan.due(100.0) == []


def test_a_worker_wanted_again_while_it_drains_is_started_after_it_has_gone() -> None:
    plan = _plan(generator=1)
    plan.due(0.0)
    plan.want({Role.GENERATOR: 0}, 1.0)
    plan.want({Role.GENERATOR: 1}, 2.0)
    assert plan.due(2.0) == []
    plan.exited("generator-0", ExitCode.OK, 3.0)
    plan.want({Role.GENERATOR: 1}, 3.0)
    assert _names(plan.due(3.0), Verb.START) == ["generator-0"]


def test_names_number_the_elastic_roles_only() -> None:
    assert worker_name(Role.LEARNER, 0) == "learner"
    assert worker_name(Role.GENERATOR, 11) == "generator-11"


class FleetMachine(RuleBasedStateMachine):
    """A carrier that does what the plan says, and exits at any time with any code."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = FleetPlan(POLICY)
        self.now = 0.0
        self.alive: set[str] = set()
        self.wanted: dict[Role, int] = {}
        self.stopping = False

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if action.verb is Verb.START:
                assert action.worker not in self.alive, "started twice"
                assert not self.stopping
                self.alive.add(action.worker)
            else:
                assert action.worker in self.alive, "signalled a process that is gone"

    @precondition(lambda self: not self.stopping)
    @rule(generators=st.integers(0, 4), rewards=st.integers(0, 2))
    def want(self, generators: int, rewards: int) -> None:
        self.wanted = {Role.GENERATOR: generators, Role.REWARD: rewards}
        self.carry_out(self.plan.want(self.wanted, self.now))

    @rule(seconds=st.floats(0.1, 30.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        if not self.stopping:
            self.carry_out(self.plan.want(self.wanted, self.now))
        self.carry_out(self.plan.due(self.now))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), code=st.sampled_from([-9, 0, 1, 2, 3, 4]))
    def exit(self, data: st.DataObject, code: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.remove(name)
        self.plan.exited(name, code, self.now)

    @rule()
    def stop(self) -> None:
        self.stopping = True
        self.carry_out(self.plan.stop(self.now))

    @invariant()
    def the_plan_knows_who_is_alive(self) -> None:
        known = {w.name for w in self.plan.workers if w.phase in (Phase.RUNNING, Phase.DRAINING)}
        assert known == self.alive
        assert self.plan.is_down == (not self.alive)


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
