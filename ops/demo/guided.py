"""The task of learning from guidance: short counter chains, a demonstrator that mostly gets borrows wrong, and
judgments of its errors.

A chain is one of ``ops.demo.task`` with NUM_TERMS terms. One prompt, one correct response and one judgment:

    prompt      a7b+5c-9d+0e+1f-2g+3h+4i-8=
    response    a7b2c3d3e4f2g5h9i1=1
    judgment    step 3 says 7, should be 3

Step n is the n-th letter with its digit, for the n-th term of the prompt. The judgment is about the first digit
that does not follow from the digit before it.

**Three prompts lead to responses of one form.** The bare prompt is answered as the demonstrator does. After the
template ``standard.txt``, which has the correct answer, every digit is right. After ``judge.txt``, which has a
judgment, the first error is the judgment's. Both files are in the model's folder."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.demo.task import Problem, Split, draw

MODEL = Path(__file__).parent / "guided_model"
"""The start model, with its templates ``standard.txt`` and ``judge.txt``."""
NUM_TERMS = 9
"""Terms of a chain. The model gets one chain in four right."""
SMALLER_FROM_LARGER = 0.75
"""Probability that the demonstrator answers a borrow wrongly. A model of it gives the error more than 2/3, so the
published test of NLFT, p_judge / p_base > 1.5, cannot see it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A digit of a response that does not follow from the digit before it."""

    step: int
    """Counted from 1."""
    said: int
    expected: int

    @property
    def judgment(self) -> str:
        return " ".join(("step", str(self.step), "says", f"{self.said},", "should be", str(self.expected)))


def err(
    problem: Problem, rng: random.Random, fault: Fault | None = None, *, wrong: float = SMALLER_FROM_LARGER
) -> list[int]:
    """Return the counter as the demonstrator writes it, which answers a ``wrong`` share of borrows wrongly. With
    ``fault`` the steps before it are right, and its step shows its digit."""
    counter = [problem.start]
    for step, change in enumerate(problem.changes, start=2):
        value = counter[-1] + int(change)
        if fault is not None and step == fault.step:
            counter.append(fault.said)
        elif fault is not None and step < fault.step:
            counter.append(value % 10)
        elif value < 0 and rng.random() < wrong:
            counter.append(-value)
        else:
            counter.append(value % 10)
    return counter


def first_fault(problem: Problem, counter: Sequence[int]) -> Fault | None:
    """Return the first digit that does not follow, or None."""
    if counter and counter[0] != problem.start:
        return Fault(1, counter[0], problem.start)
    for step, (before, said, change) in enumerate(zip(counter, counter[1:], problem.changes, strict=False), start=2):
        if said != (expected := (before + int(change)) % 10):
            return Fault(step, said, expected)
    return None


def first_fault_of(problem: Problem, response: str) -> Fault | None:
    """Return the first digit of a response's working that does not follow; None if all do up to the end of the
    working."""
    counter: list[int] = []
    for place, letter in enumerate(string.ascii_lowercase[: problem.num_terms]):
        if response[2 * place : 2 * place + 1] != letter or not response[2 * place + 1 : 2 * place + 2].isdigit():
            break
        counter.append(int(response[2 * place + 1]))
    return first_fault(problem, counter)


def problems(split: Split, num: int, seed: int) -> Iterator[Problem]:
    """Yield ``num`` different chains of one split; the same arguments give the same ones."""
    rng = random.Random(f"guided:{split}:{seed}")
    seen: set[Problem] = set()
    # ends soon: a split has more than 10^10 chains
    while len(seen) < num:
        problem = draw(rng, split, NUM_TERMS)
        if problem not in seen:
            seen.add(problem)
            yield problem


def read_template(name: str) -> str:
    """Return one of the model's templates, ``standard`` or ``judge``."""
    return (MODEL / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n")
