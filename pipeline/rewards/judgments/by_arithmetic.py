"""Judgments by plain arithmetic: the first step of a chain, or the first equation, that is wrong.

Where a prompt is a chain of a one-digit counter, its response is read as one; otherwise the
response's ``equations`` are. A response whose steps all hold has no judgment: its answer is wrong,
but no step of it is, as where a task was misread.

A chain's prompt sets the counter and changes it, one lettered term at a time, as ``a7b+5c-9=``. A
response writes each letter with the counter after it, then the answer: ``a7b2c3=3``. All is modulo
10. A term may also multiply: ``d*3``. ``ops.demo.task`` has the task."""

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
"""(letter, sign or nothing, number)"""


def chain_of(prompt: str) -> list[Term]:
    """Return the terms of the chain at the end of ``prompt``; empty if it has none."""
    found = _CHAIN.search(prompt)
    return [] if found is None else [(letter, sign, int(digits)) for letter, sign, digits in _TERM.findall(found[1])]


def first_wrong_step(terms: list[Term], response: str) -> WrongStep | None:
    """Return the first step of ``response`` that does not hold; None where all do. Later steps may
    follow from it. The answer after the last term counts as a step."""
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
    """Compare what stands at ``place`` with a letter (or ``=``) and its digit."""
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
    """Return what is wrong with each response: ``step 3 says 13, should be 12``; None where no step
    is."""
    return [_judgment(response) for response in responses]


def _judgment(response: Response) -> str | None:
    terms = chain_of(response.prompt_text)
    if terms:
        wrong = first_wrong_step(terms, response.response_text)
    else:
        wrong = equations.first_wrong_step(equations.equations(response.response_text))
    return None if wrong is None else wrong.judgment
