"""Claims about seeded stalls: the first cause that ``headrace why`` names is the right one, and a
next step follows."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from pipeline.fleet.health import HealthKind
from pipeline.fleet.status import WorkerRow
from pipeline.fleet.why.explain import explain
from pipeline.fleet.why.types import Cause, Outlook, Snapshot
from pipeline.fleet.why.workers import worker_chain
from pipeline.ledger.admin import Place
from pipeline.ledger.types import REFUSAL_WORDS, Pause, Refusal
from pipeline.runtime.registry.contract import UNUSABLE_IN_A_ROW, RunState, WaitingFor
from protocol.trajectory import Field
from tests.pipeline.fleet.why.scenes import lack, queues, scene, silent, totals, trajectory, unit, waits, worker


def after_useless(num_groups: int) -> WorkerRow:
    counters: dict[str, Any] = {UNUSABLE_IN_A_ROW: num_groups}
    return worker("learner", **counters)


MEMBER = waits(unit("81", trajectory("t.81.4")), running=3)
UNSCORED = waits(unit("81", trajectory("t.81.4", Place.FINISHED, "", lack(Field.REWARD))), running=3)
NOTHING = waits(running=0, ready=3)
FULL = worker("generator-2", WaitingFor.ROOM, "room at reward-0")
LAGS = worker("learner", WaitingFor.WEIGHTS, "generator-2 (version 1) to take version 4")
SAVES = worker("learner", WaitingFor.DISK, "the last checkpoint to be written")
PAUSE = Pause(1_700_000_000.0, "operator@host", "a new verifier")
NO_SIGNAL = after_useless(32)
STOPPED = Snapshot("runs/demo", RunState.RUNNING, "", has_supervisor=True, ledger_error="Connection refused")

STALLS = {
    "a dead role": (scene([], UNSCORED, without=["reward-0"]), Cause.ABSENT, "reward-0", Outlook.MENDS),
    "a full mailbox": (scene([FULL, silent("reward-0")], MEMBER), Cause.SILENT, "reward-0", Outlook.MENDS),
    "no credit": (scene([], NOTHING, totals=totals(credit_used=100)), Cause.CREDIT, "credit", Outlook.MOVES),
    "a slow scorer": (
        scene([worker("reward-0", WaitingFor.COMPUTE, for_s=9.0)], UNSCORED), Cause.WORKING, "reward-0", Outlook.MOVES,
    ),
    "a stopped server": (STOPPED, Cause.LEDGER, "ledger", Outlook.MENDS),
    "exhausted prompts": (scene([], NOTHING, totals=totals(is_exhausted=True)), Cause.EXHAUSTED, "", Outlook.ENDED),
    "groups without signal": (scene([NO_SIGNAL], MEMBER), Cause.NO_SIGNAL, "", Outlook.YOU),
    "weights not taken": (
        scene([LAGS, worker("generator-2", WaitingFor.COMPUTE, health=HealthKind.STUCK, for_s=70.0)], MEMBER),
        Cause.STUCK, "generator-2", Outlook.MENDS,
    ),
    "a learner in its checkpoint": (scene([SAVES], MEMBER), Cause.CHECKPOINT, "learner", Outlook.MOVES),
    "a full disk": (scene([], MEMBER, unwritten="/runs/demo/ledger"), Cause.DISK, "ledger", Outlook.YOU),
    "paused by an operator": (scene([], NOTHING, totals=totals(paused=PAUSE)), Cause.PAUSED, "", Outlook.YOU),
    "one member missing": (scene([silent("generator-2")], MEMBER), Cause.SILENT, "generator-2", Outlook.MENDS),
}  # fmt: skip


@pytest.mark.parametrize("stall", STALLS)
def test_a_seeded_stall_is_named_by_its_cause_with_a_next_step(stall: str) -> None:
    snapshot, cause, who, outlook = STALLS[stall]
    first = explain(snapshot).chains[0]
    assert (first.cause, first.who, first.outlook) == (cause, who, outlook)
    assert first.next


def test_of_several_waited_for_workers_the_unwell_one_is_the_root() -> None:
    full = worker("generator-2", WaitingFor.ROOM, "reward-0 and reward-1 to read")
    first = explain(scene([full, worker("reward-0", WaitingFor.COMPUTE), silent("reward-1")], MEMBER)).chains[0]
    assert (first.cause, first.who) == (Cause.SILENT, "reward-1")
    lags = worker("learner", WaitingFor.WEIGHTS, "generator-1 (version 1), generator-2 (version 1) to take version 4")
    first = explain(scene([lags, silent("generator-2")], MEMBER)).chains[0]
    assert (first.cause, first.who) == (Cause.SILENT, "generator-2")


def test_credit_leads_to_an_unwell_learner_and_a_refusal_for_good_leads_nowhere() -> None:
    for refusal, cause in ((Refusal.NO_CREDIT, Cause.SILENT), (Refusal.PAUSED, Cause.CREDIT)):
        waiting = worker("generator-2", WaitingFor.CREDIT, REFUSAL_WORDS[refusal])
        assert worker_chain(scene([waiting, silent("learner")], MEMBER), waiting).cause is cause


def test_a_learner_that_waits_for_a_checkpoint_names_it_and_its_limit() -> None:
    found = explain(scene([SAVES], MEMBER))
    assert found.headline == "learner waits for its disk: the last checkpoint to be written"
    assert "supervisor.checkpoint_timeout_s" in found.chains[0].next


def test_groups_without_signal_are_counted_from_a_whole_batch_on_and_hide_no_trouble() -> None:
    found = explain(scene([NO_SIGNAL, silent("generator-2")], MEMBER))
    assert [chain.cause for chain in found.chains] == [Cause.NO_SIGNAL, Cause.SILENT]
    assert "the last 32 groups were all right or all wrong" in found.headline
    assert "algorithm.max_generation_batches" in found.chains[0].next
    assert explain(scene([after_useless(31)], MEMBER)).chains[0].cause is Cause.WORKING
    assert explain(scene([NO_SIGNAL], replace(MEMBER, num_ready=32))).chains[0].cause is Cause.WORKING


def test_a_pause_is_named_with_its_time_operator_and_reason_and_before_other_limits() -> None:
    full = totals(paused=PAUSE, credit_used=100)
    found = explain(scene([], NOTHING, totals=full, queues=queues(bytes=101)))
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(PAUSE.since_s))
    assert found.headline.endswith(f"admission is paused by an operator since {since}, operator@host: a new verifier")
    assert "`headrace run resume runs/demo`" in found.chains[0].next


def test_in_a_pause_the_learner_waits_for_work_in_flight_first() -> None:
    found = explain(scene([], MEMBER, totals=totals(paused=PAUSE)))
    assert found.chains[0].cause is Cause.WORKING
    found = explain(scene([], waits(unit("81", trajectory("t.81.4")), running=32), totals=totals(paused=PAUSE)))
    assert any("paused by an operator" in words for words in found.also)
