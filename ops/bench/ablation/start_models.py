"""The models that the tables on long chains start from: policies of mixed quality, a reward model
for the critic, and a critic that has learned from the start policy.

They are Hugging Face folders, made from the demo's start model and a seed in minutes of a core.

    python -m ops.bench.ablation.start_models --out ops/bench/ablation/policy

**The policy** is there already, in ``policy``. It begins as the demo's start model, which finds
terms by their letters and counts. Demonstrations that turn back at an end of the scale
(``long_chains``) make it err where a chain is decided, while sampling finds right responses.

**The policy of the tailed mix** is in ``tailed_policy``. It went on from ``policy`` with
demonstrations of that mix's lengths, at first without the way that begins a response, then with it.

**The reward model** is made before a table, from that policy's layers under a scalar head. It
learns from pairs of a right and a wrong response to one prompt (Bradley-Terry). Their last token
alone counts, as for any reward model. Its scores of earlier tokens were never taught, and its scale
is its own. VAPO's baseline starts its critic so, and VC-PPO describes the effect of the bias.

**The critic** of the tailed mix is made once for all rows of its table. It has the policy's layers,
and learns the Monte-Carlo returns of the demonstrator that taught the policy: as many responses of
the policy itself would take a fleet most of an hour."""

from __future__ import annotations

import argparse
import itertools
import random
import string
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
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

from ops.bench.ablation.long_chains import LABELS, LAP, TAILED, Chain, Mix, draw
from ops.demo.make_tiny_model import BOS, EOS, PAD, Recipe, batches, build_model, build_tokenizer, save, train
from ops.demo.make_tiny_model import SYMBOLS as DEMO_SYMBOLS
from ops.demo.task import Split
from ops.ending import exit_code

SYMBOLS = (PAD, BOS, EOS, *string.digits, *"+-<>=*~", *LABELS, *LAP)
MAX_POSITIONS = 512
POLICY = Path(__file__).parent / "policy"
TAILED_POLICY = Path(__file__).parent / "tailed_policy"
_PAIRS_A_STEP = 8
_RESPONSES_A_STEP = 64
_BATCH_TOKENS = 2048
TAILED_WRONG_TURNS = 0.5
PHASES = ((0.0, 600), (0.8, 600), (0.2, 300))
"""Share of short chains, and steps: first the laps are learned, then to find the outcome behind
one, then behind many."""
TAILED_PHASES = (
    (False, 300, 3e-3),
    (True, 160, 1.5e-3),
    (True, 120, 1.5e-3),
    (True, 200, 2e-3),
    (True, 130, 1e-3),
    (True, 150, 1e-3),
)
"""Whether responses begin with their way, steps, largest learning rate: until it followed its way."""
CRITIC_PHASES = ((0, 80), (1, 40), (5, 30))
"""Laps of long chains, and steps."""
_SKILLED = Path(__file__).parents[2] / "demo" / "tiny_model"
"""Finds terms by their letters, and counts, already."""


def make_policy(folder: Path, phases: Sequence[tuple[float, int]], seed: int) -> None:
    """Teach a policy from demonstrations."""
    tokenizer = build_tokenizer(SYMBOLS, MAX_POSITIONS)
    model = build_model(seed, len(SYMBOLS), MAX_POSITIONS)
    _take_over(model, AutoModelForCausalLM.from_pretrained(_SKILLED))
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


def make_tailed_policy(folder: Path, phases: Sequence[tuple[bool, int, float]], seed: int) -> None:
    """Teach ``policy`` the tailed mix, from a demonstrator that tosses a coin for its way."""
    model = Qwen3ForCausalLM.from_pretrained(POLICY)
    tokenizer = build_tokenizer(SYMBOLS, MAX_POSITIONS)
    for is_marked, num_steps, learning_rate in phases:
        rng = random.Random(f"{seed}:tailed")
        shown = _tailed_demonstrations(rng, tokenizer, replace(TAILED, is_marked=is_marked))
        recipe = Recipe(seed, num_steps, _BATCH_TOKENS, learning_rate)
        train(model, batches(rng, shown, _BATCH_TOKENS), recipe)
    save(folder, model, tokenizer, "The start policy of the table on the tailed mix: `start_models --tailed`.\n")


def make_critic(folder: Path, phases: Sequence[tuple[int, int]] = CRITIC_PHASES, *, seed: int = 0) -> None:
    """Teach a critic the returns of the tailed demonstrator's responses, 1 or -1 at each of their
    tokens, from the tailed policy's layers; what is there already is kept. ``phases``: laps of long
    chains, and steps."""
    if (folder / "config.json").exists():
        return
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model: Qwen3ForTokenClassification = AutoModelForTokenClassification.from_pretrained(TAILED_POLICY, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.02)
    tokenizer = build_tokenizer(SYMBOLS, MAX_POSITIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, betas=(0.9, 0.98))
    rng = random.Random(seed)
    step, total = 0, sum(steps for _, steps in phases)
    for laps, num_steps in phases:
        mix = replace(TAILED, long_laps=laps, long_every=2)
        for _ in range(num_steps):
            step += 1
            optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, step / 50) * (1.05 - step / total)
            loss, explained = _value_loss(model, tokenizer, rng, mix)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 20 == 0:
                print(f"critic, step {step:4d}: explains {explained:.2f} at the last token", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _value_loss(
    model: Qwen3ForTokenClassification, tokenizer: PreTrainedTokenizerFast, rng: random.Random, mix: Mix
) -> tuple[Tensor, float]:
    """Return the mean over responses of the squared error of a batch's tokens, and the share of the
    returns' variance that the values before the last tokens explain."""
    chains = [draw(rng, Split.TRAIN, mix.kind(place), mix=mix) for place in range(_RESPONSES_A_STEP)]
    responses = [chain.respond(rng, TAILED_WRONG_TURNS) for chain in chains]
    right = [response.endswith(f"={chain.answer}") for chain, response in zip(chains, responses, strict=True)]
    sequences = tuple(_encoded(tokenizer, *pair) for pair in zip(chains, responses, strict=True))
    returns = torch.tensor(right) * 2.0 - 1.0
    values = _scores(model, sequences)
    mask = torch.zeros_like(values)
    for row, (chain, sequence) in enumerate(zip(chains, sequences, strict=True)):
        # the value of a token is that of the state before it
        mask[row, len(tokenizer.encode(chain.prompt)) - 1 : len(sequence) - 1] = 1.0
    errors = (values - returns[:, None]).square() * mask
    last = values.detach()[torch.arange(len(chains)), mask.sum(1).long() + mask.argmax(1) - 1]
    return (errors.sum(1) / mask.sum(1)).mean(), float(1 - (returns - last).var() / returns.var())


def make_reward_model(folder: Path, *, num_steps: int = 300, seed: int = 0) -> None:
    """Teach a reward model from pairs; what is there already is kept."""
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


def _take_over(model: Qwen3ForCausalLM, skilled: PreTrainedModel) -> None:
    """Give a model the weights of one with another vocabulary; ``<`` begins as ``-`` does, ``>`` as
    ``+``."""
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


def _tailed_demonstrations(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, mix: Mix
) -> Iterator[tuple[list[int], list[int]]]:
    for place in itertools.count():
        chain = draw(rng, Split.TRAIN, mix.kind(place), mix=mix)
        yield tokenizer.encode(chain.prompt), tokenizer.encode(chain.respond(rng, TAILED_WRONG_TURNS) + EOS)


def _pairs(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[list[int], list[int]]]:
    """Yield a right and a wrong response to one prompt, each with its prompt."""
    while True:
        chain = draw(rng, Split.TRAIN)
        wrong = chain.respond(rng)
        if chain.num_turns and not wrong.endswith(f"={chain.answer}"):
            yield _encoded(tokenizer, chain, chain.respond()), _encoded(tokenizer, chain, wrong)


def _encoded(tokenizer: PreTrainedTokenizerFast, chain: Chain, response: str) -> list[int]:
    return tokenizer.encode(chain.prompt + response + EOS)


def _last_scores(model: Qwen3ForTokenClassification, sequences: tuple[list[int], ...]) -> Tensor:
    """Return the score at the last token of each sequence, float32 [N]."""
    last = torch.tensor([len(sequence) - 1 for sequence in sequences])
    return _scores(model, sequences)[torch.arange(len(sequences)), last]


def _scores(model: Qwen3ForTokenClassification, sequences: tuple[list[int], ...]) -> Tensor:
    """Return the score at each token, float32 [N, longest]."""
    width = max(map(len, sequences))
    ids = torch.full((len(sequences), width), SYMBOLS.index(PAD))
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
    return model(input_ids=ids, attention_mask=(ids != SYMBOLS.index(PAD)).long()).logits[..., 0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Make a policy again."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.ablation.start_models", description="Make a policy.")
    parser.add_argument("--tailed", action="store_true", help="that of the tailed mix")
    parser.add_argument("--out", type=Path, help="folder (default: the one beside this module)")
    parser.add_argument("--seed", type=int, default=0, help="of the demonstrations (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.tailed:
        make_tailed_policy(options.out or TAILED_POLICY, TAILED_PHASES, options.seed)
    else:
        make_policy(options.out or POLICY, PHASES, options.seed)


if __name__ == "__main__":
    sys.exit(exit_code(main))
