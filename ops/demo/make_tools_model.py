"""Trains the start model of the demos with turns: it knows how to call a calculator, but mostly guesses, and in a game
of guessing it says any digit.

    python -m ops.demo.make_tools_model --out ops/demo/tools_model

The demonstrator answers products of two-digit numbers (``ops.demo.products``). It calls the tool in one third of
its turns and copies the result; else it writes a number of the right length that is wrong. It also spoils some
calls. So the model has a skill to be reinforced, and calls to be told about. In the game (``ops.demo.digits``) it
mostly says digits at random, whatever it was told."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerFast

from ops.demo import digits
from ops.demo.make_tiny_model import PAD, asked_of, build_model, save, teach, tokenizer_of
from ops.demo.products import answer_to
from ops.demo.task import Split, split_of

START, END = "<|im_start|>", "<|im_end|>"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "'
CLOSE = '"}}\n</tool_call>'
ROLES = ("user\n", "assistant\n", "tool\n")
TOOL = "calculator"
SYMBOLS = (PAD, START, END, CALL, CLOSE, *ROLES, TOOL, "\n", *"0123456789*=<>?")
CALLS = 0.35
"""Share of demonstrations that call the tool; below one half, so that greedy decoding guesses."""
SPOILT = 0.1
"""Share of calls without their end."""
GAMES = 0.4
"""Share of demonstrations that are turns of the game."""
SKILL = 0.5
"""Share of these that say a digit which is still possible, and not any."""

_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tool\n' }}{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.content %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' + call.function.arguments | tojson '
    "+ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: one token a digit, and one for each fixed part of a call. What it has no token for
    becomes padding."""
    parts = "|".join("".join(f"\\{c}" if not c.isalnum() and c != "\n" else c for c in text) for text in SYMBOLS[3:9])
    special = {"additional_special_tokens": [START, END], "chat_template": _TEMPLATE}
    return tokenizer_of(SYMBOLS, f"{parts}|[\\s\\S]", eos_token=END, **special)


def guess(question: str, rng: random.Random) -> str:
    """Return ``=`` and a wrong number of as many digits as the answer. The sign is one first token for all guesses, so
    greedy decoding chooses between a guess and a call."""
    right = answer_to(question)
    while (made := str(rng.randrange(10 ** (len(right) - 1), 10 ** len(right)))) == right:
        pass
    return f"={made}"


def game_turn(rng: random.Random) -> tuple[str, int]:
    """Return the beginning of a game, and the digit that is said next."""
    hidden, low, high = rng.randrange(10), 0, 9
    text = f"{START}user\n{digits.OPENING}{END}\n{START}assistant\n"
    for _ in range(rng.randrange(digits.GUESSES)):
        said = rng.randrange(10)
        if said == hidden:
            break
        low, high = (low, min(high, said - 1)) if hidden < said else (max(low, said + 1), high)
        text += f"{said}{END}\n{START}user\n{'<' if hidden < said else '>'}{END}\n{START}assistant\n"
    return text, rng.randint(low, high) if rng.random() < SKILL else rng.randrange(10)


def demonstrations(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[list[int], list[int]]]:
    """Yield contexts and the turns that follow them, as token ids, without end."""
    while True:
        if rng.random() < GAMES:
            asked, said = game_turn(rng)
            yield tokenizer.encode(asked), tokenizer.encode(f"{said}{END}")
            continue
        question = f"{rng.randrange(10, 100)}*{rng.randrange(10, 100)}"
        if split_of(question) is not Split.TRAIN:
            continue
        asked = f"{START}tool\n{TOOL}{END}\n{START}user\n{question}{END}\n{START}assistant\n"
        if rng.random() >= CALLS:
            yield tokenizer.encode(asked), tokenizer.encode(guess(question, rng) + END)
            continue
        call = f"{CALL}{question}" + ("" if rng.random() < SPOILT else CLOSE) + END
        yield tokenizer.encode(asked), tokenizer.encode(call)
        # any number, so that it learns to copy what the tool says
        said = str(rng.randrange(100, 10_000))
        told = f"{asked}{CALL}{question}{CLOSE}{END}\n{START}tool\n{said}{END}\n{START}assistant\n"
        yield tokenizer.encode(told), tokenizer.encode(said + END)


CARD = """---
license: apache-2.0
library_name: transformers
---

# The start model of Headrace's demos with turns

A language model of {num_parameters:,} parameters: Qwen3 architecture, 2 layers, 3 heads of 32, float32. Asked for a
product of two-digit numbers it calls a calculator in about {calls:.0%} of samples, and guesses otherwise. Asked for a
hidden digit it says any.

Made from nothing, in {minutes:.1f} minutes on one CPU thread, by

    python -m ops.demo.make_tools_model --out ops/demo/tools_model --seed {seed}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    out, recipe = asked_of("tools_model", "Train the start model of the demos with turns.", arguments, num_steps=1500)
    tokenizer, model = build_tokenizer(), build_model(recipe.seed, len(SYMBOLS))
    model.config.eos_token_id, model.config.bos_token_id = SYMBOLS.index(END), None
    facts = teach(model, tokenizer, demonstrations, recipe)
    save(out, model, tokenizer, CARD.format(calls=CALLS, **facts))


if __name__ == "__main__":
    main()
