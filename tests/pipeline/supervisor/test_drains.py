"""Claims about drains of single workers: what is wanted afterwards, on paper and of a fleet."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.observability.status import RunSnapshot
from pipeline.operator import steering
from pipeline.operator.attached import attach
from pipeline.process.exit_codes import ExitCode
from pipeline.runtime.registry.contract import Drain, Fleet, Heartbeat, WaitingFor
from pipeline.supervisor.drains import drained, resized
from pipeline.supervisor.fleet_plan import wanted_names
from pipeline.supervisor.run_folder import run_lock
from protocol.ids import Incarnation, Role
from tests.pipeline.supervisor.supervised import Run
from tests.pipeline.supervisor.test_fleet_processes import LaunchedRun

pytestmark = pytest.mark.timeout(90)
FLEET = Fleet({Role.LEARNER: 1, Role.GENERATOR: 3, Role.REWARD: 2})


def names(fleet: Fleet) -> set[str]:
    return set(wanted_names(fleet.counts, fleet.left_out))


def beat(worker: str, epoch: int = 1) -> Heartbeat:
    who = Incarnation(Role(worker.partition("-")[0]), worker, epoch)
    fields = {"pid": 1, "host": "h", "at_s": 0.0, "started_s": 0.0, "progress": 0, "progress_at_s": 0.0}
    return Heartbeat(who=who, waiting_for=WaitingFor.INPUT, **fields)  # type: ignore[arg-type]


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
    first: dict[str, Heartbeat] = {}

    def begin(snapshot: RunSnapshot) -> None:
        first.update({one.who.worker: one for one in snapshot.heartbeats})
        told(run.run_dir, "generator-0")
        told(run.run_dir, "generator-1", replace=True)
        run.react = until_done

    def until_done(snapshot: RunSnapshot) -> None:
        there = {one.who.worker: one for one in snapshot.heartbeats}
        fresh = there.get("generator-1")
        if "generator-0" not in there and fresh is not None and fresh.who.epoch > first["generator-1"].who.epoch:
            assert there["generator-2"].pid == first["generator-2"].pid
            assert there["reward-0"].pid == first["reward-0"].pid
            assert {worker.name for worker in run.supervisor._plan.workers} == {
                *("learner", "reward-0", "generator-1", "generator-2")
            }
            assert all(worker.num_restarts == 0 for worker in run.supervisor._plan.workers)
            run.interrupt(snapshot)

    run.when_live(begin, num_workers=5)
    with run_lock(run.run_dir):
        outcome = run.until_end()
    assert (outcome.exit_code, outcome.failure) == (ExitCode.OK, None)
    assert first
