"""What the main loop says of itself."""

from __future__ import annotations

from pipeline.runtime.clock import ManualClock
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.worker_state import WorkerState, resident_bytes
from protocol.ids import Incarnation, Role

WHO = Incarnation(role=Role.REWARD, worker="reward-0", epoch=3)


async def test_progress_stands_still_in_every_heartbeat_of_a_dead_loop():
    clock = ManualClock(start_s=100.0)
    pulse = WorkerState(WHO, clock)
    pulse.progress(4)
    first = pulse.heartbeat()
    await clock.advance(7.0)
    later = pulse.heartbeat()
    assert (first.progress, later.progress) == (4, 4)
    assert later.at_s - later.progress_at_s == 7.0


def test_a_wait_ends_itself_and_no_other():
    pulse = WorkerState(WHO, ManualClock())
    assert pulse.heartbeat().waiting_for is WaitingFor.STARTING
    pulse.waiting_for(WaitingFor.INPUT)
    with pulse.waiting(WaitingFor.ROOM, "reward-0 to read"):
        assert (pulse.heartbeat().waiting_for, pulse.heartbeat().detail) == (WaitingFor.ROOM, "reward-0 to read")
    assert pulse.heartbeat().waiting_for is WaitingFor.INPUT
    with pulse.waiting(WaitingFor.ROOM):
        # another task went on meanwhile
        pulse.waiting_for(WaitingFor.COMPUTE)
    assert pulse.heartbeat().waiting_for is WaitingFor.COMPUTE


def test_every_mark_of_the_loop_is_a_turn_and_only_work_is_progress():
    pulse = WorkerState(WHO, ManualClock())
    pulse.waiting_for(WaitingFor.INPUT)
    idle = pulse.heartbeat()
    pulse.waiting_for(WaitingFor.INPUT)
    assert (pulse.heartbeat().turns, pulse.heartbeat().progress) == (idle.turns + 1, idle.progress)
    pulse.progress()
    assert (pulse.heartbeat().turns, pulse.heartbeat().progress) == (idle.turns + 2, idle.progress + 1)


def test_a_heartbeat_does_not_change_after_it_was_taken():
    pulse = WorkerState(WHO, ManualClock())
    pulse.counters["chunks"] = 1
    beat = pulse.heartbeat()
    pulse.counters["chunks"] = 2
    assert beat.counters == {"chunks": 1}


def test_resident_memory_is_believable():
    assert 1 << 20 < resident_bytes() < 1 << 40


def test_work_that_begins_after_idleness_is_told_apart_from_work_that_goes_on() -> None:
    pulse = WorkerState(WHO, ManualClock())
    pulse.waiting_for(WaitingFor.INPUT)
    pulse.waiting_for(WaitingFor.COMPUTE)
    assert pulse.heartbeat().begun == 1
    pulse.held = 4
    pulse.waiting_for(WaitingFor.LEDGER)
    pulse.waiting_for(WaitingFor.COMPUTE)
    assert pulse.heartbeat().begun == 1, "with work in hand it goes on with the same"
    pulse.waiting_for(WaitingFor.CREDIT)
    pulse.waiting_for(WaitingFor.COMPUTE)
    assert pulse.heartbeat().begun == 2, "a wait for credit or weights is none of the work's"


def test_pieces_of_work_are_in_the_heartbeat_by_thread() -> None:
    pulse = WorkerState(WHO, ManualClock())
    with pulse.work.task("update", 10.0, "tokens"):
        pulse.work.step(0.5)
        pulse.storing.step()
        told = pulse.heartbeat()
    assert (told.work.kind, told.work.share, told.work.steps, told.storing.steps) == ("update", 0.5, 1, 1)
