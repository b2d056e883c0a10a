"""Claims about the rule on rewards: a frozen or shifted scorer is named, chance and idleness are
not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipeline.fleet.peers.frame import Finding, Frame
from pipeline.fleet.peers.watcher import Watch

Reward = Callable[[int, float, np.random.Generator], float]


def watched(
    wrong: Reward, *, seconds: int = 360, num: int = 6, step_s: float = 1.0, is_idle: bool = False
) -> list[Finding]:
    """Return the findings where scorer 2, or the last one, has these rewards from 200 s on."""
    draw = np.random.default_rng(11)
    workers, done = tuple(f"reward-{at}" for at in range(num)), np.zeros(num)
    watch, found = Watch(), list[Finding]()
    values = np.zeros((num, 2), np.float32)
    for at in range(int(seconds / step_s)):
        time_s = at * step_s
        for worker in range(num):
            is_wrong = worker == min(2, num - 1) and time_s >= 200.0
            if not (is_wrong and is_idle):
                done[worker] += 4
            values[worker, 0] = wrong(4, time_s, draw) if is_wrong else healthy(4, time_s, draw)
            values[worker, 1] = done[worker]
        found += watch.tick(Frame(time_s, workers, ("reward",) * num, ("reward_mean", "done"), values.copy()))
    return [one for one in found if "reward" in one.sentence]


def healthy(pieces: int, time_s: float, draw: np.random.Generator) -> float:
    """Return the mean of verdicts, which become rarer with time for all."""
    return float(draw.binomial(pieces, 0.5 - time_s / 2000.0)) / pieces


def test_a_scorer_that_always_gives_the_same_reward_is_named_within_a_minute() -> None:
    found = watched(lambda *_: 0.5)
    assert [(one.worker, one.kind, one.metric) for one in found] == [("reward-2", "reward", "reward_mean")]
    assert found[0].alarm_s <= 260.0
    assert "rewards are all 0.5" in found[0].sentence


def test_a_scorer_whose_rewards_rise_against_its_peers_is_named() -> None:
    found = watched(lambda pieces, at, draw: min(1.0, healthy(pieces, at, draw) + 0.35))
    assert [(one.worker, one.kind) for one in found] == [("reward-2", "reward")]
    assert found[0].alarm_s <= 310.0
    assert "standard errors; the limit is 6" in found[0].sentence


def test_of_two_scorers_the_one_that_always_gives_the_same_reward_is_named() -> None:
    for constant in (0.5, 1.0):
        found = watched(lambda *_, constant=constant: constant, num=2)
        assert [(one.worker, one.kind) for one in found] == [("reward-1", "reward")]
        assert found[0].alarm_s <= 230.0


def test_of_two_scorers_the_one_whose_own_rewards_have_changed_is_named() -> None:
    found = watched(lambda _, __, draw: 0.75 + 0.25 * float(draw.integers(2)), num=2)
    assert [(one.worker, one.kind) for one in found] == [("reward-1", "reward")]
    assert found[0].alarm_s <= 310.0
    assert "standard errors; the limit is 6" in found[0].sentence


def test_rewards_that_fall_for_all_scorers_blame_none() -> None:
    for num in (2, 6):
        assert watched(healthy, seconds=700, num=num) == []


def test_a_scorer_without_new_work_repeats_its_reward_and_is_not_frozen() -> None:
    assert watched(lambda *_: 0.5, is_idle=True) == []


def test_a_frozen_scorer_is_named_in_a_table_of_fifteen_seconds() -> None:
    assert [one.worker for one in watched(lambda *_: 0.5, seconds=900, step_s=15.0)] == ["reward-2"]


def test_five_lucky_responses_of_a_scorer_that_lacks_work_are_no_finding() -> None:
    draw, num = np.random.default_rng(3), 24
    workers, done = tuple(f"reward-{at}" for at in range(num)), np.zeros(num)
    watch, found = Watch(), list[Finding]()
    for time_s in range(400):
        # from 300 s on the scorers have a response in fifteen seconds: reward 0 or 1
        pieces = np.full(num, 7) if time_s < 300 else (np.arange(num) + time_s) % 15 == 0
        reward = np.full(num, np.nan)
        np.divide(draw.binomial(pieces.astype(int), 0.28), pieces, out=reward, where=pieces > 0)
        reward[5] = 1.0 if time_s >= 300 and pieces[5] else reward[5]
        done += pieces
        values = np.column_stack([reward, done]).astype(np.float32)
        found += watch.tick(Frame(float(time_s), workers, ("reward",) * num, ("reward_mean", "done"), values))
    assert found == []


def test_a_table_of_rewards_alone_is_judged_by_their_rule() -> None:
    draw, watch, found = np.random.default_rng(5), Watch(), list[Finding]()
    workers = tuple(f"reward-{at}" for at in range(6))
    for time_s in range(300):
        values = (draw.binomial(8, 0.5, (6, 1)) / 8.0).astype(np.float32)
        values[2] = 0.5 if time_s >= 200 else values[2]
        found += watch.tick(Frame(float(time_s), workers, ("reward",) * 6, ("reward_mean",), values))
    assert [(one.worker, one.kind) for one in found] == [("reward-2", "reward")]
