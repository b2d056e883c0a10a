"""Answers to a self-check: who differs from most under a policy version."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.supervisor.recovery.answers import differing

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
