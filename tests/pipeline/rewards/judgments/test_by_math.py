"""Claims about judgments for mathematics: constants are compared, variables are left alone."""

from __future__ import annotations

import pytest

from pipeline.rewards.judgments.by_math import found, judgments
from pipeline.rewards.verifier import Response


def judgment(text: str) -> str | None:
    (said,) = judgments([Response(response_text=text, answer="", verifier="math")])
    return said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("We get $2^{3} + 1 = 9$ and $3^{2} = 8$.", "step 2 says 3^{2} = 8, should be 9"),
        ("\\[ \\sqrt{16} + 1 = 6 \\]", "step 1 says \\sqrt{16} + 1 = 6, should be 5"),
        (
            "\\begin{align} \\[ 2^{3} &= 8 \\\\ 3^{2} &= 10 \\] \\end{align}",
            "step 2 says 3^{2} &= 10, should be 9",
        ),
        ("$A = \\pi \\cdot 2^{2} = 13$", "step 1 says \\pi \\cdot 2^{2} = 13, should be 12.56637061"),
        ("So 3 + 4 = 7 and \\(\\frac{\\sqrt{4}}{2} = 2\\)", "step 2 says \\frac{\\sqrt{4}}{2} = 2, should be 1"),
        ("$f(2) = 2^{2} = 5$, so 5", "step 1 says 2^{2} = 5, should be 4"),
        (
            "$\\frac{1}{3} + \\frac{1}{3} = \\frac{1}{3}$",
            "step 1 says \\frac{1}{3} + \\frac{1}{3} = \\frac{1}{3}, should be 2/3",
        ),
        (
            "$3^{2} \\text{ cm} + 1 \\text{ cm} = 11 \\text{ cm}$",
            "step 1 says 3^{2} \\text{ cm} + 1 \\text{ cm} = 11 \\text{ cm}, should be 10",
        ),
        ("3 + 4 = 8, in prose", "step 1 says 3 + 4 = 8, should be 7"),
    ],
)
def test_the_first_false_equation_of_constants_is_quoted_and_put_right(text: str, says: str) -> None:
    assert judgment(text) == says


@pytest.mark.parametrize(
    "text",
    [
        "$x^2 + 1 = 5$",
        "$\\sin 30^\\circ = 0.5$",
        "$2\\frac{1}{2} = 2.5$",
        "$50\\% \\cdot 20 = 12$",
        "$\\sqrt{-1} = 2$",
        "$A = \\pi \\cdot 2^{2} = 12.57$",
        "$\\sqrt{2} = 1.41$",
        "$2^{3} = 8$ and $\\sqrt{9} + 1 = 2^{2} = 4$",
        "$5 = 6$",
        "$\\frac{1}{ = 3$",
        "",
    ],
)
def test_variables_angles_and_rounded_values_are_never_called_wrong(text: str) -> None:
    assert judgment(text) is None


def test_equations_of_prose_and_formulas_are_counted_in_their_order() -> None:
    text = "First 2 * 3 = 6. Then $\\sqrt{36} = 6$, and 6 + 1 = 7, so $7^{2} = 48$."
    assert [equation.quoted for equation in found(text)] == ["2 * 3 = 6", "\\sqrt{36} = 6", "6 + 1 = 7", "7^{2} = 48"]
    assert judgment(text) == "step 4 says 7^{2} = 48, should be 49"
