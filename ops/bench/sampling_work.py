"""Models, prompts and heavy-tailed response lengths shared by the benchmarks of sampling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from protocol.ids import TrajectoryId
from workers.engines.generation.seam import SampledWindow, SamplingParams, WindowRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from workers.engines.generation.seam import GenerationEngine

LONGEST = 512
"""Longest response in tokens."""

VLLM_SETTINGS: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "3",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Environment of vLLM in this process, on one thread."""


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    hidden: int
    layers: int
    query_heads: int
    key_heads: int
    vocabulary: int
    num_sequences: int
    num_slots: int
    median: float
    """Of the response lengths, in tokens."""
    prompt_tokens: tuple[int, int] = (6, 23)
    """Shortest and longest."""
    group_size: int = 1
    """Responses of each prompt."""


SHAPES = (
    Shape("demo, 0.2M", 96, 2, 3, 3, 44, num_sequences=256, num_slots=64, median=12.0),
    Shape("demo, 0.2M, long", 96, 2, 3, 3, 44, num_sequences=128, num_slots=64, median=40.0),
    Shape("0.5M, grouped", 128, 4, 4, 2, 256, num_sequences=128, num_slots=64, median=40.0),
)


@dataclass(frozen=True, slots=True)
class Work:
    prompts: list[np.ndarray]
    """int32 [prompt tokens] each"""
    lengths: np.ndarray
    """int64 [sequences]: response tokens"""


def make_model(shape: Shape) -> PreTrainedModel:
    """Make a random Qwen3 with heads of 32."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.key_heads,
        head_dim=32,
        vocab_size=shape.vocabulary,
        max_position_embeddings=2 * LONGEST,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def make_work(shape: Shape, seed: int = 0) -> Work:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(shape.median), 0.8, shape.num_sequences), 2, LONGEST).astype(np.int64)
    shortest, longest = shape.prompt_tokens
    prompts = [
        rng.integers(1, shape.vocabulary, rng.integers(shortest, longest + 1)).astype(np.int32)
        for _ in range(-(-lengths.size // shape.group_size))
    ]
    return Work([prompts[number // shape.group_size] for number in range(lengths.size)], lengths)


def run_engine(engine: GenerationEngine, work: Work, turn: int, window: int) -> list[SampledWindow]:
    """Sample with Headrace's engine, window by window."""
    requests: dict[TrajectoryId, WindowRequest] = {}
    for number, (prompt, length) in enumerate(zip(work.prompts, work.lengths.tolist(), strict=True)):
        request = WindowRequest(
            trajectory=TrajectoryId("t", turn, number),
            prompt_tokens=prompt,
            response_tokens=np.empty(0, np.int32),
            window_tokens=window,
            max_response_tokens=length,
            sampling=SamplingParams(1.0),
            seed=0,
        )
        requests[request.trajectory] = request
        engine.submit(request)
    windows = list[SampledWindow]()
    while engine.stats().num_live:
        for got in engine.advance(8):
            windows.append(got)
            if not got.finish_reason.is_final:
                before = requests[got.trajectory]
                after = replace(before, response_tokens=np.concatenate([before.response_tokens, got.tokens]))
                requests[got.trajectory] = after
                engine.submit(after)
    return windows
