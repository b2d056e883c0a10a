"""A reward worker too many of whose tries give no verdict is named."""

from __future__ import annotations

from pipeline.fleet.signs import SAME_VERDICTS, Signs
from pipeline.fleet.state import Worker
from pipeline.fleet.suspicions import FleetSuspicions
from protocol.ids import Incarnation, Role
from tests.pipeline.runtime.registries import worker_of


def beat(judged: float, failed: float, late: float = 0.0, role: Role = Role.REWARD) -> Worker:
    counters = {"judged": judged, "failed": failed, "late": late}
    return worker_of(Incarnation(role, f"{role}-0", 1), counters=counters, links=())


def test_a_share_of_failed_tries_above_the_limit_is_named() -> None:
    verdicts = Signs()
    assert not verdicts.observe(1.0, 101.0, [beat(100, 0)])
    (first,) = verdicts.observe(2.0, 102.0, [beat(130, 10, late=10)])
    assert (first.component, first.kind, first.role, first.since_s) == ("reward-0", "verdicts", "reward", 102.0)
    assert verdicts.observe(3.0, 103.0, [beat(140, 14, late=14)])
    assert "25%" in first.sentence and "100% of these for lack of time" in first.sentence and first.score > 1.0
    assert not verdicts.observe(600.0, 700.0, [beat(240, 14, late=14)]), "it is over"


def test_a_few_failures_and_those_of_other_roles_are_no_incident() -> None:
    verdicts = Signs()
    verdicts.observe(1.0, 1.0, [beat(0, 0), beat(0, 0, role=Role.VALUE)])
    assert not verdicts.observe(2.0, 2.0, [beat(100, 10), beat(0, 99, role=Role.VALUE)])
    assert not Signs().observe(1.0, 1.0, [beat(0, 50)]), "what was before the first look is not new"


def test_the_observer_suspects_such_a_worker() -> None:
    fleet = FleetSuspicions()
    fleet.observe(1.0, 1.0, [beat(0, 0)], published=0)
    _, found = fleet.observe(2.0, 2.0, [beat(10, 10)], published=0)
    assert "verdicts" in {one.kind for one in found}


def judged(num: float, right: float) -> Worker:
    counters = {"judged": num, "judged_accuracy": right}
    return worker_of(Incarnation(Role.REWARD, "reward-0", 1), counters=counters, links=())


def test_a_verifier_that_finds_hundreds_of_responses_in_a_row_wrong_is_named_until_one_is_right() -> None:
    same = Signs()
    assert not same.observe(100.0, 100.0, [judged(SAME_VERDICTS - 1, 0.0)])
    (found,) = same.observe(101.0, 101.0, [judged(SAME_VERDICTS + 88, 0.0)])
    assert (found.component, found.kind, found.since_s) == ("reward-0", "verdicts", 101.0)
    assert "each of the last 600 responses was wrong" in found.sentence
    assert not same.observe(102.0, 102.0, [judged(SAME_VERDICTS + 100, 0.5)])
    assert same.observe(200.0, 200.0, [judged(2 * SAME_VERDICTS + 100, 0.5)])


def test_a_verifier_that_never_found_anything_wrong_is_named_and_a_model_that_has_learned_is_not() -> None:
    (found,) = Signs().observe(1.0, 1.0, [judged(700, 700.0)])
    assert "each of 700 responses was right" in found.sentence
    learned = Signs()
    for right in range(2000):
        assert not learned.observe(float(right), float(right), [judged(100.0 + right, float(right))])
    other = worker_of(Incarnation(Role.VALUE, "value", 1), counters={"judged": 9999.0}, links=())
    assert not Signs().observe(1.0, 1.0, [other])


def test_the_observer_suspects_one_verdict_throughout() -> None:
    _, found = FleetSuspicions().observe(1.0, 1.0, [judged(600, 0.0)], published=0)
    assert "verdicts" in {one.kind for one in found}
