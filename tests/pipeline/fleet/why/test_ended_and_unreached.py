"""Claims about explanations of processes that an error or full disk ended, or that reach none."""

from __future__ import annotations

from dataclasses import replace

from pipeline.fleet.why.explain import explain
from pipeline.fleet.why.types import Cause, Ended, Outlook
from pipeline.fleet.why.workers import worker_chain
from pipeline.ledger.admin import Place
from pipeline.runtime.registry.contract import RunState, WaitingFor
from tests.pipeline.fleet.why.scenes import (
    lack,
    scene,
    silent,
    trajectory,
    unit,
    waits,
    worker,
)
from tests.pipeline.fleet.why.test_explain import AWAITED, root


def test_a_full_disk_under_the_ledger_is_named_first_with_its_folder() -> None:
    s = scene([silent("learner"), silent("generator-1")], AWAITED, unwritten="/runs/demo/ledger")
    assert root(s) == (Cause.DISK, "ledger", Outlook.YOU)
    assert "/runs/demo/ledger" in explain(s).headline and "df /runs/demo/ledger" in explain(s).chains[0].next


def test_a_worker_ended_by_a_full_disk_is_named_with_the_folder_after_its_restart() -> None:
    error = "StorageFailed: /runs/demo/checkpoints: [Errno 28] No space left on device; free some space"
    s = scene([worker("learner", WaitingFor.COMPUTE)], AWAITED, exits={"learner": Ended("it ended", 3.0, error=error)})
    assert root(s) == (Cause.DISK, "learner", Outlook.YOU)
    assert "/runs/demo/checkpoints" in explain(s).headline
    long_ago = replace(s, exits={"learner": Ended("it ended", 60.0, error=error)})
    assert root(long_ago) == (Cause.WORKING, "learner", Outlook.MOVES)
    other = replace(s, exits={"learner": Ended("it ended", 3.0, error="KeyError: 7")})
    assert root(other) == (Cause.WORKING, "learner", Outlook.MOVES)


def test_a_disk_that_refuses_checkpoints_is_told_with_its_folder_while_updates_go_on() -> None:
    words = (
        "checkpoint of version 9 under /runs/demo/checkpoints could not be written: [Errno 28] No space left on device"
    )
    s = scene([replace(worker("learner", WaitingFor.COMPUTE), refused=words)], AWAITED)
    assert root(s) == (Cause.DISK, "learner", Outlook.YOU)
    assert "/runs/demo/checkpoints" in explain(s).headline
    assert root(replace(s, state=RunState.FINISHED))[0] is not Cause.DISK


def test_a_supervisor_that_is_gone_is_told_although_its_workers_go_on() -> None:
    s = scene([worker("learner", WaitingFor.COMPUTE)], AWAITED)
    assert root(s) == (Cause.WORKING, "learner", Outlook.MOVES)
    orphaned = replace(s, has_supervisor=False)
    assert root(orphaned) == (Cause.SUPERVISOR, "supervisor", Outlook.YOU)
    assert [chain.cause for chain in explain(orphaned).chains] == [Cause.SUPERVISOR, Cause.WORKING]
    assert "headrace up --resume" in explain(orphaned).chains[0].next
    frozen = replace(scene([silent("learner")], AWAITED), has_supervisor=False)
    assert [chain.cause for chain in explain(frozen).chains][:2] == [Cause.SILENT, Cause.SUPERVISOR]
    ending = replace(orphaned, state=RunState.STOPPING)
    assert Cause.SUPERVISOR not in [chain.cause for chain in explain(ending).chains]


CRASHED = {"generator-1": Ended("it ended (failure)", 3.0, 2, "ImportError: no module named flash")}


def test_a_worker_ended_by_an_error_is_named_with_error_count_and_consequence():
    s = scene([], waits(running=0), without=["generator-1", "generator-2"], exits=CRASHED)
    found = explain(s)
    told = "generator-1 is missing: it ended (failure) by ImportError: no module named flash, 3 s ago, the 2nd time"
    assert told in found.headline
    assert found.outlook is Outlook.MENDS
    assert "The same error before any finished work ends the run" in found.chains[0].next
    starting = scene([worker("generator-1", WaitingFor.STARTING)], AWAITED, exits=CRASHED)
    assert any("generator-1 is back: it ended" in words for words in explain(starting).also)


def test_a_run_that_failed_names_the_error_and_needs_you():
    detail = "generator-1 ended twice by the same error: ImportError: no module named flash (exit code 2)"
    found = explain(scene([], AWAITED, state=RunState.FAILED, detail=detail))
    assert (found.chains[0].cause, found.outlook) == (Cause.FAILED, Outlook.YOU)
    assert "ImportError: no module named flash" in found.headline
    assert "--resume" in found.chains[0].next


UNREACHED = "reward-0 at tcp://127.0.1.1:5600 (no answer for 7 s)"


def test_a_generator_that_reaches_no_scorer_is_named_with_the_address_and_needs_you():
    far = replace(worker("generator-2", WaitingFor.ROOM, f"{UNREACHED}; others do its work"), unreached=UNREACHED)
    one = trajectory("t.81.4", Place.FINISHED, "", lack())
    found = explain(scene([far], waits(unit("81", one), ready=31, running=1))).chains[0]
    assert (found.cause, found.who, found.outlook) == (Cause.UNREACHABLE, "generator-2", Outlook.YOU)
    assert found.links[-1] == f"generator-2 does not reach {UNREACHED}"
    assert "wire.advertise_host" in found.next
    held = explain(scene([far], waits(unit("81", trajectory("t.81.4")), ready=31, running=1))).chains[0]
    assert (held.cause, held.outlook) == (Cause.UNREACHABLE, Outlook.YOU)


def test_a_generator_that_reaches_no_scorer_is_told_besides_while_others_do_its_work():
    far = replace(worker("generator-2", WaitingFor.COMPUTE), unreached=UNREACHED)
    assert f"generator-2 does not reach {UNREACHED}" in explain(scene([far], AWAITED)).also


NO_LEARNER = "learner at tcp://10.0.0.1:5600 (no answer for 7 s)"


def test_a_generator_cut_off_from_the_learners_weights_is_named_and_needs_you():
    cut_off = replace(worker("generator-2", WaitingFor.WEIGHTS, "the learner's first version"), unreached=NO_LEARNER)
    rest = [silent("generator-0"), silent("generator-1")]
    far = explain(scene([cut_off, *rest], waits(unit("81", trajectory("t.81.4")), ready=31, running=1)))
    assert any(f"generator-2 does not reach {NO_LEARNER}" in words for words in (*far.also, *far.chains[0].links))
    chain = worker_chain(scene([cut_off], AWAITED), cut_off)
    assert (chain.cause, chain.who, chain.outlook) == (Cause.UNREACHABLE, "generator-2", Outlook.YOU)
    assert "it gets no new version" in chain.next
    at_room = replace(worker("generator-2", WaitingFor.ROOM, "reward-0 to read"), unreached=NO_LEARNER)
    assert worker_chain(scene([at_room], AWAITED), at_room).cause is not Cause.UNREACHABLE, "scorers are reached"
    both = replace(at_room, unreached=f"{NO_LEARNER}; {UNREACHED}")
    assert worker_chain(scene([both], AWAITED), both).cause is Cause.UNREACHABLE
