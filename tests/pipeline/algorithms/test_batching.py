"""Packing plans use every sample once and whole; packed arrays unpack to the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.algorithms.batching import (
    READ_AGAIN,
    TrainingSample,
    Tree,
    balance,
    cut_trees,
    pack,
    plan_micro_batches,
    plan_padded_batches,
    plan_ranks,
    split_minibatches,
)
from pipeline.algorithms.prefixes import SharedPrefixes
from tests.pipeline.algorithms.packed import random_samples
from tests.pipeline.algorithms.test_prefixes import num_nodes

LENGTHS = st.lists(st.integers(1, 50), max_size=40)
SEQUENCES = st.lists(st.lists(st.integers(2, 4), min_size=1, max_size=20).map(np.array), max_size=20)
"""Of few different tokens, so that many begin alike."""


def plan_whole(lengths: list[int], max_tokens: int) -> list[list[int]]:
    return plan_micro_batches(SharedPrefixes.none(lengths), max_tokens)


@given(LENGTHS, st.integers(1, 80))
def test_every_sample_is_in_exactly_one_micro_batch(lengths: list[int], max_tokens: int) -> None:
    plan = plan_whole(lengths, max_tokens)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    assert all(batch == sorted(batch) for batch in plan)


@given(LENGTHS, st.integers(1, 80))
def test_a_micro_batch_keeps_its_budget_unless_one_sample_alone_breaks_it(lengths: list[int], max_tokens: int) -> None:
    for batch in plan_whole(lengths, max_tokens):
        assert sum(lengths[i] for i in batch) <= max_tokens or len(batch) == 1


@given(LENGTHS, st.integers(50, 200))
def test_a_plan_is_near_the_fewest_micro_batches_possible(lengths: list[int], max_tokens: int) -> None:
    fewest = -(-sum(lengths) // max_tokens)
    num = len(plan_whole(lengths, max_tokens))
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
    assert plan_whole([6, 6, 4, 4, 5, 5], 10) == [[0, 2], [1, 3], [4, 5]]


def test_the_same_lengths_give_the_same_plan() -> None:
    lengths = [5, 3, 3, 8, 5, 1, 1, 8]
    assert plan_whole(lengths, 9) == plan_whole(list(lengths), 9)


@given(SEQUENCES, st.integers(1, 60))
def test_samples_that_share_tokens_are_cut_into_trees_of_the_budget(
    sequences: list[np.ndarray], max_tokens: int
) -> None:
    prefixes = SharedPrefixes.of(sequences)
    trees = cut_trees(prefixes, max_tokens)
    assert sorted(index for tree in trees for index in tree.members) == list(range(len(sequences)))
    for tree in trees:
        tokens = num_nodes([sequences[index] for index in tree.members])
        longest = max(sequences[index].size for index in tree.members)
        leaves = [one for one in tree.members if not is_beginning(one, tree.members, sequences)]
        read = sum(sequences[index].size for index in leaves)
        assert tree.size == max(tokens, read // READ_AGAIN)
        assert tree.size <= max(max_tokens, longest + max_tokens // 4) or len(tree.members) == 1


@given(st.lists(st.lists(st.integers(2, 3), min_size=1, max_size=6), max_size=7), st.integers(1, 20))
def test_no_other_cuts_repeat_fewer_tokens(rows: list[list[int]], max_tokens: int) -> None:
    prefixes = SharedPrefixes.of([np.array(row) for row in rows])
    num, shared = len(rows), prefixes.shared.tolist()
    repeated = sum(shared[place] for place in beginnings(cut_trees(prefixes, max_tokens)))

    def fits(begin: int, end: int) -> bool:
        members = prefixes.order[begin:end].tolist()
        longest = int(prefixes.lengths[members].max())
        size = num_nodes([np.array(rows[index]) for index in members])
        return end - begin == 1 or size <= max(max_tokens, longest + max_tokens // 4)

    repeats: list[int] = []
    for chosen in (cuts for size in range(num) for cuts in combinations(range(1, num), size)):
        cuts = (0, *chosen, num)
        if all(fits(begin, end) for begin, end in pairwise(cuts)):
            repeats.append(sum(shared[place] for place in chosen))
    fewest = min(repeats, default=0)
    assert repeated == fewest


def beginnings(trees: Sequence[Tree]) -> list[int]:
    return [0, *np.cumsum([len(tree.members) for tree in trees])[:-1].tolist()] if trees else []


def is_beginning(one: int, members: Sequence[int], sequences: Sequence[np.ndarray]) -> bool:
    """Whether a later member, by length and then by number, has all tokens of this one."""
    tokens = sequences[one]
    return any(
        (sequences[other].size, other) > (tokens.size, one) and np.array_equal(sequences[other][: tokens.size], tokens)
        for other in members
    )


@given(SEQUENCES, st.integers(1, 60))
def test_micro_batches_count_common_tokens_once(sequences: list[np.ndarray], max_tokens: int) -> None:
    prefixes = SharedPrefixes.of(sequences)
    plan = plan_micro_batches(prefixes, max_tokens)
    assert sorted(index for batch in plan for index in batch) == list(range(len(sequences)))
    for batch in plan:
        assert batch == sorted(batch)
        longest = max(sequences[index].size for index in batch)
        size = num_nodes([sequences[index] for index in batch])
        assert size <= max(max_tokens, longest + max_tokens // 4)


def group(num: int, prompt: int, response: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    head = rng.integers(2, 1000, prompt)
    return [np.concatenate([head, rng.integers(2, 1000, response)]) for _ in range(num)]


def test_groups_stay_whole_wherever_their_members_are() -> None:
    groups = [group(4, 30, 5, seed) for seed in range(3)]
    mixed = [groups[at % 3][at // 3] for at in range(12)]
    assert plan_micro_batches(SharedPrefixes.of(mixed), 50) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert len(plan_micro_batches(SharedPrefixes.none([one.size for one in mixed]), 50)) == 12


def test_a_group_above_the_budget_repeats_its_prompt_in_as_few_micro_batches_as_it_takes() -> None:
    plan = plan_micro_batches(SharedPrefixes.of(group(16, 40, 10)), 100)
    assert sorted(len(batch) for batch in plan) == [4, 6, 6]


def test_answers_to_a_prompt_that_fills_the_budget_still_share_it() -> None:
    plan = plan_micro_batches(SharedPrefixes.of(group(8, 1000, 12)), 1024)
    assert len(plan) == 1


def test_windows_of_a_response_are_one_pass_over_it() -> None:
    response = np.arange(2, 500)
    windows = [response[: 18 + 60 * number] for number in range(1, 9)]
    prefixes = SharedPrefixes.of(windows[::-1])
    assert prefixes.num_tokens == 498
    assert plan_micro_batches(prefixes, 1) == [list(range(8))]


def test_keys_that_attention_copies_have_a_bound_too() -> None:
    """Each of these answers has one token of its own."""
    answers = group(200, 100, 1)
    num_trees = len(cut_trees(SharedPrefixes.of(answers), 1000))
    assert num_trees == -(-200 // (8 * 1000 // 101))


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
    plans = plan_ranks(SharedPrefixes.none(lengths), num_ranks, max_tokens)
    assert len(plans) == num_ranks
    assert len({len(plan) for plan in plans}) == 1
    assert sorted(index for plan in plans for batch in plan for index in batch) == list(range(len(lengths)))
    for plan, share in zip(plans, balance(lengths, num_ranks), strict=True):
        assert sorted(index for batch in plan for index in batch) == share
        tokens = [sum(lengths[index] for index in batch) for batch in plan]
        assert tokens == sorted(tokens, reverse=True), "what is computed at once is of about the same size"
        assert all(total <= max_tokens or len(batch) == 1 for total, batch in zip(tokens, plan, strict=True))


@given(SEQUENCES, st.integers(1, 4), st.integers(1, 60))
def test_ranks_share_trees_and_compute_as_many_micro_batches_each(
    sequences: list[np.ndarray], num_ranks: int, max_tokens: int
) -> None:
    prefixes = SharedPrefixes.of(sequences)
    plans = plan_ranks(prefixes, num_ranks, max_tokens)
    assert len({len(plan) for plan in plans}) == 1 and len(plans) == num_ranks
    assert sorted(index for plan in plans for batch in plan for index in batch) == list(range(len(sequences)))
    for plan in plans:
        sizes = [num_nodes([sequences[index] for index in batch]) for batch in plan]
        assert sizes == sorted(sizes, reverse=True)


def test_no_rank_waits_for_one_that_has_the_whole_tree() -> None:
    prefixes = SharedPrefixes.of(group(16, 4, 50))
    plans = plan_ranks(prefixes, 2, 10_000)
    assert [sum(len(batch) for batch in plan) for plan in plans] == [8, 8]


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
        plan_whole([1], 0)
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
