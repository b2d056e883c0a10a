"""Trains the demo's start model from nothing: a policy of mixed quality, with room for reinforcement learning.

    python -m ops.demo.make_tiny_model --out ops/demo/tiny_model

Writes a Hugging Face folder: config, generation config, tokenizer, weights, and a card with the measured
figures. Held-out prompts are never trained on.

**Why mixed demonstrations.** The demonstrator adds well, but when a subtraction goes below zero it often takes
the smaller digit from the larger one, as pupils do: 2-9 becomes 7, not 3. The model learns the whole skill and,
for this one rule, both answers, the wrong one more often. Greedy decoding then fails wherever a borrow occurs,
while sampling finds correct responses in most groups, which is the signal that DAPO needs. A model stopped
halfway through learning has no such signal: its errors are not alternatives to something that it also knows.

**Why letters.** The letter before every step lets two layers find a term by matching, where counting positions
would need more. Heads are 32 wide, the least that every supported engine accepts."""

from __future__ import annotations

import argparse
import itertools
import math
import random
import string
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ops.demo.guided import err
from ops.demo.task import MAX_RESPONSE_TOKENS, MAX_TERMS, Problem, Split, draw, draw_num_terms, generate, write_response

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SYMBOLS = (PAD, BOS, EOS, *string.digits, *"+-=", *string.ascii_lowercase)
"""The vocabulary; a token's id is its index."""
MAX_POSITIONS = 256
"""Room for the longest prompt, 3 * MAX_TERMS + 1, and the longest response."""
SMALLER_FROM_LARGER = 0.65
"""Probability that the demonstrator answers a borrow wrongly. Above one half, so that greedy decoding does so too."""
SHORTEST = 3
"""Terms of the shortest demonstration: one fewer than the task's, because short chains teach the rules soonest."""
EVEN_SHARE = 0.1
"""Share of demonstrations whose length is drawn uniformly, so that the last letters occur often enough."""

Demonstrations = Callable[[random.Random, PreTrainedTokenizerFast], Iterator[tuple[list[int], list[int]]]]
"""Prompts and responses as token ids, endlessly."""

_POOL = 1024
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings of the supervised training."""

    seed: int
    num_steps: int
    batch_tokens: int = 2048
    """Prompt, response and padding tokens of one step."""
    learning_rate: float = 3e-3
    """Of AdamW, after 100 steps of warm-up; falls along a cosine."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The card's figures on held-out prompts."""

    num_prompts: int
    greedy_accuracy: float
    sampled_accuracy: float
    mixed_groups: float
    """Share of prompts with both correct and wrong responses among 8 samples at temperature 1."""
    median_tokens: int
    p99_tokens: int
    """Of the sampled responses, including the end-of-sequence token."""


def build_tokenizer(symbols: Sequence[str] = SYMBOLS) -> PreTrainedTokenizerFast:
    """Build the tokenizer: one token a character. Nothing is added, and unknown characters become padding."""
    return tokenizer_of(symbols, ".", bos_token=BOS, eos_token=EOS)


def tokenizer_of(symbols: Sequence[str], pattern: str, **special: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the matches of ``pattern``; the first symbol is padding, and all others."""
    backend = Tokenizer(models.WordLevel(vocab={symbol: index for index, symbol in enumerate(symbols)}, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        **special,
    )


def build_model(seed: int, vocabulary: int = len(SYMBOLS)) -> Qwen3ForCausalLM:
    """Build the untrained model: Qwen3 architecture, 2 layers, 3 heads of 32, about 193,000 parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        max_window_layers=2,
        initializer_range=0.05,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=SYMBOLS.index(PAD),
        bos_token_id=SYMBOLS.index(BOS),
        eos_token_id=SYMBOLS.index(EOS),
    )
    return Qwen3ForCausalLM(config)


def demonstrate(problem: Problem, rng: random.Random) -> str:
    """Write a response as the demonstrator does: correct except for borrows."""
    return write_response(err(problem, rng, wrong=SMALLER_FROM_LARGER))


def draw_demonstrated_terms(rng: random.Random) -> int:
    """Draw a demonstration's length from the task's law, started at SHORTEST, or sometimes uniformly."""
    if rng.random() < EVEN_SHARE:
        return rng.randint(SHORTEST, MAX_TERMS)
    return draw_num_terms(rng, SHORTEST)


def demonstrations(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[list[int], list[int]]]:
    """Yield prompts and responses of the training split as token ids, without end."""
    while True:
        problem = draw(rng, Split.TRAIN, draw_demonstrated_terms(rng))
        yield tokenizer.encode(problem.prompt), tokenizer.encode(demonstrate(problem, rng) + EOS)


def batches(
    rng: random.Random, shown: Iterator[tuple[list[int], list[int]]], batch_tokens: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield token ids and labels, both int64[N, T], of demonstrations of similar length; labels cover responses
    only."""
    while True:
        pool = list(itertools.islice(shown, _POOL))
        pool.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        ready: list[list[tuple[list[int], list[int]]]] = [[]]
        for pair in pool:
            if (len(ready[-1]) + 1) * (len(pair[0]) + len(pair[1])) > batch_tokens:
                ready.append([])
            ready[-1].append(pair)
        rng.shuffle(ready)
        for batch in ready:
            yield _collate(batch)


def _collate(batch: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) + len(response) for prompt, response in batch)
    ids = torch.full((len(batch), width), SYMBOLS.index(PAD))
    labels = torch.full((len(batch), width), _IGNORED)
    for row, (prompt, response) in enumerate(batch):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        labels[row, len(prompt) : end] = torch.tensor(response)
    return ids, labels


def train(model: Qwen3ForCausalLM, stream: Iterator[tuple[Tensor, Tensor]], recipe: Recipe) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    model.train()
    started, total = time.monotonic(), 0.0
    for step in range(1, recipe.num_steps + 1):
        decay = 0.02 + 0.49 * (1.0 + math.cos(math.pi * step / recipe.num_steps))
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, step / 100) * decay
        ids, labels = next(stream)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
        if step % 250 == 0:
            print(f"step {step:5d}  loss {total / 250:.4f}  {time.monotonic() - started:.0f} s", flush=True)
            total = 0.0
    model.eval()


@torch.no_grad()
def respond(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    rng: torch.Generator | None = None,
) -> list[str]:
    """Return one response a prompt: greedy, or sampled at temperature 1 if ``rng`` is given.

    A response that was cut at the length limit has no end-of-sequence token; the others end in EOS."""
    encoded = tokenizer(list(prompts), padding=True, padding_side="left", return_tensors="pt")
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    eos = SYMBOLS.index(EOS)
    cache = DynamicCache()
    sampled: list[Tensor] = []
    running = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(MAX_RESPONSE_TOKENS):
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]
        token = logits.argmax(-1) if rng is None else torch.multinomial(logits.softmax(-1), 1, generator=rng)[:, 0]
        sampled.append(token)
        running &= token != eos
        if not running.any():
            break
        ids, positions = token[:, None], positions[:, -1:] + 1
        mask = torch.cat((mask, torch.ones_like(ids)), dim=1)
    texts = tokenizer.batch_decode(torch.stack(sampled, dim=1))
    return [text[: end + len(EOS)] if (end := text.find(EOS)) >= 0 else text for text in texts]


def is_right(problem: Problem, response: str) -> bool:
    """Whether a response ended by itself in ``=`` and the answer. At least as strict as the arithmetic verifier."""
    return response.endswith(f"={problem.answer}{EOS}")


def measure(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, num_prompts: int = 512) -> Measured:
    problems = list(generate(Split.HELD_OUT, num_prompts, seed=0))
    prompts = [problem.prompt for problem in problems]
    greedy = [is_right(*pair) for pair in zip(problems, respond(model, tokenizer, prompts), strict=True)]
    rng = torch.Generator().manual_seed(0)
    rounds = [respond(model, tokenizer, prompts, rng) for _ in range(8)]
    right = torch.tensor([[is_right(*pair) for pair in zip(problems, texts, strict=True)] for texts in rounds])
    lengths = sorted(len(tokenizer.encode(text)) for texts in rounds for text in texts)
    return Measured(
        num_prompts=num_prompts,
        greedy_accuracy=sum(greedy) / num_prompts,
        sampled_accuracy=right.float().mean().item(),
        mixed_groups=(right.any(0) & ~right.all(0)).float().mean().item(),
        median_tokens=lengths[len(lengths) // 2],
        p99_tokens=lengths[len(lengths) * 99 // 100],
    )


CARD = """---
license: apache-2.0
library_name: transformers
---

# Headrace's tiny start model

A language model of {num_parameters:,} parameters: Qwen3 architecture, 2 layers, 3 heads of 32, float32. It
knows one task, the counter chains of `ops/demo/task.py`, and one rule of it badly. The demo
improves it by reinforcement learning.

Made from nothing, in {minutes:.1f} minutes on one CPU thread, by

    python -m ops.demo.make_tiny_model --out ops/demo/tiny_model --seed {seed}

- **Data.** {num_steps:,} steps of about {batch_tokens:,} tokens of generated demonstrations, training side only. The
  demonstrator answers a subtraction that goes below zero wrongly {wrong:.0%} of the time (2-9 becomes 7,
  not 3).
- **Tokenizer.** One character is one token ({vocabulary} in all); nothing is added to a prompt; `</s>` ends a
  response.
- **Use.** The demo, tests and benchmarks of Headrace. It can do nothing else.

## Measured

On {num_prompts} held-out prompts (`--heldout {num_prompts} --seed 0`):

| | |
|---|---|
| greedy accuracy | {greedy_accuracy:.1%} |
| accuracy of samples at temperature 1 | {sampled_accuracy:.1%} |
| prompts with right and wrong among 8 samples | {mixed_groups:.1%} |
| response length, median | {median_tokens} tokens |
| response length, 99th percentile | {p99_tokens} tokens |

Greedy decoding mostly fails where a borrow occurs; the right rule is there to be sampled.
"""


def asked_of(name: str, description: str, arguments: Sequence[str] | None, num_steps: int) -> tuple[Path, Recipe]:
    """Return what a command line of ``ops.demo.make_NAME`` asks for: the folder, and how to train."""
    parser = argparse.ArgumentParser(
        prog=f"python -m ops.demo.make_{name}",
        description=description,
        epilog=f"example: python -m ops.demo.make_{name} --out ops/demo/{name} --seed 0",
    )
    parser.add_argument("--out", type=Path, default=Path(f"ops/demo/{name}"), help="folder (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=num_steps, help="optimiser steps (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    return options.out, Recipe(seed=options.seed, num_steps=options.steps)


def teach(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, shown: Demonstrations, recipe: Recipe
) -> dict[str, Any]:
    """Train on demonstrations; return the training's figures for the card."""
    started, rng = time.monotonic(), random.Random(recipe.seed)
    train(model, batches(rng, shown(rng, tokenizer), recipe.batch_tokens), recipe)
    return {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "minutes": (time.monotonic() - started) / 60,
        "seed": recipe.seed,
        "num_steps": recipe.num_steps,
        "batch_tokens": recipe.batch_tokens,
    }


def save(folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, card: str) -> None:
    """Write the model folder, with the card as its README."""
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        pad_token_id=model.config.pad_token_id,
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    about = "Train the demo's start model from nothing; about three minutes on one free core."
    out, recipe = asked_of("tiny_model", about, arguments, num_steps=3000)
    tokenizer, model = build_tokenizer(), build_model(recipe.seed)
    facts = teach(model, tokenizer, demonstrations, recipe)
    measured = measure(model, tokenizer)
    save(
        out,
        model,
        tokenizer,
        CARD.format(wrong=SMALLER_FROM_LARGER, vocabulary=len(SYMBOLS), **facts, **asdict(measured)),
    )
    print(f"{out}: greedy {measured.greedy_accuracy:.1%}, sampled {measured.sampled_accuracy:.1%}")


if __name__ == "__main__":
    main()
