"""The task of the demo with a tool: products of two-digit numbers, which the model cannot do in its head.

    python -m ops.demo.products --out runs/products-data

Writes ``train.jsonl`` and ``heldout.jsonl``. A digest of the question decides its split. The model may answer at
once, or call the tool ``calculator`` and copy what that says:

    question  37*48
    turn 1    <tool_call>{"name": "calculator", "arguments": {"expression": "37*48"}}</tool_call>
    tool      1776
    turn 2    1776"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from ops.demo.task import Split, split_of, write_lines

_FIRST, _END = 10, 100


def questions(split: Split, seed: int) -> Iterator[str]:
    """Yield the split's questions, each once, in random order."""
    pairs = [(a, b) for a in range(_FIRST, _END) for b in range(_FIRST, _END)]
    random.Random(f"{split}:{seed}").shuffle(pairs)
    return (text for a, b in pairs if split_of(text := f"{a}*{b}") is split)


def answer_to(question: str) -> str:
    a, _, b = question.partition("*")
    return str(int(a) * int(b))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ops.demo.products", description="Write the prompt files of the demo with a tool."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/products-data"), help="folder (default: %(default)s)")
    parser.add_argument("--heldout", type=int, default=256, help="held-out questions (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of their order (default: %(default)s)")
    options = parser.parse_args(arguments)
    for split in Split:
        found = list(questions(split, options.seed))
        kept = found[: options.heldout] if split is Split.HELD_OUT else found
        rows = (
            {"messages": [{"role": "user", "content": text}], "answer": answer_to(text), "verifier": "arithmetic"}
            for text in kept
        )
        path = options.out / f"{split}.jsonl"
        write_lines(path, rows)
        print(f"{path}: {len(kept)} questions")


if __name__ == "__main__":
    main()
