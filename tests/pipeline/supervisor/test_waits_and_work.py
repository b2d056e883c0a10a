"""Claims about time spent waiting, which no reader of heartbeats counts against the work after it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.fleet.health import HealthKind
from pipeline.fleet.limits import Limits
from pipeline.fleet.signs import Signs
from pipeline.fleet.state import Worker, read_once
from pipeline.fleet.status import worker_rows
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.worker_state import WorkerState
from pipeline.supervisor.watchdog import Watchdog
from protocol.ids import Incarnation, Role
from tests.manual_clock import ManualClock

LIMITS = Limits(
    stuck_after_s=60.0,
    start_timeout_s=100.0,
    silent_after_s=100.0,
    stopped_after_s=100.0,
    checkpoint_timeout_s=200.0,
    drain_timeout_s=20.0,
    outage_timeout_s=300.0,
    send_timeout_s=10.0,
)
AT_WORK = (WaitingFor.COMPUTE, WaitingFor.COMPILE)
STATES = [(kind, held) for kind in WaitingFor for held in (0, 8)]
EVERY_S = 20
LONG_S = 400
"""Longer than any limit."""


@pytest.fixture(autouse=True)
def _heartbeats_come_every_twenty_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.runtime.worker_state.LONGEST_PASSED_S", float(EVERY_S))


class Clock(ManualClock):
    """Moved at once: nothing sleeps on it."""

    def pass_s(self, seconds: float) -> float:
        self._now += seconds
        return self._now


class Watched:
    """A worker's state and its watchdog, on one clock that ``stay`` moves."""

    def __init__(self, role: Role) -> None:
        self.clock = Clock()
        self.who = Incarnation(role=role, worker=f"{role}-0", epoch=1)
        self.state = WorkerState(self.who, self.clock)
        self.dog = Watchdog(LIMITS)

    def beats(self, seconds: int, every_s: int = EVERY_S, *, turns: bool = True) -> Iterator[tuple[Worker, str]]:
        """Turn for so long; yield each heartbeat, and why the worker would be ended."""
        for _ in range(0, seconds, every_s):
            now_s = self.clock.pass_s(every_s)
            if turns and self.state.kind not in AT_WORK:
                self.state.waiting_for(self.state.kind, "a turn")
            workers = self.dog.fleet.read([self.state.heartbeat()], now_s)
            why = self.dog.evaluate(workers, {self.who.worker: workers[0].pid}, now_s).get(self.who.worker, "")
            yield workers[0], why

    def stay(self, seconds: int) -> str:
        return next((why for _, why in self.beats(seconds) if why), "")


def _may_last(kind: WaitingFor, held: int) -> int:
    """Seconds that a worker may be there."""
    is_judged = kind in (*AT_WORK, WaitingFor.STARTING) or (held > 0 and not kind.may_hold)
    return int(LIMITS.limit_s(kind)) // EVERY_S * EVERY_S - EVERY_S if is_judged else LONG_S


@pytest.mark.parametrize("held_first", [False, True])
def test_time_in_one_state_never_counts_in_the_next(held_first: bool) -> None:
    """Work lies there before the loop begins with it, or the loop begins before it has its work."""
    roles = itertools.cycle(Role)
    for (kind, held), (then, then_held) in itertools.product(STATES, STATES):
        worker = Watched(next(roles))
        worker.state.held = held
        worker.state.waiting_for(kind)
        assert worker.stay(_may_last(kind, held)) == "", (kind, held)
        if held_first:
            worker.state.held = then_held
            assert worker.stay(EVERY_S) == "", (kind, held, then, then_held)
        worker.state.waiting_for(then)
        worker.state.held = then_held
        # the same wait with the same work goes on, and is counted on
        seconds = (
            0 if (kind, bool(held)) == (then, bool(then_held)) else _may_last(then, then_held) - EVERY_S * held_first
        )
        assert worker.stay(seconds) == "", (kind, held, then, then_held)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(STATES), st.booleans(), st.booleans(), st.integers(0, 100)), min_size=1, max_size=12
    )
)
@settings(max_examples=60, deadline=None)
def test_however_waits_follow_one_another_only_standing_at_one_of_them_counts(
    steps: list[tuple[tuple[WaitingFor, int], bool, bool, int]],
) -> None:
    worker, spent = Watched(Role.GENERATOR), dict[tuple[WaitingFor, bool], int]()
    for (kind, held), is_block, is_held_first, percent in steps:
        key = kind, held > 0
        seconds = min(percent * LONG_S // 100, _may_last(kind, held) - spent.get(key, 0)) // EVERY_S * EVERY_S
        # a block that ends brings the earlier wait back for the next reading
        if seconds <= 0 or spent.get((worker.state.kind, worker.state.held > 0), 0) > 0:
            continue
        spent[key] = spent.get(key, 0) + seconds
        with ExitStack() as ends:
            if is_held_first:
                worker.state.held = held
            if is_block:
                ends.enter_context(worker.state.waiting(kind))
            else:
                worker.state.waiting_for(kind)
            worker.state.held = held
            assert worker.stay(seconds) == "", (kind, held, seconds, spent)


@pytest.mark.parametrize("wait", [kind for kind in WaitingFor if kind not in AT_WORK])
@pytest.mark.parametrize("held", [0, 8])
def test_no_reader_takes_work_for_standing_that_has_just_begun(wait: WaitingFor, held: int) -> None:
    worker, standing = Watched(Role.LEARNER), Signs()
    for _ in range(20):
        worker.state.progress()
        worker.state.held = 8
        worker.state.waiting_for(WaitingFor.COMPUTE)
        found = [standing.observe(beat.at_s, beat.at_s, [beat]) for beat, _ in worker.beats(2, 1)]
    worker.state.held = held
    with worker.state.waiting(wait):
        found = [standing.observe(beat.at_s, beat.at_s, [beat]) for beat, _ in worker.beats(40, 1, turns=False)]
        worker.state.held = 8
    for beat, _ in worker.beats(3, 1):
        assert beat.waiting_for is WaitingFor.COMPUTE
        assert worker_rows(read_once([beat], replace(LIMITS, stuck_after_s=20.0)))[0].health is HealthKind.LIVE
        found += [standing.observe(beat.at_s, beat.at_s, [beat])]
    assert not [one for each in found for one in each if one.kind == "hung"]


def test_an_outage_of_the_ledger_does_not_count_against_what_it_held_up() -> None:
    worker = Watched(Role.REWARD)
    worker.state.waiting_for(WaitingFor.COMPUTE)
    worker.state.held = 8
    worker.state.ledger_trouble("it is away")
    assert worker.stay(200) == ""
    worker.state.ledger_trouble("")
    assert worker.stay(40) == ""


@pytest.mark.parametrize("others", [(WaitingFor.LEDGER,), (WaitingFor.ROOM, WaitingFor.LEDGER)])
def test_a_worker_that_goes_to_and_fro_without_progress_is_found(others: tuple[WaitingFor, ...]) -> None:
    worker, why = Watched(Role.GENERATOR), ""
    worker.state.held = 8
    while not why and worker.clock.monotonic() < 3000.0:
        worker.state.waiting_for(WaitingFor.COMPUTE)
        why = worker.stay(20)
        for other in others:
            with worker.state.waiting(other):
                why = why or worker.stay(20)
    assert "without progress for 80 s" in why
