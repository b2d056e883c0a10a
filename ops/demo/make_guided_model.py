"""Trains the start model of learning from guidance (``ops.demo.guided``): it errs at borrows, and follows a prompt
with the answer and one with a judgment.

    python -m ops.demo.make_guided_model --out ops/demo/guided_model

Starts from the demo's start model, whose layers find terms by their letters already, and writes a Hugging Face
folder with a card. Held-out chains are never trained on.

**What the table needs of it.** The model knows the rule of borrows: the standard prompt brings it out. The bare
prompt brings out the wrong rule with certainty. It follows a judgment: it errs at the step that is named, and
nowhere before."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForCausalLM

from ops.demo.guided import (
    NUM_TERMS,
    SMALLER_FROM_LARGER,
    Fault,
    err,
    first_fault,
    first_fault_of,
    problems,
    read_template,
)
from ops.demo.make_tiny_model import (
    BOS,
    EOS,
    PAD,
    asked_of,
    build_model,
    build_tokenizer,
    is_right,
    respond,
    save,
    teach,
)
from ops.demo.task import Problem, Split, draw, write_response

SYMBOLS = (PAD, BOS, EOS, *string.digits, *"+-=", *string.ascii_lowercase, *" ,.:")
SHORTEST, LONGEST = 3, 9
"""Range of a demonstration's terms."""
BARE, STANDARD = 0.35, 0.25
"""Shares of demonstrations after the bare and the standard prompt; the others follow a judgment."""
ODD_FAULTS = 0.4
"""Share of judged demonstrations whose fault is any digit at any step, so that the model must read it."""
_SKILLED = Path(__file__).parent / "tiny_model"


@dataclass(frozen=True, slots=True)
class Measured:
    """The card's figures, on held-out chains."""

    num_prompts: int
    greedy: float
    sampled: float
    standard: float
    """Greedy accuracy after the standard prompt."""
    followed: float
    """Share of wrong samples whose first fault greedy decoding repeats after their judgment."""


def demonstrations(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[list[int], list[int]]]:
    """Yield prompts and responses of the training split as token ids, without end."""
    standard, judge = read_template("standard"), read_template("judge")
    while True:
        problem = draw(rng, Split.TRAIN, rng.randint(SHORTEST, LONGEST))
        kind = rng.random()
        if kind < BARE:
            prompt, response = problem.prompt, write_response(err(problem, rng))
        elif kind < BARE + STANDARD:
            prompt = standard.format(gold=problem.answer, question=problem.prompt)
            response = write_response(problem.counter)
        elif (fault := _fault(problem, rng)) is None:
            continue
        else:
            prompt = judge.format(judgment=fault.judgment, question=problem.prompt)
            response = write_response(err(problem, rng, fault))
        yield tokenizer.encode(prompt), tokenizer.encode(response + EOS)


def _fault(problem: Problem, rng: random.Random) -> Fault | None:
    if rng.random() >= ODD_FAULTS:
        return first_fault(problem, err(problem, rng))
    step = rng.randint(2, problem.num_terms)
    expected = problem.counter[step - 1]
    said = (expected + rng.randint(1, 9)) % 10
    return Fault(step, said, expected)


def _take_over(model: Qwen3ForCausalLM, skilled: PreTrainedModel) -> None:
    """Copy the weights of a model with fewer symbols."""
    known = skilled.state_dict()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            weight[: len(known[name])] = known[name]


def measure(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, num_prompts: int = 512) -> Measured:
    asked = list(problems(Split.HELD_OUT, num_prompts, seed=0))
    bare = [problem.prompt for problem in asked]
    standard, judge = read_template("standard"), read_template("judge")
    shown = [standard.format(gold=problem.answer, question=problem.prompt) for problem in asked]
    samples = respond(model, tokenizer, bare, torch.Generator().manual_seed(0))
    judged = [
        (problem, fault)
        for problem, text in zip(asked, samples, strict=True)
        if (fault := first_fault_of(problem, text)) is not None
    ]
    prompts = [judge.format(judgment=fault.judgment, question=problem.prompt) for problem, fault in judged]
    repeated = respond(model, tokenizer, prompts)
    followed = [first_fault_of(problem, text) == fault for (problem, fault), text in zip(judged, repeated, strict=True)]

    def share_right(texts: Sequence[str]) -> float:
        return sum(is_right(*pair) for pair in zip(asked, texts, strict=True)) / num_prompts

    return Measured(
        num_prompts=num_prompts,
        greedy=share_right(respond(model, tokenizer, bare)),
        sampled=share_right(samples),
        standard=share_right(respond(model, tokenizer, shown)),
        followed=sum(followed) / len(followed),
    )


CARD = """---
license: apache-2.0
library_name: transformers
---

# Headrace's guided start model

A language model of {num_parameters:,} parameters: Qwen3 architecture, 2 layers, 3 heads of 32, float32. It
knows one task, the chains of `ops/demo/guided.py`, and one rule of it badly: {wrong:.0%} of its
demonstrations of a subtraction that goes below zero were wrong.

Made from the demo's start model, in {minutes:.1f} minutes on one CPU thread, by

    python -m ops.demo.make_guided_model --out ops/demo/guided_model --seed {seed}

- **Templates.** `standard.txt` has the gold answer: after it the model works rightly. `judge.txt`
  has a judgment: after it the model errs at the step that it names.
- **Data.** {num_steps:,} steps of about {batch_tokens:,} tokens of generated demonstrations, training side only.
- **Use.** The demonstration and the benchmark of learning from guidance. It can do nothing else.

## Measured

On {num_prompts} held-out chains of {num_terms} terms:

| | |
|---|---|
| greedy accuracy | {greedy:.1%} |
| accuracy of samples at temperature 1 | {sampled:.1%} |
| greedy accuracy after the standard prompt | {standard:.1%} |
| wrong samples whose first error is repeated after its judgment | {followed:.1%} |
"""


def main(arguments: Sequence[str] | None = None) -> None:
    about = "Teach the start model of learning from guidance; a few minutes on one free core."
    out, recipe = asked_of("guided_model", about, arguments, num_steps=2500)
    tokenizer, model = build_tokenizer(SYMBOLS), build_model(recipe.seed, len(SYMBOLS))
    _take_over(model, AutoModelForCausalLM.from_pretrained(_SKILLED))
    facts = teach(model, tokenizer, demonstrations, recipe)
    measured = measure(model, tokenizer)
    save(
        out, model, tokenizer, CARD.format(wrong=SMALLER_FROM_LARGER, num_terms=NUM_TERMS, **facts, **asdict(measured))
    )
    print(f"{out}: greedy {measured.greedy:.1%}, followed {measured.followed:.1%}")


if __name__ == "__main__":
    main()
