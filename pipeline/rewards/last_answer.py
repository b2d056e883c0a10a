r"""The final answer of a response, found as graders of MATH and GSM8K do, without asking for
commitment.

It is the content of the last ``\boxed{}``. Without a box, what follows the last ``####``; else what
follows the last "answer is" (or the label ``Answer:``); else the last line, if it is one value
(``22``, ``$\frac12$ cm``) or an equation whose right side is a value (``51 - 29 = 22.``)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.rewards.final_answer import TAIL_CHARS, answer_places, is_heading, split_value
from pipeline.rewards.math_markup import closing
from pipeline.rewards.math_values import Equation, Expression, Items, Value, Words, read
from pipeline.rewards.quantities import Quantity

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_CONNECTIVE = re.compile(r"(?:so|thus|therefore|hence|then|finally|and)\b[\s,:]*", re.I)
_MOST_WORDS = 3
"""Most words of a name before an equals sign (``Total cost = 22``), and of a unit, in a last line."""


@dataclass(frozen=True, slots=True)
class LastAnswer:
    """An answer as written, or why none was found."""

    value: str = ""
    problem: str = ""


def last_answer(text: str) -> LastAnswer:
    """Return the final answer in the last ``TAIL_CHARS`` characters of ``text``. Raises Unreadable."""
    text = text[-TAIL_CHARS:]
    boxes = list(_BOX.finditer(text))
    if boxes:
        return _in_box(text, boxes[-1].end())
    lines = [m for m in _HASHES.finditer(text) if not is_heading(m[1], text[m.end() :])]
    if lines:
        value = lines[-1][1].strip()
        return LastAnswer(value) if value else LastAnswer(problem="an empty answer")
    places = list(answer_places(text))
    if places:
        payload = text[places[-1][1] : places[-1][2]].strip()
        value, problem = split_value(payload)
        value = payload if problem else value
        return LastAnswer(value) if value.strip() else LastAnswer(problem="an empty answer")
    line = text.rstrip().rpartition("\n")[2].strip()
    line = _CONNECTIVE.sub("", line, count=1) if "=" in line else line
    found = read(line)
    return LastAnswer(line) if found is not None and _is_one_value(found) else LastAnswer(problem="no final answer")


def _in_box(text: str, start: int) -> LastAnswer:
    if text[start : start + 1] != "{":
        bare = re.match(r"[^\s$\\{}]+", text[start:])
        return LastAnswer(problem="a box without braces") if bare is None else LastAnswer(bare[0])
    end = closing(text, start)
    if end < 0:
        return LastAnswer(problem="a box that is not closed")
    value = text[start + 1 : end].strip()
    return LastAnswer(value) if value else LastAnswer(problem="an empty box")


def _is_one_value(value: Value) -> bool:
    match value:
        case Words(tokens):
            return len(tokens) == 1
        case Quantity(unit=unit) | Expression(unit=unit):
            return len(re.findall(r"\w{2,}", unit)) < _MOST_WORDS
        case Items(items):
            return all(_is_one_value(item) for item in items)
        case Equation(sides):
            names = (len(side.tokens) <= _MOST_WORDS for side in sides[:-1] if isinstance(side, Words))
            return all(names) and _is_one_value(sides[-1])
        case _:
            return True
