"""Claims about the escalation of repairs, on paper: times are numbers, and a small model of a fleet
carries its orders out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeline.config.operations import RecoverySection
from pipeline.fleet.repair.escalation import Escalation, IncidentSign
from pipeline.fleet.repair.levels import (
    LEVELS,
    Abilities,
    Member,
    RepairLevel,
    RepairOrder,
    StepOutcome,
)
from pipeline.fleet.repair.records import StepRow
from protocol.ids import Role

RepairPolicy = Literal["act", "own_signs", "advise"]
POLICIES: tuple[RepairPolicy, ...] = ("act", "own_signs", "advise")
RESTART_TIMEOUT_S, SELF_CHECK_S = 60.0, 90.0
LIMITS = RecoverySection(
    policy="act", tolerate_s=10.0, steady_s=100.0, settle_s=150.0, max_repairs=3, incident_restarts=2,
    max_evictions=1, window_s=1000.0,
)  # fmt: skip


def role_of(worker: str) -> Role:
    return Role(worker.partition("-")[0])


def roster(*at_work: str, idle: tuple[str, ...] = (), host: str = "here") -> dict[str, Member]:
    return {name: Member(role_of(name), host, is_at_work=name in at_work) for name in (*at_work, *idle)}


FLEET = roster("learner", "generator-0", "generator-1", "reward-0")
STANDBY = Abilities(standby_roles=frozenset({Role.GENERATOR}))
CHECKING = Abilities(no_self_check="")


def escalation(policy: RepairPolicy = "act", limits: RecoverySection = LIMITS) -> Escalation:
    made = Escalation(limits.model_copy(update={"policy": policy}), RESTART_TIMEOUT_S)
    assert made.tick(0.0, FLEET) == []
    return made


def suspected(
    worker: str = "generator-1", kind: str = "hung", number: int = 1, **more: bool | float
) -> dict[int, IncidentSign]:
    return {number: IncidentSign(number, worker, kind, "no progress for 9 s", **more)}  # type: ignore[arg-type]


def levels(steps: list[StepRow]) -> list[tuple[str, str]]:
    return [(str(step.rung), str(step.outcome)) for step in steps]


def lose(made: Escalation, now_s: float, worker: str = "generator-1", *, starts: bool = True) -> None:
    made.lost(now_s, worker, role_of(worker), "killed by SIGKILL")
    if starts:
        made.started(now_s + 1.0, worker)


def test_a_restart_for_an_incident_has_the_times_of_finding_and_of_deciding():
    made = escalation()
    sign = replace(suspected()[1], stood_s=7.0)
    made.see_incidents(20.0, {1: sign})
    assert made.tick(29.0, FLEET) == []
    (restart,) = made.tick(31.0, FLEET)
    assert restart.level is RepairLevel.RESTART
    assert (restart.detect_s, restart.localise_s) == (7.0, 11.0)


# -- the supervisor's own signs --------------------------------------------------------------------


def test_a_lost_worker_that_works_again_is_repaired_without_an_order():
    made = escalation()
    lose(made, 10.0)
    made.works(20.0, "generator-1")
    assert made.tick(119.0, FLEET) == [] and len(made.cases) == 1
    assert made.tick(120.0, FLEET) == [] and made.cases == ()
    steps = made.taken_steps()
    assert levels(steps) == [("isolate", "done"), ("restart", "begun"), ("restart", "done"), ("restart", "done")]
    assert steps[-1].sentence == "it has worked for 100 s: repaired"
    assert {step.case for step in steps} == {1} and steps[1].limit_s == 60.0


def test_a_flapping_worker_is_evicted_with_a_sentence_instead_of_a_loop():
    made = escalation()
    for number in range(4):
        assert made.tick(50.0 * number, FLEET) == []
        lose(made, 50.0 * number)
        made.works(50.0 * number + 10.0, "generator-1")
    (order,) = made.tick(151.0, FLEET)
    assert (order.level, order.workers, order.worker) == (RepairLevel.EVICT, ("generator-1",), "generator-1")
    said = made.taken_steps()[-1].sentence
    assert "4 losses in a row, none followed by 100 s of work; 3 are allowed" in said
    assert "`headrace fleet readmit generator-1`" in said
    lose(made, 160.0)
    assert made.tick(10_000.0, FLEET) == [] and made.taken_steps() == [], "it is out until a person readmits it"


def test_a_worker_that_is_lost_now_and_then_is_never_evicted():
    made = escalation()
    for number in range(50):
        lose(made, 150.0 * number)
        made.works(150.0 * number + 10.0, "generator-1")
        assert made.tick(150.0 * number + 140.0, FLEET) == [] and made.cases == ()


def test_the_last_worker_of_a_role_is_never_evicted_and_says_why():
    made = escalation()
    for number in range(4):
        lose(made, 10.0 * number, "reward-0")
    assert made.tick(32.0, FLEET) == [
        RepairOrder(RepairLevel.ROLE_RESTART, 1, "reward-0", made.cases[0].reason, 90.0, ())
    ]
    refused = [step.sentence for step in made.taken_steps() if step.outcome is StepOutcome.REFUSED]
    assert refused == ["no other reward is at work, and without one the run would stop"]


def test_a_learner_that_flaps_and_works_between_goes_on_for_ever():
    made = escalation()
    for number in range(100):
        lose(made, 20.0 * number, "learner")
        made.works(20.0 * number + 10.0, "learner")
        assert all(
            order.level is RepairLevel.ROLE_RESTART and order.workers == ()
            for order in made.tick(20.0 * number + 11.0, FLEET)
        )
    assert not any(step.rung is RepairLevel.WHOLE_RUN for step in made.taken_steps())


def test_a_learner_that_never_comes_back_climbs_to_the_whole_run():
    made = escalation()
    lose(made, 0.0, "learner")
    assert made.tick(60.0, FLEET) == []
    (role,) = made.tick(61.0, FLEET)
    (run,) = made.tick(role.deadline_s, roster("generator-0", idle=("learner",)))
    assert (role.level, run.level) == (RepairLevel.ROLE_RESTART, RepairLevel.WHOLE_RUN)
    assert levels(made.taken_steps())[3:] == [
        ("replace", "skipped"), ("evict", "refused"), ("role_restart", "begun"), ("role_restart", "failed"),
        ("rollback", "skipped"), ("whole_run", "begun"),
    ]  # fmt: skip


def test_signs_of_loading_and_an_absent_ledger_move_the_deadline():
    made = escalation()
    lose(made, 0.0, "learner")
    for now in range(0, 600, 50):
        made.moved(float(now), "learner")
        assert made.tick(now + 49.0, FLEET) == []
    made.reset_timers(600.0)
    assert made.tick(659.0, FLEET) == []
    assert [order.level for order in made.tick(660.0, FLEET)] == [RepairLevel.ROLE_RESTART]


def test_the_ends_that_levels_bring_are_no_further_losses():
    made, only = escalation(), roster(idle=("learner",))
    means = Abilities(rollback_roles=frozenset({Role.LEARNER}))
    lose(made, 0.0, "learner")
    for now, level in ((61.0, RepairLevel.ROLE_RESTART), (123.0, RepairLevel.ROLLBACK)):
        (order,) = made.tick(now, only, means)
        assert order.level is level
        made.taken_steps()
        lose(made, now + 1.0, "learner")
        assert made.taken_steps() == [] and made.cases[0].num_losses == 1


def test_ends_of_one_process_before_its_successor_count_once():
    made = escalation()
    for now in (0.0, 0.1, 0.2, 0.3, 0.4):
        lose(made, now, starts=False)
    assert made.cases[0].num_losses == 1


def test_a_worker_that_is_not_wanted_any_more_has_no_case():
    made = escalation()
    lose(made, 0.0)
    made.left("generator-1")
    made.left("generator-1")
    assert made.cases == () and made.tick(1000.0, FLEET) == []


# -- a worker that is given up ---------------------------------------------------------------------


def given_up(made: Escalation, worker: str = "generator-1", *, own: bool = True) -> bool:
    return made.exhausted(5.0, worker, role_of(worker), "ended twice by the same error", is_its_own=own)


def test_a_worker_that_a_restart_does_not_repair_is_evicted_while_another_works():
    made = escalation("own_signs")
    made.lost(5.0, "generator-1", Role.GENERATOR, "failure")
    assert given_up(made) and given_up(made)
    assert [order.level for order in made.tick(6.0, FLEET)] == [RepairLevel.EVICT]
    assert "ended twice by the same error" in made.taken_steps()[-1].sentence


@pytest.mark.parametrize(
    ("at_work", "own", "why"),
    [
        (("learner", "generator-1"), True, "no other generator is at work"),
        (("learner", "generator-0", "generator-1"), False, "other workers of the role failed in the same way"),
    ],
)
def test_the_run_ends_where_an_eviction_would_not_help(at_work: tuple[str, ...], own: bool, why: str):
    made = escalation()
    made.tick(1.0, roster(*at_work, idle=("generator-0",) if "generator-0" not in at_work else ()))
    assert not given_up(made, own=own)
    assert made.tick(6.0, FLEET) == [], "the plan itself ends the run"
    steps = made.taken_steps()
    assert why in next(step.sentence for step in steps if step.outcome is StepOutcome.REFUSED)
    assert steps[-1].rung is RepairLevel.WHOLE_RUN and "generator-1 ended twice by the same error" in steps[-1].sentence


def test_a_run_does_not_end_for_one_worker_while_another_of_its_role_works():
    made = escalation(limits=LIMITS.model_copy(update={"max_evictions": 0}))
    lose(made, 0.0)
    orders = [order for now in range(1, 1000, 20) for order in made.tick(float(now), FLEET)]
    assert [order.level for order in orders] == [RepairLevel.ROLE_RESTART]
    left = [step for step in made.taken_steps() if step.rung is RepairLevel.WHOLE_RUN]
    assert [step.outcome for step in left] == [StepOutcome.LEFT] and "with 1 other generator at work" in left[
        0
    ].sentence
    made.started(1000.0, "generator-1")
    made.works(1001.0, "generator-1")
    assert made.tick(1101.0, FLEET) == [] and made.cases == ()


def test_a_lost_observer_makes_no_case():
    made = escalation()
    lose(made, 1.0, "observer")
    assert made.cases == ()


def test_evictions_have_a_budget_over_the_whole_run():
    made = escalation()
    fleet = roster("learner", "generator-0", "generator-1", "generator-2")
    made.tick(1.0, fleet)
    assert given_up(made, "generator-1") and not given_up(made, "generator-2")
    assert "look for a common cause" in next(s for s in made.taken_steps() if s.outcome is StepOutcome.REFUSED).sentence


def test_a_peer_that_is_down_is_no_reason_to_evict():
    made = escalation()
    lose(made, 1.0, "generator-0", starts=False)
    assert not given_up(made, "generator-1")


def test_a_worker_that_a_self_check_proves_faulty_is_evicted_where_another_works():
    for policy in ("act", "own_signs"):
        made = escalation(policy)
        made.checked(5.0, "generator-1", "its answer differs")
        (order,) = made.tick(5.0, FLEET)
        assert (order.level, order.workers) == (RepairLevel.EVICT, ("generator-1",))
        assert levels(made.taken_steps()) == [("self_check", "done"), ("evict", "begun")]
        made.checked(6.0, "generator-1", "again")
        assert made.tick(6.0, FLEET) == [] and made.taken_steps() == [], "once"


def test_a_proven_fault_only_advises_under_advise_and_evicts_no_last_worker():
    advised = escalation("advise")
    advised.checked(5.0, "generator-1", "its answer differs")
    assert advised.tick(5.0, FLEET) == [] and advised.cases == ()
    assert levels(advised.taken_steps()) == [("self_check", "done"), ("evict", "advised")]
    last = escalation()
    last.checked(5.0, "reward-0", "its answer differs")
    last.checked(5.0, "nobody", "is there")
    assert last.tick(5.0, FLEET) == [] and last.cases == ()
    assert levels(last.taken_steps()) == [("self_check", "done"), ("evict", "refused")]


def checking(policy: RepairPolicy = "act") -> Escalation:
    """An escalation whose generator-1 is under a self-check."""
    made = escalation(policy)
    made.see_incidents(0.0, suspected(kind="mismatch"))
    (order,) = made.tick(10.0, FLEET, CHECKING)
    assert (order.level, order.workers) == (RepairLevel.SELF_CHECK, ("generator-1",))
    return made


@pytest.mark.parametrize("policy", POLICIES)
def test_wrong_tokens_are_checked_under_each_policy_before_anything_is_done(policy: RepairPolicy):
    made = checking(policy)
    made.checked(30.0, "generator-1", "its answer differs")
    orders = made.tick(30.0, FLEET, CHECKING)
    taken = levels(made.taken_steps())
    assert taken[:3] == [("tolerate", "begun"), ("self_check", "begun"), ("self_check", "done")]
    if policy == "advise":
        assert orders == [] and taken[3:] == [("evict", "advised"), ("restart", "advised")]
    else:
        assert [order.level for order in orders] == [RepairLevel.EVICT] and taken[3:] == [("evict", "begun")]


def test_a_suspect_that_is_not_proven_is_restarted_and_the_proven_one_evicted():
    made = checking()
    made.checked(30.0, "generator-0", "its answer differs")
    orders = {(str(order.level), order.worker) for order in made.tick(30.0, FLEET)}
    assert orders == {("evict", "generator-0"), ("restart", "generator-1")}


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (lambda made, order: made.checked(30.0, "", "all answers are the same"), "done"),
        (lambda made, order: made.failed(30.0, order, "others changed the fleet"), "failed"),
        (lambda made, order: None, "failed"),
    ],
    ids=["nothing is proven", "it could not begin", "it has no end"],
)
def test_a_self_check_that_proves_nothing_leads_to_the_restart(
    end: Callable[[Escalation, RepairOrder], None], outcome: str
):
    made = escalation()
    made.see_incidents(0.0, suspected(kind="mismatch"))
    (order,) = made.tick(10.0, FLEET, CHECKING)
    made.started(15.0, "generator-1")
    assert made.tick(30.0, FLEET, CHECKING) == [], "it is no repair, and has its own time"
    end(made, order)
    orders = [one for now in (30.0, 10.0 + SELF_CHECK_S) for one in made.tick(now, FLEET, CHECKING)][:1]
    assert [(one.level, one.reason) for one in orders] == [(RepairLevel.RESTART, order.reason)]
    assert levels(made.taken_steps())[2:5] == [("self_check", outcome), ("isolate", "begun"), ("restart", "begun")]


def test_without_a_self_check_wrong_tokens_lead_to_the_restart_at_once():
    made = escalation()
    made.see_incidents(0.0, suspected(kind="mismatch"))
    assert [one.level for one in made.tick(10.0, FLEET)] == [RepairLevel.RESTART]
    assert [step.sentence for step in made.taken_steps()][1] == "no self-check is available"


def test_a_self_checks_case_ends_with_its_incident_and_a_loss_takes_it_over():
    ended, lost = checking(), checking()
    ended.see_incidents(20.0, {})
    assert ended.cases == ()
    ended.checked(30.0, "", "all answers are the same")
    assert ended.tick(200.0, FLEET) == []
    lose(lost, 20.0)
    lost.checked(30.0, "", "all answers are the same")
    assert [case.level for case in lost.cases] == [RepairLevel.RESTART] and lost.tick(31.0, FLEET) == []


# -- incidents -------------------------------------------------------------------------------------


def test_an_incident_that_passes_within_the_tolerance_costs_nothing():
    made = escalation()
    made.see_incidents(0.0, suspected())
    assert made.tick(9.9, FLEET) == []
    made.see_incidents(9.9, {})
    assert made.tick(10.0, FLEET) == [] and made.cases == ()
    assert levels(made.taken_steps()) == [("tolerate", "begun"), ("tolerate", "done")]


def test_a_quiet_incident_costs_nothing_though_it_has_not_ended():
    made = escalation()
    made.see_incidents(0.0, suspected())
    made.see_incidents(9.0, suspected(is_quiet=True, found_s=6.5))
    assert [order for now in range(9, 39) for order in made.tick(float(now), FLEET)] == []
    made.see_incidents(39.0, {})
    assert made.cases == ()
    assert levels(made.taken_steps()) == [("tolerate", "begun"), ("tolerate", "done")]


def test_a_self_check_that_proves_nothing_leads_to_no_restart_of_a_quiet_worker():
    made = escalation()
    made.see_incidents(0.0, suspected(kind="mismatch"))
    (check,) = made.tick(10.0, FLEET, CHECKING)
    assert check.level is RepairLevel.SELF_CHECK
    made.see_incidents(12.0, suspected(kind="mismatch", is_quiet=True))
    made.checked(15.0, "", "all answers are the same")
    assert [order for now in range(15, 45) for order in made.tick(float(now), FLEET, CHECKING)] == []
    made.see_incidents(45.0, suspected(kind="mismatch", found_s=12.0))
    assert [order.level for order in made.tick(45.0, FLEET, CHECKING)] == [RepairLevel.SELF_CHECK]


def test_an_incident_that_comes_and_goes_is_tolerated_for_as_long_in_all():
    made = escalation()
    made.see_incidents(0.0, suspected())
    made.see_incidents(8.0, suspected(is_quiet=True, found_s=6.0))
    made.see_incidents(20.0, suspected(found_s=6.0))
    assert made.tick(23.9, FLEET) == []
    (restart,) = made.tick(24.0, FLEET)
    assert restart.level is RepairLevel.RESTART


def test_a_worker_with_two_incidents_is_quiet_when_both_are():
    made = escalation()
    one, other = suspected(), suspected("generator-1", "slow", 2)
    made.see_incidents(0.0, one | other)
    made.see_incidents(5.0, suspected(is_quiet=True) | other)
    (restart,) = made.tick(10.0, FLEET)
    assert restart.level is RepairLevel.RESTART


def test_an_incident_that_is_quiet_after_a_restart_leads_to_no_eviction():
    made = escalation()
    made.see_incidents(0.0, suspected())
    made.tick(10.0, FLEET)
    made.started(12.0, "generator-1")
    made.works(15.0, "generator-1")
    made.see_incidents(164.0, suspected(is_quiet=True, found_s=100.0))
    assert [order for now in (115.0, 165.0, 180.0) for order in made.tick(now, FLEET)] == []
    made.see_incidents(190.0, {})
    assert made.tick(265.0, FLEET) == [] and made.cases == ()


def test_an_incident_that_lasts_isolates_first_and_restarts_then():
    made = escalation()
    made.see_incidents(0.0, suspected())
    (restart,) = made.tick(10.0, FLEET)
    assert levels(made.taken_steps())[1:] == [("isolate", "begun"), ("restart", "begun")]
    assert (restart.level, restart.workers, restart.deadline_s) == (RepairLevel.RESTART, ("generator-1",), 70.0)
    assert restart.reason == "incident 1: generator-1 is hung: no progress for 9 s"
    made.lost(10.2, "generator-1", Role.GENERATOR, "killed by SIGKILL")
    assert made.cases[0].num_losses == 0, "the end that was ordered is no loss"


def test_an_incident_that_a_restart_did_not_end_leads_to_an_eviction():
    made = escalation()
    made.see_incidents(0.0, suspected())
    made.tick(10.0, FLEET)
    made.started(12.0, "generator-1")
    made.works(15.0, "generator-1")
    assert [order for now in (114.0, 115.0, 164.0) for order in made.tick(now, FLEET)] == [], "incidents end late"
    (order,) = made.tick(165.0, FLEET)
    assert order.level is RepairLevel.EVICT and "incident 1 is still open 150 s later" in order.reason


def test_incidents_that_come_back_after_each_restart_lead_to_an_eviction():
    made, orders = escalation(), list[RepairOrder]()
    for number in range(1, 4):
        begun_s = 200.0 * number
        made.see_incidents(begun_s, suspected(number=number))
        orders += made.tick(begun_s + 10.0, FLEET)
        made.started(begun_s + 11.0, "generator-1")
        made.works(begun_s + 12.0, "generator-1")
        made.see_incidents(begun_s + 50.0, {})
        orders += made.tick(begun_s + 150.0, FLEET)
    assert [str(order.level) for order in orders] == ["restart", "restart", "evict"]
    assert "incidents have restarted it 2 times within 1000 s, 2 are allowed" in orders[-1].reason


@pytest.mark.parametrize(("kind", "word"), [("disk", "make room"), ("odd", "by itself"), ("sideways", "evidence")])
def test_what_no_level_repairs_is_left_to_a_person_once(kind: str, word: str):
    made = escalation()
    made.tick(0.0, FLEET)
    for now in range(5):
        made.see_incidents(float(now), suspected(kind=kind))
        assert made.tick(float(now) + 1000.0, FLEET) == []
    (step,) = made.taken_steps()
    assert step.outcome is StepOutcome.LEFT and word in step.sentence and step.case == 0
    assert step.role == "generator", "of a worker"


def test_two_alarms_of_links_are_tolerated_and_the_third_names_the_shared_end():
    made = escalation()
    fleet = roster("generator-0", "generator-1", "reward-0", "reward-1", "reference-0")
    made.tick(0.0, fleet)
    found = dict[int, IncidentSign]()
    for number, link in enumerate(
        ("generator-0>reward-0", "generator-1>reward-1", "generator-0>reference-0", "generator-0>reward-1"), 1
    ):
        assert made.cases == ()
        found[number] = IncidentSign(number, link, "undelivered", "4 messages were not received")
        made.see_incidents(float(number), found)
    assert [case.worker for case in made.cases] == ["generator-0"]
    later = escalation()
    for number, now in enumerate((0.0, 301.0, 602.0), 1):
        later.see_incidents(now, {number: IncidentSign(number, "generator-0>reward-0", "undelivered", "lost")})
    assert later.cases == (), "alarms that are far apart are tolerated each"


def test_incidents_alone_never_end_a_run():
    made = escalation()
    made.see_incidents(0.0, suspected("learner"))
    made.tick(10.0, FLEET)
    made.started(11.0, "learner")
    orders = [order for now in range(20, 2000, 20) for order in made.tick(float(now), roster(idle=("learner",)))]
    assert {order.level for order in orders} == {RepairLevel.ROLE_RESTART}
    made.see_incidents(2000.0, {})
    assert made.cases == ()


@pytest.mark.parametrize("policy", ["own_signs", "advise"])
def test_without_act_an_incident_leads_to_advice_alone(policy: RepairPolicy):
    made = escalation(policy)
    made.see_incidents(0.0, suspected())
    assert [order for now in range(0, 5000, 7) for order in made.tick(float(now), FLEET)] == []
    begun, advised = made.taken_steps()
    assert begun.rung is RepairLevel.TOLERATE and (advised.rung, advised.outcome) == (
        RepairLevel.RESTART,
        StepOutcome.ADVISED,
    )
    made.see_incidents(6000.0, {})
    assert made.cases == ()


def test_advice_on_a_flapping_worker_is_given_once_and_its_restarts_are_followed():
    made = escalation("advise")
    for number in range(20):
        lose(made, 10.0 * number)
        assert made.tick(10.0 * number + 5.0, FLEET) == []
    advised = [step for step in made.taken_steps() if step.outcome is StepOutcome.ADVISED]
    assert [(step.rung, step.worker) for step in advised] == [(RepairLevel.EVICT, "generator-1")]
    assert advised[0].sentence.startswith("recovery.policy is advise; `act` would do this now: 4 losses in a row")
    made.works(200.0, "generator-1")
    assert made.tick(300.0, FLEET) == [] and made.cases == ()


def test_a_loss_after_advice_is_followed_like_any_other():
    made = escalation("own_signs")
    made.see_incidents(0.0, suspected())
    made.tick(10.0, FLEET)
    lose(made, 20.0)
    made.works(30.0, "generator-1")
    assert made.tick(130.0, FLEET) == [] and made.cases == ()
    assert levels(made.taken_steps())[-1] == ("restart", "done")


# -- standbys, hosts -------------------------------------------------------------------------------


def test_a_standby_takes_over_before_anything_is_evicted():
    made = Escalation(LIMITS, RESTART_TIMEOUT_S)
    made.tick(0.0, FLEET, STANDBY)
    for number in range(4):
        lose(made, float(2 * number))
    (replace,) = made.tick(8.0, FLEET, STANDBY)
    assert (replace.level, replace.workers) == (RepairLevel.REPLACE, ("generator-1",))
    made.failed(9.0, replace, "the standby ended")
    assert [one.level for one in made.tick(9.0, FLEET)] == [RepairLevel.EVICT]


def test_a_standby_that_takes_over_is_the_level_replace_and_brings_the_worker_back():
    made = escalation()
    made.lost(10.0, "generator-1", Role.GENERATOR, "killed by SIGKILL")
    made.started(10.2, "generator-1", "standby-1")
    made.works(11.0, "generator-1")
    assert made.tick(111.0, FLEET) == [] and made.cases == ()
    steps = made.taken_steps()
    assert levels(steps)[1:] == [("restart", "begun"), ("replace", "begun"), ("replace", "done"), ("replace", "done")]
    assert steps[2].sentence == "standby-1 takes over, with its model loaded"


def test_losses_of_standbys_that_took_over_end_in_an_eviction_as_other_losses_do():
    made = escalation()
    for number in range(4):
        made.lost(5.0 * number, "generator-1", Role.GENERATOR, "killed by SIGKILL")
        made.started(5.0 * number + 1.0, "generator-1", f"standby-{number}" if number < 3 else "")
    assert [one.level for one in made.tick(20.0, FLEET, STANDBY)] == [RepairLevel.EVICT]


def test_a_lost_standby_is_followed_by_a_restart_and_then_by_the_next_standby():
    made = escalation()
    made.lost(0.0, "generator-1", Role.GENERATOR, "killed by SIGKILL")
    made.started(1.0, "generator-1", "standby-1")
    lose(made, 5.0)
    assert made.cases[0].level is RepairLevel.RESTART
    assert [one.level for one in made.tick(70.0, FLEET, STANDBY)] == [RepairLevel.REPLACE]


def test_a_replacement_is_ordered_once_and_its_own_end_of_the_process_is_no_loss():
    made = escalation()
    lose(made, 0.0)
    (order,) = made.tick(70.0, FLEET, STANDBY)
    assert (order.level, order.workers) == (RepairLevel.REPLACE, ("generator-1",))
    made.lost(70.5, "generator-1", Role.GENERATOR, "killed by SIGKILL")
    made.started(71.0, "generator-1", "standby-1")
    assert made.cases[0].num_losses == 1
    made.works(72.0, "generator-1")
    assert made.tick(172.0, FLEET, STANDBY) == [] and made.cases == ()


def test_a_standby_replaces_neither_another_role_nor_a_joined_host_s_worker():
    made = escalation()
    lose(made, 0.0, "reward-0")
    assert RepairLevel.REPLACE not in [one.level for one in made.tick(70.0, FLEET, STANDBY)]
    fleet = FLEET | guests(2, at_work=(0,))
    made = escalation()
    made.tick(0.0, fleet, STANDBY)
    made.see_incidents(1.0, suspected("generator-b-1"))
    made.tick(11.0, fleet, STANDBY)
    assert RepairLevel.REPLACE not in [one.level for one in made.tick(71.0, fleet, STANDBY)]


def guests(num: int, *, at_work: tuple[int, ...] = ()) -> dict[str, Member]:
    return {f"generator-b-{n}": Member(Role.GENERATOR, "b", is_guest=True, is_at_work=n in at_work) for n in range(num)}


@pytest.mark.parametrize(("num_healthy", "host"), [(0, "b"), (1, "b"), (2, "")])
def test_a_sick_joined_host_is_evicted_as_a_whole_with_at_most_one_healthy_worker(num_healthy: int, host: str):
    made = escalation()
    fleet = FLEET | guests(4, at_work=tuple(range(num_healthy)))
    made.tick(0.0, fleet)
    signs = {number: suspected(f"generator-b-{number}", number=number)[number] for number in range(num_healthy, 4)}
    made.see_incidents(0.0, signs)
    assert [order.level for order in made.tick(10.0, fleet)] == [RepairLevel.RESTART] * len(signs)
    made.taken_steps()
    # none has come back to work
    first, *others = made.tick(70.0, fleet)
    assert (first.level, first.host) == (RepairLevel.EVICT, host)
    assert set(first.workers) == ({f"generator-b-{n}" for n in range(4)} if host else {f"generator-b-{num_healthy}"})
    assert [order.level for order in others] == ([] if host else [RepairLevel.ROLE_RESTART]), "one eviction is allowed"
    mates = [step for step in made.taken_steps() if (step.rung, step.outcome) == (RepairLevel.EVICT, StepOutcome.DONE)]
    assert len(mates) == (3 - num_healthy if host else 0)


def on_devices(**devices: str) -> dict[str, Member]:
    """Generators of the run's host that compute on these devices; those in capitals do no work."""
    return {
        f"generator-{name}": Member(
            Role.GENERATOR, "here", is_at_work=device.islower(), devices=frozenset({device.lower()})
        )
        for name, device in devices.items()
    }


@pytest.mark.parametrize(
    ("devices", "evicted"),
    [
        ({"a": "X", "b": "X", "c": "y"}, {"generator-a", "generator-b"}),
        ({"a": "X", "b": "X", "h": "x", "c": "y"}, {"generator-a", "generator-b", "generator-h"}),
        ({"a": "X", "b": "X", "h": "x", "i": "x", "c": "y"}, {"generator-a"}),
        ({"a": "X", "b": "Z", "c": "y"}, {"generator-a"}),
    ],
    ids=["all are sick", "one is healthy", "two are healthy", "on other devices"],
)
def test_sick_workers_of_one_device_are_evicted_as_one_fault(devices: dict[str, str], evicted: set[str]):
    made, fleet = escalation(), FLEET | on_devices(**devices)
    made.tick(0.0, fleet)
    for name in [name for name, member in fleet.items() if member.devices and not member.is_at_work]:
        made.lost(1.0, name, Role.GENERATOR, "killed")
    made.taken_steps()
    order, *others = made.tick(61.0, fleet)
    assert (order.level, order.host, set(order.workers)) == (RepairLevel.EVICT, "", evicted)
    steps = made.taken_steps()
    sentence = next(step.sentence for step in steps if step.rung is RepairLevel.EVICT)
    if len(evicted) > 1:
        assert others == [] and sentence.startswith("evicted with all workers of its device (x of here): no work")
        assert [step.worker for step in steps if (step.rung, step.outcome) == (RepairLevel.EVICT, "done")] == [
            "generator-b"
        ]
    else:
        assert sentence.startswith("evicted: no work")
    assert sentence.count("`headrace fleet readmit generator-") == len(evicted)


def test_a_device_of_which_a_role_has_all_its_workers_is_not_evicted_as_a_whole():
    made, fleet = escalation(), {"learner": Member(Role.LEARNER, "here", is_at_work=True)} | on_devices(a="X", b="X")
    made.tick(0.0, fleet)
    for name in ("generator-a", "generator-b"):
        made.lost(1.0, name, Role.GENERATOR, "killed")
    assert RepairLevel.EVICT not in [order.level for order in made.tick(61.0, fleet)]


def test_the_runs_own_host_is_never_evicted_as_a_whole():
    made = escalation()
    made.tick(0.0, roster("generator-0", "generator-1", idle=("generator-2", "generator-3")))
    for name in ("generator-2", "generator-3"):
        lose(made, 1.0, name, starts=False)
    assert given_up(made, "generator-3")
    assert [order.host for order in made.tick(6.0, FLEET)] == [""]


# -- anything at all -------------------------------------------------------------------------------

WORKERS = ("learner", "generator-0", "generator-1", "generator-2", "reward-0", "reward-1")
KINDS = ("hung", "slow", "disk", "silent", "mismatch")


@dataclass
class Process:
    """A worker's place in the model: which of its processes may still write."""

    writing: set[int] = field(default_factory=lambda: {1})
    newest: int = 1
    is_down: bool = False
    has_worked: bool = True


class LadderMachine(RuleBasedStateMachine):
    """A fleet whose workers are lost, suspected, start and work in any order."""

    @initialize(policy=st.sampled_from(POLICIES))
    def begin(self, policy: RepairPolicy) -> None:
        self.policy, self.now = policy, 0.0
        self.escalation = Escalation(LIMITS.model_copy(update={"policy": policy}), RESTART_TIMEOUT_S)
        self.there = {name: Process() for name in WORKERS}
        self.open: dict[int, IncidentSign] = {}
        self.next_incident = 1
        self.restarted: dict[str, list[float]] = {name: [] for name in WORKERS}
        self.evicted: list[tuple[float, str]] = []
        self.evicted_for: list[int] = []
        self.promised: set[str] = set()
        """Evictions that were decided since the last tick."""
        self.tick(0.0)

    def has_peer_at_work(self, name: str) -> bool:
        members = self.members().items()
        return any(one.role is role_of(name) and one.is_at_work for other, one in members if other != name)

    def members(self) -> dict[str, Member]:
        return {
            name: Member(role_of(name), "here", is_at_work=not one.is_down and one.has_worked)
            for name, one in self.there.items()
        }

    @rule(passed=st.sampled_from([0.0, 1.0, 11.0, 61.0, 101.0]))
    def tick(self, passed: float) -> None:
        self.now += passed
        members = self.members()
        cases = {case.worker: set(case.incidents) for case in self.escalation.cases}
        for order in self.escalation.tick(self.now, members, CHECKING):
            if order.level is RepairLevel.SELF_CHECK:
                continue
            assert self.policy != "advise"
            for name in order.workers:
                self.carry_out(order, name, members, cases.get(name, set()))

    def carry_out(self, order: RepairOrder, name: str, members: dict[str, Member], incidents: set[int]) -> None:
        process = self.there[name]
        match order.level:
            case RepairLevel.RESTART:
                named = [one for one in self.open.values() if one.component == name]
                assert not named or not all(one.is_quiet for one in named)
                process.writing.clear()
                self.restarted[name].append(self.now)
                process.is_down = True
            case RepairLevel.ROLE_RESTART:
                assert not members[name].is_at_work or incidents
                if incidents:
                    self.restarted[name].append(self.now)
                process.writing.clear()
                process.is_down = True
            case RepairLevel.EVICT:
                assert any(role_of(other) is role_of(name) for other in self.there if other != name), "never empty"
                assert name in self.promised or self.has_peer_at_work(name)
                assert not set(self.evicted_for) & incidents, "one worker an incident"
                self.evicted_for += incidents
                self.evicted.append((self.now, name))
                del self.there[name]
                self.escalation.left(name)
            case _:
                assert order.level is RepairLevel.WHOLE_RUN

    @rule(name=st.sampled_from(WORKERS))
    def is_lost(self, name: str) -> None:
        if (process := self.there.get(name)) is not None:
            process.writing.clear()
            process.is_down, process.has_worked = True, False
            self.escalation.lost(self.now, name, role_of(name), "killed")

    @rule(name=st.sampled_from(WORKERS), works=st.booleans())
    def starts(self, name: str, works: bool) -> None:
        process = self.there.get(name)
        if process is not None and process.is_down:
            process.newest += 1
            process.writing.add(process.newest)
            process.is_down, process.has_worked = False, works
            self.escalation.started(self.now, name)
            if works:
                self.escalation.works(self.now, name)

    @rule(name=st.sampled_from(WORKERS), own=st.booleans())
    def is_given_up(self, name: str, own: bool) -> None:
        process = self.there.get(name)
        if process is None or not process.is_down or self.policy == "advise":
            return
        case = next((case for case in self.escalation.cases if case.worker == name), None)
        if case is not None and case.is_final:
            return
        if self.escalation.exhausted(self.now, name, role_of(name), "too often", is_its_own=own):
            assert own and self.has_peer_at_work(name)
            self.promised.add(name)

    @rule(name=st.sampled_from(WORKERS), kind=st.sampled_from(KINDS))
    def opens(self, name: str, kind: str) -> None:
        self.open[self.next_incident] = IncidentSign(self.next_incident, name, kind, "seen")
        self.next_incident += 1
        self.escalation.see_incidents(self.now, self.open)

    @rule()
    def a_self_check_ends(self) -> None:
        self.escalation.checked(self.now, "", "all answers are the same")
        # in the same turn of the supervisor: no incident changes before what was decided is carried out
        self.tick(0.0)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), found_s=st.sampled_from([0.0, 5.0, 20.0]))
    def is_quiet_or_found_again(self, data: st.DataObject, found_s: float) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        self.open[number] = replace(self.open[number], is_quiet=not self.open[number].is_quiet, found_s=found_s)
        self.escalation.see_incidents(self.now, self.open)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        del self.open[data.draw(st.sampled_from(sorted(self.open)))]
        self.escalation.see_incidents(self.now, self.open)

    @rule()
    def nothing_can_be_read(self) -> None:
        self.escalation.reset_timers(self.now)

    @invariant()
    def at_most_one_process_of_a_worker_may_write(self) -> None:
        if hasattr(self, "there"):
            assert all(len(process.writing) <= 1 for process in self.there.values())

    @invariant()
    def every_level_that_is_not_the_last_has_a_deadline(self) -> None:
        if hasattr(self, "escalation"):
            cases = self.escalation.cases
            assert len({case.worker for case in cases}) == len(cases)
            for case in cases:
                assert case.waits or case.is_final or (case.is_advised and case.incidents and not case.is_own)
                longest = max(RESTART_TIMEOUT_S, LIMITS.settle_s, SELF_CHECK_S)
                assert not case.waits or case.deadline_s <= self.now + longest

    @invariant()
    def budgets_bound_restarts_and_evictions(self) -> None:
        if hasattr(self, "restarted"):
            since = self.now - LIMITS.window_s
            for times in self.restarted.values():
                assert sum(at > since for at in times) <= LIMITS.incident_restarts
            assert sum(at > since for at, _ in self.evicted) <= LIMITS.max_evictions

    @invariant()
    def steps_go_up_and_name_a_level(self) -> None:
        if hasattr(self, "escalation"):
            for step in self.escalation.taken_steps():
                assert step.rung in LEVELS and step.sentence


LadderMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLadder = LadderMachine.TestCase
