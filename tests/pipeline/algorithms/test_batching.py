"""Packing plans use every sample once and whole; packed arrays unpack to the same samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.algorithms.batching import (
    TrainingSample,
    balance,
    pack,
    plan_micro_batches,
    plan_padded_batches,
    plan_ranks,
    split_minibatches,
)
from tests.pipeline.algorithms.packed import random_samples

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


@given(LENGTHS, st.integers(1, 80))
def test_every_sample_is_in_exactly_one_micro_batch(lengths: list[int], max_tokens: int) -> None:
    plan = plan_micro_batches(lengths, max_tokens)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    assert all(batch == sorted(batch) for batch in plan)


@given(LENGTHS, st.integers(1, 80))
def test_a_micro_batch_keeps_its_budget_unless_one_sample_alone_breaks_it(lengths: list[int], max_tokens: int) -> None:
    for batch in plan_micro_batches(lengths, max_tokens):
        assert sum(lengths[i] for i in batch) <= max_tokens or len(batch) == 1


@given(LENGTHS, st.integers(50, 200))
def test_a_plan_is_near_the_fewest_micro_batches_possible(lengths: list[int], max_tokens: int) -> None:
    fewest = -(-sum(lengths) // max_tokens)
    num = len(plan_micro_batches(lengths, max_tokens))
    # of any two micro-batches one is more than half full, or best fit would have joined them
    assert num <= 2 * fewest
    assert num >= fewest


@given(LENGTHS, st.integers(1, 80))
def test_padded_batches_hold_every_sequence_once_and_their_padding_is_in_the_budget(
    lengths: list[int], max_tokens: int
) -> None:
    plan = plan_padded_batches(lengths, max_tokens)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    for batch in plan:
        assert len(batch) * max(lengths[i] for i in batch) <= max_tokens or len(batch) == 1
    assert [lengths[i] for batch in plan for i in batch] == sorted(lengths, reverse=True)


def test_best_fit_decreasing_fills_the_gaps() -> None:
    assert plan_micro_batches([6, 6, 4, 4, 5, 5], 10) == [[0, 2], [1, 3], [4, 5]]


@given(st.lists(st.tuples(st.integers(1, 50), st.sampled_from([b"a", b"b", b"c"])), max_size=40), st.integers(1, 200))
def test_neighbours_with_the_same_prompt_are_cut_apart_by_the_budget_alone(
    samples: list[tuple[int, bytes]], max_tokens: int
) -> None:
    lengths, prompts = [length for length, _ in samples], [prompt for _, prompt in samples]
    plan = plan_micro_batches(lengths, max_tokens, prompts)
    assert sorted(index for batch in plan for index in batch) == list(range(len(samples)))
    for batch in plan:
        assert batch == sorted(batch)
        assert sum(lengths[i] for i in batch) <= max_tokens or len(batch) == 1
    home = {index: number for number, batch in enumerate(plan) for index in batch}
    start = 0
    for index in range(1, len(samples)):
        if prompts[index] != prompts[index - 1]:
            start = index
        elif home[index] != home[index - 1]:
            assert sum(lengths[start : index + 1]) > max_tokens, "the run of neighbours would have fitted"
            start = index


def test_groups_of_unlike_lengths_stay_whole() -> None:
    lengths = [5, 3, 4, 5, 3, 4]
    assert plan_micro_batches(lengths, 12, [b"x"] * 3 + [b"y"] * 3) == [[0, 1, 2], [3, 4, 5]]
    assert plan_micro_batches(lengths, 12) != [[0, 1, 2], [3, 4, 5]]


def test_the_same_lengths_give_the_same_plan() -> None:
    lengths = [5, 3, 3, 8, 5, 1, 1, 8]
    assert plan_micro_batches(lengths, 9) == plan_micro_batches(list(lengths), 9)


@given(LENGTHS, st.integers(1, 8))
def test_shares_of_ranks_hold_every_sample_once_and_are_within_4_thirds_of_the_best(
    lengths: list[int], num_ranks: int
) -> None:
    shares = balance(lengths, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    fullest = max(sum(lengths[i] for i in share) for share in shares)
    # greedy: the fullest rank was the emptiest when it took its last sample
    assert fullest <= sum(lengths) / num_ranks + max(lengths, default=0)


@given(LENGTHS, st.integers(1, 8), st.integers(1, 80))
def test_ranks_compute_every_sample_once_in_as_many_micro_batches_each(
    lengths: list[int], num_ranks: int, max_tokens: int
) -> None:
    plans = plan_ranks(lengths, num_ranks, max_tokens)
    assert len(plans) == num_ranks
    assert len({len(plan) for plan in plans}) == 1
    assert sorted(index for plan in plans for batch in plan for index in batch) == list(range(len(lengths)))
    for plan, share in zip(plans, balance(lengths, num_ranks), strict=True):
        assert sorted(index for batch in plan for index in batch) == share
        tokens = [sum(lengths[index] for index in batch) for batch in plan]
        assert tokens == sorted(tokens, reverse=True), "what is computed at once is of about the same size"
        assert all(total <= max_tokens or len(batch) == 1 for total, batch in zip(tokens, plan, strict=True))


@given(st.integers(0, 20), st.integers(1, 8))
def test_minibatches_keep_the_order_and_differ_by_at_most_one_sample(num: int, parts: int) -> None:
    samples = random_samples(0, max(num, 1))[:num]
    batches = split_minibatches(samples, parts)
    assert [s.name for batch in batches for s in batch] == [s.name for s in samples]
    sizes = [len(batch) for batch in batches]
    assert len(sizes) == min(parts, num)
    assert not sizes or (min(sizes) >= 1 and max(sizes) - min(sizes) <= 1)


@given(st.integers(0, 2**32 - 1))
def test_packed_arrays_lie_where_each_sample_says(seed: int) -> None:
    samples = random_samples(seed)
    batch = pack(samples)
    assert batch.num_rows == len(samples)
    assert batch.num_tokens == sum(s.tokens.size for s in samples) == batch.position_ids.size
    assert batch.old_logprobs is not None
    assert batch.reference_logprobs is not None
    for row, sample in enumerate(samples):
        start, end = batch.cumulative_lengths[row : row + 2]
        np.testing.assert_array_equal(batch.tokens[start:end], sample.tokens)
        np.testing.assert_array_equal(batch.position_ids[start:end], np.arange(sample.tokens.size))
        mine = batch.row_ids == row
        response = sample.tokens[sample.prompt_length :]
        np.testing.assert_array_equal(batch.targets[mine], response)
        np.testing.assert_array_equal(batch.tokens[batch.predictors[mine] + 1], response)
        assert (batch.predictors[mine] >= start).all()
        np.testing.assert_array_equal(batch.loss_mask[mine], sample.loss_mask)
        np.testing.assert_array_equal(batch.advantages[mine], sample.advantages.astype(np.float32))
    for values, sample in zip(batch.split(batch.behavior_logprobs), samples, strict=True):
        np.testing.assert_array_equal(values, sample.behavior_logprobs.astype(np.float32))


def test_log_probs_that_some_sample_lacks_are_absent_from_the_pack() -> None:
    first, second, *_ = random_samples(1)
    assert pack([first, replace(second, old_logprobs=None)]).old_logprobs is None
    assert pack([first, replace(second, reference_logprobs=None)]).reference_logprobs is None


def _wrong(sample: TrainingSample) -> list[tuple[TrainingSample, str]]:
    return [
        (replace(sample, prompt_length=0), "0 are prompt"),
        (replace(sample, prompt_length=sample.tokens.size), "at least 1 prompt and 1 response token"),
        (replace(sample, advantages=np.zeros(99)), "advantages of shape"),
        (replace(sample, old_logprobs=np.zeros(99)), "old_logprobs of shape"),
    ]


def test_a_malformed_sample_is_refused_by_name() -> None:
    for sample, message in _wrong(random_samples(2)[0]):
        with pytest.raises(ValueError, match=message) as caught:
            pack([sample])
        assert sample.name in str(caught.value)


def test_senseless_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="0 samples"):
        pack([])
    with pytest.raises(ValueError, match="max_tokens"):
        plan_micro_batches([1], 0)
    with pytest.raises(ValueError, match="num is 0"):
        split_minibatches([], 0)
    with pytest.raises(ValueError, match="num_ranks"):
        balance([1], 0)


def test_a_sample_without_an_imitation_mask_imitates_nothing() -> None:
    zeros = np.zeros(2, np.float32)
    bare = TrainingSample(
        "t.0.0", np.arange(3, dtype=np.int32), 1, np.ones(2, np.bool_), zeros, zeros, np.zeros(2, np.int32)
    )
    imitated = replace(bare, nll_mask=np.array([True, False]))
    assert pack([bare, imitated]).nll_mask.tolist() == [False, False, True, False]
