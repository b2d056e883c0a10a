"""Claims about the way of a new version of code to the workers, and its way back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.operations import CodeSection
from pipeline.supervisor.rollout import WATCH_LIMIT_S, CodedMember, Rollout, RolloutState, UpdateSample

LIMITS = CodeSection(canary_pieces=4, canary_timeout_s=30.0, judged_updates=3, lazy_limit_s=100.0)
new_rollout = partial(Rollout, LIMITS, restart_timeout_s=60.0, standstill_s=20.0)
MADE_S = 1000.0
OLD = CodedMember(is_new=False, is_ready=True, progress=50)
STARTING = CodedMember(is_new=True)
READY = CodedMember(is_new=True, is_ready=True)


def updates(every_s: float, number: int, *, end_s: float, loss: float = 0.5) -> list[UpdateSample]:
    return [UpdateSample(end_s - every_s * place, loss) for place in reversed(range(number))]


class Fleet:
    """Workers that a test changes. The wall clock is the monotonic one, later."""

    def __init__(self, num_workers: int, *, is_lazy: bool = False, is_way_back: bool = False) -> None:
        self.rollout = new_rollout(now_s=0.0, made_s=MADE_S, is_lazy=is_lazy, is_way_back=is_way_back)
        self.workers = {f"reward-{number}": OLD for number in range(num_workers)}
        self.updates = updates(2.0, 10, end_s=MADE_S)
        self.now_s = 0.0
        self.is_held_up = False
        self.ordered: set[str] = set()

    def look(self, later_s: float = 0.5) -> list[str]:
        """Look as often as a supervisor does, until ``later_s`` have passed."""
        orders: list[str] = []
        end_s = self.now_s + later_s
        while self.now_s < end_s:
            orders += self.jump(min(1.0, end_s - self.now_s))
        return orders

    def jump(self, later_s: float) -> list[str]:
        """Look once after a time without a look, as when the ledger was away."""
        self.now_s += later_s
        wall_s = MADE_S + self.now_s
        orders = self.rollout.evaluate(self.now_s, wall_s, self.workers, self.updates, is_held_up=self.is_held_up)
        self.ordered |= {*orders}
        return orders

    def all_new(self, progress: int = 9) -> None:
        """Follow all orders at once, until updates are watched."""
        for _ in range(4 * len(self.workers)):
            if self.rollout.phase is not RolloutState.WATCHING:
                self.look()
                self.workers |= dict.fromkeys(self.ordered, replace(READY, progress=progress))
        assert self.rollout.phase is RolloutState.WATCHING


def test_one_worker_tries_the_version_before_the_others_take_it_one_at_a_time() -> None:
    fleet = Fleet(3)
    assert fleet.look() == ["reward-2"]
    assert fleet.look() == [], "it drains"
    fleet.workers["reward-2"] = STARTING
    assert fleet.look() == []
    fleet.workers["reward-2"] = replace(READY, progress=3)
    assert fleet.look() == [], "a piece of work is missing"
    fleet.workers["reward-2"] = replace(READY, progress=4)
    assert fleet.look() == ["reward-0"]
    assert fleet.look() == []
    fleet.workers["reward-0"] = STARTING
    assert fleet.look() == []
    fleet.workers["reward-0"] = READY
    assert fleet.look() == ["reward-1"]
    fleet.workers["reward-1"] = READY
    assert fleet.look() == [] and fleet.rollout.phase is RolloutState.WATCHING


def test_a_canary_without_work_is_good_after_its_limit() -> None:
    fleet = Fleet(2)
    fleet.look()
    fleet.workers["reward-1"] = READY
    assert fleet.look(30.0) == []
    assert fleet.look(1.0) == ["reward-0"]


def test_a_canary_that_holds_work_without_doing_it_is_not_good_however_long_it_lasts() -> None:
    fleet = Fleet(2)
    fleet.look()
    fleet.workers["reward-1"] = replace(READY, progress=3, held=1)
    assert fleet.look(1000.0) == [] and fleet.rollout.phase is RolloutState.CANARY
    fleet.workers["reward-1"] = replace(READY, progress=4, held=1)
    assert fleet.look() == ["reward-0"]


def test_a_worker_on_its_way_without_a_sign_of_life_fails_the_version() -> None:
    fleet = Fleet(2)
    fleet.look()
    for sign in range(5):
        fleet.workers["reward-1"] = replace(STARTING, sign=sign)
        assert fleet.look(59.0) == [] and fleet.rollout.phase is RolloutState.CANARY, "it loads"
    fleet.look(2.0)
    assert fleet.rollout.phase is RolloutState.FAILED
    assert fleet.rollout.failure == "reward-1 did not start with it: there was no sign of life for 60 s"


def test_a_drain_with_signs_of_life_may_last_and_one_without_fails_the_version() -> None:
    fleet = Fleet(2)
    assert fleet.look() == ["reward-1"]
    for sign in range(5):
        fleet.workers["reward-1"] = replace(OLD, sign=sign)
        assert fleet.look(59.0) == [] and fleet.rollout.phase is RolloutState.CANARY
    fleet.look(2.0)
    assert fleet.rollout.phase is RolloutState.FAILED


def test_no_limit_runs_out_while_nothing_can_be_seen() -> None:
    fleet = Fleet(2)
    fleet.look()
    fleet.workers["reward-1"] = STARTING
    fleet.jump(4000.0)
    assert fleet.rollout.phase is RolloutState.CANARY
    fleet.workers["reward-1"] = READY
    fleet.look()
    fleet.jump(4000.0)
    assert fleet.rollout.phase is RolloutState.CANARY, "it had no time for a piece of work"
    fleet.all_new()
    fleet.jump(4000.0)
    assert fleet.rollout.phase is RolloutState.WATCHING


@pytest.mark.parametrize("stage", ["canary", "rolling", "watching"])
def test_the_bad_end_of_a_worker_with_the_version_fails_it_until_it_is_settled(stage: str) -> None:
    fleet = Fleet(2)
    if stage == "watching":
        fleet.all_new()
    else:
        fleet.look()
        fleet.workers["reward-1"] = replace(READY, progress=9 if stage == "rolling" else 0)
        fleet.look()
    assert fleet.rollout.phase == stage
    assert fleet.rollout.ended("reward-1", "ended (failure): KeyError")
    assert fleet.rollout.phase is RolloutState.FAILED
    assert fleet.rollout.failure == "reward-1, which used it, ended (failure): KeyError"
    assert fleet.look() == []
    assert fleet.rollout.ended("reward-0", "ended"), "also of those that die meanwhile"


@pytest.mark.parametrize(
    ("every_s", "number", "loss", "phase"),
    [
        (2.0, 4, 0.5, RolloutState.SETTLED),
        (2.9, 4, 0.5, RolloutState.SETTLED),
        (3.1, 4, 0.5, RolloutState.FAILED),
        (3.1, 3, 0.5, RolloutState.WATCHING),
        (2.0, 1, math.nan, RolloutState.FAILED),
        (2.0, 1, math.inf, RolloutState.FAILED),
    ],
)
def test_rates_and_losses_before_and_after_decide(
    every_s: float, number: int, loss: float, phase: RolloutState
) -> None:
    fleet = Fleet(2)
    fleet.all_new()
    begin_s = MADE_S + fleet.now_s
    fleet.updates += [UpdateSample(begin_s + 1.0 + every_s * place, loss) for place in range(number)]
    fleet.look(15.0)
    assert fleet.rollout.phase is phase


def test_without_enough_updates_before_nothing_is_compared() -> None:
    fleet = Fleet(2)
    fleet.updates = fleet.updates[:3]
    fleet.all_new()
    fleet.updates += updates(50.0, 5, end_s=MADE_S + fleet.now_s + 300.0)
    fleet.look(301.0)
    assert fleet.rollout.phase is RolloutState.SETTLED
    alone = Fleet(2)
    alone.updates = alone.updates[:4]
    alone.all_new()
    alone.look(WATCH_LIMIT_S - 10.0)
    assert alone.rollout.phase is RolloutState.WATCHING
    alone.look(20.0)
    assert alone.rollout.phase is RolloutState.SETTLED


@pytest.mark.parametrize(
    ("every_s", "num_after", "fails_after_s"),
    [
        # four updates took 8 s before, and no time below 20 s is a standstill
        (2.0, 0, 20.0),
        (2.0, 3, 20.0),
        # four took 40 s
        (10.0, 0, 60.0),
        (10.0, 2, 60.0),
    ],
)
def test_a_rate_that_falls_to_nothing_fails_the_version(every_s: float, num_after: int, fails_after_s: float) -> None:
    fleet = Fleet(2)
    fleet.updates = updates(every_s, 10, end_s=MADE_S)
    fleet.all_new()
    fleet.updates += [UpdateSample(MADE_S + fleet.now_s + at_s, 0.5) for at_s in range(num_after)]
    fleet.look(fails_after_s - 2.0)
    assert fleet.rollout.phase is RolloutState.WATCHING
    fleet.look(4.0)
    assert fleet.rollout.phase is RolloutState.FAILED
    assert f"fell by a third or more: {num_after} of 4 in " in fleet.rollout.failure


def test_a_standstill_that_something_else_explains_is_not_held_against_the_version() -> None:
    fleet = Fleet(2)
    fleet.all_new()
    fleet.is_held_up = True
    fleet.look(1000.0)
    assert fleet.rollout.phase is RolloutState.WATCHING
    fleet.is_held_up = False
    fleet.look(18.0)
    assert fleet.rollout.phase is RolloutState.WATCHING
    fleet.look(4.0)
    assert fleet.rollout.phase is RolloutState.FAILED


def test_a_pause_that_the_run_had_before_is_no_alarm_and_an_outage_before_hides_none() -> None:
    fleet = Fleet(2)
    # an update in ten takes 80 s, as with an evaluation
    fleet.updates = [UpdateSample(MADE_S - at_s, 0.5) for at_s in (230, 220, 210, 130, 120, 110, 100, 90, 80, 70)]
    fleet.all_new()
    fleet.look(1.5 * (10 + 10 + 80 + 10) - 2.0)
    assert fleet.rollout.phase is RolloutState.WATCHING
    fleet.look(4.0)
    assert fleet.rollout.phase is RolloutState.FAILED
    resumed = Fleet(2)
    resumed.updates = [*updates(2.0, 6, end_s=MADE_S - 40_000.0), *updates(2.0, 4, end_s=MADE_S)]
    resumed.all_new()
    resumed.look(1.5 * (2.0 * 3 + 10 * 2.0) + 2.0)
    assert resumed.rollout.phase is RolloutState.FAILED, "the night that the run was down counts as ten updates"


@pytest.mark.parametrize("stage", ["canary", "rolling", "watching"])
def test_a_loss_that_is_not_finite_fails_a_version_that_a_worker_goes_by(stage: str) -> None:
    fleet = Fleet(2)
    fleet.updates[-1] = replace(fleet.updates[-1], loss=math.nan)
    fleet.look()
    assert fleet.rollout.phase is RolloutState.CANARY, "no worker goes by it yet"
    if stage == "watching":
        fleet.all_new()
    else:
        fleet.workers["reward-1"] = replace(READY, progress=9 if stage == "rolling" else 0)
        fleet.look()
    assert fleet.rollout.phase == stage
    fleet.updates.append(UpdateSample(MADE_S + fleet.now_s, math.nan))
    assert fleet.look() == [] and fleet.rollout.phase is RolloutState.FAILED


def test_one_slow_update_does_not_roll_back() -> None:
    fleet = Fleet(2)
    fleet.all_new()
    begin_s = MADE_S + fleet.now_s
    fleet.updates += [UpdateSample(begin_s + at_s, 0.5) for at_s in (1.0, 3.0, 16.0, 18.0)]
    fleet.look(19.0)
    assert fleet.rollout.phase is RolloutState.SETTLED


def test_a_lazy_version_comes_with_restarts_and_to_all_after_its_limit() -> None:
    fleet = Fleet(3, is_lazy=True)
    assert fleet.look(50.0) == []
    # one restarts by itself: it is the canary
    fleet.workers["reward-0"] = replace(READY, progress=9)
    assert fleet.look(10.0) == [] and fleet.rollout.phase is RolloutState.ROLLING
    assert fleet.look(30.0) == []
    assert fleet.look(20.0) == ["reward-1"], "the limit has passed"
    # it counts from the change, over restarts of the supervisor
    later = Fleet(3, is_lazy=True)
    later.rollout = new_rollout(now_s=0.0, made_s=MADE_S - 95.0, is_lazy=True)
    assert later.look(4.0) == [] and later.look(2.0) == ["reward-2"]
    begun = Fleet(3, is_lazy=True)
    begun.rollout = new_rollout(now_s=0.0, made_s=MADE_S - 95.0, is_lazy=True)
    begun.workers["reward-0"] = replace(READY, progress=9)
    assert begun.look(4.0) == [] and begun.rollout.phase is RolloutState.ROLLING
    assert begun.look(2.0) == ["reward-1"]


def test_the_way_back_takes_all_workers_at_once_and_blames_none() -> None:
    fleet = Fleet(3, is_way_back=True)
    fleet.workers["reward-1"] = READY
    assert fleet.look() == ["reward-0", "reward-2"]
    assert fleet.look(1000.0) == [] and not fleet.rollout.ended("reward-0", "ended")
    fleet.workers |= {"reward-0": READY, "reward-2": READY}
    fleet.look()
    assert fleet.rollout.phase is RolloutState.SETTLED


EVENTS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["drained", "ready", "works", "crash", "gone", "back", "wait"])),
    max_size=60,
)


@given(EVENTS, st.booleans())
def test_whatever_happens_workers_are_replaced_one_by_one_after_a_good_canary(
    events: list[tuple[int, str]], is_lazy: bool
) -> None:
    fleet = Fleet(4, is_lazy=is_lazy)
    pending: set[str] = set()
    has_proof = False
    deeds: dict[str, Callable[[CodedMember], CodedMember]] = {
        "drained": lambda one: one if one.is_new else STARTING,
        "ready": lambda one: replace(one, is_ready=True),
        "works": lambda one: replace(one, progress=one.progress + 2) if one.is_ready else one,
        "wait": lambda one: one,
    }
    for number, event in events:
        name = f"reward-{number}"
        if event == "gone":
            fleet.workers.pop(name, None)
        elif event == "back":
            fleet.workers.setdefault(name, STARTING)
        elif event == "crash":
            if name in fleet.workers and fleet.workers[name].is_new:
                fleet.rollout.ended(name, "ended")
                fleet.workers[name] = STARTING
        elif name in fleet.workers:
            fleet.workers[name] = deeds[event](fleet.workers[name])
        orders = fleet.look(1.0)
        good = [one for one in fleet.workers.values() if one.is_new and one.is_ready and one.progress >= 4]
        has_proof = has_proof or bool(good) or fleet.now_s > LIMITS.canary_timeout_s
        new = {name for name, one in fleet.workers.items() if one.is_new}
        pending = {
            name for name in pending if (name in fleet.workers and not fleet.workers[name].is_ready) or name not in new
        }
        pending &= fleet.workers.keys()
        assert len(orders) <= 1 and not (orders and fleet.rollout.is_over)
        for order in orders:
            assert order in fleet.workers and order not in new, "none is replaced twice"
            assert not pending - {order}, "the one before has come back"
            assert has_proof or not any(one.is_new for one in fleet.workers.values()), "only the canary goes unproved"
            assert not is_lazy or fleet.now_s >= LIMITS.lazy_limit_s or fleet.rollout.phase is not RolloutState.LAZY
        pending |= set(orders)
