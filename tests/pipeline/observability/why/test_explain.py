"""Claims about explanations: a wait is followed to its root, and the next step is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.incidents.book import IncidentBook, Suspicion
from pipeline.incidents.records import FoundCause, folded
from pipeline.ledger.admin import Holder, Place
from pipeline.ledger.types import LatePolicy, Unit
from pipeline.observability.status import Health
from pipeline.observability.why.explain import explain
from pipeline.observability.why.types import Cause, Ended, Outlook, Snapshot, seconds
from pipeline.runtime.registry.contract import RunState, WaitingFor
from pipeline.training.critic_gate import EXPLAINED_VARIANCE, GATE_OPEN, VALUE_STEPS
from protocol.trajectory import Field
from tests.pipeline.observability.why.scenes import (
    CRITIC,
    CRITIC_FLEET,
    FLEET,
    lack,
    queues,
    scene,
    silent,
    totals,
    trajectory,
    unit,
    waits,
    worker,
)

AWAITED = waits(unit("81", trajectory("t.81.4")), running=3)
SAMPLED = waits(unit("81", trajectory("t.81.4", Place.FINISHED, "", lack(num_failures=1))), running=3)


def root(s: Snapshot) -> tuple[Cause, str, Outlook]:
    chain = explain(s).chains[0]
    return chain.cause, chain.who, chain.outlook


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
    stuck = worker("generator-2", WaitingFor.COMPUTE, health=Health.STUCK, for_s=61.0)
    assert root(scene([stuck], AWAITED)) == (Cause.STUCK, "generator-2", Outlook.MENDS)


def test_what_a_dead_incarnation_holds_goes_to_others():
    for s in (scene([], AWAITED, without=["generator-2"]), scene([worker("generator-2", epoch=2)], AWAITED)):
        found = explain(s).chains[0]
        assert (found.cause, found.who, found.outlook) == (Cause.LEASE, "generator-2", Outlook.MENDS)
        assert "generator-2#1 is gone" in found.links
        assert "headrace requeue --worker generator-2" in found.next


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
    assert "headrace scale generator=1" in found.next and "headrace join" in found.next


def test_a_silent_worker_unknown_to_the_supervisor_is_yours_to_replace():
    view = waits(unit("81", trajectory("t.81.4", Place.LEASED, "hostb-0#1")), running=3)
    foreign = replace(silent("generator-2"), worker="hostb-0")
    found = explain(scene([foreign], view)).chains[0]
    assert (found.cause, found.outlook) == (Cause.SILENT, Outlook.MENDS)
    assert "the supervisor does not know it" in found.next


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
    assert "No response counts as wrong" in chain.next


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
    assert "headrace requeue --field reward" in found.next


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
    busy = worker("generator-2", WaitingFor.COMPUTE, health=Health.STUCK, for_s=70.0)
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
    assert "would become too stale" in found.headline
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


# -- the whole run ---------------------------------------------------------------------------------


def test_a_ledger_that_does_not_answer_is_an_answer():
    s = Snapshot("runs/demo", RunState.RUNNING, "", has_supervisor=True, ledger_error="Connection refused")
    assert root(s) == (Cause.LEDGER, "ledger", Outlook.MENDS)
    assert root(replace(s, has_supervisor=False)) == (Cause.LEDGER, "ledger", Outlook.YOU)


@pytest.mark.parametrize(
    ("state", "outlook", "doing"),
    [
        (RunState.FINISHED, Outlook.ENDED, "report"),
        (RunState.RUNNING, Outlook.YOU, "--resume"),
        (RunState.FAILED, Outlook.YOU, "--resume"),
    ],
)
def test_a_run_without_a_process_is_over_or_waits_for_you(state, outlook, doing):
    for left in ([], [silent("generator-2", 900.0)]):
        s = replace(scene([], AWAITED, state=state), workers=left, has_supervisor=False)
        found = explain(s)
        assert (found.chains[0].cause, found.outlook) == (Cause.NOBODY, outlook)
        assert doing in found.chains[0].next


def test_a_run_that_ends_names_who_is_still_to_drain():
    found = explain(scene([silent("generator-2")], AWAITED, state=RunState.STOPPING, detail="stopped"))
    assert (found.chains[0].cause, found.outlook) == (Cause.DRAINING, Outlook.ENDED)
    assert "generator-2" in found.headline


def test_what_else_is_wrong_is_told_besides():
    s = scene(
        [silent("generator-2"), worker("learner", WaitingFor.COMPUTE)],
        AWAITED,
        queues=queues(dead=2),
        without=["reward-0"],
    )
    assert explain(s).also == (
        "generator-2 is silent for 12 s",
        "reward-0 is not there",
        "2 dead letters: `headrace dead-letters list`",
    )


_workers = st.builds(
    worker,
    st.sampled_from([*CRITIC_FLEET, "reference-0"]),
    st.sampled_from(WaitingFor),
    st.sampled_from(["", "reward-0 to read", "a value worker to join", "generator-1 (version 1) to take version 4"]),
    health=st.sampled_from(Health),
    epoch=st.integers(1, 2),
)
_lacks = st.builds(lack, st.sampled_from(Field), overdue_s=st.floats(-9, 9))
_trajectories = st.builds(
    lambda place, holder, lacks: trajectory("t.81.4", place, holder, *lacks),
    st.sampled_from(Place),
    st.sampled_from(["generator-1#1", "generator-2#1", "elsewhere-9#3"]),
    st.lists(_lacks, min_size=1, max_size=2),
)
_units = st.builds(lambda some: unit("81", *some), st.lists(_trajectories, max_size=3))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_moment_has_an_answer_with_a_beginning_an_end_and_a_next_step(data):
    kind = data.draw(st.sampled_from(Unit))
    units = data.draw(st.lists(_units, max_size=4))
    if kind is not Unit.GROUP:
        units = [replace(one, trajectories=one.trajectories[:1]) for one in units]
    rows = {row.worker: row for row in data.draw(st.lists(_workers, max_size=8))}
    view = waits(
        *units,
        kind=kind,
        ready=data.draw(st.integers(0, 40)),
        running=len(units),
        late=data.draw(st.sampled_from(LatePolicy)),
        num_evaluation_open=data.draw(st.integers(0, 1)),
        num_evaluation_unscored=data.draw(st.integers(0, 1)),
    )
    names = ("bytes", "claimed", "finished", "value", "parked", "dead")
    s = Snapshot(
        "runs/demo",
        data.draw(st.sampled_from(RunState)),
        "",
        data.draw(st.booleans()),
        list(rows.values()),
        data.draw(st.sampled_from([{}, FLEET, CRITIC_FLEET])),
        data.draw(st.sampled_from([view, None])),
        totals(
            is_closed=data.draw(st.booleans()),
            is_exhausted=data.draw(st.booleans()),
            credit_used=data.draw(st.sampled_from([9, 100])),
        ),
        queues(**{name: data.draw(st.sampled_from([0, 200])) for name in names}),
        data.draw(st.sampled_from([None, CRITIC])),
    )
    found = explain(s)
    assert found.headline
    for chain in found.chains:
        assert all(chain.links) and len(set(chain.links)) == len(chain.links), "a link that comes twice is a ring"
        assert chain.next
    unwell = {row.worker for row in rows.values() if row.health is not Health.LIVE}
    if found.chains[0].cause not in (Cause.NOBODY, Cause.DRAINING, Cause.LEDGER):
        told = found.headline + " ".join(link for chain in found.chains for link in chain.links) + " ".join(found.also)
        assert all(name in told for name in unwell), "an unwell worker is never left unsaid"


def test_open_incidents_are_told_with_their_age_and_cause_and_many_are_counted():
    cause = FoundCause(component="reward-0", kind="hung")
    records = IncidentBook().look(
        100.0,
        [Suspicion(f"generator-{n}", "stalled", 88.0, "3 chunks wait for 12 s", causes=(cause,)) for n in range(7)],
    )
    s = scene([], waits(running=0), incidents=list(folded(records).values()), now_s=100.0)
    first, *_, last = explain(s).also
    told = "incident 1, for 12 s: generator-0 is stalled (3 chunks wait for 12 s); cause: reward-0 is hung; "
    assert first == f"{told}`headrace incidents show 1`"
    assert last == "2 more open incidents: `headrace incidents list --open runs/demo`"
    assert explain(replace(s, state=RunState.FINISHED)).also == ()


def test_durations_are_for_people():
    assert [seconds(s) for s in (-1.0, 0.04, 1.2, 61.0, 185.0, 7800.0)] == [
        "0.0 s",
        "0.0 s",
        "1 s",
        "61 s",
        "3 min 5 s",
        "2 h 10 min",
    ]


def test_hundreds_of_workers_in_trouble_are_told_in_few_lines() -> None:
    s = scene([silent(f"generator-{number}") for number in range(300)], AWAITED, queues=queues(dead=2))
    also = explain(s).also
    assert len(also) <= 10
    assert any("more workers: `headrace status runs/demo`" in words for words in also)
    assert "2 dead letters: `headrace dead-letters list`" in also
