"""A worker that ends by an error of its own is named with it, once; a drain is no finding."""

from __future__ import annotations

from pipeline.fleet.signs import TOLD_S, Signs
from pipeline.fleet.suspicions import FleetSuspicions
from pipeline.runtime.registry.contract import FailureReport
from protocol.ids import Incarnation, Role
from tests.pipeline.runtime.registries import worker_of


def failure(epoch: int = 2, ago_s: float = 0.5) -> FailureReport:
    who = Incarnation(Role.REFERENCE, "reference-1", epoch)
    return FailureReport(who=who, error="RuntimeError", message="a task was lost", ago_s=ago_s)


def test_a_failure_is_told_once_with_the_error_and_the_time_of_the_end() -> None:
    signs = Signs()
    (only,) = signs.observe(1000.0, 1000.0, [], [failure()])
    assert (only.component, only.kind, only.role, only.since_s) == ("reference-1", "failed", "reference", 999.5)
    assert "incarnation 2" in only.sentence and "RuntimeError: a task was lost" in only.sentence
    assert not signs.observe(1001.0, 1001.0, [], [failure(ago_s=1.5)])
    (again,) = signs.observe(1002.0, 1002.0, [], [failure(3, 0.1), failure(ago_s=2.5)])
    assert "incarnation 3" in again.sentence, "its successor ended the same way"


def test_an_observer_that_starts_later_tells_no_old_failure() -> None:
    assert not Signs().observe(1000.0, 1000.0, [], [failure(ago_s=TOLD_S + 1.0)])
    assert Signs().observe(1000.0, 1000.0, [], [failure(ago_s=TOLD_S - 1.0)])


def test_a_failed_worker_is_named_although_its_successor_has_the_next_epoch() -> None:
    finder = FleetSuspicions()
    finder.observe(1.0, 1.0, [worker_of(Incarnation(Role.REFERENCE, "reference-1", 2))], -1)
    successor = worker_of(Incarnation(Role.REFERENCE, "reference-1", 3))
    _, found = finder.observe(2.0, 2.0, [successor], -1)
    assert found == [], "so far it looks like a drain"
    _, found = finder.observe(3.0, 3.0, [successor], -1, [failure()])
    assert [(one.component, one.kind) for one in found] == [("reference-1", "failed")]


def test_a_step_that_differed_when_it_was_made_again_blames_the_machine() -> None:
    who = Incarnation(Role.LEARNER, "learner", 1)
    (only,) = Signs().observe(
        9.0, 9.0, [], [FailureReport(who=who, error="StepDiffered", message="loss nan, then 0.5")]
    )
    assert (only.component, only.kind) == ("learner", "machine")
