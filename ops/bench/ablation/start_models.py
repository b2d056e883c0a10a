"""The models that the tables on long chains start from: a policy of mixed quality, and a reward model for the
critic.

Both are Hugging Face folders, made in minutes on one core from the demo's start model and a seed.

    python -m ops.bench.ablation.start_models --out ops/bench/ablation/policy

**The policy** is committed in ``policy``. It begins as the demo's start model, which finds terms by their
letters and counts. Demonstrations that turn back at an end of the scale (``long_chains``) make it err where a
chain is decided, while sampling still finds correct responses.

**The reward model** is made before a table from that policy's layers under a scalar head. It learns from pairs
of a correct and a wrong response to one prompt (Bradley-Terry), by their last token alone. Its scores of
earlier tokens are untrained and its scale is arbitrary. VAPO starts its critic this way, and VC-PPO describes
the bias that results."""

from __future__ import annotations

import argparse
import itertools
import random
import string
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
    Qwen3ForTokenClassification,
)

from ops.bench.ablation.long_chains import LABELS, LAP, Chain, draw
from ops.demo.make_tiny_model import BOS, EOS, PAD, Recipe, batches, build_model, build_tokenizer, save, train
from ops.demo.make_tiny_model import SYMBOLS as DEMO_SYMBOLS
from ops.demo.task import Split
from ops.ending import exit_code

SYMBOLS = (PAD, BOS, EOS, *string.digits, *"+-<>=*~", *LABELS, *LAP)
MAX_POSITIONS = 512
POLICY = Path(__file__).parent / "policy"
_PAIRS_A_STEP = 8
_BATCH_TOKENS = 2048
PHASES = ((0.0, 600), (0.8, 600), (0.2, 300))
"""Share of short chains, and steps: first the laps are learned, then finding the outcome after one, then after
many."""
_SKILLED = Path(__file__).parents[2] / "demo" / "tiny_model"
"""Finds terms by their letters, and counts."""


def make_policy(folder: Path, phases: Sequence[tuple[float, int]], seed: int) -> None:
    tokenizer = build_tokenizer(SYMBOLS, MAX_POSITIONS)
    model = build_model(seed, len(SYMBOLS), MAX_POSITIONS)
    _copy_skills(model, AutoModelForCausalLM.from_pretrained(_SKILLED))
    for share_of_short, num_steps in phases:
        rng = random.Random(f"{seed}:{share_of_short}")
        shown = _demonstrations(rng, tokenizer, share_of_short)
        train(model, batches(rng, shown, _BATCH_TOKENS), Recipe(seed, num_steps, _BATCH_TOKENS))
    save(
        folder,
        model,
        tokenizer,
        "The start policy of the tables on long chains: `ops/bench/ablation/start_models.py`.\n",
    )


def make_reward_model(folder: Path, *, num_steps: int = 300, seed: int = 0) -> None:
    """Train a reward model on pairs, unless the folder already has one."""
    if (folder / "config.json").exists():
        return
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model: Qwen3ForTokenClassification = AutoModelForTokenClassification.from_pretrained(POLICY, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.02)
    tokenizer = build_tokenizer(SYMBOLS, MAX_POSITIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    pairs = _pairs(random.Random(seed), tokenizer)
    right_way: list[float] = []
    for step in range(1, num_steps + 1):
        better, worse = zip(*itertools.islice(pairs, _PAIRS_A_STEP), strict=True)
        margin = _last_scores(model, better) - _last_scores(model, worse)
        loss = torch.nn.functional.softplus(-margin).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        right_way.append((margin > 0).float().mean().item())
        if step % 50 == 0:
            print(f"reward model, step {step:4d}: {sum(right_way[-50:]) / 50:.1%} of pairs", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _copy_skills(model: Qwen3ForCausalLM, skilled: PreTrainedModel) -> None:
    """Copy weights from a model with another vocabulary; ``<`` starts as ``-``, and ``>`` as ``+``."""
    known = skilled.state_dict()
    like = [{"<": "-", ">": "+"}.get(symbol, symbol) for symbol in SYMBOLS]
    places = [(row, DEMO_SYMBOLS.index(symbol)) for row, symbol in enumerate(like) if symbol in DEMO_SYMBOLS]
    ours, theirs = map(list, zip(*places, strict=True))
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if weight.shape == known[name].shape:
                weight.copy_(known[name])
            else:
                weight[ours] = known[name][theirs]


def _demonstrations(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, share_of_short: float
) -> Iterator[tuple[list[int], list[int]]]:
    while True:
        chain = draw(rng, Split.TRAIN, laps=1 if rng.random() < share_of_short else rng.randint(1, 9))
        yield tokenizer.encode(chain.prompt), tokenizer.encode(chain.respond(rng) + EOS)


def _pairs(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[list[int], list[int]]]:
    """Yield a correct and a wrong response to one prompt, each with its prompt."""
    while True:
        chain = draw(rng, Split.TRAIN)
        wrong = chain.respond(rng)
        if chain.num_turns and not wrong.endswith(f"={chain.answer}"):
            yield _encoded(tokenizer, chain, chain.respond()), _encoded(tokenizer, chain, wrong)


def _encoded(tokenizer: PreTrainedTokenizerFast, chain: Chain, response: str) -> list[int]:
    return tokenizer.encode(chain.prompt + response + EOS)


def _last_scores(model: Qwen3ForTokenClassification, sequences: tuple[list[int], ...]) -> Tensor:
    """Return the score at the last token of each sequence, float32 [N]."""
    width = max(map(len, sequences))
    ids = torch.full((len(sequences), width), SYMBOLS.index(PAD))
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
    scores = model(input_ids=ids, attention_mask=(ids != SYMBOLS.index(PAD)).long()).logits[..., 0]
    last = torch.tensor([len(sequence) - 1 for sequence in sequences])
    return scores[torch.arange(len(sequences)), last]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ops.bench.ablation.start_models", description="Make the policy.")
    parser.add_argument("--out", type=Path, default=POLICY, help="output folder (default: the committed one)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the demonstrations (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    make_policy(options.out, PHASES, options.seed)


if __name__ == "__main__":
    sys.exit(exit_code(main))
