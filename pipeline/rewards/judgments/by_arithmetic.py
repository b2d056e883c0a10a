"""Judgments by plain arithmetic: the first wrong step of a chain, or the first wrong equation.

If the prompt is a chain of a one-digit counter, the response is read as one; otherwise the
response's ``equations`` are checked. A response whose steps all hold gets no judgment: its answer
is wrong, but none of its steps, as when a task was misread.

A chain's prompt sets the counter and changes it, one lettered term at a time: ``a7b+5c-9=``, or
``d*3`` to multiply. A response writes each letter with the counter after it, then the answer:
``a7b2c3=3``. All modulo 10. ``ops.demo.task`` defines the task."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeline.rewards.judgments import equations
from pipeline.rewards.judgments.equations import WrongStep
from pipeline.rewards.verifier import Response

_CHAIN = re.compile(r"((?:[a-z][-+*]?[0-9]+){2,})=\s*\Z")
_TERM = re.compile(r"([a-z])([-+*]?)([0-9]+)")
_PIECE = re.compile(r"=?[a-z]?-?[0-9]+|\S")
_MODULUS = 10

Term = tuple[str, str, int]
"""(letter, operator or "", number)"""


def chain_of(prompt: str) -> list[Term]:
    """Return the terms of the chain at the end of ``prompt``; empty if there is none."""
    found = _CHAIN.search(prompt)
    return [] if found is None else [(letter, sign, int(digits)) for letter, sign, digits in _TERM.findall(found[1])]


def first_wrong_step(terms: list[Term], response: str) -> WrongStep | None:
    """Return the first wrong step, or None. Later steps may follow from it. The answer after the
    last term is also a step."""
    text, place, shown = response.strip(), 0, 0
    for number, (letter, sign, value) in enumerate(terms, 1):
        shown = _after(shown, sign, value)
        if (wrong := _compared(text, place, number, letter, shown)) is not None:
            return wrong
        place += len(letter) + 1
    number = len(terms) + 1
    if (wrong := _compared(text, place, number, "=", shown)) is not None:
        return wrong
    rest = text[place + 2 :].strip()
    return WrongStep(number, _piece(rest, 0), "the end") if rest else None


def _after(shown: int, sign: str, value: int) -> int:
    match sign:
        case "+":
            return (shown + value) % _MODULUS
        case "-":
            return (shown - value) % _MODULUS
        case "*":
            return shown * value % _MODULUS
        case _:
            return value % _MODULUS


def _compared(text: str, place: int, number: int, letter: str, shown: int) -> WrongStep | None:
    """Compare the text at ``place`` with a letter (or ``=``) and its digit."""
    expected, piece = f"{letter}{shown}", _piece(text, place)
    if piece == expected:
        return None
    if piece.startswith(letter) and len(piece) > len(letter):
        return WrongStep(number, piece.removeprefix(letter), str(shown))
    return WrongStep(number, piece or "nothing", expected)


def _piece(text: str, place: int) -> str:
    found = _PIECE.match(text, place)
    return "" if found is None else found[0]


def judgments(responses: Sequence[Response]) -> list[str | None]:
    """Return what is wrong with each response, such as ``step 3 says 13, should be 12``, or None."""
    return [_judgment(response) for response in responses]


def _judgment(response: Response) -> str | None:
    terms = chain_of(response.prompt_text)
    if terms:
        wrong = first_wrong_step(terms, response.response_text)
    else:
        wrong = equations.first_wrong_step(equations.equations(response.response_text))
    return None if wrong is None else wrong.judgment
