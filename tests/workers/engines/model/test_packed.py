"""A packed forward has the results of each sequence alone, and the same gradient."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GraniteConfig, GraniteForCausalLM
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as eager_softcap
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as eager_sinks

from pipeline.algorithms.batching import pack
from protocol.errors import EngineError
from tests.pipeline.algorithms.conversations import sample_at
from tests.workers.engines.tiny import ARCHITECTURES, VOCABULARY, plain_logprobs, ragged, tiny_model
from workers.engines.model.attention import PACKED_ATTENTION, PackedLayout, lay, packed_attention
from workers.engines.model.head import HEAD_BYTES, Entropy
from workers.engines.model.layers import recompute_layers
from workers.engines.model.packed import PackedTokens, prepare_packed, score_packed

CPU = torch.device("cpu")
SEVEN_TOKENS = 7 * 3 * 4 * VOCABULARY
"""Of a float32 model; three or four of a float64 one."""


def packed_batch(seed: int = 0, num: int = 12) -> tuple[list[tuple[np.ndarray, int]], PackedTokens]:
    sequences = ragged(np.random.default_rng(seed), num)
    return sequences, PackedTokens.of([s for s, _ in sequences], [n for _, n in sequences], CPU)


@pytest.mark.parametrize("head_bytes", [HEAD_BYTES, SEVEN_TOKENS], ids=["whole", "in parts"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_logprobs_equal_those_of_each_sequence_alone(architecture: str, head_bytes: int) -> None:
    plain = tiny_model(architecture)
    packed = prepare_packed(copy.deepcopy(plain))
    sequences, batch = packed_batch()
    with torch.no_grad():
        scores = score_packed(packed, batch, 0.7, head_bytes=head_bytes)
        expected = torch.cat([plain_logprobs(plain, tokens, num, 0.7) for tokens, num in sequences])
    assert plain.config._attn_implementation != PACKED_ATTENTION
    assert expected.std() > 0.5, "weights so small that every token is as likely would hide a mistake"
    torch.testing.assert_close(scores.logprobs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("head_bytes", [HEAD_BYTES, SEVEN_TOKENS], ids=["whole", "in parts"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_gradients_equal_those_of_each_sequence_alone(architecture: str, head_bytes: int) -> None:
    plain = tiny_model(architecture, torch.float64)
    packed = prepare_packed(copy.deepcopy(plain))
    sequences, batch = packed_batch()
    weights = torch.randn(batch.targets.numel(), dtype=torch.float64)
    (score_packed(packed, batch, 0.7, head_bytes=head_bytes).logprobs * weights).sum().backward()
    (torch.cat([plain_logprobs(plain, tokens, num, 0.7) for tokens, num in sequences]) * weights).sum().backward()
    for (name, got), expected in zip(packed.named_parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None and expected.grad.abs().max() > 0, name
        torch.testing.assert_close(got.grad, expected.grad, atol=1e-9, rtol=1e-9, msg=name)


def tree_batch(seed: int = 0) -> tuple[list[tuple[np.ndarray, int]], PackedTokens]:
    """Responses to two prompts, in no order: two begin alike, two are equal, and of one there are
    windows, each after the windows before."""
    rng = np.random.default_rng(seed)
    first, second = rng.integers(2, VOCABULARY, 40), rng.integers(2, VOCABULARY, 3)
    response, other = rng.integers(2, VOCABULARY, 6), rng.integers(2, VOCABULARY, 25)
    sequences = [
        (np.concatenate([first, response]), 6),
        (np.concatenate([second, other]), 25),
        (np.concatenate([first, other[:8]]), 8),
        (np.concatenate([first, response[:4], [2]]), 5),
        (np.concatenate([first, other]), 9),
        (np.concatenate([second, other]), 25),
        (np.concatenate([first, other[:16]]), 8),
    ]
    return sequences, PackedTokens.of([tokens for tokens, _ in sequences], [num for _, num in sequences], CPU)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("head_bytes", [HEAD_BYTES, SEVEN_TOKENS], ids=["whole", "in parts"])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen2 with a window"])
def test_what_sequences_have_in_common_is_computed_once_and_gives_the_same_numbers(
    architecture: str, head_bytes: int, recomputed: bool
) -> None:
    name, _, window = architecture.partition(" with ")
    changes = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 0} if window else {}
    plain = tiny_model(name, torch.float64, **changes)
    packed = prepare_packed(copy.deepcopy(plain))
    recompute_layers(packed, recomputed)
    sequences, batch = tree_batch()
    assert batch.tokens.numel() == batch.layout.num_tokens == (40 + 6 + 1 + 25) + (3 + 25)
    got = score_packed(packed, batch, 0.7, head_bytes=head_bytes).logprobs
    expected = torch.cat([plain_logprobs(plain, tokens, num, 0.7) for tokens, num in sequences])
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)
    weights = torch.randn(expected.numel(), dtype=torch.float64)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, one), other in zip(packed.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and other.grad is not None:
            assert (one.grad - other.grad).norm() <= 1e-10 * other.grad.norm(), name


def test_tokens_between_the_scored_ones_are_state_alone() -> None:
    """Conversations that begin alike, as a batch has them: whatever is scored has the numbers of its sequence alone."""
    rng = np.random.default_rng(3)
    prompt, first, told = (rng.integers(2, VOCABULARY, size) for size in (5, 4, 6))
    turns = [rng.integers(2, VOCABULARY, size) for size in (3, 7, 2)]
    rows = [np.concatenate([prompt, first, told, turn]) for turn in turns]
    scored = [np.concatenate([np.arange(5, 9), np.arange(15, row.size)]) for row in rows]
    samples = [sample_at(places, row, 5) for places, row in zip(scored, rows, strict=True)]
    plain = tiny_model("qwen3", torch.float64)
    packed = prepare_packed(copy.deepcopy(plain))
    batch = PackedTokens.from_batch(pack(samples), CPU)
    assert batch.layout.num_tokens == 5 + 4 + 6 + 3 + 7 + 2, "what they share is there once"
    got = score_packed(packed, batch, 0.7).logprobs
    every = [plain_logprobs(plain, row, row.size - 1, 0.7) for row in rows]
    expected = torch.cat([one[torch.from_numpy(places) - 1] for one, places in zip(every, scored, strict=True)])
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)
    weights = torch.randn(expected.numel(), dtype=torch.float64)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, one), other in zip(packed.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None, name
        assert (one.grad - other.grad).norm() <= 1e-10 * other.grad.norm(), name


TREES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40)), min_size=1, max_size=8)
"""For each sequence, how many tokens it shares with the one before, at most, and how many are its own."""


@settings(max_examples=60, deadline=None)
@given(
    TREES,
    st.sampled_from(
        [{}, {"sliding_window": 6}, {"softcap": 2.0}, {"s_aux": True}, {"s_aux": True, "sliding_window": 3}]
    ),
    st.integers(0, 3),
)
def test_attention_in_a_tree_is_that_of_each_sequence_alone(
    tree: list[tuple[int, int]], options: dict[str, Any], seed: int
) -> None:
    sizes, shared = list[int](), list[int]()
    for common, own in tree:
        shared.append(min(common, sizes[-1] if sizes else 0))
        sizes.append(max(1, shared[-1] + own))
    layout = PackedLayout.of(sizes, CPU, shared)
    torch.manual_seed(seed)
    if "s_aux" in options:
        options = options | {"s_aux": torch.randn(4, dtype=torch.float64, requires_grad=True)}
    query, key, value = row = [
        torch.randn(1, heads, layout.num_tokens, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    ]
    factors = torch.randn(1, layout.num_tokens, 4, 8, dtype=torch.float64)
    found, _ = packed_attention(None, query, key, value, None, packed_layout=layout, **options)
    places = [torch.from_numpy(place) for place in lay(np.array(sizes), np.array(shared))]
    alone: list[torch.Tensor] = []
    for place, alike in zip(places, shared, strict=True):
        assert layout.position_ids[place].tolist() == list(range(place.numel()))
        whole = PackedLayout.of([place.numel()], CPU)
        q, k, v = (one.index_select(2, place) for one in row)
        alone.append(packed_attention(None, q, k, v, None, packed_layout=whole, **options)[0][:, alike:])
    # no other sequence has the new tokens of each
    expected = torch.cat(alone, 1)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    inputs = [*row, options["s_aux"]] if "s_aux" in options else row
    for one, other in zip(
        torch.autograd.grad((found * factors).sum(), inputs),
        torch.autograd.grad((expected * factors).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 6])
def test_in_half_precision_attention_has_the_gradient_of_single_precision(
    dtype: torch.dtype, window: int | None
) -> None:
    layout = PackedLayout.of([9, 30, 27, 30, 12], CPU, [0, 0, 20, 20, 4])
    torch.manual_seed(0)
    row = [torch.randn(1, heads, layout.num_tokens, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    singles = [one.detach().float().requires_grad_() for one in row]
    factors = torch.randn(1, layout.num_tokens, 4, 8)
    for query, key, value in (row, singles):
        output, _ = packed_attention(None, query, key, value, None, sliding_window=window, packed_layout=layout)
        (output * factors).sum().backward()
    for half, single in zip(row, singles, strict=True):
        assert half.grad is not None and single.grad is not None
        assert (half.grad - single.grad).norm() <= 0.01 * single.grad.norm()


def test_gradients_do_not_change_what_attention_returns() -> None:
    layout = PackedLayout.of([30, 27], CPU, [0, 20])
    query, key, value = (
        torch.randn(1, heads, layout.num_tokens, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
    )
    with_gradient, _ = packed_attention(None, query, key, value, None, packed_layout=layout)
    with torch.no_grad():
        without, _ = packed_attention(None, query, key, value, None, packed_layout=layout)
    assert torch.equal(with_gradient, without), "the ratio of unchanged weights is 1"


def test_windows_of_a_response_attend_as_one_sequence() -> None:
    layout = PackedLayout.of([10, 30, 60, 90], CPU, [0, 10, 30, 60])
    (bucket,) = layout.buckets
    assert (bucket.num_sequences, bucket.length, bucket.places) == (1, 90, None)


def test_queries_of_a_prompt_are_in_one_bucket_only() -> None:
    layout = PackedLayout.of([412] * 8, CPU, [0] + [400] * 7)
    assert [(bucket.num_sequences, bucket.num_queries, bucket.length) for bucket in layout.buckets] == [
        (1, 412, 412),
        (7, 12, 412),
    ]


@pytest.mark.parametrize("shared", [(1, 0), (0, 4), (0, -1), (0,)])
def test_sequences_that_share_more_than_they_have_are_refused(shared: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="share"):
        PackedLayout.of([3, 5], CPU, shared)


@pytest.mark.parametrize("head_bytes", [HEAD_BYTES, SEVEN_TOKENS], ids=["whole", "in parts"])
def test_hidden_states_are_those_that_predict_each_scored_token(head_bytes: int) -> None:
    plain = tiny_model()
    packed = prepare_packed(copy.deepcopy(plain))
    sequences, batch = packed_batch()
    scores = score_packed(packed, batch, 0.7, head_bytes=head_bytes, keep_states=True)
    with torch.no_grad():
        whole = [
            plain(input_ids=torch.from_numpy(tokens)[None].long(), output_hidden_states=True).hidden_states[-1][0]
            for tokens, _ in sequences
        ]
    expected = torch.cat([states[-num - 1 : -1] for states, (_, num) in zip(whole, sequences, strict=True)])
    assert scores.states is not None and not scores.states.requires_grad
    torch.testing.assert_close(scores.states, expected, atol=1e-5, rtol=0)
    without = score_packed(packed, batch, 0.7, head_bytes=head_bytes)
    assert without.states is None
    torch.testing.assert_close(scores.logprobs, without.logprobs, atol=1e-6, rtol=0)


def test_a_sequence_does_not_feel_what_it_is_packed_with() -> None:
    model = prepare_packed(tiny_model(dtype=torch.float64))
    rng = np.random.default_rng(3)
    tokens = rng.integers(2, VOCABULARY, 30)
    neighbours = [rng.integers(2, VOCABULARY, size) for size in (30, 29, 80, 2)]
    with torch.no_grad():
        alone = score_packed(model, PackedTokens.of([tokens], [20], CPU)).logprobs
        among = score_packed(model, PackedTokens.of([*neighbours, tokens], [1, 1, 1, 1, 20], CPU)).logprobs[4:]
    torch.testing.assert_close(among, alone, atol=1e-12, rtol=0)


def test_sliding_windows_are_kept_within_each_sequence() -> None:
    changes = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
    plain = tiny_model("qwen2", torch.float64, **changes)
    packed = prepare_packed(copy.deepcopy(plain))
    full = prepare_packed(tiny_model("qwen2", torch.float64))
    sequences, batch = packed_batch()
    with torch.no_grad():
        got = score_packed(packed, batch).logprobs
        expected = torch.cat([plain_logprobs(plain, tokens, num, 1.0) for tokens, num in sequences])
        assert (score_packed(full, batch).logprobs - expected).abs().max() > 1e-3, "the window must matter here"
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


def test_a_model_that_scales_its_logits_is_scored_through_its_own_forward() -> None:
    config = GraniteConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=VOCABULARY, logits_scaling=4.0, initializer_range=0.2, pad_token_id=None,
    )  # fmt: skip
    plain = GraniteForCausalLM(config)
    packed = prepare_packed(copy.deepcopy(plain))
    sequences, batch = packed_batch()
    with torch.no_grad():
        got = score_packed(packed, batch, head_bytes=1).logprobs
        expected = torch.cat([plain_logprobs(plain, tokens, num, 1.0) for tokens, num in sequences])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    with pytest.raises(EngineError, match=r"GraniteForCausalLM changes its hidden states.*turn clusters off"):
        score_packed(packed, batch, keep_states=True)


@pytest.mark.parametrize("head_bytes", [HEAD_BYTES, SEVEN_TOKENS], ids=["whole", "in parts"])
def test_entropy_is_that_of_the_tempered_distribution(head_bytes: int) -> None:
    model = prepare_packed(tiny_model(dtype=torch.float64))
    _, batch = packed_batch()
    with torch.no_grad():
        logits = model(
            input_ids=batch.tokens[None],
            position_ids=batch.layout.position_ids[None],
            packed_layout=batch.layout,
            use_cache=False,
        ).logits[0, batch.positions]
        expected = torch.distributions.Categorical(logits=logits / 0.7).entropy()
    measured = score_packed(model, batch, 0.7, Entropy.MEASURE, head_bytes).entropy
    followed = score_packed(model, batch, 0.7, Entropy.DIFFERENTIATE, head_bytes).entropy
    assert measured is not None and followed is not None
    torch.testing.assert_close(measured, expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(followed, expected, atol=1e-10, rtol=0)
    assert not measured.requires_grad and followed.requires_grad
    assert score_packed(model, batch).entropy is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=40))
def test_every_token_finds_its_way_into_a_bucket_and_back(lengths: list[int]) -> None:
    layout = PackedLayout.of(lengths, CPU)
    gathered = torch.cat([bucket.gather for bucket in layout.buckets])
    assert torch.equal(gathered[layout.scatter], torch.arange(sum(lengths)))
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for bucket in layout.buckets:
        rows = owner[bucket.gather].unflatten(0, (bucket.num_sequences, bucket.length))
        assert torch.equal(rows, rows[:, :1].expand_as(rows)), "a row of a bucket holds one sequence"
    assert sum(bucket.num_sequences for bucket in layout.buckets) == len(lengths)
    num_padded = sum(bucket.num_sequences * bucket.length for bucket in layout.buckets) - layout.num_tokens
    assert num_padded <= 0.34 * sum(lengths) + 16 * len(lengths)


def test_positions_begin_anew_with_every_sequence() -> None:
    """A model with rotary positions shows the difference only at the end of its positions."""
    assert PackedLayout.of([3, 1, 2], CPU).position_ids.tolist() == [0, 1, 2, 0, 0, 1]


def test_a_sequence_without_context_is_refused() -> None:
    with pytest.raises(EngineError, match=r"sequence 1 of 2 has 3 tokens of which 3 are to be scored"):
        PackedTokens.of([np.arange(5), np.arange(3)], [2, 3], CPU)


def test_calling_a_packed_model_without_a_layout_is_refused() -> None:
    model = prepare_packed(tiny_model())
    with pytest.raises(EngineError, match="without packed_layout"):
        model(input_ids=torch.tensor([[2, 3, 4]]), use_cache=False)


def test_a_known_type_with_layers_of_another_kind_makes_the_trial() -> None:
    model = tiny_model()
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(EngineError, match="a trial pass ended by KeyError: 'chunked_attention'"):
        prepare_packed(model)


@pytest.mark.parametrize("changed", [{"softcap": 2.0}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
def test_soft_caps_and_sinks_are_those_of_transformers_own_attention(changed: dict[str, Any]) -> None:
    """Of two key heads for four query heads, in half precision too."""
    layout = PackedLayout.of([7, 5], CPU)
    torch.manual_seed(0)
    query, key, value = (2 * torch.randn(1, heads, 12, 8) for heads in (4, 2, 2))
    module = SimpleNamespace(num_key_value_groups=2, training=False, sinks=changed.get("s_aux"))
    for dtype, near in ((torch.float64, 1e-5), (torch.bfloat16, 0.05)):
        q, k, v = (tensor.to(dtype) for tensor in (query, key, value))
        found, _ = packed_attention(None, q, k, v, None, packed_layout=layout, **changed)
        for start, end in ((0, 7), (7, 12)):
            future = torch.full((end - start, end - start), -torch.inf, dtype=dtype).triu(1)[None, None]
            eager: Any = eager_sinks if "s_aux" in changed else eager_softcap
            parts = [tensor[:, :, start:end] for tensor in (q, k, v)]
            expected, _ = eager(module, *parts, future, scaling=8**-0.5, softcap=changed.get("softcap"))
            torch.testing.assert_close(found[:, start:end], expected, atol=near, rtol=near)


def test_sinks_and_a_soft_cap_at_once_are_refused() -> None:
    part = torch.zeros(1, 1, 2, 8)
    with pytest.raises(EngineError, match="both sinks and a soft cap"):
        layout = PackedLayout.of([2], CPU)
        packed_attention(None, part, part, part, None, packed_layout=layout, softcap=1.0, s_aux=torch.zeros(1))
