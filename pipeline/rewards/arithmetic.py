"""Exact arithmetic: the last number of the response must equal the answer.

Verdicts have accuracy 0 or 1. The rules:

1. A number is ASCII digits, with an optional decimal part, or a decimal part alone: ``42``,
   ``3.50``, ``.5``.
2. Commas between groups of three digits belong to it: ``1,234`` is one number, ``1,23`` is two.
3. A minus (``-`` or ``−``) or plus directly before it is its sign, unless preceded by a digit or a
   closing bracket: ``5-3`` is 5 and 3, ``x=-3`` is -3.
4. The last number counts. Characters after it (a full stop, a unit, a bracket) do not matter, and
   letters may touch its digits.
5. Equality is of values, exact at any length: ``042``, ``42.0`` and ``+42`` equal ``42``; ``-0``
   equals ``0``; ``0.33`` does not equal ``0.333``. No rounding, no fractions, no exponents: ``1e3``
   is 1 and 3.

An answer that is not one number by these rules is a fault of the data, not a wrong response."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierFailureKind, VerifierOutcome

_NUMBER = re.compile(
    r"(?:(?<![0-9)\]}])(?P<sign>[-+−]))?"
    r"(?:(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.(?P<part>[0-9]+))?|(?<![0-9.])\.(?P<only_part>[0-9]+))"
)

_DIGITS = "0123456789"

Number = tuple[bool, str, str]
"""(is negative, whole digits, decimal digits), without outer zeros, so that equal values are equal tuples."""


def last_number(text: str) -> Number | None:
    """Return the last number of ``text`` in canonical form, or None."""
    match = None
    for match in _NUMBER.finditer(_last_run(text)):  # noqa: B007  the last one is wanted
        pass
    return None if match is None else _canonical(match)


def _last_run(text: str) -> str:
    """Return the last run of digits, commas and points, so that the search for a number is short.
    Includes the two characters before: the sign, and the one that decides whether it is a sign."""
    end = max(text.rfind(digit) for digit in _DIGITS) + 1
    start = len(text[:end].rstrip(_DIGITS + ".,"))
    return text[max(0, start - 2) : end]


def exact_number(text: str) -> Number | None:
    """Return ``text`` as a number, ignoring white space around it; None if it is not exactly one."""
    match = _NUMBER.fullmatch(text.strip())
    return None if match is None else _canonical(match)


def verify(responses: Sequence[Response]) -> list[VerifierOutcome]:
    return [_verify_one(response) for response in responses]


def _verify_one(response: Response) -> VerifierOutcome:
    expected = exact_number(response.answer)
    if expected is None:
        return VerifierFailure(
            kind=VerifierFailureKind.BAD_ANSWER,
            error=f"the answer {response.answer[:80]!r} is not a number; the arithmetic verifier compares numbers only",
        )
    return Verdict(accuracy=float(last_number(response.response_text) == expected))


def _canonical(match: re.Match[str]) -> Number:
    whole = (match["whole"] or "").replace(",", "").lstrip("0")
    part = (match["part"] or match["only_part"] or "").rstrip("0")
    return (match["sign"] in ("-", "−") and bool(whole or part), whole, part)
