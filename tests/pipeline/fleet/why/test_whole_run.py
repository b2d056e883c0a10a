"""Claims about explanations of a whole run: its end, its server, and further troubles."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.fleet.health import HealthKind
from pipeline.fleet.incidents.book import IncidentBook, Suspicion
from pipeline.fleet.incidents.records import FoundCause
from pipeline.fleet.why.explain import explain
from pipeline.fleet.why.types import Cause, Outlook, Snapshot, seconds
from pipeline.ledger.admin import Place
from pipeline.ledger.types import LatePolicy, Unit
from pipeline.runtime.registry.contract import RunState, WaitingFor
from protocol.trajectory import Field
from tests.pipeline.fleet.incidents.folded import folded
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
        "reward-0 is missing",
        "2 dead letters: `headrace ledger dead-letters list`",
    )


_workers = st.builds(
    worker,
    st.sampled_from([*CRITIC_FLEET, "reference-0"]),
    st.sampled_from(WaitingFor),
    st.sampled_from(["", "reward-0 to read", "a value worker to join", "generator-1 (version 1) to take version 4"]),
    health=st.sampled_from(HealthKind),
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
    unwell = {row.worker for row in rows.values() if row.health is not HealthKind.LIVE}
    if found.chains[0].cause not in (Cause.NOBODY, Cause.DRAINING, Cause.LEDGER):
        told = found.headline + " ".join(link for chain in found.chains for link in chain.links) + " ".join(found.also)
        assert all(name in told for name in unwell), "an unwell worker is never left unsaid"


def test_open_incidents_are_told_with_their_age_and_cause_and_many_are_counted():
    cause = FoundCause(component="reward-0", kind="hung")
    records = IncidentBook().update(
        100.0,
        [Suspicion(f"generator-{n}", "stalled", 88.0, "3 chunks wait for 12 s", causes=(cause,)) for n in range(7)],
    )
    s = scene([], waits(running=0), incidents=list(folded(records).values()), now_s=100.0)
    first, *_, last = explain(s).also
    told = "incident 1, for 12 s: generator-0 is stalled (3 chunks wait for 12 s); cause: reward-0 is hung; "
    assert first == f"{told}`headrace fleet incidents show 1`"
    assert last == "2 more open incidents: `headrace fleet incidents list --open runs/demo`"
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
    assert "2 dead letters: `headrace ledger dead-letters list`" in also
