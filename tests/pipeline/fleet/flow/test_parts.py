"""Claims about the parts of the analysis: words, limits, the sums, the graph and the ranking."""

from __future__ import annotations

import random
from math import log

import pytest

from pipeline.fleet.flow.fleet import FleetTracks, role_by_name
from pipeline.fleet.flow.format import Awaited, is_unknown, read_wait
from pipeline.fleet.flow.graph import reached, wait_graph, waiters
from pipeline.fleet.flow.limits import ErrorTest, UsualLimit
from pipeline.fleet.flow.rows import LinkRow, StateRow, Symptom
from pipeline.fleet.flow.service import BOUND, RoleService, ServiceSum, slow_workers
from pipeline.fleet.flow.suspects import FlowSuspect
from pipeline.fleet.flow.watcher import rank
from pipeline.fleet.limits import evidence_bound
from pipeline.runtime.registry.contract import WaitingFor


@pytest.mark.parametrize(
    ("word", "awaited", "target"),
    [
        ("room:reward-0", Awaited.ROOM, "reward-0"),
        ("CREDIT(a>b)", Awaited.ROOM, "a>b"),
        ("input:generator-1", Awaited.INPUT, "generator-1"),
        ("lock = learner", Awaited.LOCK, "learner"),
        ("REDIS", Awaited.LEDGER, ""),
        ("Compute", Awaited.NOTHING, ""),
        ("pondering", Awaited.UNKNOWN, ""),
        ("", Awaited.UNKNOWN, ""),
    ],
)
def test_words_are_read_with_the_worker_that_they_name(word: str, awaited: Awaited, target: str) -> None:
    assert read_wait(word) == (awaited, target)


def test_all_words_of_heartbeats_are_known() -> None:
    assert [word for word in WaitingFor if is_unknown(word)] == []
    assert is_unknown("pondering")
    assert not is_unknown("")


def test_a_role_without_a_name_is_the_worker_without_its_number() -> None:
    assert [role_by_name(name) for name in ("generator-12", "gen_3", "learner", "host:7", "42")] == [
        "generator", "gen", "learner", "host", "42",
    ]  # fmt: skip


def test_a_limit_is_twice_the_99th_percentile_and_at_least_three_seconds() -> None:
    usual, rng = UsualLimit(), random.Random(0)
    assert usual.limit_s(1.0) == 61.0
    for _ in range(500):
        usual.add(rng.uniform(0, 1))
    assert usual.limit_s(1.0) == 4.0
    for _ in range(2000):
        usual.add(rng.uniform(0, 10))
    assert 19.0 < usual.limit_s(0.0) < 30.0


def test_a_limit_follows_what_has_become_usual_just_now() -> None:
    usual = UsualLimit()
    for _ in range(1000):
        usual.add(1.0)
    before = usual.limit_s(0.0)
    for _ in range(60):
        usual.add(8.0)
    assert before == 3.0
    assert usual.limit_s(0.0) >= 12.0


def observed(sum_of: ServiceSum, role: RoleService, at_s: float, seconds: float) -> None:
    sum_of.observe(at_s, log(seconds), role)


def test_four_observations_far_above_the_expected_are_slow_and_ordinary_ones_never() -> None:
    role, rng = RoleService(), random.Random(1)
    others, slow = ServiceSum("a"), ServiceSum("b")
    for second in range(400):
        observed(others, role, second, rng.lognormvariate(0, 0.5))
    assert others.total < BOUND
    for second in range(400, 404):
        assert slow.total < BOUND
        observed(slow, role, second, 8.0)
    assert slow.total >= BOUND


def test_one_observation_counts_at_most_four_however_slow_it_is() -> None:
    role, one = RoleService(), ServiceSum("one")
    for second in range(200):
        role.add(second, 0.0, "others")
    observed(one, role, 300, 1e6)
    assert one.total == pytest.approx(3.2)


def test_the_piece_that_runs_is_evidence_only_while_it_runs() -> None:
    role = RoleService()
    for second in range(200):
        role.add(second, 0.0, "others")
    one = ServiceSum("one")
    one.compute(300, 30.0, 0, role)
    assert one.evidence(300, role) > 3.0
    assert one.total == 0.0
    one.leave()
    assert one.evidence(300, role) == 0.0


def test_a_worker_that_waits_for_input_loses_evidence() -> None:
    one = ServiceSum("one")
    one.total = 10.0
    for _ in range(20):
        one.rest()
    assert one.total == 0.0


def test_a_worker_that_was_always_slower_is_not_slow_now() -> None:
    role, old = RoleService(), ServiceSum("old")
    for second in range(600):
        role.add(second, 0.0, "others")
        old.observe(second, log(3.0), RoleService())
    for second in range(600, 660):
        role.add(second, 0.0, "others")
        observed(old, role, second, 3.0)
    assert old.total < BOUND


def role_of(slow: dict[int, float], size: int, *, seconds: int = 8, idle: tuple[int, ...] = ()) -> list[int]:
    """Return the workers that are slow after so many seconds, in which some take so many times as
    long; idle ones finish nothing."""
    role, rng = RoleService(), random.Random(2)
    sums = [ServiceSum(str(number)) for number in range(size)]
    for second in range(200 + seconds):
        for number, one in enumerate(sums):
            if second < 200 or number not in idle:
                times = slow.get(number, 1.0) if second >= 200 else 1.0
                observed(one, role, second, times * rng.lognormvariate(0, 0.1))
    found = slow_workers([(one, one.evidence(200 + seconds, role)) for one in sums], 200 + seconds)
    return [number for number, one in enumerate(sums) if one in found]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_one_slow_worker_of_a_role_of_any_size_is_blamed(size: int) -> None:
    assert role_of({1: 6.0}, size) == [1]


def test_workers_that_are_slow_by_a_common_cause_are_not_blamed() -> None:
    assert role_of({0: 6.0, 1: 6.0}, 2) == []
    assert role_of({0: 6.0, 1: 6.0, 2: 6.0}, 3) == []
    assert role_of(dict.fromkeys(range(4), 6.0), 8) == []


def test_of_two_workers_neither_is_blamed_before_the_other_has_shown_its_pace() -> None:
    assert role_of({0: 6.0}, 2, seconds=8, idle=(1,)) == []
    assert role_of({0: 6.0}, 2, seconds=30, idle=(1,)) == [0], "the other has no work at all"


def test_a_worker_that_is_a_little_slow_hides_no_much_slower_one() -> None:
    assert role_of({0: 2.0, 1: 10.0}, 3, seconds=20) == [1]


def test_what_is_clearly_slow_does_not_become_usual() -> None:
    assert role_of({1: 4.0}, 3, seconds=500) == [1]


def test_a_worker_that_recovers_is_soon_not_slow_any_more() -> None:
    role, one = RoleService(), ServiceSum("one")
    for second in range(420):
        for other in "abcdefg":
            role.add(second, 0.0, other)
        observed(one, role, second, 8.0 if 300 <= second < 400 else 1.0)
        if second not in range(410, 419):
            assert (one.total >= BOUND) is (303 <= second < 410), second


def test_errors_far_above_those_of_the_role_are_named_and_usual_ones_not() -> None:
    erring, usual = ErrorTest(), ErrorTest()
    for _ in range(6):
        erring.count(1, 2, 0.0)
    assert erring.total >= evidence_bound(26)
    for _ in range(500):
        usual.count(20, 2, 0.1)
    assert usual.total < evidence_bound(26)
    assert evidence_bound(320) == evidence_bound(1) + log(10)


def test_one_row_of_many_errors_is_not_enough() -> None:
    once = ErrorTest()
    once.count(0, 1000, 0.0)
    assert once.total < evidence_bound(1)


def made(*states: StateRow, links: tuple[LinkRow, ...] = ()) -> FleetTracks:
    fleet = FleetTracks()
    fleet.read(0.0, states, links)
    return fleet


def test_a_full_outbox_waits_for_downstream_and_an_empty_input_for_all_upstreams() -> None:
    fleet = made(
        StateRow(0, "a", "a", "room", in_flight=1, output_depth=1),
        StateRow(0, "b", "b", "input", in_flight=0),
        StateRow(0, "c", "c", "compute", in_flight=1),
        StateRow(0, "d", "d", "lock:c", in_flight=1),
        links=(LinkRow(0, "a", "b", 3, 2, 2, 1), LinkRow(0, "a", "c", 2, 2, 2, 2), LinkRow(0, "c", "b", 1, 1, 1, 1)),
    )
    graph = wait_graph(fleet)
    assert reached(graph, "a") == {"a>b", "b", "a", "c>b", "c"} | reached(graph, "b")
    assert reached(graph, "b") >= {"a>b", "a", "c>b", "c"}
    assert reached(graph, "c") == set()
    assert reached(graph, "d") == {"c"}
    assert waiters(graph, "c", fleet.workers) == 3


def test_causes_are_ranked_by_class_then_progress_then_waiters() -> None:
    fleet = made(
        StateRow(0, "waits", "x", "room:stuck", in_flight=1, output_depth=1),
        StateRow(0, "also", "x", "room:busy", in_flight=1, output_depth=1),
        *(StateRow(0, name, "y", "compute", in_flight=1) for name in ("silent", "stuck", "busy", "older", "slow")),
    )

    def suspect(name: str, symptom: Symptom, stalled_s: float) -> FlowSuspect:
        return FlowSuspect(name, symptom, stalled_s, 1.0, "")

    ranked, _ = rank(
        fleet,
        [
            suspect("slow", Symptom.SLOW, 99.0),
            suspect("waits", Symptom.ERRORS, 99.0),
            suspect("busy", Symptom.STUCK, 5.0),
            suspect("free", Symptom.STUCK, 5.0),
            suspect("stuck", Symptom.STUCK, 8.0),
            suspect("older", Symptom.STUCK, 9.0),
            suspect("silent", Symptom.SILENT, 5.0),
        ],
    )
    assert [one.component for one in ranked] == ["silent", "older", "stuck", "busy", "free", "slow", "waits"]
