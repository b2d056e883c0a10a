"""Tiny random models, and training samples on them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pipeline.algorithms.batching import TrainingSample
from pipeline.data.tokenizer import TextTokenizer

VOCABULARY = 64
ARCHITECTURES: dict[str, tuple[type, type[PreTrainedModel]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def tiny_model(
    architecture: str = "qwen3", dtype: torch.dtype = torch.float32, *, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """Make a model of hidden size 64 with 4 query and 2 key heads of 32, weights large enough that
    tokens matter. One in float64 computes its norms in float64 too."""
    make_config, make_model = ARCHITECTURES[architecture]
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    torch.manual_seed(seed)
    model = make_model(make_config(**(settings | changes)))
    # in place; transformers' own method loses the type
    torch.nn.Module.to(model, dtype)
    return exact_norms(model) if dtype == torch.float64 else model


def exact_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Make a float64 model compute its norms in float64 too; return the model.

    Transformers' own round to float32, forward and backward: sums in another order would differ."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)
    return model


def _norm(module: Any, states: torch.Tensor) -> torch.Tensor:
    return module.weight * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + module.variance_epsilon)


def tiny_tokenizer() -> TextTokenizer:
    """Make a tokenizer of the tiny models' vocabulary: of one to three letters each, token 1
    special."""
    names = [
        chr(ord("a") + number % 5) * (1 + number % 3) + chr(ord("A") + number // 5) for number in range(VOCABULARY)
    ]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=names[0]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([names[1]])
    return TextTokenizer(tokenizer, {}, None, "")


def ragged(
    rng: np.random.Generator, num: int, longest: int = 90, *, share: bool = True
) -> list[tuple[np.ndarray, int]]:
    """Make sequences with a heavy tail of lengths, and how many tokens of each are the response.

    If they ``share`` tokens, of every three one begins like an earlier one, and one continues one."""
    made: list[tuple[np.ndarray, int]] = []
    for number in range(num):
        prompt = rng.integers(2, VOCABULARY, int(rng.integers(1, 8)))
        if share and number % 3:
            earlier = made[int(rng.integers(len(made)))][0][: longest // 2]
            prompt = earlier if number % 3 == 2 else earlier[: int(rng.integers(1, earlier.size + 1))]
        size = int(np.clip(rng.lognormal(2.2, 1.0), 1, longest - prompt.size))
        response = rng.integers(2, VOCABULARY, size)
        made.append((np.concatenate([prompt, response]).astype(np.int32), size))
    return made


def make_samples(num: int = 13, *, seed: int = 0, with_old: bool = True) -> list[TrainingSample]:
    """Make samples with holes in their masks and log-probs that a policy of this vocabulary might
    have."""
    rng = np.random.default_rng(seed)
    samples: list[TrainingSample] = []
    for number, (tokens, response) in enumerate(ragged(rng, num)):
        mask = rng.random(response) < 0.9
        mask[0] = True
        old = rng.normal(-4.0, 0.5, response).astype(np.float32)
        samples.append(
            TrainingSample(
                name=f"t.{number}.0",
                tokens=tokens,
                prompt_length=tokens.size - response,
                loss_mask=mask,
                advantages=np.full(response, rng.normal(), dtype=np.float32),
                behavior_logprobs=old + rng.normal(0.0, 0.1, response).astype(np.float32),
                versions=np.zeros(response, dtype=np.int32),
                reference_logprobs=old + rng.normal(0.0, 0.3, response).astype(np.float32),
                old_logprobs=old if with_old else None,
            )
        )
    return samples


def with_old(samples: list[TrainingSample], old: list[np.ndarray]) -> list[TrainingSample]:
    """Give samples the learner's own log-probs, as behaviour's too."""
    return [replace(s, old_logprobs=o, behavior_logprobs=o) for s, o in zip(samples, old, strict=True)]


def plain_logprobs(model: PreTrainedModel, tokens: np.ndarray, num_scored: int, temperature: float) -> torch.Tensor:
    """Score one sequence alone, by the model's own attention: the result that packing must
    reproduce."""
    row = torch.from_numpy(tokens.astype(np.int64))[None]
    logits = model(input_ids=row, use_cache=False).logits[0, :-1] / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, row[0, 1:, None])[-num_scored:, 0]
