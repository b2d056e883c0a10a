"""Claims about evictions: what is wanted afterwards, on paper and of a fleet."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.fleet.state import Worker
from pipeline.fleet.status import RunSnapshot
from pipeline.operator import steering
from pipeline.operator.attached import attach
from pipeline.process.exit_codes import ExitCode
from pipeline.runtime.registry.contract import Drain, Eviction, Fleet, WaitingFor
from pipeline.supervisor.fleet_edits import carried_over, drained, evicted, readmitted, resized
from pipeline.supervisor.fleet_plan import wanted_names
from pipeline.supervisor.run_folder import run_lock
from protocol.ids import Incarnation, Role
from tests.pipeline.supervisor.supervised import Run
from tests.pipeline.supervisor.test_fleet_processes import LaunchedRun

pytestmark = pytest.mark.timeout(90)
FLEET = Fleet({Role.LEARNER: 1, Role.GENERATOR: 3, Role.REWARD: 2})


def names(fleet: Fleet) -> set[str]:
    return set(wanted_names(fleet.counts, fleet.left_out))


def out(worker: str = "generator-1") -> Eviction:
    return Eviction(worker, "", "ECC errors", "supervisor", 1000.0)


def test_an_evicted_worker_is_not_wanted_and_comes_back_by_readmission():
    fleet = evicted(FLEET, out(), Role.GENERATOR)
    assert names(FLEET) - names(fleet) == {"generator-1"} and names(fleet) < names(FLEET)
    assert evicted(fleet, out(), Role.GENERATOR) == fleet, "a repeat changes nothing"
    assert readmitted(fleet, fleet.evictions[0]) == FLEET


@pytest.mark.parametrize("worker", ["generator-1", "generator-2"])
def test_a_role_that_grows_again_gets_other_names_than_the_evicted_one(worker: str):
    fleet = resized(evicted(FLEET, out(worker), Role.GENERATOR), {Role.GENERATOR: 4})
    assert fleet.counts[Role.GENERATOR] == 4 and worker not in names(fleet)
    assert names(readmitted(fleet, fleet.evictions[0])) == names(fleet) | {worker}
    assert len(names(readmitted(fleet, fleet.evictions[0], most=4))) == len(names(fleet)), (
        "by demand: as many as before"
    )


def test_a_joined_hosts_worker_costs_the_runs_own_fleet_nothing():
    guest = out("generator-hostb-x3f9a1-0")
    fleet = evicted(FLEET, guest, Role.GENERATOR)
    assert fleet.counts == FLEET.counts and fleet.left_out == {guest.worker}
    host = evicted(fleet, Eviction(host="hostb"))
    assert host.left_out == {guest.worker}, "an empty name is no worker"
    assert host.eviction_of("generator-9", "hostb") == host.evictions[1]
    assert host.eviction_of("", "hostc") is None and host.eviction_of("", "") is None
    assert readmitted(readmitted(host, host.evictions[0]), host.evictions[1]) == FLEET


def test_evictions_outlive_the_desired_fleet_and_leave_each_role_a_worker():
    fleet = evicted(evicted(FLEET, out("generator-0"), Role.GENERATOR), out("reward-1"), Role.REWARD)
    fresh = carried_over(Fleet({Role.LEARNER: 1, Role.GENERATOR: 1, Role.REWARD: 2}), fleet.evictions)
    assert names(fresh) == {"learner", "generator-1", "reward-0"}
    assert [one.worker for one in fresh.evictions] == ["generator-0", "reward-1"]
    assert names(readmitted(fresh, fresh.evictions[0])) == {"learner", "generator-0", "reward-0"}


@given(data=st.data())
def test_whatever_is_evicted_scaled_and_readmitted_the_counts_hold(data: st.DataObject):
    fleet = FLEET
    for _ in range(data.draw(st.integers(1, 12))):
        before, count = names(fleet), fleet.counts[Role.GENERATOR]
        match data.draw(st.sampled_from(["evict", "scale", "readmit"])):
            case "evict" if count > 1:
                worker = data.draw(st.sampled_from(sorted(name for name in before if name.startswith("generator"))))
                fleet = evicted(fleet, out(worker), Role.GENERATOR)
                assert names(fleet) == before - {worker}
            case "readmit" if fleet.evictions:
                one = data.draw(st.sampled_from(fleet.evictions))
                fleet = readmitted(fleet, one)
                assert one not in fleet.evictions and len(names(fleet)) == len(before) + 1
            case _:
                fleet = resized(fleet, {Role.GENERATOR: data.draw(st.integers(1, 6))})
        assert len(names(fleet)) == sum(fleet.counts.values())
        assert not names(fleet) & fleet.evicted


# -- a real fleet ----------------------------------------------------------------------------------


def _steer(run: Run, **how: str) -> None:
    async def change() -> None:
        async with attach(run.run_dir) as at:
            await (steering.readmit(at, worker=how["back"]) if "back" in how else steering.evict(at, **how))

    asyncio.run(change())


def _started(snapshot: RunSnapshot) -> set[str]:
    """The workers that may be at work: the last one of a role is not evicted."""
    return {beat.who.worker for beat in snapshot.workers if beat.waiting_for is not WaitingFor.STARTING}


def test_an_evicted_worker_is_fenced_and_ended_and_readmitted_under_its_name(tmp_path: Path) -> None:
    run = Run(tmp_path, "fleet.generator=2")
    seen: list[str] = []

    def react(snapshot: RunSnapshot) -> None:
        epochs = {beat.who.worker: beat.who.epoch for beat in snapshot.workers}
        if not seen and {"generator-0", "generator-1"} <= _started(snapshot):
            seen.append(f"evicted at {epochs['generator-1']}")
            threading.Thread(target=lambda: _steer(run, worker="generator-1", reason="ECC errors")).start()
        elif len(seen) == 1 and "generator-1" not in epochs:
            seen.append("gone")
            threading.Thread(target=lambda: _steer(run, back="generator-1")).start()
        elif len(seen) == 2 and "generator-1" in epochs:
            seen.append(f"back at {epochs['generator-1']}")
            run.interrupt(snapshot)

    run.react = react
    with run_lock(run.run_dir):
        assert run.until_end().exit_code == ExitCode.OK
    assert seen == ["evicted at 1", "gone", "back at 3"], "one epoch for the fence"


def test_an_evicted_worker_stays_out_over_a_restart_of_the_run(tmp_path: Path) -> None:
    first = Run(tmp_path, "fleet.generator=2")
    done = threading.Event()

    def steer() -> None:
        _steer(first, worker="generator-0")
        done.set()

    sent: list[bool] = []

    def once(snapshot: RunSnapshot) -> None:
        if len(_started(snapshot)) >= 4 and not sent:
            sent.append(True)
            threading.Thread(target=steer).start()
        elif done.is_set():
            first.interrupt(snapshot)

    first.react = once
    with run_lock(first.run_dir):
        assert first.until_end().exit_code == ExitCode.OK
    again = Run(tmp_path, "fleet.generator=2", resume=True)
    again.when_live(again.interrupt, num_workers=3)
    with run_lock(again.run_dir):
        assert again.until_end().exit_code == ExitCode.OK
    there = {beat.who.worker for snapshot in again.snapshots for beat in snapshot.workers}
    assert there == {"learner", "generator-1", "reward-0"}


def beat(worker: str, epoch: int = 1) -> Worker:
    who = Incarnation(Role(worker.partition("-")[0]), worker, epoch)
    fields = {"pid": 1, "host": "h", "at_s": 0.0, "started_s": 0.0, "progress": 0, "progress_at_s": 0.0}
    return Worker(who=who, waiting_for=WaitingFor.INPUT, **fields)  # type: ignore[arg-type]


def test_a_drained_worker_is_not_wanted_and_no_other_worker_changes() -> None:
    fleet = drained(FLEET, Drain("generator-1", 4), Role.GENERATOR, [])
    assert fleet.counts[Role.GENERATOR] == 2
    assert names(FLEET) - names(fleet) == {"generator-1"} and names(fleet) < names(FLEET)


def test_a_replaced_worker_is_wanted_and_the_count_stays() -> None:
    fleet = drained(FLEET, Drain("generator-1", 4, is_replaced=True), Role.GENERATOR, [beat("generator-1", 4)])
    assert (fleet.counts, names(fleet)) == (FLEET.counts, names(FLEET))
    assert fleet.drains == (Drain("generator-1", 4, is_replaced=True),)


def test_drains_of_workers_that_are_gone_are_forgotten() -> None:
    fleet = drained(FLEET, Drain("generator-1", 4, is_replaced=True), Role.GENERATOR, [])
    fleet = drained(fleet, Drain("generator-hostb-x3f9a1-0", 1), Role.GENERATOR, [beat("generator-1", 5)])
    assert fleet.drains == (Drain("generator-hostb-x3f9a1-0", 1),)
    assert fleet.counts == FLEET.counts, "a joined host has a number of its own"
    fleet = drained(fleet, Drain("generator-0", 1), Role.GENERATOR, [beat("generator-hostb-x3f9a1-0", 1)])
    assert [one.worker for one in fleet.drains] == ["generator-hostb-x3f9a1-0", "generator-0"]
    # the highest number is as gone as by `headrace scale`
    assert drained(FLEET, Drain("generator-2", 1), Role.GENERATOR, []).drains == ()


@given(data=st.data())
def test_whatever_is_drained_and_scaled_the_counts_hold_and_nothing_else_moves(data: st.DataObject) -> None:
    fleet = FLEET
    for _ in range(data.draw(st.integers(1, 12))):
        before, count = names(fleet), fleet.counts[Role.GENERATOR]
        if data.draw(st.booleans()) and count > 1:
            worker = data.draw(st.sampled_from(sorted(name for name in before if name.startswith("generator"))))
            fleet = drained(fleet, Drain(worker, 1), Role.GENERATOR, [])
            assert names(fleet) == before - {worker}
        else:
            number = data.draw(st.integers(1, 6))
            fleet = resized(fleet, {Role.GENERATOR: number})
            assert names(fleet) >= before if number >= count else names(fleet) < before
        assert len(names(fleet)) == sum(fleet.counts.values())
        assert len(fleet.drains) < 6, "entries without an effect are forgotten"


# -- a real fleet ----------------------------------------------------------------------------------


def told(run_dir: Path, worker: str, *, replace: bool = False) -> None:
    """Drain a worker as the command does; the supervisor's loop is the caller's."""

    async def call() -> None:
        async with attach(run_dir) as at:
            await steering.drain(at, worker, replace)

    thread = threading.Thread(target=lambda: asyncio.run(call()))
    thread.start()
    thread.join()


@pytest.mark.parametrize("place", [Run, LaunchedRun])
def test_a_drained_worker_leaves_a_replaced_one_comes_anew_and_no_budget_is_charged(
    tmp_path: Path, place: type[Run]
) -> None:
    run = place(tmp_path, "fleet.generator=3", "supervisor.max_restarts=0")
    first: dict[str, Worker] = {}

    def begin(snapshot: RunSnapshot) -> None:
        first.update({one.who.worker: one for one in snapshot.workers})
        told(run.run_dir, "generator-0")
        told(run.run_dir, "generator-1", replace=True)
        run.react = until_done

    def until_done(snapshot: RunSnapshot) -> None:
        there = {one.who.worker: one for one in snapshot.workers}
        fresh = there.get("generator-1")
        if "generator-0" not in there and fresh is not None and fresh.who.epoch > first["generator-1"].who.epoch:
            assert there["generator-2"].pid == first["generator-2"].pid
            assert there["reward-0"].pid == first["reward-0"].pid
            assert {worker.name for worker in run.supervisor._plan.workers} == {
                *("learner", "reward-0", "generator-1", "generator-2")
            }
            assert not any(worker.failures for worker in run.supervisor._plan.workers)
            run.interrupt(snapshot)

    run.when_live(begin, num_workers=5)
    with run_lock(run.run_dir):
        outcome = run.until_end()
    assert (outcome.exit_code, outcome.failure) == (ExitCode.OK, None)
    assert first
