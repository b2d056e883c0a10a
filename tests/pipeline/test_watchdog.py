"""Claims about which workers are dead by all but name."""

from __future__ import annotations

import pytest

from pipeline.runtime.registry import Heartbeat, WaitingFor
from pipeline.watchdog import Patience, Watchdog
from protocol.ids import Incarnation, Role

PATIENCE = Patience(stuck_after_s=60.0, start_timeout_s=100.0, silent_after_s=10.0)
PIDS = {"generator-0": 7}


def _beat(at_s: float, *, progress: int = 0, waiting: WaitingFor = WaitingFor.INPUT, pid: int = 7) -> Heartbeat:
    who = Incarnation(role=Role.GENERATOR, worker="generator-0", epoch=1)
    return Heartbeat(
        who=who, pid=pid, host="h", at_s=at_s, started_s=0.0, progress=progress, progress_at_s=0.0, waiting_for=waiting
    )


@pytest.fixture
def dog() -> Watchdog:
    return Watchdog(PATIENCE)


def test_a_beating_worker_is_left_alone_however_long_it_waits(dog: Watchdog) -> None:
    for second in range(1000):
        assert dog.look([_beat(second)], PIDS, float(second)) == {}


def test_a_worker_whose_heartbeat_stands_still_is_dead(dog: Watchdog) -> None:
    assert dog.look([_beat(5.0)], PIDS, 0.0) == {}
    assert dog.look([_beat(5.0)], PIDS, 10.0) == {}
    assert "no heartbeat for 11 s" in dog.look([_beat(5.0)], PIDS, 11.0)["generator-0"]


def test_a_wall_clock_that_jumps_kills_nobody(dog: Watchdog) -> None:
    dog.look([_beat(5.0)], PIDS, 0.0)
    assert dog.look([_beat(100_000.0)], PIDS, 1.0) == {}
    assert dog.look([_beat(3.0)], PIDS, 2.0) == {}


def test_a_ledger_that_was_away_kills_nobody(dog: Watchdog) -> None:
    dog.look([_beat(5.0)], PIDS, 0.0)
    dog.blind(50.0)
    assert dog.look([_beat(5.0)], PIDS, 51.0) == {}
    assert dog.look([_beat(52.0)], PIDS, 52.0) == {}


def test_computing_without_progress_is_stuck_but_not_while_it_still_starts(dog: Watchdog) -> None:
    for second in range(101):
        assert dog.look([_beat(second, progress=1, waiting=WaitingFor.COMPUTE)], PIDS, float(second)) == {}
    reasons = dog.look([_beat(101, progress=1, waiting=WaitingFor.COMPUTE)], PIDS, 101.0)
    assert "computing without progress for 101 s" in reasons["generator-0"]
    assert dog.look([_beat(102, progress=2, waiting=WaitingFor.COMPUTE)], PIDS, 102.0) == {}


def test_a_process_that_never_says_a_word_is_not_started(dog: Watchdog) -> None:
    assert dog.look([], PIDS, 0.0) == {}
    assert dog.look([_beat(1.0, pid=6)], PIDS, 100.0) == {}, "the heartbeat of the incarnation before it is not its own"
    assert "not started after 101 s" in dog.look([], PIDS, 101.0)["generator-0"]


def test_a_successor_begins_with_full_patience(dog: Watchdog) -> None:
    dog.look([_beat(5.0)], PIDS, 0.0)
    assert dog.look([_beat(5.0)], PIDS, 20.0) != {}
    assert dog.look([_beat(5.0)], {"generator-0": 8}, 20.0) == {}
    assert dog.look([_beat(5.0)], {}, 21.0) == {}
