"""Kinds of response that are not right, though the right number is in most of them.

Each is a function of a solution and a random generator, which chooses among several wordings; its
name is the row's."""

from __future__ import annotations

import random
from collections.abc import Callable

from ops.bench.verdicts.solutions import Solution

Corruption = Callable[[Solution, random.Random], tuple[str, str]]
"""Returns a response, and the answer to which it is compared."""


def another(solution: Solution, rng: random.Random) -> str:
    """Return a number near the answer that is not it."""
    number = solution.number
    near = [number + 1, number - 1, number * 10, number + 10, -number, number + 0.5, number * 2, abs(number - 100)]
    chosen = rng.choice([value for value in near if value != number])
    return f"{chosen:.10g}"


def _ended(solution: Solution, rng: random.Random, *endings: str, answer: str = "") -> tuple[str, str]:
    ending = rng.choice(endings).format(
        right=solution.answer, wrong=another(solution, rng), third=another(solution, rng)
    )
    return f"{solution.working}\n{ending}", answer or solution.answer


def another_number_in_a_box(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """The working is right, the box is not."""
    return _ended(
        solution, rng, "\\boxed{{{wrong}}}", "$\\boxed{{\\${wrong}}}$", "So {right} in all. \\boxed{{{wrong}}}"
    )


def another_number_after_hashes(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """The sentence before has the right one."""
    return _ended(
        solution, rng, "#### {wrong}", "The answer is {right}.\n#### {wrong}", "So it is {right}.\n#### ${wrong}"
    )


def another_number_in_words(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """A sentence or a label with a wrong number."""
    return _ended(
        solution,
        rng,
        "The answer is {wrong}.",
        "**Answer:** {wrong}",
        "Answer: ${wrong}",
        "So it is {right}. The answer is {wrong}",
    )


def a_false_equation_in_a_box(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """An equation or an inequality whose one side is right."""
    return _ended(
        solution,
        rng,
        "\\boxed{{{wrong} = {right}}}",
        "\\boxed{{{right} = {wrong}}}",
        "\\boxed{{x > {right}}}",
        "\\boxed{{\\neq {right}}}",
    )


def alternatives_in_words(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """``18 or 21``."""
    return _ended(
        solution,
        rng,
        "The answer is {right} or {wrong}.",
        "The answer is {wrong} or {right}.",
        "The answer is either {right} or {wrong}.",
        "#### {right} or {wrong}",
        "**Answer:** {right} / {wrong}",
    )


def alternatives_in_a_box(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """Two numbers in one box."""
    return _ended(
        solution,
        rng,
        "\\boxed{{{right} \\text{{ or }} {wrong}}}",
        "\\boxed{{{wrong} or {right}}}",
        "\\boxed{{{right}, {wrong}}}",
        "\\boxed{{{right} \\pm {wrong}}}",
    )


def alternative_boxes(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """Two boxes in one sentence."""
    return _ended(
        solution,
        rng,
        "\\boxed{{{right}}} or \\boxed{{{wrong}}}",
        "Either \\boxed{{{wrong}}} or \\boxed{{{right}}}.",
        "\\boxed{{{wrong}}}, \\boxed{{{right}}}",
        "\\boxed{{{right}}} or {wrong}",
    )


def a_list_of_candidates(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """Several numbers without a word."""
    return _ended(
        solution,
        rng,
        "The answer is {right}, {wrong}, {third}",
        "#### {wrong} {right}",
        "#### {right} #### {wrong}",
        "Answer: {wrong}; {right}",
        "The answer is {right} and {wrong}.",
    )


def an_empty_box_after_the_solution(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """A box without content."""
    return _ended(
        solution,
        rng,
        "\\boxed{{}}",
        "So {right}. $\\boxed{{ }}$",
        "The answer is {right}.\n\\boxed{{\\text{{}}}}",
        "#### {right}\n\\boxed{{}}",
    )


def an_empty_answer_after_the_solution(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """A label, hashes or a sentence without content."""
    return _ended(
        solution,
        rng,
        "It is {right}.\n####",
        "It is {right}.\n**Answer:**",
        "It is {right}. The answer is",
        "{right}\n#### ?",
    )


def negated_in_words(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """``The answer is not 18``."""
    return _ended(
        solution,
        rng,
        "The answer is not {right}.",
        "The answer isn't {right}.",
        "It is not true that the answer is {right}.",
        "The answer is definitely not {right} dollars.",
        "#### not {right}",
        "The answer is anything but {right}.",
    )


def negated_beside_a_box(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """A box that the sentence denies."""
    return _ended(
        solution,
        rng,
        "It is not \\boxed{{{right}}}.",
        "\\boxed{{\\text{{not }} {right}}}",
        "\\boxed{{{right}}} is wrong.",
        "The answer cannot be \\boxed{{{right}}}.",
    )


def hedged(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """Doubt in the same sentence, or in the one before."""
    return _ended(
        solution,
        rng,
        "I think the answer is {right}.",
        "The answer is probably {right}.",
        "Maybe the answer is {right}?",
        "The answer might be {right}.",
        "I am not sure. The answer is {right}.",
        "The answer is {right}, I guess.",
        "Perhaps \\boxed{{{right}}}",
        "#### maybe {right}",
    )


def about_the_number(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """A range, or a number that is only near."""
    return _ended(
        solution,
        rng,
        "The answer is about {right}.",
        "The answer is approximately {right}.",
        "The answer is between {right} and {wrong}.",
        "The answer is at least {right}.",
        "#### ~{right}",
        "\\boxed{{\\approx {right}}}",
        "The answer is {right} or so.",
    )


def taken_back(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """Right, and then not."""
    return _ended(
        solution,
        rng,
        "\\boxed{{{right}}}. Wait, that is wrong. It should be {wrong}.",
        "The answer is {right}. Actually, no, {wrong}.",
        "#### {right}\nHmm, I made a mistake.",
        "#### {right}\n{wrong}",
        "The answer is {right}.\nScratch that: {wrong}.",
    )


def contradicted_later(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """A later statement gives another number."""
    return _ended(
        solution,
        rng,
        "The answer is {right}.\nThe answer is {wrong}.",
        "\\boxed{{{right}}}\n\\boxed{{{wrong}}}",
        "#### {right}\n#### {wrong}",
        "\\boxed{{{right}}}\nThe answer is {wrong}.",
        "\\boxed{{{right}}}\n#### {wrong}",
    )


def asked(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """A question."""
    return _ended(
        solution,
        rng,
        "Is the answer {right}?",
        "The answer is {right}?",
        "\\boxed{{{right}?}}",
        "#### {right}?",
        "\\boxed{{{right}}}?",
    )


def nothing_committed(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """The working alone, or a number in passing."""
    ending = rng.choice(["", f"\nSo {solution.answer} it comes to.", f"\n{solution.answer}"])
    return f"{solution.working}{ending}", solution.answer


def cut_off(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """The limit of tokens came before the end of the answer."""
    return _ended(
        solution,
        rng,
        "So it is {right}: \\boxed{{{right}",
        "So it is {right}. The answer is $",
        "So {right}.\n\\boxed",
        "So {right}.\n####",
    )


def another_size(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """The right digits with another sign, power of ten or factor."""
    return _ended(
        solution,
        rng,
        "The answer is -{right}.",
        "The answer is {right} thousand.",
        "The answer is half of {right}.",
        "\\boxed{{{right} \\times 10}}",
        "#### {right}e3",
        "\\boxed{{{right}^2 + 1}}",
        "The answer is {right} minus 1.",
    )


def in_a_condition_or_of_others(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """A statement under a condition, or by other people."""
    return _ended(
        solution,
        rng,
        "If the answer is {right}, then the shop is open.",
        "Some think the answer is {right}.",
        "Suppose the answer is {right}.",
        "Assuming the answer is {right} we can go on.",
        "It is unclear whether the answer is {right}.",
    )


def digits_apart_or_another_point(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """The right digits with a space, a comma or a point among them."""
    digits = solution.answer if len(solution.answer.partition(".")[0]) > 1 else f"1{solution.answer}"
    mark = rng.choice([" ", ", ", ".", "\\,", "{,}", ",0"])
    head, tail = digits[0], digits[1:]
    apart = f".{digits.replace('.', '')}" if len(tail.partition(".")[0]) > 2 or "." in tail else f"{head}{mark}{tail}"
    apart = apart.replace("{", "{{").replace("}", "}}")
    return _ended(solution, rng, f"\\boxed{{{{{apart}}}}}", f"#### {apart}", f"The answer is {apart}", answer=digits)


def a_mixed_number_for_a_fraction(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """``1 1/2`` for 11/2, or the other way round."""
    whole = solution.answer.partition(".")[0]
    mixed, fraction = f"{whole} 1/2", f"{whole}1/2"
    answer, value = rng.choice([(mixed, fraction), (fraction, mixed), (f"\\frac{{{whole}1}}{{2}}", f"{whole}\\frac12")])
    value = value.replace("{", "{{").replace("}", "}}")
    return _ended(solution, rng, f"\\boxed{{{{{value}}}}}", f"#### {value}", f"The answer is {value}.", answer=answer)


def another_unit(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """The right number, and a unit that is not the answer's."""
    return _ended(
        solution,
        rng,
        "\\boxed{{{right} \\text{{ kg}}}}",
        "#### {right} kg",
        "The answer is {right} m.",
        "\\boxed{{{right} \\text{{ cm}}^2}}",
        answer=f"{solution.answer}\\text{{ cm}}",
    )


def other_brackets_or_another_order(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """A set or an interval for a point, or its coordinates the other way round."""
    return _ended(
        solution,
        rng,
        "\\boxed{{\\{{{right}, -1\\}}}}",
        "\\boxed{{[{right}, -1]}}",
        "#### (-1, {right})",
        "The answer is {right}, -1",
        answer=f"({solution.answer}, -1)",
    )


def in_an_expression(solution: Solution, rng: random.Random) -> tuple[str, str]:
    """The right number as a part: a factor, a time, a base, a power."""
    return _ended(
        solution,
        rng,
        "\\boxed{{{right}x}}",
        "\\boxed{{{right}:00}}",
        "#### {right}_{{12}}",
        "The answer is {right} + 1",
        "\\boxed{{\\frac{{{right}}}{{3}}}}",
        "\\boxed{{-{right} - 1}}",
    )


CORRUPTIONS: tuple[Corruption, ...] = (
    another_number_in_a_box,
    another_number_after_hashes,
    another_number_in_words,
    a_false_equation_in_a_box,
    alternatives_in_words,
    alternatives_in_a_box,
    a_list_of_candidates,
    an_empty_box_after_the_solution,
    an_empty_answer_after_the_solution,
    about_the_number,
    cut_off,
    another_size,
    digits_apart_or_another_point,
    a_mixed_number_for_a_fraction,
    another_unit,
    other_brackets_or_another_order,
    in_an_expression,
)
"""Another value than the answer, or none."""

UNCOMMITTED: tuple[Corruption, ...] = (
    alternative_boxes,
    negated_in_words,
    negated_beside_a_box,
    hedged,
    taken_back,
    contradicted_later,
    asked,
    nothing_committed,
    in_a_condition_or_of_others,
)
"""The answer's value, to which the response does not commit itself."""
