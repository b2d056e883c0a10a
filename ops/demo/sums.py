"""A real model's task: sums and differences of two numbers, asked in words as a chat.

*Consumes* a seed and two sizes. *Produces* ``train.jsonl`` and ``heldout.jsonl``, prompt files as
``[data]`` reads them. *Waits for* nothing; the same arguments always give the same bytes.

    python -m ops.demo.sums --out runs/sums-data

A line has ``messages``, which the model's chat template turns into a prompt, and the answer:

    system    You reply with just a number.
    user      What is 34 minus 15? Reply with just the number.
    answer    19

Verifier ``arithmetic``: the last number of the response must equal the answer. A question lies on
one side, train or held-out, whatever the seeds and sizes."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ops.demo.task import HELD_OUT_SHARE, Split

SMALLEST: Final = 2
LARGEST: Final = 49
SYSTEM: Final = "You reply with just a number."


@dataclass(frozen=True, slots=True)
class Sum:
    """Two numbers, of which the second is added to the first, or taken from it."""

    first: int
    second: int
    is_difference: bool

    @property
    def question(self) -> str:
        """The question as text."""
        return f"What is {self.first} {'minus' if self.is_difference else 'plus'} {self.second}? Reply with just the number."

    @property
    def answer(self) -> int:
        """The result; a difference is never below 0."""
        return self.first - self.second if self.is_difference else self.first + self.second

    @property
    def split(self) -> Split:
        """The side of this question; sums of the same two numbers lie on the same."""
        numbers = (self.answer, self.second) if self.is_difference else (self.first, self.second)
        digest = hashlib.blake2b(" ".join(map(str, sorted(numbers))).encode(), digest_size=4).digest()
        return Split.HELD_OUT if int.from_bytes(digest) % HELD_OUT_SHARE == 0 else Split.TRAIN

    @property
    def row(self) -> dict[str, object]:
        """The line of a prompt file."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.question}]
        return {"messages": messages, "answer": str(self.answer), "verifier": "arithmetic"}


def generate(split: Split, num_prompts: int, seed: int) -> list[Sum]:
    """Return ``num_prompts`` different questions of one side, in an order of the seed's.

    Raises ValueError: the side has fewer."""
    numbers = range(SMALLEST, LARGEST + 1)
    every = [Sum(a + b, b, True) if minus else Sum(a, b, False) for a in numbers for b in numbers for minus in (0, 1)]
    found = [one for one in every if one.split is split]
    if len(found) < num_prompts:
        raise ValueError(f"there are {len(found)} {split} questions; expected at least {num_prompts}; ask for fewer")
    random.Random(f"{split}:{seed}").shuffle(found)
    return found[:num_prompts]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the two prompt files."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.demo.sums",
        description="Write a real model's prompt files: sums and differences of two numbers, as chats.",
        epilog="example: python -m ops.demo.sums --out runs/sums-data --train 3840 --heldout 128 --seed 0",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/sums-data"), help="folder (default: %(default)s)")
    parser.add_argument("--train", type=int, default=3840, help="training prompts (default: %(default)s)")
    parser.add_argument("--heldout", type=int, default=128, help="held-out prompts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of both files (default: %(default)s)")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for split, num_prompts in ((Split.TRAIN, options.train), (Split.HELD_OUT, options.heldout)):
        path = options.out / f"{split}.jsonl"
        try:
            rows = [one.row for one in generate(split, num_prompts, options.seed)]
        except ValueError as error:
            parser.error(str(error))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {num_prompts} prompts")


if __name__ == "__main__":
    main()
