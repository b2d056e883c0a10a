"""Forms in which a right solution states its answer. Each is a function of a solution; its name is
the row's."""

from __future__ import annotations

from collections.abc import Callable

from ops.bench.verdicts.solutions import Solution

Form = Callable[[Solution], str]


def _grouped(answer: str) -> str:
    whole, point, cents = answer.partition(".")
    return f"{int(whole):,}{point}{cents}"


def hashes(solution: Solution) -> str:
    """GSM8K's own."""
    return f"{solution.working}\n#### {solution.answer}"


def hashes_with_commas_and_cents(solution: Solution) -> str:
    """``#### 1,234.00``."""
    cents = "" if "." in solution.answer else ".00"
    return f"{solution.working}\n#### {_grouped(solution.answer)}{cents}"


def boxed(solution: Solution) -> str:
    """A box alone."""
    return f"{solution.working}\n\\boxed{{{solution.answer}}}"


def boxed_in_a_formula_of_its_own(solution: Solution) -> str:
    """A sentence that ends in a displayed box."""
    return f"{solution.working}\n\nTherefore, the final answer is:\n\\[\n\\boxed{{{_grouped(solution.answer)}}}\n\\]"


def boxed_with_currency_or_unit(solution: Solution) -> str:
    r"""``\boxed{\$18}`` or ``\boxed{18 \text{ miles}}``."""
    inside = f"\\${solution.answer}" if solution.unit == "dollars" else f"{solution.answer} \\text{{ {solution.unit}}}"
    return f"{solution.working}\nSo we get $\\boxed{{{inside}}}$."


def prose(solution: Solution) -> str:
    """A sentence that ends in the number."""
    return f"{solution.working} The answer is {solution.answer}."


def prose_with_unit(solution: Solution) -> str:
    """A sentence that ends in the unit."""
    return f"{solution.working}\nSo the answer is {solution.answer} {solution.unit}."


def prose_with_currency(solution: Solution) -> str:
    """``The final answer is $1,234.`` with a currency sign where it is money."""
    sign = "$" if solution.unit == "dollars" else ""
    return f"{solution.working}\nThe final answer is {sign}{_grouped(solution.answer)}."


def bold_label(solution: Solution) -> str:
    """``**Answer:** 18``."""
    return f"{solution.working}\n\n**Answer:** {solution.answer}"


def label_with_unit(solution: Solution) -> str:
    """``Answer: 18 miles``."""
    return f"{solution.working}\nAnswer: {_grouped(solution.answer)} {solution.unit}"


def minervas(solution: Solution) -> str:
    """The form of few-shot prompts for MATH."""
    return f"{solution.working}\nFinal Answer: The final answer is ${solution.answer}$. I hope it is correct."


def bare(solution: Solution) -> str:
    """The number alone in the last line."""
    return f"{solution.working}\n{solution.answer}."


def bare_with_unit(solution: Solution) -> str:
    """``$1,234`` or ``18 miles`` in the last line."""
    value = f"${_grouped(solution.answer)}" if solution.unit == "dollars" else f"{solution.answer} {solution.unit}"
    return f"{solution.working}\n\n**{value}**"


def an_equation(solution: Solution) -> str:
    """``12 + 7 = 19.`` in the last line."""
    return f"{solution.working}\nSo {solution.number + 7:.10g} - 7 = {_grouped(solution.answer)}."


FORMS: tuple[Form, ...] = (
    hashes,
    hashes_with_commas_and_cents,
    boxed,
    boxed_in_a_formula_of_its_own,
    boxed_with_currency_or_unit,
    prose,
    prose_with_unit,
    prose_with_currency,
    bold_label,
    label_with_unit,
    minervas,
)
BARE_FORMS: tuple[Form, ...] = (bare, bare_with_unit, an_equation)
"""Answers that state no commitment: ``math_strict`` refuses them."""
