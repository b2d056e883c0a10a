"""The tables' task: a counter whose answer is decided at once, and written after hundreds of tokens.

Makes ``train.jsonl`` and ``heldout.jsonl``, prompt files as ``[data]`` reads them, and demonstrations. The same
arguments always give the same bytes.

    prompt    a2b<4c<3*2=                        2, then 4 down, then 3 down, on a counter that rolls over; two laps
    response  a2b8c5~2ABC...XYZ1ABC...XYZ=5      the counter after each change, the laps, the answer
    answer    5

**Reward at the end only.** The verifier ``arithmetic`` compares the last number with the answer and judges
nothing else.

**What is learned, and where.** Short chains count down by ``<`` and have one lap, long ones count up by ``>``
and have nine. At the end of the scale the demonstrator mostly turns back (2 < 4 shows 2, not 8). Laps stand for
the long and certain working of a reasoning model, which carries the outcome to the end. So a response is
decided at its beginning, like the choice of an approach. Its reward comes some 30 tokens later in short chains
and some 245 in long ones, and short chains do not teach the rule that long ones need.

**Train and held-out** prompts are disjoint by construction, as in ``ops.demo.task``."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ops.demo.task import Split, split_of

LABELS = string.ascii_lowercase
LAP = string.ascii_uppercase
MIN_CHANGES, MAX_CHANGES = 3, 5
WRONG_TURNS = 0.7
"""Probability that the demonstrator turns back at an end of the scale instead of passing it."""
_LAST = 9


class Kind(StrEnum):
    """How long a chain is, and what decides it. Half of the chains are of each kind."""

    SHORT = "short"
    """One lap; the changes count down by ``<``."""
    LONG = "long"
    """Nine laps; the changes count up by ``>``."""


LAPS = {Kind.SHORT: 1, Kind.LONG: 9}
"""Half of the right responses have 39 to 43 tokens, half 255 to 259."""


@dataclass(frozen=True, slots=True)
class Chain:
    kind: Kind
    start: int
    steps: tuple[int, ...]
    """Size of each change, 1 to 9."""
    laps: int

    @property
    def prompt(self) -> str:
        sign = "<" if self.kind is Kind.SHORT else ">"
        changes = "".join(f"{label}{sign}{steps}" for label, steps in zip(LABELS[1:], self.steps, strict=False))
        return f"{LABELS[0]}{self.start}{changes}*{self.laps}="

    @property
    def answer(self) -> str:
        return str(self.counter()[-1])

    @property
    def num_turns(self) -> int:
        """How often the chain passes an end of the scale, where the demonstrator errs."""
        return sum(
            not 0 <= before + self._towards * by <= _LAST
            for before, by in zip(self.counter(), self.steps, strict=False)
        )

    @property
    def split(self) -> Split:
        """Train or held-out, decided by a digest of the prompt."""
        return split_of(self.prompt)

    @property
    def _towards(self) -> int:
        return -1 if self.kind is Kind.SHORT else 1

    def counter(self, rng: random.Random | None = None, wrong_turns: float = WRONG_TURNS) -> list[int]:
        """Return the counter's value at first and after each change: correct without ``rng``, else as the
        demonstrator shows it."""
        shown = [self.start]
        for steps in self.steps:
            end = shown[-1] + self._towards * steps
            if not 0 <= end <= _LAST and rng is not None and rng.random() < wrong_turns:
                end = -end if end < 0 else 2 * _LAST - end
            shown.append(end % 10)
        return shown

    def respond(self, rng: random.Random | None = None, wrong_turns: float = WRONG_TURNS) -> str:
        """Write a response: correct without ``rng``, else as the demonstrator writes it."""
        counter = self.counter(rng, wrong_turns)
        working = "".join(f"{label}{digit}" for label, digit in zip(LABELS, counter, strict=False))
        laps = "".join(f"{left}{LAP}" for left in range(self.laps, 0, -1))
        return f"{working}~{laps}={counter[-1]}"


def draw(rng: random.Random, split: Split, kind: Kind | None = None, laps: int | None = None) -> Chain:
    """Draw a chain of one split from ``rng``. ``laps`` replaces the kind's number of laps."""
    # ends soon: one in eight chains, or seven, is in the wanted split
    while True:
        drawn = kind or rng.choice(tuple(Kind))
        steps = tuple(rng.randint(1, _LAST) for _ in range(rng.randint(MIN_CHANGES, MAX_CHANGES)))
        chain = Chain(drawn, rng.randrange(10), steps, LAPS[drawn] if laps is None else laps)
        if chain.split is split:
            return chain


def generate(split: Split, num_prompts: int, seed: int) -> Iterator[Chain]:
    """Yield ``num_prompts`` different chains of one split, short and long ones in turn."""
    rng = random.Random(f"{split}:{seed}")
    seen: set[Chain] = set()
    while len(seen) < num_prompts:
        chain = draw(rng, split, (Kind.SHORT, Kind.LONG)[len(seen) % 2])
        if chain not in seen:
            seen.add(chain)
            yield chain


def write_file(path: Path, split: Split, num_prompts: int, seed: int) -> None:
    """Write a prompt file: one JSON object a line with prompt, answer, verifier, kind and num_turns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for chain in generate(split, num_prompts, seed):
            row = {
                "prompt": chain.prompt,
                "answer": chain.answer,
                "verifier": "arithmetic",
                "kind": chain.kind,
                "num_turns": chain.num_turns,
            }
            file.write(json.dumps(row) + "\n")
