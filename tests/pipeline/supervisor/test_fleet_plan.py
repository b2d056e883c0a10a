"""Claims about the desired fleet against the present one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.config.runtime import SupervisorSection
from pipeline.process.exit_codes import ExitCode, FailureKind, LastError, kind_of
from pipeline.supervisor.fleet_plan import (
    MAX_STARTS_A_TURN,
    FleetPlan,
    Intervention,
    Verb,
    WorkerPhase,
    worker_name,
)
from pipeline.supervisor.takeover import may_adopt
from protocol.ids import Role

SETTINGS = SupervisorSection(
    max_restarts=3, restart_window_s=60.0, max_data_failures=2, data_failure_window_s=600.0, backoff_s=1.0,
    drain_timeout_s=10.0, drain_ceiling_s=1e9,
)  # fmt: skip


def _plan(**counts: int) -> FleetPlan:
    plan = FleetPlan(SETTINGS)
    assert plan.want({Role(role): count for role, count in counts.items()}, 0.0) == []
    return plan


def _names(actions: list[Intervention], verb: Verb) -> list[str]:
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


def test_a_left_out_worker_is_drained_and_the_others_keep_their_names() -> None:
    plan = _plan(generator=3)
    plan.due(0.0)
    for expected in (["generator-1"], []):
        assert _names(plan.want({Role.GENERATOR: 2}, 1.0, {"generator-1"}), Verb.DRAIN) == expected
    plan.exited("generator-1", ExitCode.OK, 2.0)
    plan.want({Role.GENERATOR: 2}, 3.0, {"generator-1"})
    assert [w.name for w in plan.workers] == ["generator-0", "generator-2"]
    assert plan.due(3.0) == []


def test_a_renewed_worker_is_drained_once_and_started_again_whatever_its_exit_code() -> None:
    plan = _plan(generator=2)
    plan.due(0.0)
    assert _names(plan.renew("generator-0", 1.0, "new code"), Verb.DRAIN) == ["generator-0"]
    assert plan.renew("generator-0", 1.5, "") == [] == plan.renew("generator-9", 1.5, "")
    assert plan.want({Role.GENERATOR: 2}, 2.0) == []
    plan.exited("generator-0", ExitCode.DRAIN_TIMEOUT, 3.0)
    plan.want({Role.GENERATOR: 2}, 3.0)
    assert _names(plan.due(3.0), Verb.START) == ["generator-0"]
    assert plan.failure is None and not any(worker.failures for worker in plan.workers)


def test_with_a_standby_the_first_restart_has_no_pause_and_a_quick_second_one_has() -> None:
    plan = _plan(generator=1)
    plan.due(0.0)
    plan.exited("generator-0", -9, 1.0)
    assert plan.due(1.0) == []
    plan.hasten("generator-0", 1.0)
    assert _names(plan.due(1.0), Verb.START) == ["generator-0"]
    plan.hasten("generator-0", 1.0)
    plan.exited("generator-0", -9, 2.0)
    plan.hasten("generator-0", 2.0)
    assert plan.due(2.0) == [] and plan.due(3.9) == []
    assert _names(plan.due(4.0), Verb.START) == ["generator-0"]
    plan.exited("generator-0", -9, 30.0)
    plan.hasten("generator-0", 30.0)
    assert _names(plan.due(30.0), Verb.START) == ["generator-0"], "the former failures are long past"


def test_a_drain_past_its_deadline_is_killed() -> None:
    plan = _plan(generator=1)
    plan.due(0.0)
    plan.want({Role.GENERATOR: 0}, 5.0)
    assert plan.due(14.9) == []
    assert _names(plan.due(15.0), Verb.KILL) == ["generator-0"]


def test_a_drain_is_waited_for_while_something_is_done_but_not_beyond_its_ceiling() -> None:
    plan = FleetPlan(SETTINGS.model_copy(update={"drain_ceiling_s": 100.0}))
    plan.want({Role.LEARNER: 1}, 0.0)
    plan.due(0.0)
    plan.stop(0.0)
    for now in range(5, 95, 5):
        assert plan.due(float(now)) == []
        plan.moved("learner", float(now), 10.0)
    assert _names(plan.due(100.0), Verb.KILL) == ["learner"]
    plan.moved("learner", 100.0, 500.0)
    assert _names(plan.due(110.0), Verb.KILL) == ["learner"], "what was killed is not waited for again"


def test_a_worker_that_does_not_drain_moves_no_deadline() -> None:
    plan = _plan(learner=1)
    plan.due(0.0)
    plan.moved("learner", 50.0, 10.0)
    plan.stop(60.0)
    assert _names(plan.due(70.0), Verb.KILL) == ["learner"]


def test_a_learner_stuck_twice_with_nothing_kept_between_ends_the_run_with_a_reason() -> None:
    plan = _plan(learner=1)
    for time_s, kept in ((0.0, ""), (4000.0, "000001.version-2"), (8000.0, "000001.version-2")):
        assert plan.failure is None
        plan.due(time_s)
        assert plan.replace("learner", "at compute without progress for 61 s, 60 s are allowed", kept=kept)
        assert not plan.replace("learner", "the same", kept=kept), "found dead twice, killed once"
        plan.exited("learner", -9, time_s + 1.0, kept=kept)
    assert plan.failure is not None
    assert plan.failure.exit_code == ExitCode.STUCK
    assert "was stuck twice after checkpoint 000001.version-2" in plan.failure.reason
    assert "at compute without progress" in plan.failure.reason
    assert _names(plan.due(9000.0), Verb.START) == []


def test_failures_of_a_learner_that_keeps_nothing_count_together_however_far_apart() -> None:
    crashing, learning = _plan(learner=1), _plan(learner=1)
    for number in range(4):
        now = 1000.0 * number
        for plan, kept in ((crashing, ""), (learning, f"{number:06d}.version-{number}")):
            plan.due(now)
            plan.exited("learner", -9, now + 100.0, kept=kept)
    assert learning.failure is None, "once in a while, with a checkpoint between: for ever"
    assert crashing.failure is not None
    assert "4 infrastructure failures without a checkpoint between them" in crashing.failure.reason


@given(
    failures=st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["", "a", "b"])), min_size=1, max_size=30),
    code=st.sampled_from([-9, 1]),
)
@settings(max_examples=300, deadline=None)
def test_a_budget_counts_what_is_within_its_period_or_without_a_checkpoint_between_and_says_which(
    failures: list[tuple[int, str]], code: int
) -> None:
    """Each failure has the seconds since the one before, and the newest checkpoint."""
    plan, now_s, seen = _plan(learner=1), 0.0, list[tuple[float, str]]()
    most, period_s = (3, 60.0) if code == -9 else (2, 600.0)
    for gap_s, kept in failures:
        now_s += gap_s
        seen.append((now_s, kept))
        plan.due(now_s + 1000.0)
        plan.exited("learner", code, now_s, kept=kept)
        recent = sum(at_s > now_s - period_s for at_s, _ in seen)
        fruitless = len(list(itertools.takewhile(lambda one: one[1] == seen[-1][1], reversed(seen))))
        if max(recent, fruitless) <= most:
            assert plan.failure is None
            continue
        assert plan.failure is not None
        is_recent = recent > most
        words = f"within {period_s:g} s" if is_recent else "without a checkpoint between them"
        assert f" {recent if is_recent else fruitless} " in plan.failure.reason
        assert words in plan.failure.reason
        return


def test_a_dead_worker_is_started_again_after_a_growing_pause() -> None:
    plan = _plan(generator=1)
    plan.due(0.0)
    plan.exited("generator-0", -9, 0.0)
    assert plan.due(0.9) == []
    assert _names(plan.due(1.0), Verb.START) == ["generator-0"]
    plan.exited("generator-0", -9, 1.0)
    assert plan.due(2.9) == []
    assert _names(plan.due(3.0), Verb.START) == ["generator-0"]


def test_failures_over_a_workers_budget_fail_the_fleet_with_its_exit_code() -> None:
    plan = _plan(reward=1)
    now = 0.0
    for _ in range(SETTINGS.max_restarts + 1):
        now += 10.0
        plan.due(now)
        plan.exited("reward-0", -9, now)
    assert plan.failure is not None
    assert (plan.failure.worker, plan.failure.exit_code) == ("reward-0", -9)
    assert "4 infrastructure failures within 60 s, 3 are allowed" in plan.failure.reason
    assert plan.due(now + 100.0) == []


def test_many_workers_that_are_killed_once_each_exhaust_nothing() -> None:
    plan = _plan(generator=20)
    plan.due(0.0)
    for number in range(20):
        plan.exited(f"generator-{number}", -9, 1.0)
    assert plan.failure is None
    assert sum(len(plan.due(2.0)) for _ in range(20)) == 20


def test_a_large_plan_starts_a_few_workers_a_turn_with_every_roles_first_one_first() -> None:
    plan = _plan(learner=1, generator=5000, reward=2)
    first = _names(plan.due(0.0), Verb.START)
    assert first[:3] == ["learner", "generator-0", "reward-0"]
    assert len(first) == MAX_STARTS_A_TURN
    for _ in range(50):
        assert len(plan.due(0.2)) == MAX_STARTS_A_TURN
    assert len({w.name for w in plan.workers if w.phase is WorkerPhase.RUNNING}) == 51 * MAX_STARTS_A_TURN


def test_a_newer_wish_replaces_what_was_not_started_of_the_older_at_once() -> None:
    plan = _plan(generator=5000)
    plan.due(0.0)
    drained = _names(plan.want({Role.GENERATOR: 2}, 0.1), Verb.DRAIN)
    assert drained == [f"generator-{number}" for number in range(2, MAX_STARTS_A_TURN)]
    assert plan.absent == []
    assert plan.wanted == {"generator-0": Role.GENERATOR, "generator-1": Role.GENERATOR}
    assert plan.due(0.2) == []


def test_a_stop_in_the_middle_of_a_large_wish_starts_nothing_more() -> None:
    plan = _plan(generator=5000)
    plan.due(0.0)
    assert len(plan.stop(0.1)) == MAX_STARTS_A_TURN
    assert plan.due(0.2) == []
    assert len(list(plan.workers)) == MAX_STARTS_A_TURN, "what was only wished is forgotten"


def test_data_failures_count_for_the_whole_role_because_their_work_moves_on() -> None:
    plan = _plan(generator=3, reward=1)
    plan.due(0.0)
    plan.exited("reward-0", ExitCode.FAILURE, 0.0)
    for number in range(3):
        assert plan.failure is None
        plan.exited(f"generator-{number}", ExitCode.FAILURE, float(number))
    assert plan.failure is not None
    assert (plan.failure.worker, plan.failure.exit_code) == ("generator-2", ExitCode.FAILURE)
    assert "3 data failures of generator workers within 600 s" in plan.failure.reason


def test_the_two_budgets_are_apart() -> None:
    plan = _plan(reward=1)
    for code in (-9, 1, -9, 1, -9):
        plan.due(plan_time := 100.0)
        plan.exited("reward-0", code, plan_time - 50.0)
    assert plan.failure is None, "three of one kind and two of the other: each is within its own budget"


def _dies(plan: FleetPlan, error: LastError | None, delivered: int = 0, *, code: int = ExitCode.FAILURE) -> None:
    plan.due(1000.0)
    plan.exited("generator-0", code, 1.0, error=error, delivered=delivered)


IMPORT = LastError("ImportError", "libcuda.so.1: cannot open shared object file, process 4711")
AGAIN = LastError("ImportError", "libcuda.so.1: cannot open shared object file, process 4912")


def test_an_error_that_repeats_before_any_work_fails_the_fleet_at_its_second_time() -> None:
    plan = _plan(generator=2)
    _dies(plan, IMPORT)
    assert plan.failure is None
    _dies(plan, AGAIN)
    assert plan.failure is not None
    assert (plan.failure.worker, plan.failure.exit_code) == ("generator-0", ExitCode.CONFIG)
    assert "ImportError: libcuda.so.1: cannot open shared object file" in plan.failure.reason


def test_one_error_of_two_workers_is_no_repetition() -> None:
    plan = _plan(generator=2)
    plan.due(0.0)
    for name in ("generator-0", "generator-1"):
        plan.exited(name, ExitCode.FAILURE, 0.0, error=IMPORT)
    assert plan.failure is None


def test_an_error_repeats_itself_after_as_much_work_as_before_and_not_after_other() -> None:
    plan = _plan(generator=1)
    _dies(plan, IMPORT, 3)
    _dies(plan, AGAIN, 5)
    assert plan.failure is None
    _dies(plan, IMPORT, 5)
    assert plan.failure is not None


def test_another_error_a_signal_and_a_good_end_in_between_begin_anew() -> None:
    others = (LastError("KeyError", "'answer'"), None)
    for other in others:
        plan = _plan(generator=1)
        _dies(plan, IMPORT)
        _dies(plan, other, code=ExitCode.FAILURE if other else -9)
        plan.due(2000.0)
        plan.exited("generator-0", ExitCode.FAILURE, 1500.0, error=AGAIN)
        assert plan.failure is None


def test_what_may_pass_and_kills_never_count_as_a_repeated_error() -> None:
    plan = _plan(generator=1)
    for at in (1.0, 1000.0, 2000.0, 3000.0):
        plan.due(at)
        plan.exited("generator-0", ExitCode.HOST_FAILED, at, error=LastError("OSError", "No space left", may_pass=True))
    for at in (4000.0, 5000.0, 6000.0):
        plan.due(at)
        plan.exited("generator-0", -9, at)
    for at in (7000.0, 8000.0):
        plan.due(at)
        plan.replace("generator-0")
        plan.exited("generator-0", -9, at, error=IMPORT)
    assert plan.failure is None


@pytest.mark.parametrize(("apart_s", "ends"), [(80_000.0, True), (90_000.0, False)])
def test_a_host_that_computes_wrongly_twice_within_a_day_ends_the_run_by_its_name(apart_s: float, ends: bool) -> None:
    plan = _plan(learner=1)
    for number, at in enumerate((1.0, 1.0 + apart_s)):
        plan.due(at)
        error = LastError("StepDiffered", f"host gpu7 has a faulty memory or device: loss {'x' * number}")
        # with work in between, and other numbers: no repeated error
        plan.exited("learner", ExitCode.ENGINE, at, error=error, delivered=10 * number + 10)
        assert (plan.failure is not None) is (ends and number == 1)
    if plan.failure is not None:
        assert (
            "for the second time within a day: StepDiffered: host gpu7 has a faulty memory or device"
            in plan.failure.reason
        )
        assert plan.failure.reason.endswith("go on elsewhere with `headrace up --resume`")


def test_a_budget_that_is_used_up_names_the_last_error() -> None:
    plan = _plan(generator=1)
    for number in range(3):
        _dies(plan, LastError("ValueError", f"part {'x' * number}"), 1)
    assert plan.failure is not None
    assert plan.failure.reason.endswith("2 are allowed: ValueError: part xx")


def _evicting(answer: bool) -> tuple[FleetPlan, list[tuple[str, str, bool]]]:
    asked: list[tuple[str, str, bool]] = []

    def evicts(worker: str, role: Role, reason: str, is_its_own: bool) -> bool:
        asked.append((worker, reason, is_its_own))
        return answer

    plan = FleetPlan(SETTINGS, evicts=evicts)
    plan.want({Role.GENERATOR: 2}, 0.0)
    return plan, asked


def test_an_evicted_worker_fails_no_fleet_and_is_not_started_again() -> None:
    plan, asked = _evicting(True)
    _dies(plan, IMPORT)
    _dies(plan, AGAIN)
    assert [(worker, own) for worker, _, own in asked] == [("generator-0", True)]
    assert "libcuda.so.1" in asked[0][1]
    assert plan.failure is None and plan.want({Role.GENERATOR: 2}, 5.0) == []
    assert plan.due(5000.0) == []
    refused, _ = _evicting(False)
    _dies(refused, IMPORT)
    _dies(refused, AGAIN)
    assert refused.failure is not None


def test_failures_of_several_workers_of_a_role_are_no_single_ones_own() -> None:
    plan, asked = _evicting(True)
    for number, name in enumerate(("generator-0", "generator-1", "generator-0")):
        plan.due(1000.0)
        plan.exited(name, ExitCode.FAILURE, float(number), error=LastError("ValueError", f"part {'x' * number}"))
    assert [(worker, own) for worker, _, own in asked] == [("generator-0", False)]


def test_rare_deaths_never_exhaust_the_budget() -> None:
    plan = _plan(reward=1)
    for day in range(50):
        plan.due(day * 1000.0)
        plan.exited("reward-0", 1 if day % 2 else -9, day * 1000.0)
    assert plan.failure is None


def test_a_worker_that_was_found_stuck_failed_of_its_surroundings() -> None:
    plan = _plan(reward=1)
    for _ in range(SETTINGS.max_restarts + 1):
        plan.due(100.0)
        plan.replace("reward-0")
        plan.exited("reward-0", -9, 100.0 - 50.0)
    assert plan.failure is not None
    assert plan.failure.exit_code == ExitCode.STUCK


def test_a_worker_that_people_keep_ending_is_given_up_and_that_is_no_success() -> None:
    plan = _plan(reward=1)
    for _ in range(SETTINGS.max_restarts + 1):
        plan.due(100.0)
        plan.exited("reward-0", ExitCode.OK, 50.0)
        plan.want({Role.REWARD: 1}, 50.0)
    assert plan.failure is not None
    assert plan.failure.exit_code != ExitCode.OK


def test_an_adopted_process_is_not_started_again_and_a_surplus_one_is_drained() -> None:
    plan = FleetPlan(SETTINGS)
    plan.adopt("learner", Role.LEARNER)
    plan.adopt("generator-0", Role.GENERATOR)
    plan.adopt("generator-3", Role.GENERATOR)
    actions = plan.want({Role.LEARNER: 1, Role.GENERATOR: 2}, 0.0)
    assert _names(actions, Verb.DRAIN) == ["generator-3"]
    assert _names(plan.due(0.0), Verb.START) == ["generator-1"]
    plan.exited("learner", -9, 1.0)
    assert _names(plan.due(2.0), Verb.START) == ["learner"]


def test_recycled_workers_drain_first_and_are_started_when_they_have_gone() -> None:
    plan = FleetPlan(SETTINGS)
    plan.adopt("learner", Role.LEARNER)
    assert _names(plan.recycle(0.0), Verb.DRAIN) == ["learner"]
    plan.want({Role.LEARNER: 1}, 0.0)
    assert plan.due(0.0) == []
    plan.exited("learner", ExitCode.OK, 1.0)
    plan.want({Role.LEARNER: 1}, 1.0)
    assert _names(plan.due(1.0), Verb.START) == ["learner"]


def test_an_exit_that_no_restart_mends_fails_the_fleet_at_once() -> None:
    plan = _plan(learner=1)
    plan.due(0.0)
    plan.exited("learner", ExitCode.CONFIG, 1.0)
    assert plan.failure is not None
    assert plan.failure.exit_code == ExitCode.CONFIG


def test_an_observer_that_no_restart_mends_is_given_up_once_and_the_fleet_goes_on() -> None:
    plan = _plan(learner=1, observer=1)
    plan.due(0.0)
    plan.exited("observer", ExitCode.CONFIG, 1.0)
    assert [lost.worker for lost in plan.given_up] == ["observer"]
    for now_s in (2.0, 100.0, 10_000.0):
        assert plan.want({Role.LEARNER: 1, Role.OBSERVER: 1}, now_s) == []
        assert plan.due(now_s) == []
    assert plan.failure is None
    assert len(plan.given_up) == 1


def test_an_observer_that_dies_is_started_again_until_its_budget_is_used_up() -> None:
    plan = _plan(observer=1)
    for number in range(4):
        assert _names(plan.due(10.0 * number), Verb.START) == ["observer"]
        plan.exited("observer", -9, 10.0 * number)
    assert [lost.reason for lost in plan.given_up] == [
        "failed too often: 4 infrastructure failures within 60 s, 3 are allowed"
    ]
    assert plan.failure is None
    assert plan.is_down


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
    """A carrier that follows the plan. Processes exit at any time with any code, register late, are
    fenced, and outlive their supervisor. Its successor adopts those that are their worker's newest
    incarnation and kills the others."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.alive: dict[str, Role] = {}
        self.wanted: dict[Role, int] = {}
        self.failures: dict[str, list[float]] = {}
        # the registry
        self.newest: dict[str, int] = {}
        # of each process that is alive; 0 while it is starting
        self.epochs: dict[str, int] = {}
        self.begin()

    def begin(self) -> None:
        self.plan = FleetPlan(SETTINGS)
        self.stopping = False

    def carry_out(self, actions: list[Intervention]) -> None:
        for action in actions:
            if action.verb is Verb.START and action.role is not None:
                assert action.worker not in self.alive, "started twice"
                assert not self.stopping
                assert self.plan.failure is None
                assert self.wanted.get(action.role, 0) > int(action.worker.rpartition("-")[2])
                self.alive[action.worker] = action.role
                self.epochs[action.worker] = 0
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
    @rule(data=st.data(), code=st.sampled_from([-9, 0, 1, 2, 3, 4, 5, 9]), is_stuck=st.booleans())
    def exit(self, data: st.DataObject, code: int, is_stuck: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        if is_stuck:
            code = -9
            self.plan.replace(name)
        role = self.alive.pop(name)
        if code not in (0, 2) and not self.plan.is_draining(name):
            whose = role if kind_of(code) is FailureKind.DATA else name
            self.failures.setdefault(whose, []).append(self.now)
        self.plan.exited(name, code, self.now)

    @rule()
    def stop(self) -> None:
        self.stopping = True
        self.carry_out(self.plan.stop(self.now))

    @precondition(lambda self: not self.stopping)
    @rule()
    def recycle(self) -> None:
        self.carry_out(self.plan.recycle(self.now))

    @rule()
    def the_supervisor_dies_and_its_successor_adopts_what_runs(self) -> None:
        self.begin()
        self.failures.clear()
        for name, role in list(self.alive.items()):
            if may_adopt(self.epochs[name], self.newest.get(name, 0)):
                self.plan.adopt(name, role)
            else:
                del self.alive[name]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_process_registers(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        if self.epochs[name] == 0:
            self.epochs[name] = self.newest[name] = self.newest.get(name, 0) + 1

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_process_is_fenced_and_the_supervisor_dies_before_it_is_killed(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.newest[name] = self.newest.get(name, 0) + 1
        was_registered = self.epochs[name] > 0
        self.the_supervisor_dies_and_its_successor_adopts_what_runs()
        assert (name in self.alive) == (not was_registered), (
            "one that registers later gets a newer epoch than the fence"
        )

    @invariant()
    def the_plan_knows_who_is_alive(self) -> None:
        known = {w.name for w in self.plan.workers if w.phase in (WorkerPhase.RUNNING, WorkerPhase.DRAINING)}
        assert known == set(self.alive)
        assert self.plan.is_down == (not self.alive)

    @invariant()
    def a_budget_that_was_exceeded_fails_the_fleet(self) -> None:
        present = {w.name for w in self.plan.workers} | set(Role)
        self.failures = {whose: times for whose, times in self.failures.items() if whose in present}
        for whose, times in self.failures.items():
            most, period_s = (2, 600.0) if whose in set(Role) else (3, 60.0)
            recent = [at for at in times if at > times[-1] - period_s]
            assert len(recent) <= most or self.plan.failure is not None


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
