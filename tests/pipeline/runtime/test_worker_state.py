"""The main loop's report of itself."""

from __future__ import annotations

import math

import msgspec

from pipeline.runtime.registry.contract import Heartbeat, WaitingFor
from pipeline.runtime.worker_state import WorkerState, resident_bytes
from protocol.ids import Incarnation, Role
from tests.manual_clock import ManualClock

WHO = Incarnation(role=Role.REWARD, worker="reward-0", epoch=3)


async def test_progress_stands_still_in_every_heartbeat_of_a_dead_loop():
    clock = ManualClock(start_s=100.0)
    worker_state = WorkerState(WHO, clock)
    worker_state.progress(4)
    first = worker_state.heartbeat()
    await clock.advance(7.0)
    later = worker_state.heartbeat()
    assert (first.progress, later.progress) == (4, 4)
    assert later.at_s - later.progress_at_s == 7.0


def test_a_wait_ends_itself_and_no_other():
    worker_state = WorkerState(WHO, ManualClock())
    assert worker_state.heartbeat().waiting_for is WaitingFor.STARTING
    worker_state.waiting_for(WaitingFor.INPUT)
    with worker_state.waiting(WaitingFor.ROOM, "reward-0 to read"):
        assert (worker_state.heartbeat().waiting_for, worker_state.heartbeat().detail) == (
            WaitingFor.ROOM,
            "reward-0 to read",
        )
    assert worker_state.heartbeat().waiting_for is WaitingFor.INPUT
    with worker_state.waiting(WaitingFor.ROOM):
        # another task went on meanwhile
        worker_state.waiting_for(WaitingFor.COMPUTE)
    assert worker_state.heartbeat().waiting_for is WaitingFor.COMPUTE


def test_every_mark_of_the_loop_is_a_turn_and_only_work_is_progress():
    worker_state = WorkerState(WHO, ManualClock())
    worker_state.waiting_for(WaitingFor.INPUT)
    idle = worker_state.heartbeat()
    worker_state.waiting_for(WaitingFor.INPUT)
    assert (worker_state.heartbeat().turns, worker_state.heartbeat().progress) == (idle.turns + 1, idle.progress)
    worker_state.progress()
    assert (worker_state.heartbeat().turns, worker_state.heartbeat().progress) == (idle.turns + 2, idle.progress + 1)


def test_a_heartbeat_does_not_change_after_it_was_taken():
    worker_state = WorkerState(WHO, ManualClock())
    worker_state.counters["chunks"] = 1
    beat = worker_state.heartbeat()
    worker_state.counters["chunks"] = 2
    assert beat.counters == {"chunks": 1}


def test_a_number_that_is_not_finite_leaves_the_heartbeat_readable():
    """JSON writes it as null, which no reader takes for a number: the supervisor would end."""
    worker_state = WorkerState(WHO, ManualClock())
    worker_state.counters.update(loss=math.nan, worst=math.inf, updates=3)
    blob = msgspec.json.encode(worker_state.heartbeat())
    assert msgspec.json.decode(blob, type=Heartbeat).counters == {"updates": 3}


def test_resident_memory_is_believable():
    assert 1 << 20 < resident_bytes() < 1 << 40


def test_work_that_begins_after_idleness_is_told_apart_from_work_that_goes_on() -> None:
    worker_state = WorkerState(WHO, ManualClock())
    worker_state.waiting_for(WaitingFor.INPUT)
    worker_state.waiting_for(WaitingFor.COMPUTE)
    assert worker_state.heartbeat().begun == 1
    worker_state.held = 4
    worker_state.waiting_for(WaitingFor.LEDGER)
    worker_state.waiting_for(WaitingFor.COMPUTE)
    assert worker_state.heartbeat().begun == 1, "with work in hand it goes on with the same"
    worker_state.waiting_for(WaitingFor.CREDIT)
    worker_state.waiting_for(WaitingFor.COMPUTE)
    assert worker_state.heartbeat().begun == 2, "a wait for credit or weights is none of the work's"


def test_pieces_of_work_are_in_the_heartbeat_by_thread() -> None:
    worker_state = WorkerState(WHO, ManualClock())
    with worker_state.work.task("update", 10.0, "tokens"):
        worker_state.work.step(0.5)
        worker_state.storing.step()
        told = worker_state.heartbeat()
    assert (told.work.kind, told.work.share, told.work.steps, told.storing.steps) == ("update", 0.5, 1, 1)
