"""One pass over the logits gives log-probs, entropies, a loss of them, and its whole gradient."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from tests.workers.engines.tiny import ARCHITECTURES, VOCABULARY, ragged, tiny_model
from workers.engines.model.head import HEAD_BYTES, Entropy, cut_parts, rows_at_once, score_logits
from workers.engines.model.packed import PackedTokens, PartLoss, TokenScores, loss_packed, prepare_packed, score_packed

CPU = torch.device("cpu")
TEN_TOKENS = 10 * 3 * 8 * VOCABULARY
"""Of a float64 model."""


def packed_batch() -> tuple[np.ndarray, PackedTokens]:
    sequences = ragged(np.random.default_rng(0), 12)
    lengths = [num for _, num in sequences]
    assert min(lengths) < 10 < max(lengths), "some rows are longer than a part, and others not"
    batch = PackedTokens.of([tokens for tokens, _ in sequences], lengths, CPU)
    return np.repeat(np.arange(len(lengths)), lengths), batch


def some_loss(num_tokens: int) -> PartLoss:
    """A loss that reads log-probs and entropies, and sees the place of each token."""
    weights = torch.linspace(-1.0, 1.5, num_tokens, dtype=torch.float64)

    def loss(scores: TokenScores, part: slice) -> torch.Tensor:
        assert scores.entropy is not None
        return (scores.logprobs.exp() * weights[part] - 0.3 * weights[part] * scores.entropy).sum()

    return loss


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


class Adapted(torch.nn.Module):
    """A frozen head with an adapter beside it, as peft makes one."""

    def __init__(self, base: torch.nn.Module, hidden: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Linear(hidden, 3, bias=False, dtype=torch.float64)
        self.up = torch.nn.Linear(3, VOCABULARY, dtype=torch.float64)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.base(states) + self.up(self.down(states))


def adapted() -> PreTrainedModel:
    model = tiny_model("llama", torch.float64, tie_word_embeddings=False)
    head = model.get_output_embeddings()
    assert head is not None
    model.set_output_embeddings(Adapted(head, 64))
    return model


@pytest.mark.parametrize("keep_rows", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_model("qwen3", torch.float64),
        lambda: tiny_model("qwen2", torch.float64, tie_word_embeddings=False),
        adapted,
    ],
    ids=["tied", "a head of its own", "an adapter on the head"],
)
def test_a_loss_in_parts_has_value_and_gradient_of_the_whole(make: Any, keep_rows: bool) -> None:
    model = prepare_packed(make())
    row_ids, batch = packed_batch()
    loss = some_loss(row_ids.size)
    whole = loss(score_packed(model, batch, 0.7, Entropy.DIFFERENTIATE), slice(0, row_ids.size))
    (3.0 * whole).backward()
    expected = gradients(model)
    seen: list[slice] = []

    def watched(scores: TokenScores, part: slice) -> torch.Tensor:
        seen.append(part)
        assert scores.states is not None and not scores.states.requires_grad
        return loss(scores, part)

    found = loss_packed(
        model, batch, watched, 0.7, Entropy.DIFFERENTIATE, TEN_TOKENS, row_ids=row_ids, keep_rows=keep_rows, keep_states=True
    )  # fmt: skip
    (3.0 * found).backward()
    assert len(seen) > 3
    torch.testing.assert_close(found, whole, atol=1e-12, rtol=1e-12)
    got = gradients(model)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-11, rtol=1e-9, msg=name)


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("entropy", [Entropy.NONE, Entropy.MEASURE, Entropy.DIFFERENTIATE])
def test_the_logits_are_made_once_and_their_softmax_is_taken_once(entropy: Entropy) -> None:
    """Once more for the gradient would be as many forward passes over the head again."""
    model = prepare_packed(tiny_model("llama", torch.float64))
    row_ids, batch = packed_batch()
    calls: list[int] = []
    head = model.get_output_embeddings()
    assert head is not None
    head.register_forward_hook(lambda *_: calls.append(1))
    with Operations() as operations:
        loss_packed(
            model, batch, lambda scores, _: scores.logprobs.sum(), 1.0, entropy, TEN_TOKENS, row_ids=row_ids, keep_rows=False
        ).backward()  # fmt: skip
    parts = -(-row_ids.size // 10)
    assert parts > 5
    assert len(calls) == parts
    assert operations.counts["_log_softmax"] == parts
    assert operations.counts["_log_softmax_backward_data"] == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_parts_in_low_precision_have_the_gradient_of_the_whole(architecture: str, autocast: torch.dtype | None) -> None:
    model = prepare_packed(tiny_model(architecture))
    row_ids, batch = packed_batch()
    found: list[dict[str, torch.Tensor]] = []
    for head_bytes in (HEAD_BYTES, TEN_TOKENS // 2):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = loss_packed(
                model, batch, some_loss(row_ids.size), 0.7, Entropy.DIFFERENTIATE, head_bytes, row_ids=row_ids, keep_rows=False
            )  # fmt: skip
        loss.backward()
        found.append(gradients(model))
    for name, gradient in found[0].items():
        assert found[1][name].dtype == gradient.dtype == torch.float32
        apart = (found[1][name] - gradient).norm() / gradient.norm()
        assert apart < (1e-5 if autocast is None else 2e-2), name


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_gradient_of_log_probs_and_entropies_is_the_true_one(temperature: float) -> None:
    torch.manual_seed(0)
    logits = (3.0 * torch.randn(5, 11, dtype=torch.float64)).requires_grad_()
    targets = torch.tensor([0, 10, 3, 3, 7])
    assert torch.autograd.gradcheck(
        lambda z: cast("Any", score_logits(z, targets, temperature, Entropy.DIFFERENTIATE)), (logits,), atol=1e-8
    )
    expected = torch.log_softmax(logits / temperature, -1)
    logprobs, entropies = score_logits(logits, targets, temperature, Entropy.MEASURE)
    assert entropies is not None and not entropies.requires_grad
    torch.testing.assert_close(logprobs, expected.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropies, -(expected.exp() * expected).sum(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_takes_logits_in_blocks_of_rows_with_the_same_numbers(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    logits, targets = 4 * torch.randn(11, 50).to(dtype), torch.randint(50, (11,))
    factors = torch.randn(2, 11)

    def numbers() -> list[torch.Tensor]:
        given = logits.clone().requires_grad_()
        logprobs, entropies = score_logits(given, targets, 0.7, Entropy.DIFFERENTIATE)
        assert entropies is not None
        (gradient,) = torch.autograd.grad((torch.stack([logprobs, entropies]) * factors).sum(), given)
        return [logprobs, entropies, gradient]

    whole = numbers()
    # three rows at once
    monkeypatch.setattr("workers.engines.model.head._BLOCK_BYTES", 3 * 50 * 4)
    assert all(torch.equal(one, other) for one, other in zip(numbers(), whole, strict=True))


def test_a_confident_policy_keeps_the_little_gradient_that_it_has() -> None:
    """Rounding of log-sum-exp, whose size is that of the logits, would be many times as much."""
    torch.manual_seed(0)
    logits = 8.0 * torch.randn(6, 1000) + 37.7
    logits[:, 5] = logits.amax(dim=1) + 10.0
    targets = torch.tensor([5, 5, 5, 5, 8, 9])
    found: list[torch.Tensor] = []
    for dtype in (torch.float32, torch.float64):
        given = logits.detach().to(dtype, copy=True).requires_grad_()
        score_logits(given, targets, 1.0, Entropy.MEASURE)[0].sum().backward()
        assert given.grad is not None
        found.append(given.grad.double())
    assert 0.0 < float(found[1][:4, 5].max()) < 1e-3
    torch.testing.assert_close(found[0], found[1], atol=3e-7, rtol=1e-4)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 40), st.booleans())
def test_parts_cover_every_token_once_and_are_no_longer_than_they_must_be(
    lengths: list[int], rows: int, keep_rows: bool
) -> None:
    row_ids = np.repeat(np.arange(len(lengths)), lengths)
    parts = cut_parts(row_ids, rows, keep_rows=keep_rows)
    assert [place for part in parts for place in range(part.start, part.stop)] == list(range(row_ids.size))
    for part in parts:
        inside = set(row_ids[part].tolist())
        assert part.stop - part.start <= rows or (keep_rows and len(inside) == 1)
        if keep_rows:
            assert part.stop - part.start == sum(lengths[row] for row in inside), "every row is whole"


def test_rows_at_once_are_counted_in_bytes() -> None:
    assert rows_at_once(150_000, torch.float32, 3 * 4 * 150_000 * 447) == 447
    assert rows_at_once(150_000, torch.bfloat16, 3 * 4 * 150_000 * 447) == 447, "scores are float32"
    assert rows_at_once(150_000, torch.float64, 3 * 4 * 150_000 * 447) == 223
    assert rows_at_once(150_000, torch.float32, 1) == 1


def test_a_loss_in_parts_leaves_the_model_as_it_was() -> None:
    plain = tiny_model(dtype=torch.float64)
    model = prepare_packed(copy.deepcopy(plain))
    row_ids, batch = packed_batch()
    loss = some_loss(row_ids.size)
    loss_packed(model, batch, loss, 0.7, Entropy.MEASURE, TEN_TOKENS, row_ids=row_ids, keep_rows=False)
    assert all(parameter.grad is None for parameter in model.parameters()), "before backward there is none"
