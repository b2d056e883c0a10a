"""Simulated runs: closed forms, the promises of the run's own rules, and what holds a run up."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig
from pipeline.ledger.validation import surplus
from pipeline.plan.costs import Costs, GeneratorCosts, LearnerCosts, LedgerCosts, ScorerCosts, WeightsCosts, WireCosts
from pipeline.plan.simulate.ledger import Versions
from pipeline.plan.simulate.prediction import Prediction
from pipeline.plan.simulate.run import Responses, simulate
from protocol.errors import ConfigError
from protocol.ids import TrajectoryId

STEP_S = 0.01
LEARN_S = 3.0
COSTS = Costs(
    generator=GeneratorCosts(decode_base_s=STEP_S),
    learner=LearnerCosts(base_s=LEARN_S),
    reward=ScorerCosts(),
    reference=ScorerCosts(),
    value=ScorerCosts(),
    weights=WeightsCosts(travel_base_s=0.0),
    ledger=LedgerCosts(chunk_s=0.0, token_s=0.0, worker_share=0.0, answer_s=0.0),
    wire=WireCosts(message_s=0.0, token_s=0.0),
)
"""Work alone; all that goes between costs nothing."""


def run_config(**changes: Any) -> RunConfig:
    settings = {
        "model.path": "ops/demo/tiny_model",
        "data.train": '["x"]',
        "algorithm.name": "grpo",
        "algorithm.group_size": 4,
        "algorithm.groups_per_update": 4,
        "algorithm.num_minibatches": 1,
        "generation.num_slots": 8,
        "generation.window_tokens": 400,
        "generation.max_response_tokens": 400,
        "fleet.generator": 2,
        "staleness.eta": 0,
    }
    return load_config([], [f"{key}={value}" for key, value in (settings | changes).items()])


def constant(length: int) -> Responses:
    return Responses(lambda _: length)


def predict(config: RunConfig, responses: Responses, costs: Costs = COSTS, updates: int = 12) -> Prediction:
    return simulate(config, costs, responses, num_updates=updates, warm_up=updates // 3)


def changed(costs: Costs, section: str, **values: float) -> Costs:
    return msgspec.structs.replace(costs, **{section: msgspec.structs.replace(getattr(costs, section), **values)})


def test_with_a_barrier_an_update_takes_its_rollout_and_its_step():
    found = predict(run_config(), constant(200))
    assert found.update_s == pytest.approx(200 * STEP_S + LEARN_S, rel=0.02)
    assert (found.staleness_max, found.bottleneck) == (0, "staleness")
    assert found.tokens_per_s == pytest.approx(16 * 200 / found.update_s)


def test_a_slow_learner_is_never_without_a_batch_when_staleness_allows_it():
    found = predict(run_config(**{"staleness.eta": 2}), constant(100))
    assert found.update_s == pytest.approx(LEARN_S, rel=0.001)
    assert (found.bottleneck, found.staleness_max) == ("learner", 2)
    assert found.use["learner"] == pytest.approx(1.0, abs=0.001)


def test_slow_generators_are_always_full_when_staleness_allows_it():
    found = predict(run_config(**{"staleness.eta": 4, "generation.num_slots": 2}), constant(400), updates=30)
    assert found.update_s == pytest.approx(16 * 400 * STEP_S / (2 * 2), rel=0.01)
    assert found.bottleneck == "generator"
    assert found.use["generator"] > 0.99


def test_a_decode_step_costs_as_much_as_it_has_sequences():
    costs = changed(COSTS, "generator", decode_sequence_s=STEP_S)
    alone = predict(run_config(**{"fleet.generator": 16, "generation.num_slots": 1}), constant(200), costs)
    together = predict(run_config(**{"fleet.generator": 2}), constant(200), costs)
    assert alone.update_s - LEARN_S == pytest.approx(200 * 2 * STEP_S, rel=0.03)
    assert together.update_s - LEARN_S == pytest.approx(200 * 9 * STEP_S, rel=0.03)


def test_a_slow_scorer_holds_the_run_up_and_its_mailboxes_stay_bounded():
    costs = changed(COSTS, "reward", piece_s=1.0)
    config = run_config(**{"staleness.eta": 4, "wire.high_water_mark": 1, "fleet.reward": 2})
    found = predict(config, constant(50), costs)
    assert found.update_s == pytest.approx(16 * 1.0 / 2, rel=0.02)
    assert found.bottleneck == "reward"
    writers = 2 * 16
    assert all(moment.mailboxes["reward"] <= 2 * 2 * 2 + writers + 2 * 2 * 8 for moment in found.moments)


def test_a_ledger_that_answers_too_few_chunks_holds_the_run_up():
    costs = changed(COSTS, "ledger", chunk_s=0.5)
    found = predict(run_config(**{"staleness.eta": 4}), constant(50), costs)
    assert found.update_s == pytest.approx(16 * 0.5, rel=0.02)
    assert found.bottleneck == "ledger"


def test_weights_that_travel_long_make_an_update_that_waits_for_them_longer():
    slow = changed(COSTS, "weights", num_bytes=2e9, bytes_per_s=1e9)
    assert predict(run_config(), constant(200), slow).update_s == pytest.approx(
        predict(run_config(), constant(200)).update_s + 2.0, rel=0.01
    )


def test_groups_of_one_accuracy_are_dropped_and_sampled_again():
    config = run_config(**{"algorithm.name": "dapo", "algorithm.dynamic_sampling": "true", "staleness.eta": 2})
    every_third = Responses(lambda _: 100, accuracy=lambda name: float(name.group % 3 > 0 and name.member % 2))
    found = predict(config, every_third, updates=30)
    assert found.dropped["no_signal"] == pytest.approx(30 * 4 / 2, abs=8)
    assert found.sampled_per_s == pytest.approx(1.5 * found.tokens_per_s, rel=0.1)


def test_between_two_windows_means_that_no_window_has_two_versions():
    config = run_config(**{"staleness.eta": 2, "generation.window_tokens": 100, "generation.swap": '"window"'})
    between = predict(config, constant(400), updates=20)
    mixed = predict(run_config(**{"staleness.eta": 2, "generation.window_tokens": 100}), constant(400), updates=20)
    assert between.staleness != mixed.staleness
    assert between.staleness_max <= 2


def test_a_run_is_the_same_each_time():
    config = run_config(**{"staleness.eta": 1})
    assert predict(config, drawn(3, 400)) == predict(config, drawn(3, 400))


def drawn(seed: int, most: int) -> Responses:
    def length(name: TrajectoryId) -> int:
        return 1 + int(most * random.Random(seed * 7919 + name.group * 64 + name.member).random() ** 3)

    def accuracy(name: TrajectoryId) -> float:
        return float(random.Random(seed + name.group * 64 + name.member).random() < (name.group % 5) / 4)

    return Responses(length, accuracy)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1000),
    algorithm=st.sampled_from(["grpo", "dapo", "reinforce++", "tppo"]),
    eta=st.integers(0, 3),
    late=st.sampled_from(["wait", "drop"]),
    oversampling=st.sampled_from([1.0, 1.5]),
    window=st.sampled_from([40, 160, 400]),
    slots=st.integers(1, 12),
    generators=st.integers(1, 4),
    swap=st.sampled_from(["token", "window"]),
    learn_s=st.sampled_from([0.05, 1.0, 5.0]),
    score_s=st.sampled_from([0.0, 0.02]),
    travel_s=st.sampled_from([0.0, 0.5]),
)
def test_staleness_never_exceeds_its_bound_and_the_buffer_never_its_cap(
    seed: int,
    algorithm: str,
    eta: int,
    late: str,
    oversampling: float,
    window: int,
    slots: int,
    generators: int,
    swap: str,
    learn_s: float,
    score_s: float,
    travel_s: float,
):
    config = run_config(
        **{
            "algorithm.name": algorithm,
            "algorithm.oversampling": oversampling,
            "staleness.eta": max(eta, 1) if algorithm == "tppo" else eta,
            "staleness.late": f'"{late}"',
            "generation.window_tokens": window,
            "generation.num_slots": slots,
            "generation.swap": f'"{swap}"',
            "fleet.generator": generators,
        }
    )
    costs = changed(changed(COSTS, "learner", base_s=learn_s), "reward", piece_s=score_s)
    found = predict(config, drawn(seed, 400), changed(costs, "weights", travel_base_s=travel_s), updates=8)
    eta = config.staleness.eta
    assert all(age <= eta for update in found.updates for age in update.staleness)
    assert all(age >= 0 for update in found.updates for age in update.staleness)
    cap = (eta + 1) * 16 + surplus(oversampling, 16)
    assert 0 < found.most_in_flight <= cap
    trained = 16 if algorithm != "tppo" else found.updates[-1].num_sequences
    assert all(update.num_sequences == trained for update in found.updates if algorithm != "tppo")


def test_a_ledger_that_is_full_of_trained_units_is_freed_by_an_early_checkpoint_as_in_a_run():
    settings: dict[str, Any] = {
        "algorithm.groups_per_update": 256,
        "algorithm.group_size": 16,
        "checkpoint.every_updates": 100,
        "ledger.max_memory_mb": 32,
        "generation.num_slots": 512,
    }
    found = predict(run_config(**settings), constant(400), updates=6)
    assert found.num_updates == 6
    assert max(update.wait_s for update in found.updates) > 5.0 + 400 * STEP_S


def test_versions_are_counted_by_the_step_at_which_they_came():
    versions = Versions()
    versions.swap(10, 1)
    versions.swap(10, 2)
    versions.swap(25, 3)
    assert versions.segments(0, 30) == [(0, 10), (2, 15), (3, 5)]
    assert versions.segments(12, 20) == [(2, 8)]
    assert versions.segments(25, 26) == [(3, 1)]


def test_roles_without_workers_or_costs_and_environments_are_refused():
    with pytest.raises(ConfigError, match=r"have no reward, but the run has that role: add \[reward\]"):
        predict(run_config(), constant(10), msgspec.structs.replace(COSTS, reward=None))
    with pytest.raises(ConfigError, match=r"fleet\.reward is 0: nobody would do the work of that role"):
        predict(run_config(**{"fleet.reward": 0, "wire.transport": "tcp"}), constant(10))
    with pytest.raises(ConfigError, match=r"fleet\.generator is 0: nobody would sample"):
        predict(run_config(**{"fleet.generator": 0, "wire.transport": "tcp"}), constant(10))
    with pytest.raises(ConfigError, match="5 updates of which 5 are warm-up"):
        simulate(run_config(), COSTS, constant(10), num_updates=5, warm_up=5)


def test_responses_are_cut_at_the_runs_limit():
    found = predict(run_config(), replace(constant(10), length=lambda _: 10_000))
    assert found.updates[0].num_tokens == 16 * 400
