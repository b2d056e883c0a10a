r"""Judgments for mathematics: the first equation of constants that does not hold.

Equations of plain arithmetic are read by ``equations``, in prose and in formulas. Formula equations
with roots, powers in braces or ``\pi`` are read by math-verify and compared as numbers. Equations
with a variable are not judged, because they may hold for some value, nor are those with a per cent
sign, a function or an angle. It runs in a sandbox process, because such an expression may take
forever."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from pipeline.rewards.equivalence import warm_up as warm_up
from pipeline.rewards.judgments.equations import MAX_CHARS, Equation, equations, first_wrong_step
from pipeline.rewards.verifier import Response

_FORMULA = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|\$([^$\n]+)\$", re.DOTALL)
_LINES = re.compile(r"\\\\|\n\s*\n|\\begin\{[a-z*]+\}|\\end\{[a-z*]+\}")
_UNIT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}|\\[,;!: ]|\\boxed(?=\s*\{)|&")
_CONSTANTS = re.compile(r"\\(?:[dt]?frac|sqrt|cdot|times|div|left|right|pi|binom)(?![A-Za-z])")
_UNREAD = re.compile(r"[A-Za-z\\,;%°'|:<>≤≥≈±]|\.\.\.|…")
_MIXED = re.compile(r"[0-9]\s*\\[dt]?frac")
_DECIMAL = re.compile(r"-?[0-9]*\.([0-9]+)")
_MAX_SIDE_CHARS = 200
_DIGITS = 30
_LARGEST = 10**15


def judgments(responses: Sequence[Response]) -> list[str | None]:
    """Return what is wrong with each response, or None if every equation that could be read holds."""
    wrong = (first_wrong_step(found(response.response_text)) for response in responses)
    return [None if step is None else step.judgment for step in wrong]


def found(text: str) -> list[Equation]:
    """Return the equations of prose and formulas, in order."""
    text = text[:MAX_CHARS]
    plain = {equation.place: equation for equation in equations(text)}
    of_formulas = {equation.place: equation for equation in _of_formulas(text) if equation.place not in plain}
    return [equation for _, equation in sorted({**of_formulas, **plain}.items())]


def _of_formulas(text: str) -> Iterator[Equation]:
    for formula in _FORMULA.finditer(text):
        begin, end = formula.span(formula.lastindex or 0)
        for start, stop in _parts(text, begin, end):
            sides = list(_sides(text, start, stop))
            for (left, left_end), (right, right_end) in pairwise(sides):
                equation = _compared(text, left, left_end, right, right_end)
                if equation is not None:
                    yield equation


def _parts(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the lines of a formula."""
    for mark in _LINES.finditer(text, begin, end):
        yield begin, mark.start()
        begin = mark.end()
    yield begin, end


def _sides(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the spans between the ``=`` signs of a line."""
    depth = 0
    for place in range(begin, end):
        depth += (text[place] == "{") - (text[place] == "}")
        if text[place] == "=" and depth == 0:
            yield begin, place
            begin = place + 1
    yield begin, end


def _compared(text: str, left: int, left_end: int, right: int, right_end: int) -> Equation | None:
    sides = _without_units(text[left:left_end]), _without_units(text[right:right_end])
    values = [_value(side) for side in sides]
    if None in values or all(re.fullmatch(r"-?[0-9.]+", side) for side in sides):
        return None
    holds = _agree(values[0], values[1], sides)
    quoted = text[left:right_end].strip(" \t\n.$&")
    computed = 1 if re.fullmatch(r"-?[0-9.]+", sides[0]) else 0
    return Equation(place=left_end, quoted=quoted, holds=holds, should_be=_in_words(values[computed]))


def _without_units(side: str) -> str:
    return _UNIT.sub(" ", side).strip(" \t\n.$")


@lru_cache(maxsize=1024)
def _value(side: str) -> Any:
    """Return ``side`` as a real number, or None if it is not one."""
    if not side or len(side) > _MAX_SIDE_CHARS or _MIXED.search(side) or _UNREAD.search(_CONSTANTS.sub(" ", side)):
        return None
    from math_verify import parse
    from sympy import Expr, N

    parsed = parse(f"\\boxed{{{side}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]  None is documented
    expression = parsed[0] if parsed else None
    if not isinstance(expression, Expr) or expression.free_symbols:
        return None
    value = N(expression, _DIGITS)
    return value if value.is_real and value.is_finite and abs(value) < _LARGEST else None


def _agree(left: Any, right: Any, sides: tuple[str, str]) -> bool:
    """Return whether two values are equal, or differ by less than the last digit of a decimal side."""
    places = [len(found[1]) for side in sides if (found := _DECIMAL.fullmatch(side)) is not None]
    gap = abs(left - right)
    return bool(gap <= 1e-9 * max(1, abs(left), abs(right)) or (places and gap < 10 ** -min(places)))


def _in_words(value: Any) -> str:
    nearest = round(float(value))
    return str(nearest) if abs(value - nearest) < 1e-9 else f"{float(value):.10g}"
