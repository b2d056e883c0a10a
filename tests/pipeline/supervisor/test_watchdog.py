"""Claims about which workers are dead by all but name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.fleet.limits import Limits, limits_of
from pipeline.fleet.state import Worker
from pipeline.process.descendants import Activity
from pipeline.process.work import WorkReport
from pipeline.runtime.registry.contract import Heartbeat, WaitingFor
from pipeline.supervisor.watchdog import Watchdog
from protocol.ids import Incarnation, Role
from tests.pipeline.fleet.reported import Reported
from tests.pipeline.op_config import op_config

PATIENCE = Limits(
    stuck_after_s=60.0,
    start_timeout_s=100.0,
    silent_after_s=10.0,
    stopped_after_s=3.0,
    checkpoint_timeout_s=200.0,
    drain_timeout_s=20.0,
    outage_timeout_s=300.0,
    send_timeout_s=10.0,
)
PIDS = {"reward-0": 7}
IDLE = (WaitingFor.INPUT, WaitingFor.CREDIT, WaitingFor.WEIGHTS)


def _beat(
    at_s: float,
    *,
    progress: int = 0,
    waiting: WaitingFor = WaitingFor.INPUT,
    pid: int = 7,
    turns: int | None = None,
    held: int = 0,
    work: WorkReport | None = None,
    storing: WorkReport | None = None,
    begun: int = 0,
    silent_s: float = 0.0,
) -> Worker:
    """A heartbeat; its loop turns between any two, unless ``turns`` is given."""
    return Worker(
        who=Incarnation(role=Role.REWARD, worker="reward-0", epoch=1),
        pid=pid,
        host="h",
        at_s=at_s,
        started_s=0.0,
        progress=progress,
        progress_at_s=0.0,
        waiting_for=waiting,
        turns=int(at_s) + 1 if turns is None else turns,
        held=held,
        work=work or WorkReport(),
        storing=storing or WorkReport(),
        begun=begun,
        silent_s=silent_s,
    )


def test_every_limit_of_a_run_file_reaches_the_watchdog(tmp_path: Path) -> None:
    named = {field.name: 7.0 + number for number, field in enumerate(fields(Limits))}
    sections = {"outage_timeout_s": "ledger", "send_timeout_s": "wire"}
    config = op_config(
        tmp_path, *(f"{sections.get(name, 'supervisor')}.{name}={value}" for name, value in named.items())
    )
    assert asdict(limits_of(config)) == named


class Watched(Watchdog):
    """A watchdog that reads what workers and registry make of a test's heartbeats."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._reported = Reported()

    def look(
        self,
        beats: Iterable[Heartbeat],
        pids: Mapping[str, int],
        now_s: float,
        overdue_s: Mapping[Role, float] | None = None,
        activity: Mapping[str, Activity | None] | None = None,
    ) -> dict[str, str]:
        reported = self._reported.beats(list(beats), now_s)
        return self.evaluate(self.fleet.read(reported, now_s, overdue_s or {}), pids, now_s, activity or {})


@pytest.fixture
def dog() -> Watched:
    return Watched(PATIENCE)


def _condemned_after(
    dog: Watched,
    seconds: int,
    *,
    overdue_s: Mapping[Role, float] | None = None,
    progress: int = 0,
    waiting: WaitingFor = WaitingFor.INPUT,
    turns: int | None = None,
    held: int = 0,
) -> tuple[int, str] | None:
    """Let a worker report the same every second; return when it was found dead, and why."""
    for second in range(seconds):
        beat = _beat(float(second), progress=progress, waiting=waiting, turns=turns, held=held)
        if dead := dog.look([beat], PIDS, float(second), overdue_s or {}):
            return second, dead["reward-0"]
    return None


@pytest.mark.parametrize("waiting", IDLE)
def test_a_worker_that_turns_idle_and_holds_nothing_is_left_alone_for_ever(dog: Watched, waiting: WaitingFor) -> None:
    assert _condemned_after(dog, 5000, waiting=waiting) is None


def test_a_worker_whose_heartbeat_stands_still_is_dead(dog: Watched) -> None:
    for second in range(11):
        assert dog.look([_beat(5.0)], PIDS, float(second)) == {}
    assert "no heartbeat for 11 s" in dog.look([_beat(5.0)], PIDS, 11.0)["reward-0"]


def _done(slices: int) -> Activity:
    return Activity(1000 * slices, slices)


def _replaced_at(dog: Watched, slices: list[int], *, start_s: int = 0) -> tuple[int, str] | None:
    """Let a silent worker's threads have run so often, by the second, 0 for unknown; return when it
    is found dead, and why."""
    for second, number in enumerate(slices, start_s):
        activity = {"reward-0": _done(number) if number else None}
        if dead := dog.look([_beat(5.0)], PIDS, float(second), activity=activity):
            return second, dead["reward-0"]
    return None


def test_a_silent_worker_whose_process_does_not_run_is_replaced_sooner(dog: Watched) -> None:
    found = _replaced_at(dog, [0, 0, *[7] * 9])
    assert found is not None
    assert found[0] == 6, "more than three seconds after the first look into it, at 2 s"
    assert "its process does not run (supervisor.stopped_after_s)" in found[1]


@pytest.mark.parametrize("slices", [[7, 8], [7, 0], [7, 7, 7, 8]])
def test_a_silent_worker_that_may_have_run_has_the_patience_for_a_silent_one(dog: Watched, slices: list[int]) -> None:
    found = _replaced_at(dog, slices * 9)
    assert found is not None
    assert (found[0], "silent_after_s" in found[1]) == (11, True)


def test_a_process_that_does_not_run_between_two_heartbeats_is_left_alone(dog: Watched) -> None:
    for second in range(100):
        beat = _beat(float(second - second % 3))
        assert dog.look([beat], PIDS, float(second), activity={"reward-0": _done(7)}) == {}


def test_only_workers_with_late_heartbeats_are_looked_into(dog: Watched) -> None:
    dog.look([_beat(5.0)], PIDS, 0.0)
    assert dog.quiet(2.0) == []
    dog.look([_beat(5.0)], PIDS, 2.5)
    assert dog.quiet(2.5) == ["reward-0"]
    dog.look([_beat(6.0)], PIDS, 3.0)
    assert dog.quiet(3.0) == []


def test_a_worker_is_not_taken_for_stopped_while_the_reader_itself_stood_still(dog: Watched) -> None:
    """A host that was suspended, or a ledger that was away."""
    assert _replaced_at(dog, [7] * 4) is None
    assert dog.look([_beat(5.0)], PIDS, 6.0, activity={"reward-0": _done(7)}) == {}
    dog.reset_timers(7.0)
    found = _replaced_at(dog, [7] * 9, start_s=7)
    assert found is not None
    assert found[0] == 11


@pytest.mark.parametrize(
    ("waiting", "limit_s"),
    [
        (WaitingFor.INPUT, 60),
        (WaitingFor.CREDIT, 60),
        (WaitingFor.WEIGHTS, 60),
        (WaitingFor.COMPUTE, 60),
        (WaitingFor.ROOM, 70),
        (WaitingFor.LEDGER, 360),
        (WaitingFor.COMPILE, 100),
        (WaitingFor.STARTING, 100),
        (WaitingFor.DISK, 200),
        (WaitingFor.DRAINING, 80),
    ],
)
def test_a_loop_that_does_not_turn_is_dead_at_the_limit_of_what_it_says(
    dog: Watched, waiting: WaitingFor, limit_s: int
) -> None:
    found = _condemned_after(dog, 1000, waiting=waiting, turns=4)
    assert found is not None
    assert found[0] == limit_s + 1, found


def test_computing_without_progress_is_stuck_though_other_tasks_turn(dog: Watched) -> None:
    found = _condemned_after(dog, 100, waiting=WaitingFor.COMPUTE)
    assert found == (61, "at compute without progress for 61 s, 60 s are allowed")


@pytest.mark.parametrize("waiting", [WaitingFor.COMPUTE, WaitingFor.COMPILE, WaitingFor.STARTING, WaitingFor.DRAINING])
def test_work_whose_pieces_end_is_left_alone_however_long_the_whole_takes(dog: Watched, waiting: WaitingFor) -> None:
    for second in range(3000):
        # one in 50 s
        pieces = WorkReport(steps=second // 50)
        assert (
            dog.look([_beat(float(second), waiting=waiting, turns=1, held=9, work=pieces)], PIDS, float(second)) == {}
        )
    still = WorkReport(steps=60)
    found = [
        second
        for second in range(3000, 3400)
        if dog.look([_beat(float(second), waiting=waiting, turns=1, held=9, work=still)], PIDS, float(second))
    ]
    assert found, "when its pieces stand still it is stuck all the same"


def test_a_piece_may_take_several_times_the_slowest_before_it_by_default() -> None:
    dog = Watched(replace(PATIENCE, stuck_after_s=None))
    slow = WorkReport(steps=3, slowest_s=40.0)
    found = [
        second
        for second in range(300)
        if dog.look([_beat(float(second), waiting=WaitingFor.COMPUTE, work=slow)], PIDS, float(second))
    ]
    assert found[0] == 201, "five times 40 s"


def test_what_a_person_has_set_is_the_most_that_is_borne(dog: Watched) -> None:
    slow = WorkReport(steps=3, slowest_s=40.0)
    found = [
        second
        for second in range(100)
        if dog.look([_beat(float(second), waiting=WaitingFor.COMPUTE, work=slow)], PIDS, float(second))
    ]
    assert found[0] == 61


def test_idle_time_before_work_is_not_counted_against_the_work(dog: Watched) -> None:
    assert _condemned_after(dog, 500) is None
    for second in range(500, 561):
        beat = _beat(float(second), waiting=WaitingFor.COMPUTE, held=16, begun=1)
        assert dog.look([beat], PIDS, float(second)) == {}, "it was idle for 500 s, and has worked since"
    assert dog.look([_beat(561.0, waiting=WaitingFor.COMPUTE, held=16, begun=1)], PIDS, 561.0)


def test_writing_to_the_disk_hides_no_stuck_computing_and_is_waited_for_at_the_disk(dog: Watched) -> None:
    for second in range(1000):
        writing = WorkReport(steps=second)
        beat = _beat(float(second), waiting=WaitingFor.DISK, turns=1, storing=writing)
        assert dog.look([beat], PIDS, float(second)) == {}
    found = [
        second
        for second in range(1000, 1100)
        if dog.look(
            [_beat(float(second), waiting=WaitingFor.COMPUTE, storing=WorkReport(steps=second))], PIDS, float(second)
        )
    ]
    assert found, "files that are written are no progress of what is computed"


@pytest.mark.parametrize(("waiting", "limit_s"), [(WaitingFor.INPUT, 60), (WaitingFor.ROOM, 70)])
def test_work_in_hand_without_progress_is_stuck_though_the_loop_turns(
    dog: Watched, waiting: WaitingFor, limit_s: int
) -> None:
    found = _condemned_after(dog, 100, waiting=waiting, held=3)
    assert found is not None
    assert found[0] == limit_s + 1
    assert "holds 3 pieces of work without progress" in found[1]


@pytest.mark.parametrize("waiting", [WaitingFor.CREDIT, WaitingFor.WEIGHTS])
def test_work_in_hand_may_wait_for_credit_and_weights(dog: Watched, waiting: WaitingFor) -> None:
    assert _condemned_after(dog, 1000, waiting=waiting, held=3) is None


def test_an_idle_worker_beside_overdue_work_is_stuck_and_one_of_another_role_is_not(dog: Watched) -> None:
    assert _condemned_after(dog, 1000, overdue_s={Role.REFERENCE: 500.0}) is None
    assert _condemned_after(Watched(PATIENCE), 1000, overdue_s={Role.REWARD: 59.0}) is None, "somebody does it"
    found = _condemned_after(Watched(PATIENCE), 1000, overdue_s={Role.REWARD: 500.0})
    assert found is not None
    assert "idle for 61 s although work of its role has been overdue for 500 s" in found[1]


def test_a_worker_that_has_left_may_take_its_time_to_end_but_not_for_ever(dog: Watched) -> None:
    dog.look([_beat(0.0)], PIDS, 0.0)
    for second in range(1, 21):
        assert dog.look([], PIDS, float(second)) == {}
    assert "left 21 s ago" in dog.look([], PIDS, 21.0)["reward-0"]


@pytest.mark.parametrize(("gone", "limit_s"), [(set[int](), 60), ({7}, 10)])
def test_a_silent_unmanaged_worker_is_fenced_and_sooner_once_its_process_is_gone(
    dog: Watched, gone: set[int], limit_s: int
) -> None:
    for second in range(limit_s + 1):
        assert dog.look([_beat(5.0)], {}, float(second)) == {}
        assert dog.departed([_beat(5.0, silent_s=float(second))], {}, gone) == {}
    late = _beat(5.0, silent_s=limit_s + 1.0)
    assert dog.look([_beat(5.0)], {}, limit_s + 1.0) == {}
    assert dog.departed([late], PIDS, gone) == {}, "one of ours is no guest"
    assert "reward-0" in dog.departed([late], {}, gone)


def test_a_guest_that_beats_is_left_alone(dog: Watched) -> None:
    for second in range(1000):
        beat = _beat(float(second), turns=1, held=3)
        dog.look([beat], {}, float(second))
        assert dog.departed([beat], {}, set()) == {}


def test_a_wall_clock_that_jumps_kills_nobody(dog: Watched) -> None:
    dog.look([_beat(5.0)], PIDS, 0.0)
    assert dog.look([_beat(100_000.0)], PIDS, 1.0) == {}
    assert dog.look([_beat(3.0)], PIDS, 2.0) == {}


def test_a_ledger_that_was_away_kills_nobody(dog: Watched) -> None:
    dog.look([_beat(5.0)], PIDS, 0.0)
    for second in range(1, 50):
        dog.reset_timers(float(second))
    assert dog.look([_beat(5.0)], PIDS, 51.0) == {}
    assert dog.look([_beat(52.0)], PIDS, 52.0) == {}


def test_a_supervisor_that_was_itself_stopped_kills_nobody(dog: Watched) -> None:
    dog.look([_beat(5.0, waiting=WaitingFor.COMPUTE)], PIDS, 0.0)
    assert dog.look([_beat(5.0, waiting=WaitingFor.COMPUTE)], PIDS, 3600.0) == {}
    assert dog.look([_beat(6.0, waiting=WaitingFor.COMPUTE)], PIDS, 3600.2) == {}


def test_a_process_that_never_says_a_word_is_not_started(dog: Watched) -> None:
    for second in range(101):
        assert dog.look([_beat(1.0, pid=6)], PIDS, float(second)) == {}, "the heartbeat before its own is not its own"
    assert "not started after 101 s" in dog.look([], PIDS, 101.0)["reward-0"]


def test_a_successor_begins_with_full_patience(dog: Watched) -> None:
    for second in range(20):
        dog.look([_beat(5.0)], PIDS, float(second))
    assert dog.look([_beat(5.0)], PIDS, 20.0) != {}
    assert dog.look([_beat(5.0)], {"reward-0": 8}, 20.0) == {}
    assert dog.look([_beat(5.0)], {}, 21.0) == {}


@given(
    data=st.data(),
    waits=st.lists(st.sampled_from(list(WaitingFor)), min_size=1, max_size=30),
)
@settings(max_examples=150, deadline=None)
def test_a_worker_within_its_limits_is_never_replaced_and_one_that_stands_still_is(
    data: st.DataObject, waits: list[WaitingFor]
) -> None:
    dog, now, progress = Watched(PATIENCE), 0.0, 0
    for waiting in waits:
        progress += 1
        held = data.draw(st.integers(0, 3))
        for _ in range(data.draw(st.integers(1, int(PATIENCE.limit_s(waiting)) // 4))):
            now += 4.0
            beat = _beat(now, progress=progress, waiting=waiting, turns=progress, held=held)
            assert dog.look([beat], PIDS, now, {Role.REWARD: 1000.0}) == {}
    last = PATIENCE.limit_s(waits[-1])
    begun, dead = now, {}
    while now <= begun + last + 4.0:
        now += 4.0
        dead = dog.look([_beat(now, progress=progress, waiting=waits[-1], turns=progress)], PIDS, now)
    assert dead, f"still at {waits[-1]} for more than {last} s"
