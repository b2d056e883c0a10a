"""The heartbeat thread, on a writer that is scripted by the test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import structlog
from structlog.typing import FilteringBoundLogger

from pipeline.runtime.heartbeat import HeartbeatThread
from pipeline.runtime.registry.contract import FleetSummary, Heartbeat
from pipeline.runtime.worker_state import WorkerState
from protocol.errors import LedgerFull, LedgerUnavailable
from protocol.ids import Incarnation, Role
from tests.manual_clock import ManualClock

WHO = Incarnation(role=Role.REWARD, worker="reward-0", epoch=1)
PATIENCE_S = 10.0


@dataclass
class Script:
    """Answers beats in order, the last answer for ever, and signals when it has come to the end."""

    answers: list[bool | Exception]
    beats: list[Heartbeat] = field(default_factory=list)
    reached_last: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)
    glances: list[FleetSummary] = field(default_factory=lambda: [FleetSummary(num_connects=1)])

    @property
    def fleet(self) -> FleetSummary:
        return self.glances[min(len(self.beats), len(self.glances)) - 1]

    def beat(self, heartbeat: Heartbeat) -> bool:
        answer = self.answers[min(len(self.beats), len(self.answers) - 1)]
        self.beats.append(heartbeat)
        if len(self.beats) >= len(self.answers):
            self.reached_last.set()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed.set()


def thread_of(
    script: Script, *, on_fenced: Callable[[], None], on_deaf: Callable[[], None], grace_s: float = PATIENCE_S
):
    worker_state = WorkerState(WHO, ManualClock())
    log = cast("FilteringBoundLogger", structlog.get_logger("test"))
    thread = HeartbeatThread(
        script,
        worker_state.heartbeat,
        on_fenced=on_fenced,
        on_deaf=on_deaf,
        log=log,
        interval_of=lambda _: 0.001,
        grace_s=grace_s,
    )
    thread.start()
    return thread


def never() -> None:
    raise AssertionError("must not be called")


def test_an_outage_is_survived_and_told_once():
    script = Script([True, LedgerUnavailable("away"), LedgerUnavailable("away"), LedgerFull("full"), True])
    with structlog.testing.capture_logs() as lines:
        thread = thread_of(script, on_fenced=never, on_deaf=never)
        assert script.reached_last.wait(PATIENCE_S)
        thread.stop()
    assert [(line["event"], line.get("num_lost")) for line in lines] == [
        ("heartbeats_lost", None),
        ("heartbeats_resumed", 3),
    ]
    assert script.closed.is_set()


def test_a_fenced_incarnation_is_told_once_and_beats_no_more():
    fenced = threading.Event()
    script = Script([True, False])
    thread = thread_of(script, on_fenced=fenced.set, on_deaf=never)
    assert fenced.wait(PATIENCE_S)
    thread.stop()
    assert script.closed.is_set()
    assert len(script.beats) == 2


def test_a_loop_that_does_not_hear_that_it_is_fenced_is_ended_without_it():
    deaf = threading.Event()
    thread = thread_of(Script([False]), on_fenced=lambda: None, on_deaf=deaf.set, grace_s=0.01)
    assert deaf.wait(PATIENCE_S)
    thread.stop()


def test_after_stop_nothing_is_written():
    script = Script([True])
    thread = thread_of(script, on_fenced=never, on_deaf=never)
    assert script.reached_last.wait(PATIENCE_S)
    thread.stop()
    num_beats = len(script.beats)
    assert script.closed.wait(PATIENCE_S)
    assert len(script.beats) == num_beats


def test_a_change_that_others_wait_for_is_told_without_waiting_for_the_next_second() -> None:
    script = Script([True, True])
    worker_state = WorkerState(WHO, ManualClock())
    log = cast("FilteringBoundLogger", structlog.get_logger("test"))
    thread = HeartbeatThread(
        script, worker_state.heartbeat, on_fenced=never, on_deaf=never, log=log, interval_of=lambda _: PATIENCE_S * 60
    )
    worker_state.on_news = thread.nudge
    thread.start()
    worker_state.policy_version = 7
    worker_state.on_news()
    assert script.reached_last.wait(PATIENCE_S)
    thread.stop()
    assert script.beats[-1].policy_version == 7


def test_the_fleets_size_sets_the_next_heartbeats_time_and_its_changes_are_told_once() -> None:
    asked: list[int] = []
    told: list[FleetSummary] = []

    def interval_of(num_workers: int) -> float:
        asked.append(num_workers)
        return 0.001

    quiet, silent, elsewhere = FleetSummary(900, 0, 1), FleetSummary(901, 2, 1), FleetSummary(902, 2, 2)
    script = Script([True] * 5, glances=[quiet, silent, silent, elsewhere, elsewhere])
    log = cast("FilteringBoundLogger", structlog.get_logger("test"))
    heartbeat = WorkerState(WHO, ManualClock()).heartbeat
    thread = HeartbeatThread(
        script, heartbeat, on_fenced=never, on_deaf=never, log=log, interval_of=interval_of, on_fleet=told.append
    )
    thread.start()
    assert script.reached_last.wait(PATIENCE_S)
    thread.stop()
    assert asked[:4] == [900, 901, 901, 902]
    assert told == [silent, elsewhere]
