"""The answers to a self-check prove one worker faulty, or none, with a sentence."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.fleet.state import Worker
from pipeline.runtime.registry.contract import Fleet
from pipeline.runtime.registry.entries import CheckDigests
from pipeline.supervisor.self_checking import ANSWER_S, EVERY_S, SelfChecking, differing
from protocol.ids import Incarnation, Role
from tests.manual_clock import ManualClock
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.runtime.registries import worker_of


def beats(*answers: str, number: int = 0, version: int = 4) -> list[Worker]:
    found: list[Worker] = []
    for at, words in enumerate(answers):
        beat = worker_of(Incarnation(Role.GENERATOR, f"generator-{at}", 1))
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


async def test_the_one_generator_that_differs_is_named_once_all_have_answered() -> None:
    made, checking = await registry(), SelfChecking()
    assert checking.read_answers(beats("", "", ""), 0.0) is None and await asked(made) == 0
    assert checking.lack(beats("", "", ""), 1.0) == "" and await checking.begin(made, 1.0)
    number = await asked(made)
    assert number > 0
    assert await checking.begin(made, 1.5) and await asked(made) == number, "one check serves two suspects"
    assert checking.read_answers(beats("x", "y", "", number=number), 2.0) is None, "one has not answered"
    found = checking.read_answers(beats("x", "y", "x", number=number), 3.0)
    assert found == ("generator-1", f"in self-check {number} its answer differs from that of 2 others")
    assert checking.read_answers(beats("x", "y", "x", number=number), 4.0) is None, "once"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (("x", "x", "x"), "all 3 answers are the same"),
        (("x", "y", "x", "z", "x"), "generator-1, generator-3 differ: `headrace fleet selfcheck --fleet` shows how"),
        (("x", "y", ""), "could compare 2 generators; 3 are needed"),
    ],
)
async def test_a_check_that_proves_none_says_what_it_found(answers: tuple[str, ...], words: str) -> None:
    made, checking = await registry(), SelfChecking()
    await checking.begin(made, 0.0)
    number = await asked(made)
    found = checking.read_answers(beats(*answers, number=number), ANSWER_S)
    assert found is not None and found[0] == "" and found[1].endswith(words)


async def test_two_generators_or_a_check_just_before_are_a_reason_for_none() -> None:
    made, checking = await registry(), SelfChecking()
    assert checking.lack(beats("", ""), 0.0).endswith("there are 2")
    await checking.begin(made, 0.0)
    assert checking.lack(beats("", "", ""), 1.0) == "", "it is under way, and serves"
    number = await asked(made)
    assert checking.read_answers(beats("x", "x", "x", number=number), 2.0) is not None
    assert checking.lack(beats("", "", ""), EVERY_S - 1.0).startswith("the last self-check was 299 s ago")
    assert checking.lack(beats("", "", ""), EVERY_S) == ""
    await checking.begin(made, EVERY_S)
    assert await asked(made) > number


async def test_a_fleet_that_others_change_again_and_again_gets_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    made, checking = await registry(), SelfChecking()

    async def is_late(*_: object) -> bool:
        return False

    monkeypatch.setattr(MemoryRegistry, "replace_fleet", is_late)
    assert not await checking.begin(made, 0.0)
    assert checking.lack(beats("", "", ""), 1.0) == ""


ONE_HOST = dict.fromkeys("abcdefgh", "h")


def test_a_worker_with_another_answer_than_most_is_named_and_the_rest_are_not() -> None:
    found = differing({"a": {3: "x"}, "b": {3: "x"}, "c": {3: "y"}}, ONE_HOST)
    assert (found.workers, found.undecided, found.compared, found.is_sound) == (("c",), (), ("a", "b", "c"), False)


def test_answers_under_different_versions_are_not_compared() -> None:
    found = differing({"a": {3: "x"}, "b": {4: "y"}}, ONE_HOST)
    assert found.is_sound and found.compared == ()
    found = differing({"a": {3: "x", 4: "y"}, "b": {4: "y"}}, ONE_HOST)
    assert found.is_sound and found.compared == ("a", "b")


def test_two_workers_that_differ_leave_open_which_is_at_fault_until_a_third_answers() -> None:
    two = {"a": {3: "x"}, "b": {3: "y"}}
    assert differing(two, ONE_HOST).undecided == ("a", "b") and not differing(two, ONE_HOST).is_sound
    three = differing({**two, "c": {3: "y"}}, ONE_HOST)
    assert (three.workers, three.undecided) == (("a",), ())


def test_a_host_all_of_whose_workers_differ_is_named_and_a_lone_worker_is_no_host() -> None:
    hosts = {"a": "h", "b": "h", "c": "h", "d": "h", "e": "other", "f": "other", "g": "third"}
    answers = {worker: {1: "y" if worker in "efg" else "x"} for worker in hosts}
    found = differing(answers, hosts)
    assert (found.workers, found.hosts) == (("e", "f", "g"), ("other",))


@given(st.integers(3, 8), st.data())
def test_one_faulty_worker_is_named_whatever_versions_the_others_have_answered(num: int, data: st.DataObject) -> None:
    workers = "abcdefgh"[:num]
    bad = data.draw(st.sampled_from(workers))
    # all have answered version 5, and some of them earlier ones
    answers = {
        worker: {
            version: f"{version}{'!' * (worker == bad)}" for version in {5, *data.draw(st.sets(st.integers(1, 4)))}
        }
        for worker in workers
    }
    found = differing(answers, ONE_HOST)
    assert (found.workers, found.undecided) == ((bad,), ())
    healthy = {worker: of for worker, of in answers.items() if worker != bad}
    assert differing(healthy, ONE_HOST).is_sound
