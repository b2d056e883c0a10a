"""A mismatch of a generator starts one self-check; its answers prove one worker faulty, or none."""

from __future__ import annotations

import msgspec

from pipeline.runtime.registry.contract import Fleet, Heartbeat
from pipeline.runtime.registry.memory import MemoryRegistry
from pipeline.runtime.registry.vitals import CheckDigests
from pipeline.supervisor.recovery.rungs import IncidentSign
from pipeline.supervisor.self_checking import ANSWER_S, EVERY_S, SelfChecking
from protocol.ids import Incarnation, Role
from tests.manual_clock import ManualClock
from tests.pipeline.runtime.registries import beat_of

MISMATCH = [IncidentSign(3, "generator-1", "mismatch", "its log-probs differ")]


def beats(*answers: str, number: int = 0, version: int = 4) -> list[Heartbeat]:
    found: list[Heartbeat] = []
    for at, words in enumerate(answers):
        beat = beat_of(Incarnation(Role.GENERATOR, f"generator-{at}", 1))
        check = CheckDigests(number=number, policy_version=version, tokens=words) if words else CheckDigests()
        found.append(msgspec.structs.replace(beat, check=check))
    return found


async def registry() -> MemoryRegistry:
    made = MemoryRegistry(ManualClock())
    await made.set_fleet(Fleet({Role.GENERATOR: 3}))
    return made


async def asked(made: MemoryRegistry) -> int:
    fleet = await made.fleet()
    assert fleet is not None
    return fleet.check


async def test_a_mismatch_starts_one_check_and_the_generator_that_differs_is_named() -> None:
    made, checking = await registry(), SelfChecking()
    other = [IncidentSign(1, "generator-1", "slow", "")]
    assert await checking.look(made, other, beats("", "", ""), 0.0) is None and await asked(made) == 0
    assert await checking.look(made, MISMATCH, beats("", "", ""), 1.0) is None
    number = await asked(made)
    assert number > 0
    assert await checking.look(made, MISMATCH, beats("x", "y", "", number=number), 2.0) is None, "one has not answered"
    found = await checking.look(made, MISMATCH, beats("x", "y", "x", number=number), 3.0)
    assert found == ("generator-1", f"in self-check {number} its answer differs from that of 2 others")
    assert await checking.look(made, MISMATCH, beats("x", "y", "x", number=number), 4.0 + EVERY_S) is None
    assert await asked(made) == number, "one check an incident"


async def test_two_faulty_ones_or_two_answers_prove_none_and_a_later_incident_checks_again() -> None:
    made, checking = await registry(), SelfChecking()
    await checking.look(made, MISMATCH, beats("", "", "", "", ""), 0.0)
    number = await asked(made)
    assert await checking.look(made, MISMATCH, beats("x", "y", "x", "z", "x", number=number), 1.0) is None
    again = [IncidentSign(4, "generator-1", "mismatch", "")]
    await checking.look(made, again, beats("", "", ""), 2.0)
    assert await asked(made) == number, "not so soon after the last one"
    await checking.look(made, again, beats("", "", ""), EVERY_S)
    later = await asked(made)
    assert later > number
    assert await checking.look(made, again, beats("x", "y", "", number=later), EVERY_S + ANSWER_S) is None, (
        "its time is over"
    )


async def test_a_fleet_of_two_generators_is_not_checked_by_itself() -> None:
    made = await registry()
    assert await SelfChecking().look(made, MISMATCH, beats("", ""), 0.0) is None and await asked(made) == 0
