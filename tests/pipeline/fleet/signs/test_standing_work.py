"""A learner whose computation stands is named within eight seconds; what it often does is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pipeline.fleet.signs import KNOWN, Signs
from pipeline.fleet.state import Worker
from pipeline.process.work import WorkReport
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.registry.entries import Vitals
from protocol.ids import Incarnation, Role
from tests.pipeline.fleet.live_fleet import BREAKS_S, LiveFleet
from tests.pipeline.runtime.registries import worker_of

LEARNER = Incarnation(Role.LEARNER, "learner", 1)
HANGS_S = 100
UNTIL_S = 140


def beat(second: int, still_s: float, *, who: Incarnation = LEARNER, **more: Any) -> Worker:
    """A heartbeat of a second; its work has stood for so long, and each second is progress."""
    given: dict[str, Any] = {"waiting_for": WaitingFor.COMPUTE, "held": 4, "progress": second} | more
    return msgspec.structs.replace(
        worker_of(who), at_s=1000.0 + second, silent_s=0.4, moved_at_s=1000.0 + second - still_s, **given
    )


def named(still_s: Callable[[int], float], **more: Any) -> list[int]:
    """Return the seconds at which the learner is suspected. It hangs from ``HANGS_S`` on."""
    work, found = Signs(), list[int]()
    for second in range(UNTIL_S):
        still = float(second - HANGS_S) if second > HANGS_S else still_s(second)
        changes: dict[str, Any] = {name: value(second) if callable(value) else value for name, value in more.items()}
        found += [second for one in work.observe(2000.0 + second, 2000.0 + second, [beat(second, still, **changes)])]
    return found


def test_a_computation_that_stands_is_named_after_six_seconds_since_it_stands() -> None:
    assert named(lambda _: 0.3) == [*range(HANGS_S + 7, UNTIL_S)]
    work = Signs()
    found = [work.observe(2000.0 + at, 2000.0 + at, [beat(at, max(0.3, at - HANGS_S))]) for at in range(HANGS_S + 8)]
    (only,) = found[-1]
    assert (only.component, only.kind, only.role) == ("learner", "hung", "learner")
    assert only.since_s == pytest.approx(2000.0 + HANGS_S - 0.4)
    assert "no progress for 7 s" in only.sentence
    assert "limit is 6 s" in only.sentence


def test_twice_the_longest_usual_standstill_is_the_limit() -> None:
    # five seconds of each ten
    assert named(lambda second: second % 10 if second % 10 <= 5 else 0.2) == [*range(HANGS_S + 11, UNTIL_S)]


def test_standstills_that_ended_by_themselves_are_usual_after_three() -> None:
    found = named(lambda second: max(0.2, second % 30 - 10.0))
    assert {second // 30 for second in found if second < HANGS_S} == {0, 1, 2}
    # three of nineteen seconds
    assert min(second for second in found if second > HANGS_S) == HANGS_S + 29


def test_a_tenth_of_the_longest_work_is_no_hang_since_a_repair_would_cost_all_of_it() -> None:
    # updates of eighty seconds, with a piece of seven seconds in each later one
    def still(second: int) -> float:
        return second % 80 - 20.0 if second > 80 and 20 < second % 80 <= 27 else 0.3

    def work(second: int) -> WorkReport:
        return WorkReport(kind="update", elapsed_s=float(second % 80), share=second % 80 / 80)

    # from second 100 on
    assert min(named(still, work=work)) == HANGS_S + 8
    assert min(named(still)) == HANGS_S + 7


@pytest.mark.parametrize(
    "change",
    [
        {"waiting_for": WaitingFor.COMPILE},
        {"waiting_for": WaitingFor.LEDGER},
        {"held": 0},
        {"vitals": Vitals(ledger_rtt_ms=2000.0)},
        {"moved_at_s": 0.0},
        {"progress": lambda second: second // (UNTIL_S // KNOWN)},
        {"who": Incarnation(Role.REWARD, "reward-0", 1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_waits_an_unknown_past_and_workers_with_peers_are_left_to_others(change: dict[str, Any]) -> None:
    work, found = Signs(), list[Any]()
    for second in range(UNTIL_S):
        given: dict[str, Any] = {name: value(second) if callable(value) else value for name, value in change.items()}
        moved = given.pop("moved_at_s", None)
        one = beat(second, max(0.3, second - HANGS_S), **given)
        one = one if moved is None else msgspec.structs.replace(one, moved_at_s=moved)
        peer = beat(second, 0.3, who=Incarnation(one.who.role, "peer", 1))
        found += work.observe(second, second, [one, peer] if "who" in change else [one])
    assert found == []


def test_a_process_that_was_stopped_has_no_longer_limit_afterwards() -> None:
    # stopped for thirty seconds: its heartbeats stand, and one shows it before the work moves
    work, found = Signs(), list[int]()
    for second in range(UNTIL_S):
        last = 40 if 40 < second < 70 else second
        still = 30.0 if second == 70 else max(0.3, second - HANGS_S)
        found += [second for one in work.observe(second, second, [beat(last, still)])]
    assert found == [*range(HANGS_S + 7, UNTIL_S)]


def test_a_new_process_is_known_anew() -> None:
    again = msgspec.structs.replace(LEARNER, epoch=2)
    assert named(lambda _: 0.3, who=lambda second: again if second >= HANGS_S - KNOWN + 1 else LEARNER) == [
        *range(HANGS_S + 7, UNTIL_S)
    ]
    assert named(lambda _: 0.3, who=lambda second: again if second > HANGS_S else LEARNER, progress=HANGS_S) == []


def test_the_observer_suspects_a_learner_whose_step_stands_before_its_roles_limit() -> None:
    def standing(since: int, beat: Worker) -> Worker:
        return learning(beat, max(0.2, since), BREAKS_S + min(since, 0))

    def learning(beat: Worker, still_s: float, second: int) -> Worker:
        """An update takes eight seconds."""
        return msgspec.structs.replace(
            beat, moved_at_s=beat.at_s - still_s, progress=second // 8, work=WorkReport(steps=second // 8)
        )

    class Learning(LiveFleet):
        def _busy(self, name: str, now: int) -> Worker:
            beat = super()._busy(name, now)
            return learning(beat, 0.2, now) if name == "learner" else beat

    fleet = Learning()
    fleet.change("learner", standing)
    found = fleet.suspected(until_s=BREAKS_S + 9)
    assert [(one.component, one.kind) for one in found] == [("learner", "hung")]
    assert "its computation has made no progress" in found[0].sentence
