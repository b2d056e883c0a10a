"""A random model of about a given number of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 1024
_BYTES = 4
_WIDTHS = ((16 << 20, 128), (128 << 20, 512), (2 << 30, 1024), (1 << 62, 2048))
"""Models below this many bytes have this width."""


def make_model(num_bytes: int) -> PreTrainedModel:
    """Make a random Qwen3 in float32 whose weights take about ``num_bytes``; every call makes the same one."""
    width = next(width for limit, width in _WIDTHS if num_bytes < limit)
    layer, ends = 13 * width * width * _BYTES, 2 * VOCABULARY * width * _BYTES
    torch.manual_seed(0)
    heads = width // 64
    return Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=max(1, round((num_bytes - ends) / layer)),
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=64,
            vocab_size=VOCABULARY,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=1,
        )
    )
