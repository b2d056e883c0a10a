"""A worker's bad end shows in its successor's epoch; a drain does not."""

from __future__ import annotations

import msgspec

from pipeline.fleet.signs import KEPT_S, Signs
from pipeline.fleet.state import Worker
from pipeline.fleet.suspicions import FleetSuspicions
from protocol.ids import Incarnation, Role
from tests.manual_clock import ManualClock
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.runtime.registries import worker_of


def beat(epoch: int, silent_s: float = 0.3) -> Worker:
    return msgspec.structs.replace(worker_of(Incarnation(Role.REWARD, "reward-0", epoch)), silent_s=silent_s)


def test_a_successor_two_epochs_later_shows_that_its_worker_was_fenced() -> None:
    replacements = Signs()
    assert not replacements.observe(10.0, 1010.0, [beat(1)])
    assert not replacements.observe(13.0, 1013.0, [beat(1, silent_s=2.0)])
    assert not replacements.observe(14.0, 1014.0, [])
    (only,) = replacements.observe(15.0, 1015.0, [beat(3)])
    assert (only.component, only.kind, only.role) == ("reward-0", "replaced", "reward")
    assert only.since_s == 1011.0, "its last heartbeat"
    assert "incarnation 1" in only.sentence and "3" in only.sentence
    assert not replacements.observe(16.0, 1016.0, [beat(3)]), "an end is told once"


def test_a_worker_that_left_in_order_is_no_finding_and_an_old_one_is_forgotten() -> None:
    replacements = Signs()
    replacements.observe(10.0, 0.0, [beat(1)])
    assert not replacements.observe(12.0, 0.0, [beat(2)])
    replacements.observe(12.0 + KEPT_S + 1.0, 0.0, [])
    assert not replacements.observe(12.0 + KEPT_S + 2.0, 0.0, [beat(9)])


async def test_a_fence_and_a_registration_are_two_epochs_and_a_departure_is_none() -> None:
    registry = MemoryRegistry(ManualClock())
    first = await registry.register(Role.REWARD, "reward-0")
    await registry.depart(first)
    second = await registry.register(Role.REWARD, "reward-0")
    await registry.fence("reward-0")
    third = await registry.register(Role.REWARD, "reward-0")
    assert (second.epoch - first.epoch, third.epoch - second.epoch) == (1, 2)


def test_the_observer_suspects_a_replaced_worker() -> None:
    finder = FleetSuspicions()
    finder.observe(1.0, 1.0, [beat(1)], -1)
    _, found = finder.observe(2.0, 2.0, [beat(3)], -1)
    assert [(one.component, one.kind) for one in found] == [("reward-0", "replaced")]
