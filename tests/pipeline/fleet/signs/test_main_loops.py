"""A main loop that stands while heartbeats go on is named at once, and a pause or a host is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pipeline.fleet.incidents.book import Suspicion
from pipeline.fleet.signs import Signs
from pipeline.fleet.state import Worker
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.registry.entries import Vitals
from protocol.ids import Incarnation, Role
from tests.pipeline.runtime.registries import worker_of

NAMES = ("reward-0", "reward-1", "reward-2", "reward-3")


def beats(second: int, still_s: dict[str, float], *, epoch: int = 1, **more: Any) -> list[Worker]:
    """Heartbeats of a second; some loops stand for so long."""
    return [
        msgspec.structs.replace(
            worker_of(Incarnation(Role.REWARD, name, epoch)), at_s=1000.0 + second, silent_s=0.4,
            turned_at_s=1000.0 + second - still_s.get(name, 0.1),
            vitals=Vitals(loop_lag_ms=1e3 * still_s.get(name, 0.0)), **more,
        )
        for name in NAMES
    ]  # fmt: skip


def seen(standing: dict[str, tuple[int, int]], seconds: int = 40, **more: Any) -> dict[int, list[Suspicion]]:
    """Return what is suspected each second. ``standing``: from when, until when loops stand."""
    loops, found = Signs(), dict[int, list[Suspicion]]()
    for second in range(seconds):
        still = {name: float(second - since) for name, (since, until) in standing.items() if since < second < until}
        if one := loops.observe(2000.0 + second, 2000.0 + second, beats(second, still, **more)):
            found[second] = one
    return found


def test_a_standing_main_loop_is_named_within_seven_seconds_and_until_it_turns() -> None:
    found = seen({"reward-1": (10, 30)})
    assert (min(found), max(found)) == (16, 29)
    (only,) = found[16]
    assert (only.component, only.kind, only.role) == ("reward-1", "hung", "reward")
    assert only.since_s == pytest.approx(2009.6)
    assert "blocked for 6 s" in only.sentence


def test_a_pause_is_no_hang_and_neither_is_its_late_report() -> None:
    assert seen({"reward-1": (10, 14)}) == {}
    loops = Signs()
    for second in range(20):
        # stopped for eight seconds: the timer is reported late, and the loop turns again
        late = {"reward-1"} if second in (10, 11) else set[str]()
        one = [
            msgspec.structs.replace(beat, vitals=Vitals(loop_lag_ms=8000.0 * (beat.who.worker in late)))
            for beat in beats(second, {})
        ]
        assert loops.observe(second, second, one) == []


def test_loops_that_stand_at_once_are_the_hosts() -> None:
    assert seen(dict.fromkeys(NAMES[:2], (10, 30))) == {}


def test_a_start_and_a_loop_that_often_stands_as_long_are_no_hang() -> None:
    assert seen({"reward-1": (10, 30)}, waiting_for=WaitingFor.STARTING) == {}
    loops, named = Signs(), list[int]()
    for second in range(300):
        # sixteen of each fifty seconds; then it hangs
        into = second % 50 if second < 250 else second - 250
        still = {"reward-1": float(into)} if second >= 250 or into <= 16 else {}
        if loops.observe(second, second, beats(second, still)):
            named.append(second)
    assert {second // 50 for second in named if second < 250} == {0, 1, 2}, "then it is usual"
    assert [second for second in named if second >= 250] == [*range(275, 300)]


def test_a_process_that_was_stopped_is_named_when_its_loop_hangs_later() -> None:
    loops, named = Signs(), list[int]()
    for second in range(100):
        # stopped for nine seconds, three times: one heartbeat shows it, before the loop turns
        stopped = second in (10, 20, 30)
        still = {"reward-1": 9.0} if stopped else {"reward-1": second - 60.0} if second > 60 else {}
        if loops.observe(second, second, beats(second, still)):
            named.append(second)
    assert named == [*range(66, 100)]


def test_a_heartbeat_that_is_read_twice_and_a_new_process_count_anew() -> None:
    loops, old = Signs(), beats(7, {"reward-1": 6.0})
    assert [loops.observe(second, second, old) for second in range(7, 20)] == [[]] * 13
    assert loops.observe(20, 20, beats(20, {"reward-1": 19.0}, epoch=2)) == []
