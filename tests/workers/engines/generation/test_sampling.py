"""Sampling draws from the distribution that it reports, out of streams that belong to the
trajectory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.ids import TrajectoryId
from tests.workers.engines.distributions import probabilities
from workers.engines.generation.sampling import Distributions, sample
from workers.engines.generation.seam import SamplingParams
from workers.engines.model.rng import stream_key, uniforms

CPU = torch.device("cpu")
GOLDEN_KEY = 17563774314627524364
GOLDEN_UNIFORMS = [0.596307152638019, 0.013257836608772777]
GENTLE = SamplingParams(temperature=1.0)


def draw(logits: torch.Tensor, params: SamplingParams, num: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sample the same logits at positions 0 .. num - 1 of one stream."""
    keys = np.full(num, stream_key(seed, TrajectoryId("t", 0, 0)), np.uint64)
    rows = logits.expand(num, -1)
    distributions = Distributions.of([params] * num, logits.shape[-1], CPU)
    tokens, logprobs = sample(rows, distributions, torch.from_numpy(uniforms(keys, np.arange(num))))
    return tokens.numpy(), logprobs.numpy()


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """Return the statistic in standard deviations above its mean (degrees of freedom: bins - 1)."""
    used = expected > 0
    assert observed[~used].sum() == 0
    freedom = used.sum() - 1
    statistic = ((observed[used] - expected[used]) ** 2 / expected[used]).sum()
    return float((statistic - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_are_drawn_with_the_probabilities_of_the_tempered_softmax(temperature: float) -> None:
    logits = torch.randn(1, 24, generator=torch.Generator().manual_seed(1))
    num = 40_000
    tokens, logprobs = draw(logits, SamplingParams(temperature), num)
    expected = torch.softmax(logits[0] / temperature, -1).numpy()
    assert chi_square(np.bincount(tokens, minlength=24), expected * num) < 4.0
    np.testing.assert_allclose(logprobs, np.log(expected)[tokens], atol=1e-5)


def test_uniforms_are_uniform_over_positions_and_over_trajectories() -> None:
    num, bins = 50_000, 64
    over_positions = uniforms(np.full(num, stream_key(3, TrajectoryId("t", 1, 2)), np.uint64), np.arange(num))
    keys = np.array([stream_key(3, TrajectoryId("t", n // 16, n % 16)) for n in range(num)], np.uint64)
    over_trajectories = uniforms(keys, np.zeros(num, np.int64))
    for values in (over_positions, over_trajectories):
        assert values.min() > 0.0 and values.max() < 1.0
        assert chi_square(np.bincount((values * bins).astype(int), minlength=bins), np.full(bins, num / bins)) < 4.0
    neighbours = np.corrcoef(over_positions[:-1], over_positions[1:])[0, 1]
    assert abs(neighbours) < 4.0 / np.sqrt(num)


def test_a_stream_depends_on_seed_lane_group_and_member_and_on_nothing_else() -> None:
    names = [TrajectoryId(lane, g, m) for lane in ("t", "e1") for g in (0, 1, 11) for m in (0, 1)]
    keys = [stream_key(seed, name) for seed in (0, 1) for name in names]
    assert len(set(keys)) == len(keys)
    # fixed for ever: a run that is resumed with another release draws the same tokens
    assert stream_key(7, TrajectoryId("t", 12, 3)) == GOLDEN_KEY
    golden = uniforms(np.full(2, GOLDEN_KEY, np.uint64), np.array([0, 1]))
    np.testing.assert_array_equal(golden, GOLDEN_UNIFORMS)


@pytest.mark.parametrize("top_k", [1, 5, 63, 64, 100])
def test_top_k_samples_the_k_likeliest_tokens_and_reports_renormalised_logprobs(top_k: int) -> None:
    logits = 2.0 * torch.randn(1, 64, generator=torch.Generator().manual_seed(2))
    tokens, logprobs = draw(logits, SamplingParams(1.0, top_k=top_k), 4_000)
    support = torch.topk(logits[0], min(top_k, 64)).indices
    assert set(tokens) <= set(support.tolist())
    within = torch.full((64,), -torch.inf).index_copy(0, support, logits[0, support])
    np.testing.assert_allclose(logprobs, torch.log_softmax(within, -1).numpy()[tokens], atol=1e-5)
    assert len(set(tokens)) > min(top_k, 64) // 3


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_samples_only_the_fewest_tokens_that_reach_the_mass(top_p: float) -> None:
    logits = 2.0 * torch.randn(1, 64, generator=torch.Generator().manual_seed(3))
    tokens, logprobs = draw(logits, SamplingParams(1.0, top_p=top_p), 6_000)
    probabilities = torch.softmax(logits[0].double(), -1).numpy()
    order = np.argsort(-probabilities)
    nucleus = order[: int(np.searchsorted(np.cumsum(probabilities[order]), top_p)) + 1]
    assert set(tokens) <= set(nucleus)
    renormalised = np.zeros(64)
    renormalised[nucleus] = probabilities[nucleus] / probabilities[nucleus].sum()
    np.testing.assert_allclose(logprobs, np.log(renormalised[tokens]), atol=1e-4)
    if len(nucleus) > 1:
        assert chi_square(np.bincount(tokens, minlength=64), renormalised * 6_000) < 4.0


def test_ties_at_the_edge_of_top_k_keep_exactly_k_tokens() -> None:
    tokens, logprobs = draw(torch.zeros(1, 16), SamplingParams(1.0, top_k=4), 2_000)
    assert set(tokens) == {0, 1, 2, 3}
    np.testing.assert_allclose(logprobs, np.log(0.25), atol=1e-6)


def test_greedy_takes_the_first_largest_logit_and_reports_temperature_one() -> None:
    logits = torch.randn(1, 32, generator=torch.Generator().manual_seed(4))
    logits[0, [5, 9]] = 6.0
    tokens, logprobs = draw(logits, SamplingParams(0.0, top_p=0.3, top_k=2), 10)
    assert set(tokens) == {5}
    np.testing.assert_allclose(logprobs, torch.log_softmax(logits[0], -1)[5].item(), atol=1e-6)


@given(seed=st.integers(0, 2**32), others=st.integers(0, 5), spread=st.sampled_from([0.5, 3.0, 30.0]))
@settings(max_examples=40, deadline=None)
def test_a_row_draws_the_same_token_whatever_rows_share_its_batch(seed: int, others: int, spread: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(1 + others, 48, generator=rng)
    kinds = [SamplingParams(0.7), SamplingParams(1.0, 0.8), SamplingParams(1.3, 1.0, 7), SamplingParams(0.0)]
    params = [kinds[(seed + n) % 4] for n in range(1 + others)]
    uniform = torch.rand(1 + others, generator=rng, dtype=torch.float64).clamp(1e-9, 1 - 1e-9)
    together = sample(logits, Distributions.of(params, 48, CPU), uniform)
    for row in range(1 + others):
        alone = sample(logits[row : row + 1], Distributions.of([params[row]], 48, CPU), uniform[row : row + 1])
        assert alone[0].item() == together[0][row].item()
        assert abs(alone[1].item() - together[1][row].item()) < 1e-5


def test_a_token_of_probability_zero_is_never_drawn_even_at_the_ends_of_the_interval() -> None:
    logits = torch.full((4, 8), -torch.inf)
    logits[:, 3] = 0.0
    uniform = torch.tensor([2.0**-41, 0.25, 0.75, 1 - 2.0**-41], dtype=torch.float64)
    tokens, logprobs = sample(logits, Distributions.of([GENTLE] * 4, 8, CPU), uniform)
    assert tokens.tolist() == [3] * 4
    assert logprobs.tolist() == [0.0] * 4


EDGES = st.sampled_from([2.0**-41, 0.5, 1 - 2.0**-41]) | st.floats(2.0**-40, 1 - 2.0**-40)


@given(
    vocabulary=st.integers(2, 1500),
    kept=st.sampled_from([1, 2, 40, 1500]),
    uniform=EDGES,
    spread=st.sampled_from([0.0, 1.0, 20.0]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_the_token_is_the_inverse_of_the_cumulative_distribution_over_any_number_of_blocks(
    vocabulary: int, kept: int, uniform: float, spread: float, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(1, vocabulary, generator=rng)
    logits[0, torch.randperm(vocabulary, generator=rng)[kept:]] = -torch.inf
    tokens, logprobs = sample(
        logits, Distributions.of([GENTLE], vocabulary, CPU), torch.tensor([uniform], dtype=torch.float64)
    )
    exact = torch.softmax(logits[0].double(), -1)
    token = int(tokens[0])
    assert exact[token] > 0
    assert abs(logprobs[0].item() - exact[token].log().item()) < 1e-5
    above = exact[: token + 1].sum().item()
    assert above - exact[token].item() - 1e-6 <= uniform <= above + 1e-6


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param({0: 1.0, 300: 1.0}, id="the uniform is exactly where the first block ends"),
        # cumulative sums step over it by more than it weighs
        pytest.param({0: 1.0, 300: 1.3e-16, 600: 1.0}, id="a block weighs less than a sum's last bit"),
    ],
)
def test_a_token_of_probability_zero_is_never_drawn_at_the_edge_of_a_block(weights: dict[int, float]) -> None:
    logits = torch.full((1, 700), -torch.inf)
    for token, weight in weights.items():
        logits[0, token] = np.log(weight)
    tokens, _ = sample(logits, Distributions.of([GENTLE], 700, CPU), torch.tensor([0.5], dtype=torch.float64))
    assert int(tokens[0]) == 300


@pytest.mark.parametrize("vocabulary", [3, 256, 600])
def test_logits_that_are_not_numbers_give_a_token_of_the_vocabulary_whose_logprob_is_no_number(vocabulary: int) -> None:
    logits = torch.zeros(2, vocabulary)
    logits[0], logits[1, 1] = torch.nan, torch.inf
    uniform = torch.full((2,), 0.9, dtype=torch.float64)
    tokens, logprobs = sample(logits, Distributions.of([GENTLE] * 2, vocabulary, CPU), uniform)
    assert ((tokens >= 0) & (tokens < vocabulary)).all()
    assert logprobs.isnan().all()


SETTINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.8, 0.3]),
    top_k=st.sampled_from([0, 1, 4]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.9, -0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
)


@given(st.lists(SETTINGS, min_size=1, max_size=4), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_frequencies_and_logprobs_are_those_of_the_definition(params: list[SamplingParams], seed: int) -> None:
    """A grid of uniforms draws each token as often as its probability has room, to one draw."""
    rng = np.random.default_rng(seed)
    vocabulary, num = 12, 400
    logits = 2.0 * rng.normal(size=(len(params), vocabulary)).astype(np.float32)
    prompts = [rng.integers(0, vocabulary, size=rng.integers(1, 5)) for _ in params]
    responses = [rng.integers(0, vocabulary, size=rng.integers(0, 9)) for _ in params]

    def context(row: int) -> tuple[np.ndarray, int]:
        return np.concatenate([prompts[row // num], responses[row // num]]), prompts[row // num].size

    tokens, logprobs = sample(
        torch.from_numpy(logits).repeat_interleave(num, dim=0),
        Distributions.of([each for each in params for _ in range(num)], vocabulary, CPU),
        ((torch.arange(num, dtype=torch.float64) + 0.5) / num).repeat(len(params)),
        context,
    )
    for row, each in enumerate(params):
        expected = probabilities(logits[row], each, prompts[row], responses[row])
        drawn, told = tokens[row * num : (row + 1) * num], logprobs[row * num : (row + 1) * num]
        assert expected[drawn].min() > 0.0
        np.testing.assert_allclose(told, np.log(expected[drawn]), atol=1e-4)
        counts = np.bincount(drawn, minlength=vocabulary)
        if each.temperature == 0.0:
            assert counts[expected.argmax()] == num
        else:
            assert np.abs(counts - num * expected).max() <= 1.01


def test_penalties_without_contexts_are_an_error_and_no_other_distribution() -> None:
    drawn = Distributions.of([GENTLE, SamplingParams(1.0, presence_penalty=0.5)], 8, CPU)
    with pytest.raises(ValueError, match="give contexts"):
        sample(torch.zeros(2, 8), drawn, torch.full((2,), 0.5, dtype=torch.float64))


def test_rows_without_penalties_are_read_and_changed_by_no_context() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    params = [GENTLE, SamplingParams(1.0, repetition_penalty=3.0), GENTLE]
    read: list[int] = []

    def context(row: int) -> tuple[np.ndarray, int]:
        read.append(row)
        return np.array([1, 2, 3]), 1

    uniform = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    tokens, logprobs = sample(logits, Distributions.of(params, 8, CPU), uniform, context)
    alone = sample(logits, Distributions.of([GENTLE] * 3, 8, CPU), uniform)
    assert read == [1]
    for row in (0, 2):
        assert (tokens[row], logprobs[row]) == (alone[0][row], alone[1][row])
