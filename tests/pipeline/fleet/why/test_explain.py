"""Claims about explanations: a wait is followed to its root, and the next step is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.fleet.health import HealthKind
from pipeline.fleet.why.explain import explain
from pipeline.fleet.why.types import Cause, Ended, Outlook
from pipeline.ledger.admin import Holder, Place
from pipeline.ledger.types import LatePolicy, Unit
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.training.critic_gate import EXPLAINED_VARIANCE, GATE_OPEN, VALUE_STEPS
from protocol.ids import Role
from protocol.trajectory import Field
from tests.pipeline.fleet.why.scenes import (
    AWAITED,
    CRITIC,
    CRITIC_FLEET,
    FLEET,
    lack,
    queues,
    root,
    scene,
    silent,
    totals,
    trajectory,
    unit,
    waits,
    worker,
)

SAMPLED = waits(unit("81", trajectory("t.81.4", Place.FINISHED, "", lack(num_failures=1))), running=3)


# -- units, and the generators that have them ------------------------------------------------------


def test_a_frozen_generator_is_named_from_the_learner_down():
    found = explain(scene([silent("generator-2")], AWAITED))
    assert found.chains[0].links == (
        "learner waits for 3 of 32 groups",
        "group 81 has 7 of 8",
        "member 4 is on generator-2 (2 chunks, 512 tokens, last written or leased 12 s ago)",
        "generator-2 is silent for 12 s",
    )
    assert found.headline == "; ".join(found.chains[0].links)
    assert (found.chains[0].cause, found.chains[0].who, found.outlook) == (Cause.SILENT, "generator-2", Outlook.MENDS)
    assert "replaces it after 10 s" in found.chains[0].next
    assert "lease ends in 8 s" in found.chains[0].next
    assert found.also == ()


def test_a_generator_at_work_is_nothing_wrong():
    assert root(scene([], AWAITED)) == (Cause.WORKING, "generator-2", Outlook.MOVES)


def test_a_generator_that_beats_without_moving_is_stuck():
    stuck = worker("generator-2", WaitingFor.COMPUTE, health=HealthKind.STUCK, for_s=61.0)
    assert root(scene([stuck], AWAITED)) == (Cause.STUCK, "generator-2", Outlook.MENDS)


def test_what_a_dead_incarnation_holds_goes_to_others():
    for s in (scene([], AWAITED, without=["generator-2"]), scene([worker("generator-2", epoch=2)], AWAITED)):
        found = explain(s).chains[0]
        assert (found.cause, found.who, found.outlook) == (Cause.LEASE, "generator-2", Outlook.MENDS)
        assert "generator-2#1 is gone" in found.links
        assert "headrace ledger requeue --worker generator-2" in found.next


def test_with_no_generator_left_the_one_that_is_to_come_back_is_the_root():
    s = scene(
        [],
        AWAITED,
        without=["generator-1", "generator-2"],
        exits={"generator-2": Ended("it ended (killed by SIGKILL)", 4.0)},
    )
    found = explain(s).chains[0]
    assert (found.cause, found.who, found.outlook) == (Cause.ABSENT, "generator-2", Outlook.MENDS)
    assert "killed by SIGKILL" in found.links[-1]
    assert root(replace(s, has_supervisor=False)) == (Cause.ABSENT, "generator-2", Outlook.YOU)


def test_a_role_that_is_left_to_other_hosts_is_named_with_the_two_ways_to_a_worker():
    s = scene([], AWAITED, without=["generator-1", "generator-2"])
    found = explain(replace(s, wanted={})).chains[0]
    assert (found.cause, found.who, found.outlook) == (Cause.ABSENT, "generator", Outlook.YOU)
    assert "headrace scale generator=1" in found.next and "headrace fleet join" in found.next


def test_a_silent_worker_unknown_to_the_supervisor_is_yours_to_replace():
    view = waits(unit("81", trajectory("t.81.4", Place.LEASED, "hostb-0#1")), running=3)
    foreign = replace(silent("generator-2"), worker="hostb-0")
    found = explain(scene([foreign], view)).chains[0]
    assert (found.cause, found.outlook) == (Cause.SILENT, Outlook.MENDS)
    assert "it is not one of the supervisor's workers" in found.next


def test_what_nobody_holds_waits_for_a_generator_with_room():
    view = waits(unit("81", trajectory("t.81.4", Place.OPEN)), running=3)
    assert root(scene([], view)) == (Cause.WORKING, "generator-1", Outlook.MOVES)
    both = [silent("generator-1"), silent("generator-2")]
    assert root(scene(both, view))[0] is Cause.SILENT


def test_a_full_mailbox_leads_to_the_scorer_that_does_not_read():
    full = worker("generator-2", WaitingFor.ROOM, "reward-0 to read")
    found = explain(scene([full, silent("reward-0")], AWAITED)).chains[0]
    assert (found.cause, found.who) == (Cause.SILENT, "reward-0")
    assert "generator-2 waits for room: reward-0 to read" in found.links
    nobody = worker("generator-2", WaitingFor.ROOM, "a reward worker to join")
    assert root(scene([nobody], AWAITED, without=["reward-0"]))[:2] == (Cause.ABSENT, "reward-0")


def test_a_generator_without_the_ledger_says_so():
    away = worker("generator-2", WaitingFor.LEDGER, "the ledger server is at its memory limit")
    found = explain(scene([away], AWAITED)).chains[0]
    assert (found.cause, found.outlook) == (Cause.LEDGER, Outlook.MENDS)
    assert "memory limit" in found.links[-1]


def test_a_starting_or_draining_generator_is_ordinary():
    for at, cause in ((WaitingFor.STARTING, Cause.STARTING), (WaitingFor.DRAINING, Cause.DRAINING)):
        assert root(scene([worker("generator-2", at)], AWAITED)) == (cause, "generator-2", Outlook.MOVES)


def test_a_trouble_that_the_update_can_do_without_is_told_last():
    groups = [unit(str(n), trajectory(f"t.{n}.0", Place.LEASED, "generator-1#1")) for n in range(5)]
    view = waits(unit("81", trajectory("t.81.4")), *groups, running=6)
    found = explain(scene([silent("generator-2")], view))
    assert [chain.cause for chain in found.chains] == [Cause.WORKING, Cause.SILENT]
    assert found.chains[0].num_units == 5
    assert found.outlook is Outlook.MOVES


# -- fields, and their scorers ---------------------------------------------------------------------


def test_a_judge_that_is_down_is_named_and_waits_for_a_person():
    told = "endpoint quality, which does not answer: ConnectError (12 responses in flight)"
    view = scene([worker("reward-0", WaitingFor.ENDPOINT, told)], SAMPLED)
    assert root(view) == (Cause.ENDPOINT, "reward-0", Outlook.YOU)
    [chain] = explain(view).chains
    assert chain.links[-1] == f"reward-0 waits for {told}"
    assert "no response counts as wrong" in chain.next


def test_missing_guidance_leads_to_the_reference_worker_and_counts_from_the_reward():
    view = waits(unit("81", trajectory("t.81.4", Place.FINISHED, "", lack(Field.GUIDANCE))), running=3)
    fleet = FLEET | {"reference-0": Role.REFERENCE}
    found = explain(scene([], view, wanted=fleet, queues=queues(guidance=5))).chains[0]
    assert (found.cause, found.who) == (Cause.ABSENT, "reference-0")
    assert "t.81.4.1 lacks its guidance, rewarded 12 s ago" in found.links[-2]
    assert "5 chunks wait for reference" in found.links[-2]


def test_a_missing_turn_leads_to_the_environment_worker():
    view = waits(unit("81", trajectory("t.81.4", Place.WAITING, "", lack(Field.TURN))), running=3)
    fleet = FLEET | {"environment-0": Role.ENVIRONMENT}
    found = explain(scene([], view, wanted=fleet, queues=queues(turn=5))).chains[0]
    assert (found.cause, found.who) == (Cause.ABSENT, "environment-0")
    assert found.links[2] == "member 4 waits for its environment (2 chunks, 512 tokens)"
    assert "t.81.4.1 lacks its turn, written 12 s ago" in found.links[3]
    assert "5 chunks wait for environment" in found.links[3]


@pytest.mark.parametrize("kind", Unit)
def test_a_missing_field_names_chunk_failures_deadline_and_the_scorer_that_is_gone(kind):
    view = replace(SAMPLED, unit=kind)
    s = scene([], view, without=["reward-0"], queues=queues(reward=17))
    found = explain(s).chains[0]
    assert (found.cause, found.who, found.outlook) == (Cause.ABSENT, "reward-0", Outlook.MENDS)
    assert (
        "t.81.4.1 lacks its reward, written 12 s ago, due again in 3 s, a scorer failed on it 1 time" in found.links[-2]
    )
    assert "17 chunks wait for reward" in found.links[-2]
    assert "chunks wait in the ledger" in found.next
    assert (found.links[1] == "group 81 has 7 of 8") == (kind is Unit.GROUP)


def test_a_busy_scorer_is_at_work_and_an_idle_one_lost_the_message():
    busy = worker("reward-0", WaitingFor.COMPUTE)
    assert root(scene([busy], SAMPLED)) == (Cause.WORKING, "reward-0", Outlook.MOVES)
    found = explain(scene([], SAMPLED)).chains[0]
    assert (found.cause, found.who) == (Cause.REDELIVERY, "reward")
    assert "headrace ledger requeue --field reward" in found.next


def test_a_dead_value_worker_is_the_root_though_its_learner_is_well():
    view = waits(
        unit("t.81.4.0", trajectory("t.81.4", Place.FINISHED, "", lack(Field.VALUE))), running=3, kind=Unit.CHUNK
    )
    s = scene([worker("learner", updates=9)], view, wanted=CRITIC_FLEET, critic=CRITIC, queues=queues(value=40))
    found = explain(s).chains[0]
    assert found.links[0] == "learner waits for 3 of 32 chunks"
    assert (found.cause, found.who, found.outlook) == (Cause.ABSENT, "value", Outlook.MENDS)


OPEN: dict[str, Any] = {GATE_OPEN: 1.0}
"""Counters of a value worker whose critic's gate is open."""


def test_a_chunk_that_waits_for_values_is_told_while_its_trajectory_is_still_sampled():
    view = waits(unit("81", trajectory("t.81.4", Place.LEASED, "generator-2#1", lack(Field.VALUE))), running=3)
    s = scene(
        [worker("value", **OPEN), silent("value", **OPEN)],
        view,
        wanted=CRITIC_FLEET,
        critic=CRITIC,
    )
    assert root(s)[:2] == (Cause.SILENT, "value")


# -- too little on the way -------------------------------------------------------------------------

NOTHING = waits(running=0, ready=3)


def test_closed_admission_and_exhausted_data_end_the_run():
    assert root(scene([], NOTHING, totals=totals(is_closed=True))) == (Cause.CLOSED, "", Outlook.ENDED)
    assert root(scene([], NOTHING, totals=totals(is_exhausted=True))) == (Cause.EXHAUSTED, "", Outlook.ENDED)


@pytest.mark.parametrize(
    ("depths", "gone", "who", "cause"),
    [
        ({"claimed": 64}, None, "bytes", Cause.MEMORY),
        ({"claimed": 64}, "learner", "learner", Cause.ABSENT),
        ({"finished": 64}, "value", "value", Cause.ABSENT),
        ({"reward": 64}, "reward-0", "reward-0", Cause.ABSENT),
        ({"reward": 64}, None, "bytes", Cause.MEMORY),
        ({}, None, "bytes", Cause.MEMORY),
    ],
)
def test_a_full_ledger_names_what_fills_it_and_who_empties_that(depths, gone, who, cause):
    there = [worker("value", **OPEN)]
    more = {"wanted": CRITIC_FLEET, "queues": queues(bytes=200, **depths), "without": [gone] if gone else []}
    assert root(scene(there, NOTHING, **more))[:2] == (cause, who)


def test_used_credit_waits_for_the_learner_and_free_credit_for_generators():
    assert root(scene([], NOTHING, totals=totals(credit_used=100)))[0] is Cause.CREDIT
    assert root(scene([], NOTHING))[:2] == (Cause.WORKING, "generator-1")
    lost = scene([], NOTHING, without=["generator-1", "generator-2"])
    assert root(lost)[:2] == (Cause.ABSENT, "generator-1")


def test_what_runs_is_not_all_that_lacks_when_admission_has_stopped():
    view = waits(unit("81", trajectory("t.81.4")), running=1)
    found = explain(scene([], view, totals=totals(is_exhausted=True)))
    assert [chain.cause for chain in found.chains] == [Cause.EXHAUSTED, Cause.WORKING]
    assert found.chains[0].links[1] == "2 groups are not yet admitted"


# -- the learner -----------------------------------------------------------------------------------


def test_a_learner_at_work_says_which_update_and_how_much_of_the_next_is_there():
    busy = worker("learner", WaitingFor.COMPUTE, updates=12, num_updates=50)
    found = explain(scene([busy], AWAITED))
    assert found.headline.startswith("learner is at update 13 of 50")
    assert "29 of 32 groups of the next update are ready" in found.headline
    assert found.outlook is Outlook.MOVES


def test_a_learner_that_is_gone_frozen_or_without_its_ledger_is_the_root():
    assert root(scene([], AWAITED, without=["learner"])) == (Cause.ABSENT, "learner", Outlook.MENDS)
    assert root(scene([silent("learner")], AWAITED)) == (Cause.SILENT, "learner", Outlook.MENDS)
    assert root(scene([worker("learner", WaitingFor.LEDGER)], AWAITED))[0] is Cause.LEDGER
    assert root(scene([worker("learner", WaitingFor.STARTING)], AWAITED))[0] is Cause.STARTING


def test_a_learner_that_waits_for_weights_to_be_taken_names_the_generator():
    learner = worker("learner", WaitingFor.WEIGHTS, "generator-2 (version 1) to take version 4")
    busy = worker("generator-2", WaitingFor.COMPUTE, health=HealthKind.STUCK, for_s=70.0)
    assert root(scene([learner, busy], AWAITED)) == (Cause.STUCK, "generator-2", Outlook.MENDS)
    ring = worker("generator-2", WaitingFor.WEIGHTS, "the published weights")
    assert root(scene([learner, ring], AWAITED)) == (Cause.WEIGHTS, "generator-2", Outlook.MOVES)


def test_a_generator_that_could_not_verify_a_version_is_the_root_and_mends():
    learner = worker("learner", WaitingFor.WEIGHTS, "generator-2 (version 1) to take version 4")
    held = worker("generator-2", WaitingFor.QUARANTINE, "v4 is not version 4 as it was published")
    view = scene([learner, held], AWAITED)
    assert root(view) == (Cause.QUARANTINE, "generator-2", Outlook.MENDS)
    [chain] = explain(view).chains
    assert "in quarantine: v4 is not version 4 as it was published" in chain.links[-1]
    assert "publishes it again" in chain.next


def test_late_work_is_followed_by_version():
    late = unit("79", trajectory("t.79.0"), oldest=3)
    view = waits(late, unit("85", trajectory("t.85.0", Place.LEASED, "generator-1#1"), oldest=4), ready=40, running=2)
    found = explain(scene([silent("generator-2")], view))
    assert [(chain.cause, chain.who) for chain in found.chains] == [(Cause.SILENT, "generator-2")]
    assert "would be too stale" in found.headline
    assert root(scene([], replace(view, late=LatePolicy.DROP)))[:2] == (Cause.WORKING, "learner")


def test_the_critics_gate_leads_to_the_value_worker_and_on_to_what_it_waits_for():
    counters: dict[str, Any] = {GATE_OPEN: 0.0, VALUE_STEPS: 3.0, EXPLAINED_VARIANCE: 0.04}
    more = {"wanted": CRITIC_FLEET, "critic": CRITIC, "queues": queues(finished=12)}
    found = explain(scene([worker("value", **counters), silent("generator-2")], AWAITED, **more)).chains[0]
    assert found.links[0] == "learner waits for its critic: explained variance 0.04 of 0.1, step 3 of 50"
    assert found.links[1] == "value waits for 20 of 32 finished responses"
    assert (found.cause, found.who) == (Cause.SILENT, "generator-2")
    assert root(scene([worker("value", WaitingFor.COMPUTE, **counters)], AWAITED, **more))[:2] == (
        Cause.WORKING,
        "value",
    )
    assert root(scene([silent("value", **counters)], AWAITED, **more))[:2] == (Cause.SILENT, "value")
    assert root(scene([], AWAITED, **more)) == (Cause.ABSENT, "value", Outlook.MENDS)


def test_a_closed_run_waits_for_its_last_evaluation():
    view = waits(running=0, ready=0, num_evaluation_unscored=4, holders=(Holder("generator-2#1", 5, 5, 8.0),))
    closed = {"totals": totals(is_closed=True)}
    found = explain(scene([silent("generator-2")], view, **closed)).chains[0]
    assert found.links[:2] == ("learner waits for the last evaluation", "5 evaluation responses on generator-2")
    assert (found.cause, found.who) == (Cause.SILENT, "generator-2")
    assert root(scene([], view, **closed, without=["reward-0"]))[:2] == (Cause.ABSENT, "reward-0")
    view = waits(running=0, ready=0, num_evaluation_waiting=4)
    found = explain(scene([], view, **closed, wanted=FLEET | {"environment-0": Role.ENVIRONMENT})).chains[0]
    assert found.links[1] == "4 evaluation responses wait for an environment"
    assert (found.cause, found.who) == (Cause.ABSENT, "environment-0")
