"""Every reader of heartbeats comes to the same verdict on a worker at the same moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from pipeline.fleet.health import HealthKind, health
from pipeline.fleet.limits import Limits
from pipeline.fleet.state import FleetState, Worker, read_once
from pipeline.fleet.status import role_rows, worker_rows
from pipeline.observability.metrics import HeartbeatCollector
from pipeline.operator.steering import _at_work, staying_guests
from pipeline.process.work import WorkReport
from pipeline.runtime import liveness
from pipeline.runtime.registry.contract import Fleet, WaitingFor
from pipeline.runtime.worker_state import WorkerState
from pipeline.supervisor.autoscaler import reading_of
from pipeline.supervisor.code_keeper import _is_ready
from pipeline.supervisor.joining.joined_supervisor import _does_its_work
from pipeline.supervisor.watchdog import Watchdog
from protocol.ids import Incarnation, Role
from tests.manual_clock import ManualClock

LIMITS = Limits(
    stuck_after_s=None,
    start_timeout_s=100.0,
    checkpoint_timeout_s=150.0,
    drain_timeout_s=20.0,
    outage_timeout_s=40.0,
    send_timeout_s=10.0,
)
PLAN = "generator-0"


class Clock(ManualClock):
    """A monotonic clock, and a wall clock that jumps."""

    ahead_s = 0.0

    def time(self) -> float:
        return self._now + self.ahead_s

    def pass_s(self, seconds: float) -> None:
        self._now += seconds


class Fleetlike:
    """One generator of the run's own plan, as its process, its registry and its readers see it."""

    def __init__(self) -> None:
        self.clock = Clock(start_s=1e6)
        self.state = WorkerState(Incarnation(Role.GENERATOR, PLAN, 1), self.clock)
        self.state.policy_version = 0
        self.is_frozen = self.is_loop_dead = False
        self.is_computing_on = False
        self.last = self.state.heartbeat()
        self.arrived_s = self.clock.monotonic()
        self.dog = Watchdog(LIMITS)
        self.pids = {PLAN: self.last.pid}
        # the first reading begins all limits
        self.read(0.0)

    def second(self) -> None:
        self.clock.pass_s(1.0)
        if self.is_frozen:
            return
        if not self.is_loop_dead and self.state.kind is not WaitingFor.COMPUTE:
            self.state.waiting_for(self.state.kind, "a turn")
        self.last, self.arrived_s = self.state.heartbeat(), self.clock.monotonic()

    def read(self, overdue_s: float) -> tuple[Worker, dict[str, str]]:
        now_s = self.clock.monotonic()
        beat = msgspec.structs.replace(self.last, silent_s=now_s - self.arrived_s)
        workers = self.dog.fleet.read([beat], now_s, {Role.GENERATOR: overdue_s})
        return workers[0], self.dog.evaluate(workers, self.pids, now_s)


STEPS = st.one_of(
    st.tuples(st.just("wait"), st.sampled_from(list(WaitingFor))),
    st.tuples(st.just("held"), st.integers(0, 2)),
    st.tuples(st.sampled_from(["progress", "freeze", "thaw", "loop dies", "loop lives"]), st.none()),
    st.tuples(st.just("clock jumps"), st.sampled_from([-4000.0, -1.0, 3000.0])),
    st.tuples(st.just("work is overdue"), st.sampled_from([0.0, 500.0])),
)


def _at(kind: WaitingFor, held: int, *then: tuple[tuple[str, object], int]) -> list[tuple[tuple[str, object], int]]:
    return [(("wait", kind), 1), (("held", held), 1), *then]


FROZEN = _at(WaitingFor.CREDIT, 0, (("freeze", None), 25))
STUCK = _at(WaitingFor.COMPUTE, 2, (("clock jumps", 3000.0), 80))
NOT_TURNING = _at(WaitingFor.CREDIT, 0, (("loop dies", None), 80))
IDLE = _at(WaitingFor.INPUT, 0, (("work is overdue", 500.0), 80))


@example(FROZEN)
@example(STUCK)
@example(NOT_TURNING)
@example(IDLE)
@given(steps=st.lists(st.tuples(STEPS, st.sampled_from([1, 3, 7, 25, 80])), min_size=1, max_size=12))
@settings(max_examples=15, deadline=None, phases=(Phase.explicit, Phase.generate))
def test_all_readers_agree_at_every_second(steps: Sequence[tuple[tuple[str, object], int]]) -> None:
    run, overdue_s = Fleetlike(), 0.0
    for (what, value), seconds in steps:
        match what, value:
            case "wait", WaitingFor():
                run.state.waiting_for(value)
            case "held", int():
                run.state.held = value
            case "progress", _:
                run.state.progress()
            case "freeze" | "thaw", _:
                run.is_frozen = what == "freeze"
            case "loop dies" | "loop lives", _:
                run.is_loop_dead = what == "loop dies"
            case "clock jumps", float():
                run.clock.ahead_s += value
            case _, float():
                overdue_s = value
            case _:
                raise AssertionError(what)
        for _ in range(seconds):
            run.second()
            beat, dead = run.read(overdue_s)
            _all_agree(run, beat, dead, overdue_s)


def _all_agree(run: Fleetlike, beat: Worker, dead: dict[str, str], overdue_s: float) -> None:
    found = beat.health
    at = (found, beat)
    assert health(beat, LIMITS, overdue_s=overdue_s) == found, "one reading suffices"
    assert bool(dead) == found.is_certain, at
    assert dead.get(PLAN, found.evidence) == found.evidence
    assert read_once([beat], LIMITS, {Role.GENERATOR: overdue_s}) == [beat]
    (row,) = worker_rows([beat])
    assert (row.health, row.unwell_s, row.evidence) == (found.kind, found.since_s, found.evidence), at
    is_silent = beat.is_silent
    if is_silent:
        assert not found.is_well, at
    if found.is_silent:
        assert is_silent, at
    assert [row.num_live for row in role_rows([row], None)] == ([] if found.is_silent else [1]), at
    assert (_up(run, beat) == 0.0) == is_silent, at
    in_service = beat.waiting_for.is_in_service and not is_silent
    fleet = Fleet(counts={Role.GENERATOR: 1})
    assert reading_of([beat], [PLAN]).num_arrived == in_service, at
    assert _is_ready(beat) == in_service, at
    assert _does_its_work(beat) == in_service, at
    assert bool(_at_work(fleet, [beat])) == in_service, at
    guest = msgspec.structs.replace(beat, who=replace_worker(beat.who, "host-2.generator-0"))
    stays = not is_silent and beat.waiting_for not in (WaitingFor.DRAINING, WaitingFor.STOPPED)
    assert bool(staying_guests(fleet, [guest])) == stays, at


def replace_worker(who: Incarnation, worker: str) -> Incarnation:
    return Incarnation(who.role, worker, who.epoch)


def _up(run: Fleetlike, beat: Worker) -> float:
    collector = HeartbeatCollector(run.clock, "a-run")
    collector.update([beat], ())
    return next(family.samples[0].value for family in collector.collect() if family.name == "headrace_up")


@pytest.mark.parametrize("kind", ["silent", "stuck"])
def test_a_limit_that_is_moved_moves_for_every_reader(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Fleetlike()
    run.state.waiting_for(WaitingFor.COMPUTE)
    run.state.held = 1
    limits = replace(LIMITS, stuck_after_s=20.0)
    for _ in range(30):
        run.second()
    beat, _ = run.read(0.0)
    if kind == "silent":
        beat = msgspec.structs.replace(beat, silent_s=liveness.SILENT_AFTER_S + 1.0)
        assert health(beat, LIMITS).kind is HealthKind.SILENT
        monkeypatch.setattr(liveness, "SILENT_AFTER_S", 60.0)
        (worker,) = read_once([beat], LIMITS)
        assert worker.health.is_well
        _all_agree(run, worker, {}, 0.0)
    else:
        assert health(beat, LIMITS).is_well
        assert health(beat, limits).kind is HealthKind.STUCK
        (row,) = worker_rows(read_once([beat], limits))
        assert row.health is HealthKind.STUCK


def test_a_reader_that_has_just_begun_counts_no_symptom_for_longer_than_it_reads() -> None:
    fleet = FleetState(LIMITS)

    def read(now_s: float) -> Worker:
        beat = Worker(
            who=Incarnation(Role.REWARD, "reward-0", 1), pid=1, host="h", at_s=5000.0, started_s=0.0, progress=0,
            progress_at_s=0.0, waiting_for=WaitingFor.COMPUTE, held=3, still_s=900.0, silent_s=500.0 + now_s,
        )  # fmt: skip
        return fleet.read([beat], now_s)[0]

    assert read(0.0).health.is_well and read(0.0).silent_s == 0.0
    for second in range(1, int(LIMITS.silent_after_s) + 1):
        assert not read(float(second)).health.is_certain
    assert read(LIMITS.silent_after_s + 1.0).health.kind is HealthKind.SILENT
    assert read(LIMITS.silent_after_s + 2.0).health.is_certain


def test_a_heartbeat_of_another_version_without_durations_is_judged_by_its_silence_alone() -> None:
    beat = Worker(
        who=Incarnation(Role.REWARD, "reward-0", 1), pid=1, host="h", at_s=5000.0, started_s=0.0, progress=0,
        progress_at_s=0.0, waiting_for=WaitingFor.COMPUTE, held=3, work=WorkReport(steps=1),
    )  # fmt: skip
    assert health(beat, LIMITS).is_well
    late = msgspec.structs.replace(beat, silent_s=1e9)
    assert health(late, LIMITS).kind is HealthKind.SILENT
