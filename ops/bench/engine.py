"""How fast the local engine samples, against ``generate`` of transformers on the same ragged batch.

*Consumes* a random model and heavy-tailed response lengths. *Produces* a table of sampled tokens a second.

Both sides sample (temperature 1, no truncation of the distribution) the same number of response tokens for the same prompts
from the same weights, with a KV cache, on one thread. How long a response gets is forced, so that chance cannot favour a
side: the engine gets a limit per request; ``generate`` a stopping criterion that ends each row at the same length, after
which it fills the row up until the longest one has ended. No other token ends a response. The lengths are log-normal with a
99th percentile above four times the median, in the order in which they are drawn, since nobody knows them beforehand.

``generate`` runs once with all sequences in one batch and once in batches as large as the engine's slots; the promise is
kept against the faster of the two. The engine also records the log-prob of every token, ``generate`` does not.

    python -m ops.bench.engine --json bench-results/engine.json
"""

from __future__ import annotations

import argparse
import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, StoppingCriteria, StoppingCriteriaList

from ops.bench.table import interleaved_medians, show, write_json
from protocol.ids import TrajectoryId
from workers.engines.generation import SamplingParams, WindowRequest
from workers.engines.local.engine import LocalEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

BAR = 2.0
"""The engine's tokens a second over those of ``generate``: what the engine promises."""

LONGEST = 512
"""Longest response."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and a batch to measure on."""

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


SHAPES = (
    Shape("demo, 0.2M", 96, 2, 3, 3, 44, num_sequences=256, num_slots=64, median=12.0),
    Shape("demo, 0.2M, long", 96, 2, 3, 3, 44, num_sequences=128, num_slots=64, median=40.0),
    Shape("0.5M, grouped", 128, 4, 4, 2, 256, num_sequences=128, num_slots=64, median=40.0),
)


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be sampled."""

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
    """Draw prompts and heavy-tailed response lengths."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(shape.median), 0.8, shape.num_sequences), 2, LONGEST).astype(np.int64)
    prompts = [rng.integers(1, shape.vocabulary, rng.integers(6, 24)).astype(np.int32) for _ in lengths]
    return Work(prompts, lengths)


class EndsAt(StoppingCriteria):
    """Ends each row of a batch at its own response length."""

    def __init__(self, prompt_tokens: int, lengths: torch.Tensor) -> None:
        """Take the padded prompt length and int64 [rows] response lengths."""
        self._ends = prompt_tokens + lengths

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Say which rows have ended: bool [rows]."""
        return input_ids.shape[1] >= self._ends


@torch.inference_mode()
def run_generate(model: Any, work: Work, batch_size: int) -> int:
    """Sample with ``generate``, prompts padded on the left; return the response tokens that count."""
    total = 0
    for start in range(0, len(work.prompts), batch_size):
        prompts = work.prompts[start : start + batch_size]
        lengths = torch.from_numpy(work.lengths[start : start + batch_size])
        longest = max(prompt.size for prompt in prompts)
        padded = np.stack([np.pad(prompt, (longest - prompt.size, 0)) for prompt in prompts]).astype(np.int64)
        mask = np.stack([np.arange(longest) >= longest - prompt.size for prompt in prompts]).astype(np.int64)
        sampled: Any = model.generate(
            torch.from_numpy(padded),
            attention_mask=torch.from_numpy(mask),
            max_new_tokens=int(lengths.max()),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            use_cache=True,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([EndsAt(longest, lengths)]),
        )
        assert sampled.shape == (len(prompts), longest + int(lengths.max()))
        total += int(lengths.sum())
    return total


def run_engine(engine: LocalEngine, work: Work, turn: int) -> int:
    """Sample with the engine; return the response tokens."""
    for number, (prompt, length) in enumerate(zip(work.prompts, work.lengths.tolist(), strict=True)):
        engine.submit(
            WindowRequest(
                trajectory=TrajectoryId("t", turn, number),
                prompt_tokens=prompt,
                response_tokens=np.empty(0, np.int32),
                window_tokens=length,
                max_response_tokens=length,
                sampling=SamplingParams(1.0),
                seed=0,
            )
        )
    total = 0
    while engine.stats().num_live:
        total += sum(window.tokens.size for window in engine.advance(8))
    return total


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """Time both on one shape."""
    model, work = make_model(shape), make_work(shape)
    engine = LocalEngine(copy.deepcopy(model), num_slots=shape.num_slots)
    engine.load_weights(model.state_dict(), 0)
    num_tokens = int(work.lengths.sum())
    turn = 0

    def by_engine() -> None:
        nonlocal turn
        turn += 1
        assert run_engine(engine, work, turn) == num_tokens

    in_slots, in_one = f"generate, batches of {shape.num_slots}", f"generate, one batch of {shape.num_sequences}"
    seconds = interleaved_medians(
        {
            "engine": by_engine,
            in_slots: lambda: run_generate(model, work, shape.num_slots),
            in_one: lambda: run_generate(model, work, shape.num_sequences),
        },
        rounds=rounds,
    )
    speeds = {name: num_tokens / value for name, value in seconds.items()}
    return {
        "shape": shape.name,
        "num_sequences": shape.num_sequences,
        "num_slots": shape.num_slots,
        "num_tokens": num_tokens,
        "median_length": float(np.median(work.lengths)),
        "p99_length": float(np.percentile(work.lengths, 99)),
        "tokens_per_s": speeds,
        "ratio": speeds["engine"] / max(speeds[in_slots], speeds[in_one]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 when the engine does not keep its promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds; the median counts")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    results = [measure(shape, options.rounds) for shape in SHAPES]
    show(
        f"sampled tokens a second, {options.threads} thread(s), median of {options.rounds} interleaved rounds",
        ("shape", "contender", "tokens/s", "engine is faster"),
        [
            (result["shape"], name, speed, f"{result['tokens_per_s']['engine'] / speed:.2f}x")
            for result in results
            for name, speed in result["tokens_per_s"].items()
        ],
    )
    if options.json is not None:
        write_json(options.json, {"bar": BAR, "threads": options.threads, "results": results})
    return 0 if all(result["ratio"] >= BAR for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
