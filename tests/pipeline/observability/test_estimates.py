"""Claims about avg@k, pass@k, their intervals, and the best evaluation."""

from __future__ import annotations

import itertools
import random

import pytest

from pipeline.observability.estimates import BestEvaluation, average, pass_at
from tests.pipeline.observability.rows import evaluation_row


@pytest.mark.parametrize(("right", "n", "k"), [(0, 4, 2), (1, 4, 2), (2, 5, 3), (4, 5, 2), (5, 5, 1)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_responses_with_a_right_one(right: int, n: int, k: int) -> None:
    accuracies = [1.0] * right + [0.5] * (n - right)
    choices = list(itertools.combinations(accuracies, k))
    found = pass_at({0: accuracies}, k)
    assert found is not None
    assert found.value == pytest.approx(sum(1.0 in choice for choice in choices) / len(choices))


def test_pass_at_k_leaves_out_prompts_with_too_few_responses() -> None:
    found = pass_at({0: [1.0, 1.0], 1: [0.0]}, 2)
    assert found is not None
    assert found.value == 1.0
    assert pass_at({0: [1.0]}, 2) is None


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_an_interval_is_never_empty_and_stays_between_0_and_1(value: float) -> None:
    for num_prompts, k in ((1, 1), (1, 8), (5, 1), (100, 4)):
        found = average({prompt: [value] * k for prompt in range(num_prompts)})
        assert 0.0 <= found.low <= found.value <= found.high <= 1.0
        assert found.high - found.low > 0.5 / (num_prompts + 4)


def test_more_responses_of_one_prompt_are_no_more_prompts() -> None:
    one = average({prompt: [float(prompt % 2)] for prompt in range(20)})
    many = average({prompt: [float(prompt % 2)] * 50 for prompt in range(20)})
    assert many.high - many.low == pytest.approx(one.high - one.low)


@pytest.mark.parametrize(("k", "spread"), [(1, 0.0), (4, 0.3)])
def test_about_95_in_a_hundred_intervals_hold_the_true_share(k: int, spread: float) -> None:
    dice, hits = random.Random(7), 0
    for _ in range(1000):
        chances = [0.4 + dice.choice((-spread, spread)) for _ in range(40)]
        found = average({n: [float(dice.random() < chance) for _ in range(k)] for n, chance in enumerate(chances)})
        hits += found.low <= 0.4 <= found.high
    assert 930 <= hits <= 975


def test_the_best_evaluation_is_the_first_of_the_highest_of_the_main_set() -> None:
    from msgspec.structs import replace

    best = BestEvaluation()
    assert (best.row, best.num_since) == (None, 0)
    for version, accuracy in enumerate((0.2, 0.6, 0.6, 0.5)):
        best.add(evaluation_row(version, version, accuracy))
        best.add(replace(evaluation_row(9, 9, 1.0), is_main=False))
    assert best.row is not None
    assert (best.row.policy_version, best.num_since) == (1, 2)
