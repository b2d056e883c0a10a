"""Tiny random reward models with a byte tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Gemma2Config,
    Gemma2ForSequenceClassification,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from tests.byte_tokenizer import NUM_TOKENS, write_byte_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tiny_reward_model(architecture: str = "qwen3", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Make a sequence classifier whose scores differ by several units from text to text."""
    torch.manual_seed(seed)
    shared: dict[str, Any] = {
        "vocab_size": NUM_TOKENS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "num_labels": 1,
    }
    if architecture == "bert":
        shared |= {"pad_token_id": 0, **changes}
        return BertForSequenceClassification(BertConfig(**shared)).eval()
    shared |= {"num_key_value_heads": 1, "head_dim": 16, "pad_token_id": None, "bos_token_id": None, **changes}
    if architecture == "gemma2":
        return Gemma2ForSequenceClassification(Gemma2Config(**shared)).eval()
    return Qwen3ForSequenceClassification(Qwen3Config(**shared)).eval()


def write_reward_model(folder: Path, model: PreTrainedModel | None = None, template: str | None = None) -> Path:
    """Write a reward model's folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (tiny_reward_model() if model is None else model).save_pretrained(folder)
    return write_byte_tokenizer(folder, template)
