"""Claims about costs that are measured in a run: work of known costs gives these costs."""

from __future__ import annotations

import random

import msgspec
import pytest

from pipeline.config.schema import RunConfig
from pipeline.observability.fleet_history import FleetRow, RoleTime
from pipeline.observability.history import UpdateRow
from pipeline.plan.profile import non_negative, profiled
from pipeline.process.work import ServiceSums
from protocol.errors import ConfigError

PROMPT = 20.0


def update(number: int, responses: int, tokens: int, *, compute_s: float) -> UpdateRow:
    return UpdateRow(
        update=number, policy_version=number, at_s=10.0 * number, num_trajectories=responses, num_response_tokens=tokens,
        num_trained_tokens=tokens, reward=0.0, accuracy=0.0, response_length=0.0, staleness_mean=0.0, staleness_max=0,
        num_segments_mean=1.0, loss=0.0, grad_norm=0.0, learning_rate=0.0, num_refused_steps=0, wait_s=1.5, logprob_s=0.0,
        step_s=compute_s, publish_s=0.25, prepare_s=0.1, record_s=0.2, save_s=0.3, other_s=0.05,
    )  # fmt: skip


def config(**algorithm: object) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": ["d.jsonl"]}, "algorithm": algorithm})


def fleet(*generator: ServiceSums, judged: ServiceSums, learned: ServiceSums) -> list[FleetRow]:
    return [
        FleetRow(
            10.0 + 5.0 * number,
            5.0,
            {
                "generator": RoleTime(2.0, {"compute": one.seconds / 10.0, "weights": 0.2}, service={"sampling": one}),
                "reward": RoleTime(1.0, {"compute": 1.0}, service={"judging": judged}),
                "learner": RoleTime(1.0, {"compute": 1.0}, service={"update": learned}),
            },
        )
        for number, one in enumerate(generator, 1)
    ]


def a_run(num_updates: int = 12) -> tuple[list[UpdateRow], list[FleetRow]]:
    draws = random.Random(0)
    updates, sizes = list[UpdateRow](), [(draws.randint(40, 80), draws.randint(1000, 4000)) for _ in range(num_updates)]
    for number, (responses, tokens) in enumerate(sizes, 1):
        seconds = 2 * 0.5 + 0.01 * responses + 2e-3 * (tokens + PROMPT * responses)
        # the first one compiles
        updates.append(update(number, responses, tokens, compute_s=seconds + (100.0 if number == 1 else 0.0)))
    steps = [draws.randint(100, 200) for _ in range(20)]
    tokens = [step * draws.randint(4, 32) for step in steps]
    sampled = [ServiceSums(s, 0.01 * s + 5e-4 * t, t) for s, t in zip(steps, tokens, strict=True)]
    mean = sum(t + PROMPT * r for r, t in sizes[1:]) / (num_updates - 1)
    return updates, fleet(*sampled, judged=ServiceSums(30, 30 * 0.02, 900.0), learned=ServiceSums(1, 9.0, mean))


def test_the_costs_of_known_work_are_found_again() -> None:
    updates, rows = a_run()
    found = profiled(config(num_minibatches=2), updates, rows, "a run")
    learner, generator = found.costs.learner, found.costs.generator
    assert (learner.base_s, learner.sequence_s, learner.token_s) == pytest.approx((0.5, 0.01, 2e-3), rel=1e-6)
    assert (learner.publish_s, learner.update_s) == pytest.approx((0.25, 0.65))
    assert (generator.decode_base_s, generator.decode_sequence_s) == pytest.approx((0.01, 5e-4), rel=1e-6)
    tokens, steps = (
        sum(getattr(row.roles["generator"].service["sampling"], n) for row in rows) for n in ("size", "pieces")
    )
    assert generator.mean_live == pytest.approx(tokens / steps)
    assert found.prompt_tokens == pytest.approx(PROMPT)
    assert found.wait_s == pytest.approx(1.5)
    assert found.generators == 2
    judge = found.costs.reward
    assert judge is not None and judge.batch_s(30, 900.0) == pytest.approx(0.6)
    assert found.costs.reference is None
    # a fifth of 100 s, over twelve versions
    assert found.costs.weights.load_s == pytest.approx(20.0 / 12)


def test_what_happens_before_the_first_update_and_after_the_last_does_not_count() -> None:
    updates, rows = a_run()
    slow = {
        "generator": RoleTime(2.0, {"compute": 1.0}, tokens=10**6, service={"sampling": ServiceSums(9, 900.0, 9.0)})
    }
    outside = [FleetRow(5.0, 5.0, slow), *rows, FleetRow(500.0, 5.0, slow)]
    assert profiled(config(), updates, outside, "a run") == profiled(config(), updates, rows, "a run")


def test_what_a_generator_does_between_its_engines_turns_is_its_work_too() -> None:
    updates, rows = a_run()
    slower = list[FleetRow]()
    for row in rows:
        service = row.roles["generator"].service
        computing = {"compute": service["sampling"].seconds / 4.0}
        slower.append(
            FleetRow(row.at_s, row.span_s, row.roles | {"generator": RoleTime(1.0, computing, service=service)})
        )
    plain, found = (profiled(config(), updates, each, "a run").costs.generator for each in (rows, slower))
    assert found.decode_base_s == pytest.approx(1.25 * plain.decode_base_s)


def test_the_chunks_of_a_response_are_those_that_the_reference_saw() -> None:
    updates, rows = a_run()
    mean = sum(row.num_response_tokens for row in updates[1:]) / sum(row.num_trajectories for row in updates[1:])
    extra = {
        "generator": RoleTime(2.0, {}, tokens=round(100 * mean), service={"sampling": ServiceSums(100, 1.0, 100.0)}),
        "reference": RoleTime(1.0, {}, service={"scoring": ServiceSums(170, 3.0, 9.0)}),
    }
    found = profiled(config(), updates, [*rows, FleetRow(100.0, 5.0, extra)], "a run")
    assert found.chunks == pytest.approx(1.7, rel=0.01)
    assert found.lengths.chunks == found.chunks


def test_the_trained_share_is_by_rates_since_intervals_reach_beyond_the_updates() -> None:
    updates, rows = a_run()
    tokens, seconds = (sum(getattr(row, name) for row in updates[1:]) for name in ("num_response_tokens", "seconds"))
    # twice as many tokens a second are written as trained, in intervals of any length
    for span_s in (5.0, 7.0):
        rate = 2.0 * tokens / seconds
        written = [
            FleetRow(
                row.at_s,
                span_s,
                {**row.roles, "generator": RoleTime(2.0, {}, round(rate * span_s), 0, row.roles["generator"].service)},
            )
            for row in rows
        ]
        assert profiled(config(), updates, written, "a run").trained_share == pytest.approx(0.5, rel=1e-3)


def test_a_learner_is_busy_whenever_it_does_not_wait_for_units() -> None:
    updates, rows = a_run()
    one, other = (
        profiled(config(), [msgspec.structs.replace(row, wait_s=wait_s) for row in updates], rows, "a run")
        for wait_s in (0.0, 3.0)
    )
    seconds = sum(row.seconds - row.wait_s for row in updates[1:])
    assert one.costs.busy - other.costs.busy == pytest.approx(3.0 * 11 / (seconds + 3.0 * 11))


def test_predictions_of_a_run_whose_updates_are_all_alike_are_right_for_such_updates() -> None:
    updates = [update(number, 64, 2000, compute_s=3.0 + 0.01 * (number % 2)) for number in range(1, 9)]
    _, rows = a_run()
    costs = profiled(config(), updates, rows, "a run").costs
    tokens = 2000 + 64 * profiled(config(), updates, rows, "a run").prompt_tokens
    assert costs.learner.compute_s(64, tokens) == pytest.approx(3.005, abs=0.01)


def test_no_coefficient_is_negative() -> None:
    # the plain least squares of these has a base of -1
    assert non_negative([(1, 1), (1, 2), (1, 3)], [0.0, 1.0, 2.0]) == pytest.approx([0.0, 8 / 14])
    assert non_negative([(1, 1), (1, 2)], [-1.0, -2.0]) == [0.0, 0.0]


def test_a_run_with_too_few_updates_is_refused() -> None:
    updates, rows = a_run(num_updates=4)
    with pytest.raises(ConfigError, match="has 3 updates after its first; expected 4 or more"):
        profiled(config(), updates, rows, "a run")


def test_a_run_that_did_not_record_its_generators_work_is_refused() -> None:
    updates, _ = a_run()
    with pytest.raises(ConfigError, match="no records of its generators' work"):
        profiled(config(), updates, [], "a run")
