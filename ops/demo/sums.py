"""A real model's task: sums of two numbers, asked in words as a chat.

    python -m ops.demo.sums --out runs/sums-data

Writes ``train.jsonl`` and ``heldout.jsonl``, prompt files as ``[data]`` reads them. The same arguments always
give the same bytes. A line has ``messages``, which the model's chat template turns into a prompt, and the
answer:

    system    You reply with just a number.
    user      What is the sum of 23 and 15? Reply with just the number.
    answer    38

There are four ways to ask. SmolLM2-135M-Instruct answers a third of one of them, and few of the others. By the
verifier ``arithmetic`` the last number of the response must equal the answer. All questions about the same two
numbers are in one split, train or held-out, whatever the seeds and sizes."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ops.demo.task import Split, split_of, write_lines

SMALLEST: Final = 2
LARGEST: Final = 30
SYSTEM: Final = "You reply with just a number."
QUESTIONS: Final = (
    "What is {} plus {}?",
    "Add {} and {}.",
    "What is the sum of {} and {}?",
    "How much is {} and {}?",
)


@dataclass(frozen=True, slots=True)
class Sum:
    """Two numbers, and how their sum is asked for, one of QUESTIONS."""

    first: int
    second: int
    asked: str

    @property
    def question(self) -> str:
        """The user's message."""
        return f"{self.asked.format(self.first, self.second)} Reply with just the number."

    @property
    def split(self) -> Split:
        numbers = sorted((self.first, self.second))
        return split_of(f"{numbers}")

    @property
    def row(self) -> dict[str, object]:
        """One line of a prompt file."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.question}]
        return {"messages": messages, "answer": str(self.first + self.second), "verifier": "arithmetic"}


def generate(split: Split, num_prompts: int, seed: int) -> list[Sum]:
    """Return ``num_prompts`` different questions of one split, shuffled by the seed.

    Raises ValueError if the split has fewer."""
    numbers = range(SMALLEST, LARGEST + 1)
    every = [Sum(first, second, asked) for first in numbers for second in numbers for asked in QUESTIONS]
    found = [one for one in every if one.split is split]
    if len(found) < num_prompts:
        raise ValueError(
            f"there are {len(found)} {split} questions, fewer than the requested {num_prompts}; ask for fewer"
        )
    random.Random(f"{split}:{seed}").shuffle(found)
    return found[:num_prompts]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ops.demo.sums",
        description="Write a real model's prompt files: sums of two numbers, as chats.",
        epilog="example: python -m ops.demo.sums --out runs/sums-data --train 2688 --heldout 128 --seed 0",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/sums-data"), help="folder (default: %(default)s)")
    parser.add_argument("--train", type=int, default=2688, help="training prompts (default: %(default)s)")
    parser.add_argument("--heldout", type=int, default=128, help="held-out prompts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of both files (default: %(default)s)")
    options = parser.parse_args(arguments)
    for split, num_prompts in ((Split.TRAIN, options.train), (Split.HELD_OUT, options.heldout)):
        path = options.out / f"{split}.jsonl"
        try:
            rows = [one.row for one in generate(split, num_prompts, options.seed)]
        except ValueError as error:
            parser.error(str(error))
        write_lines(path, rows)
        print(f"{path}: {num_prompts} prompts")


if __name__ == "__main__":
    main()
