r"""Mathematics: the response's final answer must equal the answer.

Verdicts have accuracy 0 or 1, and a reason. It runs in a sandbox process, because simplifying an
expression that a model wrote can take forever or all memory (``9**9**9**9``), and only killing the
process ends that.

``verify`` (the verifier ``math``) takes the final answer that ``last_answer`` finds: the last box,
or what follows the last ``####``, the last "answer is", or a last line that is one value.
``verify_strictly`` (``math_strict``) takes the answer to which ``final_answer`` finds the response
committed. Both compare values as read by ``math_values``: numbers with their units exactly, lists
and intervals by their values, expressions by math-verify, words word by word. ``verify_loosely``
(``math_loose``) takes the last expression that math-verify finds anywhere. It is meant for
measuring models whose answers have no fixed form, not for training, which would exploit its errors.

If the answer is a GSM8K solution, only what follows its ``####`` counts. An empty or unreadable
answer is a fault of the data."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from pipeline.rewards.final_answer import TAIL_CHARS, commitment, flaw
from pipeline.rewards.last_answer import last_answer
from pipeline.rewards.math_markup import Unreadable, plain
from pipeline.rewards.math_values import (
    Bracketed,
    Equation,
    Expression,
    Items,
    Matrix,
    Region,
    Value,
    Words,
    Written,
    read,
)
from pipeline.rewards.quantities import PERCENT, Quantity, in_words
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
    ("x^2+1", "1+x^2"),
    ("x+y > 3", "3 < x+y"),
    ("2\\sqrt{2}", "\\sqrt{8}"),
    ("2\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "3\\begin{pmatrix} 1 \\\\ 3 \\end{pmatrix}"),
    ("3 + 4i", "4i + 3"),
    ("y = 2x", "2x - y = 0"),
    ("\\log_2 x", "\\sin(x)"),
    ("\\sin^2 x + \\cos^2 x", "1"),
    ("\\int_0^1 x dx", "\\frac{1}{2}"),
)
"""Pairs that make sympy import the modules it otherwise imports only on meeting such an expression."""


def warm_up() -> None:
    """Build the parser's tables and import sympy's modules before the first response."""
    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        # silence its warning that its own time limit is off; the sandbox has one
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for answer, value in _WARM_UP:
        is_right(answer, value)


def verify(responses: Sequence[Response]) -> list[VerifierOutcome]:
    return [_judged(response, strictly=False) for response in responses]


def verify_strictly(responses: Sequence[Response]) -> list[VerifierOutcome]:
    return [_judged(response, strictly=True) for response in responses]


def verify_loosely(responses: Sequence[Response]) -> list[VerifierOutcome]:
    from math_verify import parse

    outcomes: list[VerifierOutcome] = []
    for response in responses:
        answer = _without_solution(response.answer)
        if not _parsed_loosely(answer):
            outcomes.append(_unreadable(answer, "math-verify finds no expression in it"))
            continue
        found = parse(response.response_text[-TAIL_CHARS:], parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        outcomes.append(Verdict(accuracy=float(_math_verify_equal(list(_parsed_loosely(answer)), found))))
    return outcomes


def is_right(answer: str, value: str) -> bool:
    """Return whether two answers, as written, are equal. Raises Unreadable."""
    gold = _gold(answer)
    if answer.strip() == value.strip() or _spelling(answer) == _spelling(value) != "":
        return True
    label, content = _multiple_choice(answer)
    chosen, said = _multiple_choice(value)
    if label and (chosen or not content):
        return label == chosen
    # accept "(B) 12" if the answer is 12, and 12 if it is "(B) 12"
    gold = _gold(content) if content else gold
    got = read(said or value, tight_letter=isinstance(gold, Quantity))
    return gold is not None and got is not None and are_equal(gold, got)


def _multiple_choice(text: str) -> tuple[str, str]:
    """Return the letter of a multiple choice and the text after it, or two empty strings."""
    match = _CHOICE.fullmatch(" ".join(in_words(plain(text)).split()))
    return ("", "") if match is None else (match[1] or match[2], (match[3] or "").strip())


_CHOICE = re.compile(r"(?:(?:option|choice) )?(?:\(([A-J])\)|([A-J])(?:[.:)](?= )|$))((?: ?(?!.*\([A-J]\)).*)?)", re.I)


# -- outcomes --------------------------------------------------------------------------------------


def _judged(response: Response, *, strictly: bool) -> VerifierOutcome:
    answer = _without_solution(response.answer)
    try:
        if _gold(answer) is None:
            return _unreadable(answer, "it is empty")
    except Unreadable as error:
        return _unreadable(answer, str(error))
    try:
        return _strict_verdict(answer, response.response_text) if strictly else _verdict(answer, response.response_text)
    except Unreadable as error:
        return Verdict(accuracy=0.0, reason=str(error))
    except (MemoryError, RecursionError) as error:
        return not_judged(f"the comparison exhausted its limits: {type(error).__name__}")


def _verdict(answer: str, text: str) -> Verdict:
    found = last_answer(text)
    return Verdict(accuracy=0.0, reason=found.problem) if found.problem else _compared(answer, [found.value])


def _strict_verdict(answer: str, text: str) -> Verdict:
    found = commitment(text)
    if found.problem:
        return Verdict(accuracy=0.0, reason=found.problem)
    # an inequality or a list is not a hedge if the answer is one, too
    if isinstance(_gold(answer), Quantity | Words | Written) and not flaw(answer):
        for value in found.values:
            if problem := flaw(value):
                return Verdict(accuracy=0.0, reason=problem)
    return _compared(answer, found.values)


def _compared(answer: str, values: Sequence[str]) -> Verdict:
    for value in values:
        if not is_right(answer, value):
            return Verdict(accuracy=0.0, reason=f"{value[:80]!r} is not the answer")
    return Verdict(accuracy=1.0, reason=f"{values[-1][:80]!r} is the answer")


def _without_solution(answer: str) -> str:
    return answer.rpartition("####")[2].strip()


def _unreadable(answer: str, why: str) -> VerifierFailure:
    return VerifierFailure(
        kind=VerifierFailureKind.BAD_ANSWER,
        error=f"the answer {answer[:80]!r} cannot be compared: {why}; correct the data",
    )


@lru_cache(maxsize=1024)
def _gold(answer: str) -> Value | None:
    """Read an answer; cached, because a group's members share it."""
    return read(answer)


def _spelling(text: str) -> str:
    return re.sub(r"\s+", " ", plain(text)).casefold()


# -- equality --------------------------------------------------------------------------------------


def are_equal(gold: Value, got: Value) -> bool:
    """Return whether two values are equal. If only one is an equation, its value is compared; a
    list of one counts as its item."""
    gold, got = _alone(gold), _alone(got)
    match gold, got:
        case Equation(), Equation():
            ends = ((gold.sides[0], got.sides[0]), (gold.sides[-1], got.sides[-1]))
            return all(are_equal(*pair) for pair in ends) or _verified(gold.latex, got.latex)
        case _, Equation():
            value = _stated(got)
            return value is not None and are_equal(gold, value)
        case Equation(), _:
            value = _stated(gold)
            return value is not None and are_equal(value, got)
        case Quantity(), Quantity():
            return _same_quantity(gold, got)
        case ((Quantity() | Expression()), (Quantity() | Expression())):
            units_agree = not (gold.unit and got.unit) or gold.unit == got.unit
            return units_agree and _verified(_latex(gold), _latex(got))
        case Items(), Items():
            return _same_items(gold.items, got.items)
        case (Bracketed("(", ")"), Items()) | (Items(), Bracketed("(", ")")):
            return _all_equal(*(_coordinates(value) or (value,) for value in (gold, got)))
        case (Region(), _) | (_, Region()):
            named = {value.variable for value in (gold, got) if isinstance(value, Region) and value.variable}
            parts = [value.parts if isinstance(value, Region) else (value,) for value in (gold, got)]
            return len(named) < 2 and _same_items(*parts)
        case Bracketed(), Bracketed():
            return (gold.opening, gold.closing) == (got.opening, got.closing) and _all_equal(gold.items, got.items)
        case Matrix(), Matrix():
            return len(gold.rows) == len(got.rows) and all(map(_all_equal, gold.rows, got.rows))
        case Matrix(), Expression(unit=""):
            return _verified(gold.latex, got.latex)
        case Expression(unit=""), Matrix():
            return _verified(gold.latex, got.latex)
        case Written(), Written():
            return _same_writing(gold, got)
        case Written(kind="base", parts=digits), Quantity(unit="", value=value):
            return digits == (str(value),)
        case _:
            return gold == got


def _coordinates(value: Items | Bracketed) -> tuple[Value, ...]:
    """Return a point's values in order, also for ``x = 2, y = 3``; empty for any other list."""
    if isinstance(value, Bracketed):
        return value.items
    names = [item.sides[0] for item in value.items if isinstance(item, Equation) and len(item.sides) == 2]
    in_order = len(names) == len(value.items) > 1 and all(map(_is_name, names))
    latex = [name.latex for name in names if isinstance(name, Expression)]
    return (
        tuple(item.sides[1] for item in value.items if isinstance(item, Equation))
        if in_order and latex == sorted(set(latex))
        else ()
    )


def _alone(value: Value) -> Value:
    return value.items[0] if isinstance(value, Items) and len(value.items) == 1 else value


def _all_equal(gold: Sequence[Value], got: Sequence[Value]) -> bool:
    return len(gold) == len(got) and all(are_equal(one, other) for one, other in zip(gold, got, strict=True))


def _same_items(gold: Sequence[Value], got: Sequence[Value]) -> bool:
    left = list(got)
    for one in gold:
        found = next((place for place, other in enumerate(left) if are_equal(one, other)), None)
        if found is None:
            return False
        del left[found]
    return not left


def _same_quantity(gold: Quantity, got: Quantity) -> bool:
    if gold.unit == PERCENT and not got.unit:
        return got.value in (gold.value, gold.value / 100)
    if got.unit == PERCENT and not gold.unit:
        # a plain number below one is a share: 0.5 % is not 0.5, though 50 % may be written 50
        return got.value / 100 == gold.value or (got.value == gold.value and not 0 < abs(gold.value) < 1)
    units_agree = not (gold.unit and got.unit) or gold.unit == got.unit
    return units_agree and gold.value == got.value


def _same_writing(gold: Written, got: Written) -> bool:
    if gold.kind == "date" == got.kind:
        return gold.parts[1:] == got.parts[1:] and (gold.parts[0] in ("", got.parts[0]))
    suffixes_agree = gold.suffix == got.suffix or (gold.kind == "colon" and not (gold.suffix and got.suffix))
    return (gold.kind, gold.parts) == (got.kind, got.parts) and suffixes_agree


def _stated(equation: Equation) -> Value | None:
    """Return the value that an equation assigns to a name, or that its sides share. None if its
    sides differ, or it would have to be solved (``2x = 10``)."""
    *before, last = equation.sides
    if len(before) == 1 and _is_name(last) and not _is_name(before[0]):
        before, last = [last], before[0]
    for side in before:
        if isinstance(side, Quantity) or (isinstance(side, Expression) and _is_constant(side.latex)):
            if not are_equal(last, side) and not _is_rounded(side, last):
                return None
        elif isinstance(side, Expression) and not _is_name(side):
            return None
    return last


def _is_constant(latex: str) -> bool:
    return (
        bool(latex)
        and re.search(r"[A-Za-z]", re.sub(r"\\(?:frac|sqrt|cdot|times|div|pi|binom|log|ln|le|left)\b", "", latex))
        is None
    )


def _is_name(value: Value) -> bool:
    r"""Return whether it is like ``x``, ``f(2)``, ``x_1``, ``\angle ABC`` or ``a+b``, but not ``2x``."""
    if isinstance(value, Words):
        return True
    if not isinstance(value, Expression) or re.search(r"[A-Za-z]", value.latex) is None or _is_constant(value.latex):
        return False
    bare = re.sub(r"_\{?\w+\}?|(?<=[A-Za-z])\s*\([^()]*\)|\^\{?[0-9]\}?", "", value.latex)
    return bool(bare) and re.search(r"[0-9]", bare) is None


def _is_rounded(side: Value, last: Value) -> bool:
    """Return whether ``last`` is a decimal that the constant before it rounds to."""
    if not isinstance(last, Quantity) or last.value.denominator == 1:
        return False
    decimals = next((n for n in range(1, 7) if (last.value * 10**n).denominator == 1), None)
    exact = (
        side.value if isinstance(side, Quantity) else _rational(side.latex) if isinstance(side, Expression) else None
    )
    return decimals is not None and exact is not None and abs(exact - last.value) <= Fraction(1, 2 * 10**decimals)


def _rational(latex: str) -> Fraction | None:
    found = _expression(latex)
    value: Any = None if found is None else found.doit()
    return Fraction(int(value.p), int(value.q)) if getattr(value, "is_Rational", False) else None


def _latex(value: Quantity | Expression) -> str:
    if isinstance(value, Expression):
        return value.latex
    return f"\\frac{{{value.value.numerator}}}{{{value.value.denominator}}}"


def _verified(gold: str, got: str) -> bool:
    expected, found = _expression(gold), _expression(got)
    return expected is not None and found is not None and _math_verify_equal([expected], [found])


@lru_cache(maxsize=1024)
def _expression(latex: str) -> Any:
    """Parse LaTeX as it is with math-verify's parser; None if it cannot."""
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from sympy import I, Symbol

    if not latex:
        return None
    try:
        config = ConversionConfig(lowercase_symbols=False)
        found: Any = latex2sympy(latex, normalization_config=None, conversion_config=config)
        return found.subs(
            {symbol: I for symbol in found.free_symbols if symbol == Symbol(symbol.name) and symbol.name == "i"}
        )
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001  the parser may raise anything; such a text is not an expression
        return None


def _math_verify_equal(gold: list[Any], found: list[Any]) -> bool:
    """Compare without math-verify's own time limit, which needs SIGALRM; the sandbox has one."""
    from math_verify import verify as is_equal

    return is_equal(gold, found, timeout_seconds=None)


@lru_cache(maxsize=1024)
def _parsed_loosely(answer: str) -> tuple[Any, ...]:
    from math_verify import parse

    text = answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
    return tuple(parse(text, parsing_timeout=None))  # pyright: ignore[reportArgumentType]  None is documented
