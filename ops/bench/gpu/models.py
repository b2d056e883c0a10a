"""Random models of known shapes: folders that every engine loads, and their floating-point operations in training.

The three big shapes are those of SmolLM2-135M, Qwen2.5-0.5B and -1.5B (from their ``config.json``). Speed does not
depend on the values of the weights."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

_TOKENIZER = Path(__file__).resolve().parents[2] / "demo" / "tiny_model"


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen2 with tied embeddings."""

    name: str
    hidden: int
    layers: int
    heads: int
    key_heads: int
    intermediate: int
    vocabulary: int

    @property
    def matmul_parameters(self) -> int:
        """Weights that every token is multiplied with: all layers and the output layer. The embedding is a lookup."""
        head_dim = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.key_heads * head_dim
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocabulary

    def step_flops(self, prompt_tokens: int, response_tokens: int, num_sequences: int) -> float:
        """Return the floating-point operations of forward and backward on equal sequences, without recomputation.

        Counts six operations for each weight and token (PaLM, 2204.02311, appendix B). The output layer counts
        for response tokens only, because no other logits are needed. Six more count for each hidden unit, layer
        and pair of attending tokens: two products, half of the square."""
        length = prompt_tokens + response_tokens
        layers = self.matmul_parameters - self.hidden * self.vocabulary
        products = 6.0 * (layers * length + self.hidden * self.vocabulary * response_tokens)
        attention = 6.0 * self.layers * self.hidden * length * length
        return num_sequences * (products + attention)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("0.3M", 128, 2, 4, 2, 256, 256),
        Shape("5M", 256, 6, 8, 4, 768, 2048),
        Shape("135M", 576, 30, 9, 3, 1536, 49_152),
        Shape("0.5B", 896, 24, 14, 2, 4864, 151_936),
        Shape("1.5B", 1536, 28, 12, 2, 8960, 151_936),
    )
}
"""0.3M and 5M are for tests on a CPU."""


def make_model(shape: Shape, *, dtype: torch.dtype, positions: int) -> Qwen2ForCausalLM:
    """Make a random model on the GPU, or the CPU without one; every call makes the same."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        config = Qwen2Config(
            hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads, vocab_size=shape.vocabulary,
            max_position_embeddings=positions, tie_word_embeddings=True, pad_token_id=None, bos_token_id=None,
            eos_token_id=None,
        )  # fmt: skip
        model = Qwen2ForCausalLM(config)
    # casts in place
    torch.nn.Module.to(model, dtype)
    return model


def write_model(shape: Shape, folder: Path, *, dtype: torch.dtype, positions: int) -> Path:
    """Write a random model with a tokenizer into ``folder``; return the folder."""
    make_model(shape, dtype=dtype, positions=positions).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_TOKENIZER / name, folder / name)
    return folder
