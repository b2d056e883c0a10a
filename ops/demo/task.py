"""The demo's task: a one-digit counter, added to and subtracted from, in chains of heavy-tailed length.

    python -m ops.demo.task --out runs/demo-data

Writes ``train.jsonl`` and ``heldout.jsonl``, prompt files as ``[data]`` reads them. The same arguments always
give the same bytes.

**The task.** A counter shows one digit. A prompt sets it and then changes it, one lettered term at a time; the
answer is the digit that it shows at the end. All arithmetic is modulo 10, as on a counter that rolls over:

    prompt    a7b+5c-9d+0=     7, then 7+5=12 shows 2, then 2-9=-7 shows 3, and 3 stays
    response  a7b2c3d3=3       each term's letter with the counter after it, then ``=`` and the answer
    answer    3

**A correct response** ends in ``=`` and the answer's digits, with nothing after them. By the verifier
``arithmetic`` the last integer of the response must equal ``answer``. The working before it is not judged. One
token is one character, so a correct response to n terms is 2n + 2 tokens and the end-of-sequence token.

**Why the lengths are heavy-tailed.** The number of terms follows a Pareto law, P(n >= k) = (MIN_TERMS /
k)^TAIL_EXPONENT, cut at the 26 letters, and every term costs one step of working. So half of the responses take
13 tokens or fewer and one in forty takes 55: the stragglers that a synchronous sampler would wait for.

**Train and held-out** are disjoint by construction: a digest of the prompt decides its split, whatever the
seeds and sizes. The start model (``ops.demo.make_tiny_model``) was trained on the training split only."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

MIN_TERMS = 4
MAX_TERMS = len(string.ascii_lowercase)
"""Longest chain: one letter for each term."""
TAIL_EXPONENT = 2.0
"""Exponent of the Pareto law; smaller is heavier."""
HELD_OUT_SHARE = 8
"""One prompt in this many is held out."""
MAX_RESPONSE_TOKENS = 2 * MAX_TERMS + 3
"""Length of the longest correct response, including the end-of-sequence token."""

_MAX_REDRAWS = 1000


class Split(StrEnum):
    TRAIN = "train"
    HELD_OUT = "heldout"


def split_of(text: str) -> Split:
    """Return the split of a prompt or question, by a digest of its text."""
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return Split.HELD_OUT if int.from_bytes(digest) % HELD_OUT_SHARE == 0 else Split.TRAIN


@dataclass(frozen=True, slots=True)
class Problem:
    """A chain of terms, each between -9 and 9; the first is the digit that the counter starts from."""

    start: int
    changes: tuple[str, ...]
    """Sign and digit, ``+5`` or ``-9``. The sign is part of the text: ``-0`` and ``+0`` differ as prompts."""

    @property
    def prompt(self) -> str:
        terms = (str(self.start), *self.changes)
        return "".join(letter + term for letter, term in zip(string.ascii_lowercase, terms, strict=False)) + "="

    @property
    def counter(self) -> tuple[int, ...]:
        """The counter's digit after each term."""
        shown = [self.start]
        for change in self.changes:
            shown.append((shown[-1] + int(change)) % 10)
        return tuple(shown)

    @property
    def answer(self) -> str:
        return str(self.counter[-1])

    @property
    def num_terms(self) -> int:
        """Length of the chain, which is its difficulty."""
        return 1 + len(self.changes)

    @property
    def num_borrows(self) -> int:
        """Number of subtractions that go below zero, where the start model errs."""
        pairs = zip(self.counter, self.changes, strict=False)
        return sum(change[0] == "-" and before < int(change[1]) for before, change in pairs)

    @property
    def split(self) -> Split:
        """Train or held-out, decided by a digest of the prompt."""
        return split_of(self.prompt)


def write_response(counter: Sequence[int]) -> str:
    """Write the working and the answer, ``a7b2c3=3``, from the counter's digit after each term."""
    steps = "".join(letter + str(digit) for letter, digit in zip(string.ascii_lowercase, counter, strict=False))
    return f"{steps}={counter[-1]}"


def draw_num_terms(rng: random.Random, min_terms: int) -> int:
    """Draw a chain's length from the Pareto law that begins at ``min_terms``, cut at MAX_TERMS."""
    return min(MAX_TERMS, int(min_terms * (1.0 - rng.random()) ** (-1.0 / TAIL_EXPONENT)))


def draw(rng: random.Random, split: Split, num_terms: int) -> Problem:
    """Draw one problem of a split and length from ``rng``."""
    # ends soon: of every length, seven problems in eight, or one in eight, are in the wanted split
    while True:
        changes = tuple(rng.choice("+-") + rng.choice(string.digits) for _ in range(num_terms - 1))
        problem = Problem(start=rng.randrange(10), changes=changes)
        if problem.split is split:
            return problem


def generate(split: Split, num_prompts: int, seed: int, *, min_terms: int = MIN_TERMS) -> Iterator[Problem]:
    """Yield ``num_prompts`` different problems of one split.

    Raises:
        ValueError: The split has fewer problems of the short lengths than ``num_prompts`` needs."""
    rng = random.Random(f"{split}:{seed}")
    seen: set[Problem] = set()
    for _ in range(num_prompts):
        num_terms = draw_num_terms(rng, min_terms)
        for _ in range(_MAX_REDRAWS):
            problem = draw(rng, split, num_terms)
            if problem not in seen:
                break
        else:
            raise ValueError(
                f"after {len(seen)} different {split} prompts no new one of {num_terms} terms was found in "
                f"{_MAX_REDRAWS} draws; expected {num_prompts}; ask for fewer, and repeat them by data.epochs"
            )
        seen.add(problem)
        yield problem


def write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write a file of JSON, one object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_file(path: Path, split: Split, num_prompts: int, seed: int, *, min_terms: int = MIN_TERMS) -> None:
    """Write a prompt file: one JSON object a line with prompt, answer, verifier, difficulty and num_borrows."""
    rows = (
        {
            "prompt": problem.prompt,
            "answer": problem.answer,
            "verifier": "arithmetic",
            "difficulty": problem.num_terms,
            "num_borrows": problem.num_borrows,
        }
        for problem in generate(split, num_prompts, seed, min_terms=min_terms)
    )
    write_lines(path, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ops.demo.task",
        description="Write the demo's prompt files: chains of one-digit arithmetic, of heavy-tailed length.",
        epilog="example: python -m ops.demo.task --out runs/demo-data --train 4096 --heldout 256 --seed 0",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo-data"), help="folder (default: %(default)s)")
    parser.add_argument("--train", type=int, default=4096, help="training prompts (default: %(default)s)")
    parser.add_argument("--heldout", type=int, default=256, help="held-out prompts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of both files (default: %(default)s)")
    parser.add_argument(
        "--min-terms", type=int, default=MIN_TERMS, help="shortest chain, where the law begins (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if not 1 <= options.min_terms <= MAX_TERMS:
        parser.error(f"--min-terms is {options.min_terms}; a chain has 1 to {MAX_TERMS} terms")
    for split, num_prompts in ((Split.TRAIN, options.train), (Split.HELD_OUT, options.heldout)):
        path = options.out / f"{split}.jsonl"
        try:
            write_file(path, split, num_prompts, options.seed, min_terms=options.min_terms)
        except ValueError as error:
            parser.error(str(error))
        print(f"{path}: {num_prompts} prompts")


if __name__ == "__main__":
    main()
