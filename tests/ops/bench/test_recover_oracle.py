"""Claims about the comparison of standbys with cold starts and with an oracle: weights, weighted
times and tables, against values computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ops.bench.recover import __main__ as bench
from ops.bench.recover.oracle import (
    COLD,
    ORACLE,
    compared_with_oracle,
    oracle_bars,
    oracle_tables,
    strike_times,
    weighted_cases,
    weighted_s,
)
from ops.bench.recover.processes import PlannedRun, measure
from ops.bench.recover.trials import BASE, RunRecord, Trial, bars
from pipeline.supervisor.standbys.number import DAY_S
from protocol.errors import ConfigError

RATE = -math.log1p(-0.25)
"""Failures a day of a worker that fails within a day with probability 1/4."""
WEIGHTS = ((1, 0.75), (2, 0.24), (4, 0.01))


def test_the_weights_are_the_chances_of_a_number_of_losses_given_that_there_is_one() -> None:
    # of 3 workers exactly 0, 1, 2, 3 fail with 27, 27, 9, 1 of 64: within 2 are 63/64 < 0.99
    assert weighted_cases(3, RATE, DAY_S) == tuple(
        (k, pytest.approx(share / 37)) for k, share in ((1, 27), (2, 9), (3, 1))
    )
    # half the chance in half the time: 1 - (1 - p)^(1/2) = 0.134, so 2 of 3 suffice with 0.9976
    p = 1.0 - math.sqrt(0.75)
    one, two = 3 * p * (1 - p) ** 2, 3 * p * p * (1 - p)
    cases = weighted_cases(3, RATE, DAY_S / 2)
    assert [size for size, _ in cases] == [1, 2, 3]
    assert [weight for _, weight in cases] == pytest.approx([0.99 * one / (one + two), 0.99 * two / (one + two), 0.01])
    assert math.fsum(weight for _, weight in cases) == pytest.approx(1.0)


def test_a_catastrophe_is_a_fourth_of_the_role_or_one_more_than_the_standbys() -> None:
    published = 2.3 / 1000
    assert [size for size, _ in weighted_cases(128, published, DAY_S)] == [1, 2, 32]
    assert weighted_cases(8, published, DAY_S) == ((1, pytest.approx(0.99)), (2, 0.01))
    assert weighted_cases(8, published, DAY_S, 8)[-1] == (8, 0.01)
    assert weighted_cases(1, published, DAY_S) == ((1, 1.0),), "one worker alone"
    for struck in (1, 9):
        with pytest.raises(ConfigError, match=f"--catastrophe is {struck}, where 1 standbys suffice for 8 workers"):
            weighted_cases(8, published, DAY_S, struck)
    with pytest.raises(ConfigError, match="expected a rate above 0"):
        weighted_cases(8, 0.0, DAY_S)


def struck(number: int, *backs: float | None, role: str = "generator", onset_s: float = 100.0) -> list[Trial]:
    """Trials of one strike: workers that are struck 0.5 s after one another."""
    made = Trial(role, "kill", "", 0.0, 0.0, strike=number)
    field = "committed_s" if role == "learner" else "worked_s"
    return [
        replace(made, target=f"{role}-{index}", onset_s=onset_s + 0.5 * index, **{field: back})
        for index, back in enumerate(backs)
    ]


def run(label: str, *strikes: list[Trial], role: str = "generator", weights: object = WEIGHTS) -> RunRecord:
    trials = tuple(trial for trials in strikes for trial in trials)
    own = RunRecord(label, role, 0, (), 1.0, 100.0, 100, 1.0, None, {}, (), True, trials)
    return replace(own, weights=weights)


def test_a_strike_lasts_from_its_first_onset_until_all_are_back() -> None:
    one = run(BASE, struck(0, 2.0), struck(1, 2.0, 3.0), struck(2, 4.0))
    other = run(BASE, struck(0, 9.0, 1.0), struck(1, None, 1.0))
    assert strike_times([one, other]) == {1: [2.0, 4.0], 2: [3.5, 9.0, math.inf]}


def test_a_worker_is_back_by_its_own_log_and_a_learner_by_its_update() -> None:
    seen = [replace(trial, useful_s=1.0, committed_s=4.0, worked_s=3.0) for trial in struck(0, None)]
    assert strike_times([run(BASE, seen)]) == {1: [3.0]}
    learner = [replace(trial, role="learner") for trial in seen]
    assert strike_times([run(BASE, learner, role="learner")]) == {1: [4.0]}


def test_a_weighted_time_is_the_sum_of_the_means_by_their_weights() -> None:
    times = {1: [1.0, 3.0], 2: [5.0], 4: [100.0], 7: [math.inf]}
    assert weighted_s(times, WEIGHTS) == pytest.approx(0.75 * 2.0 + 0.24 * 5.0 + 0.01 * 100.0)
    assert weighted_s({1: [1.0], 2: [5.0]}, WEIGHTS) == math.inf, "a case that was not struck"
    assert weighted_s({**times, 2: [5.0, math.inf]}, WEIGHTS) == math.inf, "a worker that did not come back"


def fleets(base_s: float) -> list[RunRecord]:
    weights = ((1, 0.99), (2, 0.01))
    return [
        run(COLD, struck(0, 40.0), struck(1, 40.0, 39.5), weights=weights),
        run(BASE, struck(0, base_s), struck(1, base_s, 39.5), weights=weights),
        run(ORACLE, struck(0, 2.0), struck(1, 2.0, 1.5), weights=weights),
    ]


def test_standbys_are_compared_with_cold_starts_and_with_the_oracle() -> None:
    (found,) = compared_with_oracle(fleets(2.0))
    # 0.99 * 2 + 0.01 * 40 = 2.38
    assert [found.weighted_s[label].value for label in (COLD, BASE, ORACLE)] == pytest.approx([40.0, 2.38, 2.0])
    assert found.sooner.value == pytest.approx(40.0 / 2.38) and found.longer.value == pytest.approx(0.19)
    assert (found.sooner.low, found.sooner.high) == (found.sooner.value, found.sooner.value), "one strike of each"
    table = oracle_tables(fleets(2.0))
    assert "| generator | as configured | 2 | 0.0100 | 1 | 40.00 | 40.00 to 40.00 |" in table
    assert (
        "| generator | 40 (40 to 40) | 2.38 (2.38 to 2.38) | 2 (2 to 2) | 16.8 (16.8 to 16.8) | 19 (19 to 19) % |"
        in table
    )
    assert oracle_bars(fleets(2.0)) == {
        "generator: at least 15 times sooner than cold": True,
        "generator: at most 5% longer than the oracle": False,
    }
    assert list(oracle_bars(fleets(1.7)).values()) == [True, True], "0.99 * 1.7 + 0.4 is 4 % above 2"
    assert list(oracle_bars(fleets(3.0)).values()) == [False, False]


def test_an_interval_spans_what_other_draws_of_the_strikes_would_give() -> None:
    runs = fleets(2.0)
    runs.append(run(BASE, struck(0, 4.0), weights=runs[0].weights))
    (found,) = compared_with_oracle(runs)
    configured = found.weighted_s[BASE]
    # both strikes of one worker took 2 s, or both 4 s
    assert (configured.low, configured.value, configured.high) == pytest.approx((2.38, 3.37, 4.36))
    assert compared_with_oracle(runs) == compared_with_oracle(runs), "draws are seeded"


def test_a_fleet_that_was_not_back_holds_no_bar_and_a_missing_fleet_compares_nothing() -> None:
    cold, base, foretold = fleets(2.0)
    lost = run(BASE, struck(0, None), struck(1, 2.0, 2.0), weights=base.weights)
    assert list(oracle_bars([cold, lost, foretold]).values()) == [False, False]
    assert "not seen" in oracle_tables([cold, lost, foretold])
    never = run(COLD, struck(0, None), struck(1, 2.0, 2.0), weights=base.weights)
    assert next(iter(oracle_bars([never, base, foretold]).values())) is False, "that says nothing of a ratio"
    assert compared_with_oracle([cold, base]) == [] and oracle_tables([cold, base]) == ""


def test_single_repairs_of_a_comparison_have_no_bars() -> None:
    assert not [bar for bar in bars(fleets(2.0)) if "at work again" in bar]


def plans(*arguments: str) -> list[PlannedRun]:
    found: list[PlannedRun] = []

    def noted(plan: PlannedRun, on_trial: object) -> RunRecord:
        found.append(plan)
        return run(plan.label, role=str(plan.role))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "measure", noted)
        patch.chdir(Path.cwd())
        bench.main(["--oracle", "--minutes", "5", *arguments])
    return found


def test_the_three_fleets_of_a_role_meet_the_same_faults_and_differ_in_standbys() -> None:
    cold, base, foretold = plans("--role", "generator", "--set", "emulation.load_s=10", "--catastrophe", "3")
    assert [cold.label, base.label, foretold.label] == ["cold", "as configured", "oracle"]
    assert cold.sizes == base.sizes == foretold.sizes and set(cold.sizes) == {1, 3}
    assert cold.onsets == base.onsets == foretold.onsets and cold.seed == base.seed == foretold.seed
    assert [plan.is_foretold for plan in (cold, base, foretold)] == [False, False, True]
    assert cold.settings == ("emulation.load_s=10", "fleet.standby=0", "fleet.standby_learner=off")
    assert base.settings == ("fleet.standby=1", "emulation.load_s=10")
    assert foretold.settings == ("emulation.load_s=10", "fleet.standby=3")
    own = plans("--role", "generator", "--set", "fleet.standby=4")
    assert [plan.settings[-1] for plan in own] == ["fleet.standby_learner=off", "fleet.standby=4", "fleet.standby=4"]


def test_the_learner_is_struck_alone_and_has_a_standby_of_its_own() -> None:
    cold, base, foretold = plans("--role", "learner")
    assert set(cold.sizes) == {1} and cold.weights == ((1, 1.0),)
    assert base.settings == foretold.settings == ("fleet.standby_learner=on",)
    assert foretold.is_foretold and "fleet.standby_learner=off" in cold.settings


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--against", "fleet.standby=1"], "--oracle compares fleets of its own"),
        (["--rate", "0"], "--rate is 0; expected a finite number above 0"),
        (["--window", "-1"], "--window is -1"),
        (["--role", "generator", "--catastrophe", "9"], "--catastrophe is 9"),
        (["--role", "generator", "--mean", "290", "--minutes", "1"], "faults arrive in 1 minutes; expected at least 2"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused_before_a_fleet_starts(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plans(*arguments)


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.timeout(400)
def test_an_oracle_strikes_once_standbys_are_ready_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bench.ROOT)
    small = ("emulation.step_s=0.2", "emulation.decode_base_s=0.01", "fleet.generator=3", "fleet.reward=1",
             "fleet.reference=1", "observer.enabled=false", "emulation.load_s=8", "fleet.standby=2")  # fmt: skip
    weights = ((1, 0.99), (2, 0.01))
    plan = PlannedRun(ORACLE, bench.Role.GENERATOR, ("kill",), (1.0,), 2, 10.0, 6.0, small, (2,), True, weights)
    found = measure(plan)
    first, second = found.trials
    assert {first.strike, second.strike} == {0} and first.target != second.target
    assert first.put_off_s > 0.0, "a load takes longer than the warm-up"
    assert found.balances and found.weights == weights
    ((back_s,),) = strike_times([found]).values()
    assert back_s < 8.0, "neither loads anew"
    assert first.worked_s is not None and first.useful_s is not None and first.worked_s <= first.useful_s + 0.05
