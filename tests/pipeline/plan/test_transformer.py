"""Claims about what a transformer takes: equal to what transformers builds and torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from pipeline.plan.transformer import transformer
from protocol.errors import ConfigError

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 128,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = [
    ("Llama", {}),
    ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("Llama", {"head_dim": 16, "num_key_value_heads": 8}),
    ("Mistral", {}),
    ("Qwen2", {"tie_word_embeddings": True}),
    ("Qwen3", {"head_dim": 32}),
    ("Qwen3Moe", EXPERTS),
    ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
]


def config(name: str, changed: dict[str, Any]) -> Any:
    return getattr(transformers, f"{name}Config")(**SMALL | changed)


@pytest.mark.parametrize(("name", "changed"), MODELS)
def test_the_number_of_weights_is_that_of_the_model(name: str, changed: dict[str, Any]) -> None:
    made = config(name, changed)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(made)
    counted = sum(weights.numel() for weights in {id(w): w for w in model.parameters()}.values())
    assert transformer(made.to_dict()).num_weights == counted


@pytest.mark.parametrize(("name", "changed"), [MODELS[0], MODELS[2], MODELS[4], MODELS[5]])
def test_operations_are_those_that_torch_counts(name: str, changed: dict[str, Any]) -> None:
    length = 48
    made = config(name, changed)
    made._attn_implementation = "eager"
    model, tokens = getattr(transformers, f"{name}ForCausalLM")(made), torch.zeros((1, length), dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        logits = model(input_ids=tokens, use_cache=False).logits
    # it counts whole squares of scores, for tokens that are masked too; and a product of rotary positions
    ours = length * transformer(made.to_dict()).forward_flops(length)
    assert forward.get_total_flops() == pytest.approx(ours, rel=1e-3)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    # nothing needs the gradient of what the first layer reads; the embedding's is a sum, no product
    assert backward.get_total_flops() == pytest.approx(2 * ours, rel=1e-3)


def test_a_cache_has_the_keys_and_values_that_the_model_keeps() -> None:
    made = config("Qwen3", {"head_dim": 32})
    model = transformers.Qwen3ForCausalLM(made)
    cache: Any = model(input_ids=torch.zeros((1, 5), dtype=torch.long), use_cache=True).past_key_values
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert 5 * transformer(made.to_dict()).cache_bytes(item=4) == kept


def test_experts_that_a_token_is_not_given_to_take_memory_and_no_time() -> None:
    few, many = (transformer(config("Qwen3Moe", EXPERTS | {"num_experts": n}).to_dict()) for n in (8, 16))
    assert many.num_weights > 1.4 * few.num_weights
    # the router alone
    assert many.matrix_weights - few.matrix_weights == 3 * 8 * 64


def test_recomputed_layers_cost_one_more_forward_pass() -> None:
    model = transformer(config("Llama", {}).to_dict())
    assert model.training_flops(100, recomputed=1.0) == pytest.approx(model.training_flops(100) * 4 / 3)


def test_unknown_types_and_missing_sizes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"type is mamba; plans know llama, mistral, qwen2"):
        transformer({"model_type": "mamba"})
    with pytest.raises(ConfigError, match=r"no usable 'vocab_size'; a llama has one"):
        transformer({"model_type": "llama", **{k: v for k, v in SMALL.items() if k != "vocab_size"}})


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"num_hidden_layers": -3}, "num_hidden_layers -3; expected 1 to 1000"),
        ({"num_attention_heads": 0}, "num_attention_heads 0; expected 1 to"),
        ({"num_key_value_heads": 3}, "attention heads and 3 of keys; expected a number that divides them"),
    ],
)
def test_sizes_that_no_model_has_are_refused(changed: dict[str, Any], sentence: str) -> None:
    sizes = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": 100,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=sentence):
        transformer(sizes | changed)
