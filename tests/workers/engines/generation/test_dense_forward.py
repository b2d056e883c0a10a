"""The dense family's own forward agrees with transformers', for all parts of the model, and takes
only models it knows."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.workers.engines.tiny import VOCABULARY, tiny_model
from workers.engines.generation.local import dense, forward
from workers.engines.generation.local.dense import is_dense
from workers.engines.generation.local.forward import SlotForward
from workers.engines.model.weights_file import PublishedWeights

PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {"hidden_size": 128}),
    "qwen3": ("qwen3", {}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "qwen2 with a window": (
        "qwen2", {"hidden_size": 128, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3 with a window": ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
    "one head for all queries": ("qwen3", {"num_key_value_heads": 1}),
    "a large epsilon": ("qwen3", {"rms_norm_eps": 0.3}),
    "another activation": ("llama", {"hidden_act": "gelu"}),
    "stretched positions": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
            }
        },
    ),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
            }
        },
    ),
}  # fmt: skip
DYNAMIC: dict[str, Any] = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
LENGTHS = (1, 2, 9, 33, 70)
NUM_STEPS = 4


@pytest.fixture(autouse=True, params=["plain matrices", "packed matrices", "prefill apart"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the same numbers are computed."""
    least = 0 if request.param == "packed matrices" else 1 << 40
    monkeypatch.setattr(dense, "LEAST_PACKED", {torch.float32: least, torch.bfloat16: least})
    if request.param == "prefill apart":
        monkeypatch.setattr(forward, "JOINED_TOKENS", 0)


def make(part: str, *, tied: bool = True, seed: int = 0) -> PreTrainedModel:
    """Make a model no part of which is without effect: no norm weighs 1 everywhere and no bias is
    0."""
    architecture, changes = PARTS[part]
    model = tiny_model(architecture, seed=seed, tie_word_embeddings=tied, **changes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@torch.inference_mode()
def sampled_from(slots: SlotForward) -> torch.Tensor:
    """Fill rows of different lengths and decode a few tokens: float32 logits [steps, rows,
    vocabulary]."""
    sequences = make_sequences()
    slots.prefill([sequence[:length] for sequence, length in zip(sequences, LENGTHS, strict=True)], range(len(LENGTHS)))
    steps = []
    for step in range(NUM_STEPS):
        places = np.array(LENGTHS) - 1 + step
        tokens = np.array([sequence[place] for sequence, place in zip(sequences, places, strict=True)], np.int64)
        steps.append(slots.decode(tokens, places).float())
    return torch.stack(steps)


@torch.inference_mode()
def truth_of(model: PreTrainedModel) -> torch.Tensor:
    """Compute the same logits by transformers' own attention, one sequence at a time without a
    cache."""
    rows = []
    for sequence, length in zip(make_sequences(), LENGTHS, strict=True):
        logits = model(input_ids=torch.from_numpy(sequence.astype(np.int64))[None], use_cache=False).logits[0]
        rows.append(logits[length - 1 : length - 1 + NUM_STEPS].float())
    return torch.stack(rows, 1)


def make_sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, VOCABULARY, size=length + NUM_STEPS).astype(np.int32) for length in LENGTHS]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("part", PARTS)
def test_logits_are_those_of_transformers(part: str, tied: bool) -> None:
    model = make(part, tied=tied)
    assert is_dense(model)
    truth = truth_of(model)
    torch.testing.assert_close(sampled_from(SlotForward(model, len(LENGTHS))), truth, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("part", ["llama with biases", "qwen2", "qwen3", "qwen2 with a window"])
def test_in_bfloat16_they_are_as_near_the_truth_as_those_of_transformers(part: str) -> None:
    model = make(part).bfloat16()
    truth = truth_of(copy.deepcopy(model).float())
    theirs = truth_of(model)
    ours = sampled_from(SlotForward(model, len(LENGTHS)))
    assert (ours - truth).abs().mean() < 1.2 * (theirs - truth).abs().mean()


@pytest.mark.parametrize("is_lasting", [True, False])
def test_new_weights_count_from_the_next_token_copied_or_used_in_place(is_lasting: bool) -> None:
    slots = SlotForward(make("llama with biases"), len(LENGTHS))
    for seed in (1, 2):
        new = make("llama with biases", seed=seed)
        named = {name: parameter.detach() for name, parameter in new.named_parameters()}
        slots.load_weights(PublishedWeights(named, is_lasting=is_lasting))
        torch.testing.assert_close(sampled_from(slots), truth_of(new), atol=1e-4, rtol=1e-4)


def test_positions_may_outgrow_every_earlier_one() -> None:
    model = tiny_model("qwen3", max_position_embeddings=4096).eval()
    sequence = np.random.default_rng(1).integers(2, VOCABULARY, size=1500).astype(np.int32)
    slots = SlotForward(copy.deepcopy(model), 1)
    with torch.inference_mode():
        for length in (3, 1500):
            slots.prefill([sequence[:length]], [0])
            ours = slots.decode(sequence[length - 1 : length].astype(np.int64), np.array([length - 1]))
            theirs = model(input_ids=torch.from_numpy(sequence[:length].astype(np.int64))[None]).logits[:, -1]
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_others_keep_the_forward_of_transformers_and_are_served_by_it() -> None:
    torch.manual_seed(0)
    relative = MistralForCausalLM(
        MistralConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=VOCABULARY, initializer_range=0.2, sliding_window=None,
        )
    ).eval()  # fmt: skip
    for model in (relative, tiny_model("llama", **DYNAMIC).eval()):
        assert not is_dense(model)
        truth = truth_of(model)
        torch.testing.assert_close(sampled_from(SlotForward(model, len(LENGTHS))), truth, atol=1e-4, rtol=1e-4)


def test_a_model_that_is_large_or_only_derived_keeps_the_forward_of_transformers() -> None:
    class Derived(Qwen3ForCausalLM):
        """May compute anything."""

    assert is_dense(tiny_model("qwen3"))
    assert not is_dense(Derived(tiny_model("qwen3").config))
    with torch.device("meta"):
        assert not is_dense(Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=2)))
