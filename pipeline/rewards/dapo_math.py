r"""DAPO's rule-based mathematics verifier, with its exact behaviour, quirks included.

Only the last 300 characters count. The last ``Answer: ...`` line is normalised and compared as text
with the normalised truth. Without such a line, the content of the last ``\boxed{...}`` in the last
100 characters must equal the truth as it stands.

Answers that a person would accept and this does not: ``42.``, ``042``, ``42.0``, ``**42**``, and
anything after the number such as an end-of-turn marker. That is what published DAPO runs were
trained with; for laxer rules use ``math``.

It runs in the worker, so its time must be linear in answer and response. Where verl's patterns take
quadratic time, plain searches do the same.

Behaviour of verl's ``verl/utils/reward_score/math_dapo.py``; golden family ``math_verifier``. The
word lists are those of Minerva (arXiv 2206.14858, appendix D.1)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.rewards.verifier import Response, Verdict, VerifierOutcome

INVALID = "[INVALID]"
"""The answer that is read from a response that states none."""

_TAIL_CHARS = 300
_BOX_TAIL_CHARS = 100
_BOX = "\\boxed{"
_ANSWER_LINE = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)

_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
"""Replacements in this order: each works on the result of the earlier ones."""

_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *(
        "childrentickets",
        "multiples",
        "\\text{s}",
        "\\text{.}",
        "\\text{\ns}",
        "\\text{}^2",
        "\\text{}^3",
        "\\text{\n}",
    ),
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
    """The verifier's result for one response."""

    score: float
    """+1 or -1"""
    acc: bool
    pred: str
    """The answer that was found, or ``[INVALID]``."""


def score(solution: str, ground_truth: str) -> DapoScore:
    """Score one response text against its ground truth."""
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
    """Bring an answer to the form in which two answers are compared as text."""
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
    r"""Return a line from its first dollar sign to its second, without text, textbf, overline and
    box. As verl's patterns have it: ``.*?\$(.*?)\$.*``, ``\\text\{(.*?)\}`` and its like,
    ``\\boxed\{(.*)\}``."""
    first = line.find("$")
    second = line.find("$", first + 1)
    if 0 <= first < second:
        line = line[first : second + 1]
    for opening in _UNWRAPPED:
        line = _freed(line, opening)
    start, end = line.find(_BOX), line.rfind("}")
    if start >= 0 and start + len(_BOX) <= end:
        line = line[:start] + line[start + len(_BOX) : end] + line[end + 1 :]
    return line


def _freed(line: str, opening: str) -> str:
    """Return the line with every ``opening...}`` replaced by its content up to its first brace."""
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
    r"""Return the content of the last ``\boxed{...}``, braces balanced; None if it does not end."""
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
    """Judge each response by ``score``."""
    return [Verdict(accuracy=float(score(r.response_text, r.answer).acc)) for r in responses]
