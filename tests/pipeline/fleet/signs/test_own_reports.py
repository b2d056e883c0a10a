"""A worker's own report of a fault is an incident of its component, once it has lasted."""

from __future__ import annotations

import msgspec

from pipeline.fleet.incidents.book import Suspicion
from pipeline.fleet.signs import Signs
from pipeline.fleet.state import Worker
from pipeline.fleet.suspicions import FleetSuspicions
from pipeline.process.work import WorkReport
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.registry.entries import LONGEST_STANDSTILL, STANDSTILL
from protocol.ids import Incarnation, Role
from tests.pipeline.runtime.registries import worker_of


def beat(worker: str, role: Role, **changes: object) -> Worker:
    return msgspec.structs.replace(worker_of(Incarnation(role, worker, 1)), **changes)


def refusing(number: int, of: int = 3) -> list[Worker]:
    waits = [WaitingFor.QUARANTINE] * number + [WaitingFor.COMPUTE] * (of - number)
    return [
        beat(f"generator-{n}", Role.GENERATOR, waiting_for=kind, detail="v7 is not as published")
        for n, kind in enumerate(waits)
    ]


def names(found: list[Suspicion]) -> list[tuple[str, str]]:
    return [(one.component, one.kind) for one in found]


def test_a_generator_that_refuses_its_weights_for_long_is_named_and_a_moment_is_not() -> None:
    reports = Signs()
    assert not reports.observe(1.0, 101.0, refusing(1))
    assert not reports.observe(2.0, 102.0, refusing(0))
    assert not reports.observe(3.0, 103.0, refusing(1))
    assert not reports.observe(4.0, 104.0, refusing(1))
    (only,) = reports.observe(5.0, 105.0, refusing(1))
    assert (only.component, only.kind, only.since_s) == ("generator-0", "quarantine", 103.0)
    assert "v7" in only.sentence


def test_weights_that_most_generators_refuse_are_the_learners() -> None:
    reports = Signs()
    reports.observe(1.0, 1.0, refusing(2))
    assert names(reports.observe(4.0, 4.0, refusing(2))) == [("learner", "quarantine")]
    lonely = Signs()
    lonely.observe(1.0, 1.0, refusing(1, of=1))
    assert names(lonely.observe(4.0, 4.0, refusing(1, of=1))) == [("generator-0", "quarantine")]


def test_a_worker_whose_disk_refuses_is_named_with_its_words_by_the_observer() -> None:
    full = beat("learner", Role.LEARNER, refused="No space left on device: /run/checkpoints")
    _, found = FleetSuspicions().observe(1.0, 1.0, [full], -1)
    assert names(found) == [("learner", "disk")]
    assert "/run/checkpoints" in found[0].sentence


def standing(stood_s: float, longest_s: float = 0.1) -> list[Worker]:
    counters = {STANDSTILL: stood_s, LONGEST_STANDSTILL: longest_s}
    return [
        beat("generator-0", Role.GENERATOR, counters=counters, silent_s=0.5, work=WorkReport(slowest_s=30.0)),
        beat("generator-1", Role.GENERATOR, counters={STANDSTILL: 0.0}),
    ]


def test_a_generator_whose_engine_gives_no_tokens_is_named_after_eight_seconds() -> None:
    reports = Signs()
    assert not reports.observe(1.0, 101.0, standing(7.9))
    (only,) = reports.observe(2.0, 102.0, standing(9.0))
    assert (only.component, only.kind, only.since_s) == ("generator-0", "hung", 92.5)
    assert "no token for 9 s" in only.sentence and "the limit is 8 s" in only.sentence
    assert not reports.observe(3.0, 103.0, standing(0.0))


def test_an_engine_that_has_stood_before_may_stand_longer_by_half() -> None:
    reports = Signs()
    assert not reports.observe(1.0, 1.0, standing(29.0, longest_s=20.0))
    assert names(reports.observe(2.0, 2.0, standing(31.0, longest_s=20.0))) == [("generator-0", "hung")]


def test_a_step_that_was_refused_twice_is_an_incident_that_names_its_units() -> None:
    words = "a step of update 7 was not finite; its units are dead letters: 12, 13"
    finder = FleetSuspicions()
    learner = beat("learner", Role.LEARNER, counters={"refused_steps": 0.0, "loss": 0.5})
    finder.observe(1.0, 1.0, [learner], -1)
    told = msgspec.structs.replace(learner, not_committed=words, counters={"refused_steps": 1.0})
    _, found = finder.observe(2.0, 2.0, [told], -1)
    assert [(one.component, one.kind, one.sentence) for one in found] == [("learner", "numeric", words)]
