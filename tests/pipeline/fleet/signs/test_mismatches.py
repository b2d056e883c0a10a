"""A generator that the learner's check finds far from its peers is named, beyond both limits."""

from __future__ import annotations

import msgspec

from pipeline.fleet.signs import MOST_NATS, MOST_TIMES, Signs
from pipeline.fleet.state import Worker
from pipeline.fleet.suspicions import FleetSuspicions
from pipeline.runtime.registry.entries import LOGPROB_GAP, LOGPROB_USUAL_GAP
from protocol.ids import Incarnation, Role
from tests.pipeline.runtime.registries import worker_of


def fleet(gap: float, usual: float, worker: str = "generator-1") -> list[Worker]:
    counters = {f"{LOGPROB_GAP}{worker}": gap, f"{LOGPROB_USUAL_GAP}{worker}": usual, "updates": 3.0}
    learner = worker_of(Incarnation(Role.LEARNER, "learner", 1), links=())
    generators = [worker_of(Incarnation(Role.GENERATOR, f"generator-{n}", 1), counters={}, links=()) for n in range(3)]
    return [msgspec.structs.replace(learner, counters=counters), *generators]


def test_a_generator_beyond_both_limits_is_named() -> None:
    mismatches = Signs()
    assert not mismatches.observe(1.0, 101.0, fleet(0.02, 0.02))
    (first,) = mismatches.observe(5.0, 105.0, fleet(6.0, 0.02))
    assert (first.component, first.kind, first.role, first.since_s) == ("generator-1", "mismatch", "generator", 105.0)
    assert "6 nats" in first.sentence and "0.02" in first.sentence and first.score > 1.0
    assert not mismatches.observe(10.0, 110.0, fleet(0.1, 0.02))
    assert mismatches.observe(20.0, 120.0, fleet(6.0, 0.02))


def test_one_limit_alone_names_no_generator() -> None:
    for usual in (0.0, 0.01, 0.1, 1.0):
        assert not Signs().observe(1.0, 1.0, fleet(usual + 0.99 * MOST_NATS, usual)), "not enough nats"
        assert not Signs().observe(1.0, 1.0, fleet(0.99 * MOST_TIMES * usual, usual)), "not enough times the peers'"
    assert Signs().observe(1.0, 1.0, fleet(1.0 * MOST_TIMES + 0.01, 1.0))


def test_a_generator_that_has_left_is_not_named() -> None:
    assert not Signs().observe(1.0, 1.0, fleet(6.0, 0.0, worker="generator-9"))


def test_the_observer_suspects_a_mismatched_generator() -> None:
    _, found = FleetSuspicions().observe(1.0, 1.0, fleet(6.0, 0.02), -1)
    assert [(one.component, one.kind) for one in found] == [("generator-1", "mismatch")]
