r"""Mathematics: the response's committed final answer must equal the answer.

Verdicts have accuracy 0 or 1, each with its reason. It runs in a sandbox process. Simplifying an
expression that a model wrote can take for ever or all memory (``9**9**9**9``), and only killing the
process ends that.

``verify`` (the verifier ``math``) takes the final answer to which ``final_answer`` finds the
response committed. Numbers, with their currency and unit, are compared exactly; other expressions
by math-verify; words letter by letter. ``verify_loosely`` (``math_loose``) takes the last
expression that math-verify finds anywhere, commitment or not. It is for measuring models whose
answers have no form. It is not for training, which would exploit its errors.

The answer is read as LaTeX, ``$`` or ``\boxed`` around it or not; of a GSM8K solution, what follows
its ``####``. An answer without any expression is a failure of the data."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from pipeline.rewards.final_answer import LEADING_NUMBER, TAIL_CHARS, commitment, flaw, goes_on, in_words, unit_flaw
from pipeline.rewards.verifier import (
    Response,
    Verdict,
    VerifierFailure,
    VerifierFailureKind,
    VerifierOutcome,
    not_judged,
)

_WARM_UP = (
    ("\\frac{1}{2}", "0.5"),
    ("1, 2", "\\{1, 2\\}"),
    ("(1, 2)", "[1, 2]"),
    ("x^2+1", "1+x^2"),
    ("x > 3", "3 < x"),
    ("2\\sqrt{2}", "\\sqrt{8}"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 3 \\end{pmatrix}"),
    ("3 + 4i", "4i + 3"),
    ("10\\%", "0.2"),
    ("\\text{Monday}", "\\sin(x)"),
    ("x = 1 \\text{ or } x = 2", "|2| \\pm 1"),
    ("\\sin^2 x + \\cos^2 x", "1"),
    ("\\int_0^1 x dx", "\\frac{1}{2}"),
)
"""Pairs for the modules that sympy imports only when it meets such an expression."""


def warm_up() -> None:
    """Build the parser's tables and import modules for comparisons before the first response."""
    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        # it warns that its own time limit is off: ours is outside
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for answer, value in _WARM_UP:
        _are_equal(answer, value)


def verify(responses: Sequence[Response]) -> list[VerifierOutcome]:
    """Compare the committed final answer of each response with its answer."""
    return [_judge(_bare(response.answer), response.response_text) for response in responses]


def verify_loosely(responses: Sequence[Response]) -> list[VerifierOutcome]:
    """Compare the last expression of each response, wherever it stands, with its answer."""
    from math_verify import parse

    outcomes: list[VerifierOutcome] = []
    for response in responses:
        answer = _bare(response.answer)
        if not _parsed(answer):
            outcomes.append(_unreadable(answer))
            continue
        found = parse(response.response_text[-TAIL_CHARS:], parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        outcomes.append(Verdict(accuracy=float(_holds(list(_parsed(answer)), found))))
    return outcomes


def _judge(answer: str, text: str) -> VerifierOutcome:
    if not answer or (number_of(answer) is None and not _parsed(answer)):
        return _unreadable(answer)
    found = commitment(text)
    if found.problem:
        return Verdict(accuracy=0.0, reason=found.problem)
    try:
        return _compared(answer, found.values, may_be_flawed=bool(flaw(answer)))
    except (MemoryError, RecursionError) as error:
        return not_judged(f"the comparison exhausted its limits: {type(error).__name__}")


def _compared(answer: str, values: Sequence[str], *, may_be_flawed: bool) -> Verdict:
    for value in values:
        if not may_be_flawed and (problem := flaw(value)):
            return Verdict(accuracy=0.0, reason=problem)
        if not _is_right(answer, value):
            return Verdict(accuracy=0.0, reason=f"{value[:80]!r} is not the answer")
    return Verdict(accuracy=1.0, reason=f"{values[-1][:80]!r} is the answer")


def _is_right(answer: str, value: str) -> bool:
    if _letters(answer) == _letters(value) != "":
        return True
    expected, got = number_of(answer), number_of(value)
    if expected is not None and got is not None:
        return expected == got or _percent_of(answer) * expected == _percent_of(value) * got
    # x = 18, or 9 * 2 = 18: the last side is the answer, the others agree
    if "=" in value and "=" not in answer and not re.search(r"[,;]", value.replace("{,}", "")):
        *before, value = (side.strip() for side in value.split("="))
        if not all(_are_equal(answer, side) for side in before if not re.search(r"[A-Za-z]", _COMMAND.sub("", side))):
            return False
        return _is_right(answer, value)
    return _are_equal(answer, value)


def number_of(value: str) -> Fraction | None:
    """Return the number that ``value`` is, unit and currency aside; None for something else."""
    plain = _FRACTION.sub(r"\1\2/\3", in_words(_SPACES.sub("", value.replace("{,}", ","))).strip(" \t\n$*_`.()"))
    plain = re.sub(r"^\\\(\s*|\s*\\\)$", "", re.sub(r"^[A-Za-z]\s*=\s*", "", plain))
    match = LEADING_NUMBER.match(plain)
    if match is None:
        return None
    rest = plain[match.end() :]
    if goes_on(rest) or "=" in rest or unit_flaw(rest) or (match["below"] is not None and int(match["below"]) == 0):
        return None
    if len(match["number"]) > _MAX_DIGITS or len(match["below"] or "") > _MAX_DIGITS:
        return None
    number = Fraction(match["number"].replace(",", "")) / int(match["below"] or 1)
    return -number if (match["sign"] in ("-", "−")) != (match["inner"] in ("-", "−")) else number


_MAX_DIGITS = 4_000
"""Python reads no longer numbers; they are compared as expressions, or as letters."""
_FRACTION = re.compile(r"^(-?)\\[dt]?frac\s*\{?([0-9]+)\}?\s*\{?([0-9]+)\}?")
_SPACES = re.compile(r"\\[,;!: ]|[\u2009\u202f\u00a0]|(?<=[0-9])~")
_COMMAND = re.compile(r"\\[A-Za-z]+")


def _percent_of(value: str) -> Fraction:
    return Fraction(1, 100) if re.search(r"[0-9]\s*\\?%", value) else Fraction(1)


def _letters(value: str) -> str:
    return re.sub(r"[\s$*_`]|\\[,;!: ]|^\(|\)$|\.$", "", in_words(value)).casefold()


def _are_equal(answer: str, value: str) -> bool:
    from math_verify import parse

    found = parse(f"\\boxed{{{value}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]  None is documented
    return _holds(list(_parsed(answer)), found)


def _holds(gold: list[Any], found: list[Any]) -> bool:
    """Compare by math-verify, without its own limit, which needs SIGALRM: the sandbox has one."""
    from math_verify import verify as is_equal

    return is_equal(gold, found, timeout_seconds=None)


def _bare(answer: str) -> str:
    r"""Return the answer without the solution, ``\boxed`` or ``$`` around it."""
    bare = answer.rpartition("####")[2].strip()
    boxed = re.fullmatch(r"\$?\\boxed\s*\{(.*)\}\$?", bare, re.DOTALL)
    return bare if boxed is None else boxed[1].strip()


@lru_cache(maxsize=1024)
def _parsed(answer: str) -> tuple[Any, ...]:
    """Parse an answer; the members of a group share it."""
    from math_verify import parse

    text = answer if "$" in answer else f"\\boxed{{{answer}}}"
    return tuple(parse(text, parsing_timeout=None))  # pyright: ignore[reportArgumentType]  None is documented


def _unreadable(answer: str) -> VerifierFailure:
    return VerifierFailure(
        kind=VerifierFailureKind.BAD_ANSWER,
        error=f"the answer {answer[:80]!r} is not an expression that math-verify can read; mend the data",
    )
