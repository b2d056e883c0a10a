r"""DAPO's rule-based mathematics verifier, with its exact behaviour, quirks included.

Only the last 300 characters count. The last ``Answer: ...`` line is normalised and compared as text
with the normalised truth. Without such a line, the content of the last ``\boxed{...}`` in the last
100 characters must equal the truth exactly.

It rejects answers that a person would accept: ``42.``, ``042``, ``42.0``, ``**42**``, and anything
after the number, such as an end-of-turn marker. Published DAPO runs were trained with these rules;
for laxer ones use ``math``.

It runs in the worker, so its time must be linear in answer and response. Where verl's patterns take
quadratic time, plain string searches do the same.

Behaviour of verl's ``verl/utils/reward_score/math_dapo.py``; golden family ``math_verifier``. The
word lists are Minerva's (arXiv 2206.14858, appendix D.1)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.rewards.verifier import Response, Verdict, VerifierOutcome

INVALID = "[INVALID]"
"""The answer recorded for a response that states none."""

_TAIL_CHARS = 300
_BOX_TAIL_CHARS = 100
_BOX = "\\boxed{"
_ANSWER_LINE = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)

_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
"""Replacements in order; each works on the result of the ones before."""

_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}"),
    *("\\text{}^2", "\\text{}^3", "\\text{\n}"),
    *("\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)

_UNWRAPPED = ("\\text{", "\\textbf{", "\\overline{")
_REWRITTEN = (
    # \frac12 is \frac{1}{2}
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


@dataclass(frozen=True, slots=True)
class DapoScore:
    score: float
    """+1 or -1"""
    acc: bool
    pred: str
    """The answer found, or ``[INVALID]``."""


def score(solution: str, ground_truth: str) -> DapoScore:
    tail = solution[-_TAIL_CHARS:]
    lines = _ANSWER_LINE.findall(tail)
    if lines:
        pred = normalize(lines[-1])
        is_correct = pred == normalize(ground_truth)
    else:
        boxed = last_boxed(tail[-_BOX_TAIL_CHARS:])
        pred = INVALID if boxed is None else boxed
        is_correct = boxed == ground_truth
    return DapoScore(score=1.0 if is_correct else -1.0, acc=is_correct, pred=pred)


def normalize(answer: str) -> str:
    """Normalise an answer for comparison as text."""
    answer = answer.rpartition("=")[2]
    for before, after in _REPLACED:
        answer = answer.replace(before, after)
    for text in _REMOVED:
        answer = answer.replace(text, "")
    answer = "\n".join(_unwrapped(line) for line in answer.split("\n"))
    for pattern, replacement in _REWRITTEN:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()


def _unwrapped(line: str) -> str:
    r"""Keep what is between the first two dollar signs, and unwrap text, textbf, overline and
    boxed. Does what verl's patterns do: ``.*?\$(.*?)\$.*``, ``\\text\{(.*?)\}`` and the like,
    ``\\boxed\{(.*)\}``."""
    first = line.find("$")
    second = line.find("$", first + 1)
    if 0 <= first < second:
        line = line[first : second + 1]
    for opening in _UNWRAPPED:
        line = _unwrap_all(line, opening)
    start, end = line.find(_BOX), line.rfind("}")
    if start >= 0 and start + len(_BOX) <= end:
        line = line[:start] + line[start + len(_BOX) : end] + line[end + 1 :]
    return line


def _unwrap_all(line: str, opening: str) -> str:
    """Replace every ``opening...}`` by its content up to the first closing brace."""
    parts: list[str] = []
    position = 0
    while (start := line.find(opening, position)) >= 0:
        end = line.find("}", start + len(opening))
        if end < 0:
            break
        parts += (line[position:start], line[start + len(opening) : end])
        position = end + 1
    return "".join((*parts, line[position:]))


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` with balanced braces, or None if it is not closed."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth = 1
    for position in range(start, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return text[start:position]
    return None


def verify(responses: Sequence[Response]) -> list[VerifierOutcome]:
    return [Verdict(accuracy=float(score(r.response_text, r.answer).acc)) for r in responses]
