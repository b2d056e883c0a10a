"""Claims about the pool of standbys, with times by hand and with random histories."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.supervisor.fleet_plan import Intervention, Verb
from pipeline.supervisor.standbys import (
    DAY_S,
    StandbyKind,
    StandbyPhase,
    StandbyPool,
    chances,
    measured_rate,
    num_standbys,
)
from protocol.ids import Role

GENERIC, LEARNER = StandbyKind.GENERIC, StandbyKind.LEARNER
NOW_S = 2.0
ROLES = frozenset({Role.GENERATOR, Role.REWARD})


def pool(num: int = 1, kind: StandbyKind = GENERIC) -> StandbyPool:
    made = StandbyPool(start_timeout_s=60.0)
    made.want({kind: num})
    return made


def started(made: StandbyPool, now_s: float, newest: int | None = None) -> list[str]:
    return [one.worker for one in made.tick(now_s, newest) if one.verb is Verb.START]


def ready(made: StandbyPool, now_s: float, version: int | None = None) -> str:
    (name,) = started(made, now_s)
    made.reported(now_s + 1.0, name, ROLES, version)
    return name


def test_a_used_standby_is_refilled_by_another_name():
    made = pool()
    first = ready(made, 0.0)
    assert made.roles == ROLES
    assert made.take_ready(NOW_S, Role.REWARD) == first
    assert made.take_ready(NOW_S, Role.REWARD) is None and made.roles == frozenset()
    (second,) = started(made, 2.0)
    assert second != first


def test_only_a_ready_standby_is_taken_and_only_for_a_role_that_it_prepared():
    made = pool()
    (name,) = started(made, 0.0)
    assert made.take_ready(NOW_S, Role.GENERATOR) is None
    made.reported(1.0, name, frozenset(), None)
    assert made.take_ready(NOW_S, Role.GENERATOR) is None
    made.reported(2.0, name, ROLES, None)
    assert made.take_ready(NOW_S, Role.VALUE) is None
    assert made.take_ready(NOW_S, Role.GENERATOR) == name


def test_the_standby_with_the_newest_weights_is_taken_but_none_that_loads_some():
    made = pool(3)
    names = started(made, 0.0)
    for name, version, is_taking in zip(names, (3, 4, 5), (False, False, True), strict=True):
        made.reported(1.0, name, ROLES, version, is_taking=is_taking)
    behind, newest, busy = names
    assert [made.take_ready(NOW_S, Role.GENERATOR) for _ in range(3)] == [newest, behind, busy]


def test_all_that_lack_start_side_by_side():
    made = pool(3)
    first, second, _ = started(made, 0.0)
    assert started(made, 1.0) == []
    for name in (first, second):
        made.reported(2.0, name, ROLES, None)
        made.take_ready(3.0, Role.REWARD)
    assert len(started(made, 3.0)) == 2, "the third still starts"


def test_two_standbys_that_load_for_90_s_are_there_for_a_fault_every_62_s():
    made, readies = pool(2), dict[str, float]()
    faults = [122 + 62 * number for number in range(10)]
    for now_s in range(faults[-1] + 1):
        # the keeper starts none while a lost worker is on its way back
        if not any(fault <= now_s < fault + 2 for fault in faults):
            readies |= dict.fromkeys(started(made, float(now_s)), now_s + 90.0)
        for name, ready_s in readies.items():
            made.reported(float(now_s), name, ROLES if ready_s <= now_s else frozenset(), None, progress=now_s)
        if now_s in faults:
            taken = made.take_ready(float(now_s), Role.GENERATOR)
            assert taken is not None, now_s
            del readies[taken]


def test_the_learner_s_standby_starts_while_generic_ones_start_or_fail():
    made = pool()
    made.want({GENERIC: 2, LEARNER: 1})
    assert [one.worker for one in made.tick(0.0)] == ["standby-1", "standby-2", "learner-standby-3"]
    made = pool()
    made.want({GENERIC: 1})
    for now_s in range(200):
        for name in started(made, float(now_s)):
            made.ended(float(now_s), name, "killed by SIGKILL")
    assert made.given_up
    made.want({GENERIC: 1, LEARNER: 1})
    assert [one.worker for one in made.tick(200.0)] == ["learner-standby-7"]


def test_after_a_failure_one_starts_at_a_time_until_one_is_ready():
    made = pool(3)
    first, *others = started(made, 0.0)
    made.ended(1.0, first, "killed by SIGKILL")
    for name in others:
        made.ended(1.0, name, "killed by SIGKILL")
    (trial,) = started(made, 100.0)
    assert started(made, 101.0) == []
    made.reported(102.0, trial, ROLES, None)
    assert len(started(made, 103.0)) == 2


def test_a_refill_lasts_from_a_use_to_the_next_readiness_by_kind():
    made = pool()
    made.want({GENERIC: 2, LEARNER: 1})
    first, second, learner = started(made, 0.0)
    assert made.refill_s(GENERIC) is None
    made.reported(8.0, first, ROLES, None)
    made.reported(9.0, second, ROLES, None)
    made.reported(30.0, learner, frozenset({Role.LEARNER}), None)
    assert (made.refill_s(GENERIC), made.refill_s(LEARNER)) == (9.0, 30.0)
    made.take_ready(100.0, Role.GENERATOR)
    made.take_ready(103.0, Role.GENERATOR)
    # the keeper has waited for the workers' return
    third, fourth = started(made, 120.0)
    made.reported(128.0, third, ROLES, None)
    assert made.refill_s(GENERIC) == 28.0
    made.reported(140.0, fourth, ROLES, None)
    assert (made.refill_s(GENERIC), made.refill_s(LEARNER)) == (37.0, 30.0)


def test_uses_that_are_not_refilled_since_fewer_are_wanted_count_for_no_refill():
    made = pool(2)
    for name in started(made, 0.0):
        made.reported(1.0, name, ROLES, None)
        made.take_ready(2.0, Role.REWARD)
    made.want({GENERIC: 0})
    made.tick(3.0)
    made.want({GENERIC: 1})
    (name,) = started(made, 500.0)
    made.reported(510.0, name, ROLES, None)
    assert made.refill_s(GENERIC) == 10.0


def test_a_standby_that_does_not_follow_the_weights_is_replaced_after_a_pause():
    made = pool()
    name = ready(made, 0.0, 1)
    made.reported(5.0, name, ROLES, 1)
    assert made.tick(5.0, 2) == []
    for now_s in range(20, 81):
        made.reported(float(now_s), name, ROLES, 2)
        assert made.tick(float(now_s), 3) == []
    made.reported(81.0, name, ROLES, 2)
    (end,) = made.tick(81.0, 3)
    assert (end.verb, end.worker) == (Verb.KILL, name)
    assert end.reason == "it does not follow the weights: it has version 2, the newest is 3"
    assert made.take_ready(NOW_S, Role.GENERATOR) is None
    made.ended(82.0, name, "killed by SIGKILL")
    assert started(made, 85.0) == []
    assert len(started(made, 86.0)) == 1


def test_a_standby_that_loads_weights_for_long_has_the_time_of_a_start():
    made = pool()
    name = ready(made, 0.0, 1)
    for now_s in range(1, 80):
        made.reported(float(now_s), name, ROLES, 1, is_taking=True)
        actions = made.tick(float(now_s), 2 + now_s)
        assert bool(actions) == (now_s > 61), now_s
        if actions:
            break
    else:
        raise AssertionError("it was never ended")


def test_a_silent_standby_and_one_whose_loading_stands_still_are_ended():
    made = pool()
    name = ready(made, 0.0)
    assert made.tick(15.5) == []
    (end,) = made.tick(17.0)
    assert (end.worker, end.reason) == (name, "no report for 16 s")
    slow = pool()
    (name,) = started(slow, 0.0)
    for now_s in range(1, 100):
        # the second model is there after 50 s
        slow.reported(float(now_s), name, frozenset(), None, progress=1 + (now_s >= 50))
    assert slow.tick(109.0) == [], "reports go on, and progress was 59 s ago"
    slow.reported(110.0, name, frozenset(), None, progress=2)
    (end,) = slow.tick(111.0)
    assert (end.worker, end.reason) == (name, "not ready after 111 s")


def test_standbys_that_die_again_and_again_are_given_up_with_a_sentence():
    made, now_s, starts = pool(), 0.0, 0
    for _ in range(1000):
        now_s += 1.0
        for name in started(made, now_s):
            starts += 1
            made.ended(now_s, name, "killed by SIGKILL")
    assert starts == 6
    assert made.given_up == {GENERIC: "6 in a row failed, 5 are allowed; the last one: killed by SIGKILL"}


def test_a_standby_that_was_ready_renews_the_budget():
    made, now_s = pool(), 0.0
    for _ in range(8):
        now_s += 100.0
        made.ended(now_s + 5.0, ready(made, now_s), "killed by SIGKILL")
    assert made.given_up == {}


def test_fewer_wanted_standbys_end_the_surplus_without_counting_failures():
    made = pool(2)
    first, second = started(made, 0.0)
    for name in (first, second):
        made.reported(1.0, name, ROLES, None)
    made.want({GENERIC: 1})
    assert made.tick(4.0) == [Intervention(second, Verb.KILL, "fewer are wanted")]
    made.ended(5.0, second, "killed")
    made.want({GENERIC: 2})
    assert len(started(made, 5.0)) == 1
    assert made.take_ready(NOW_S, Role.REWARD) == first


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["tick", "report", "load", "die", "take", "want", "wait"]),
        st.integers(0, 5),
        st.sampled_from([Role.GENERATOR, Role.REWARD, Role.VALUE, Role.LEARNER]),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(EVENTS)
def test_no_standby_is_ever_given_to_two_workers(events: list[tuple[str, int, Role]]):
    made = pool(2)
    now_s, alive, given_away, named = 0.0, list[str](), list[str](), list[str]()
    for event, number, role in events:
        now_s += 0.5
        name = alive[number % len(alive)] if alive else "standby-0"
        match event:
            case "tick":
                for action in made.tick(now_s, number):
                    if action.verb is Verb.START:
                        alive.append(action.worker)
                        named.append(action.worker)
            case "report" | "load":
                made.reported(now_s, name, ROLES if event == "report" else frozenset(), number)
            case "die":
                made.ended(now_s, name, "killed")
                alive = [one for one in alive if one != name]
            case "take":
                was_ready = {one.name for one in made.standbys if one.phase is StandbyPhase.READY and role in one.roles}
                if (taken := made.take_ready(now_s, role)) is not None:
                    assert taken in was_ready and taken in alive
                    given_away.append(taken)
            case "want":
                made.want({GENERIC: number, LEARNER: number % 2})
            case _:
                now_s += 30.0
        held = {one.name for one in made.standbys}
        assert not held.intersection(given_away)
        for kind in StandbyKind:
            assert sum(one.kind is kind and one.phase is not StandbyPhase.ENDING for one in made.standbys) <= 5
    assert len(set(given_away)) == len(given_away)
    assert len(set(named)) == len(named)


def test_outdated_standbys_end_are_not_taken_meanwhile_and_count_as_no_failure():
    made = pool(2)
    first, second = started(made, 0.0)
    made.reported(1.0, first, ROLES, None)
    made.replace_all("other code")
    assert made.take_ready(NOW_S, Role.REWARD) is None and made.roles == frozenset()
    made.reported(3.0, second, ROLES, None)
    assert made.take_ready(NOW_S, Role.REWARD) is None
    actions = made.tick(3.0)
    assert [(one.verb, one.worker, one.reason) for one in actions if one.verb is Verb.KILL] == [
        (Verb.KILL, first, "other code"),
        (Verb.KILL, second, "other code"),
    ]
    assert [one.verb for one in actions].count(Verb.START) == 2, "no pause, as after a failure"
    for name in (first, second):
        made.ended(4.0, name, "ended")
    assert not any(one.verb is Verb.KILL for one in made.tick(5.0)) and not made.given_up


@pytest.mark.parametrize(
    ("refill_s", "numbers"), [(DAY_S, (1, 1, 2, 7, 35)), (3600.0, (0, 0, 1, 1, 4))], ids=["a day", "an hour"]
)
def test_the_number_is_that_of_the_published_table(refill_s: float, numbers: tuple[int, ...]):
    rate_per_day = 2.3 / 1000
    fleets = (8, 32, 128, 1024, 10000)
    assert tuple(num_standbys(workers, rate_per_day, refill_s) for workers in fleets) == numbers


@pytest.mark.parametrize(("workers", "number"), [(128, 2), (256, 2), (512, 3), (1024, 4)])
def test_the_number_is_that_of_the_paper_at_its_failure_probability(workers: int, number: int):
    assert num_standbys(workers, -math.log1p(-0.0012), DAY_S) == number


@given(st.integers(0, 60), st.floats(1e-6, 0.999), st.sampled_from([0.5, 0.9, 0.99]))
def test_the_number_is_the_least_that_suffices(workers: int, p: float, confidence: float):
    k = num_standbys(workers, -math.log1p(-p), DAY_S, confidence=confidence)

    def within(most: int) -> float:
        return math.fsum(math.comb(workers, i) * p**i * (1 - p) ** (workers - i) for i in range(most + 1))

    assert 0 <= k <= workers
    assert within(k) >= confidence - 1e-9
    assert k == 0 or within(k - 1) < confidence + 1e-9


def test_the_chances_are_those_of_the_binomial_distribution():
    rate = -math.log1p(-0.25)
    assert list(chances(3, rate, DAY_S)) == pytest.approx([27 / 64, 27 / 64, 9 / 64, 1 / 64])
    assert list(chances(2, 0.0, DAY_S)) == [1.0, 0.0, 0.0] and list(chances(2, 1e9, DAY_S)) == [0.0, 0.0, 1.0]
    assert math.fsum(chances(10_000, 0.1, DAY_S)) == pytest.approx(1.0)


def test_a_rate_of_nothing_needs_none_and_a_certain_one_all():
    assert (num_standbys(100, 0.0, DAY_S), num_standbys(0, 1.0, DAY_S)) == (0, 0)
    assert num_standbys(100, 1e9, DAY_S) == 100


def test_the_run_s_own_rate_counts_from_three_repairs_on_and_never_lowers_the_number():
    assert measured_rate(0.002, 2, 8, 600.0) == 0.002
    assert measured_rate(0.002, 4, 8, 3600.0) == pytest.approx(4 * 24 / 8)
    assert measured_rate(0.002, 3, 1000, 1e9) == 0.002
