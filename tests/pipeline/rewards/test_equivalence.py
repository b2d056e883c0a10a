from __future__ import annotations

import pytest

from pipeline.rewards.equivalence import verify
from pipeline.rewards.verifier import FailureKind, Response, Verdict, VerifierFailure


@pytest.mark.parametrize(
    ("text", "answer", "is_right"),
    [
        ("thus $x = \\boxed{\\frac{2}{4}}$", "\\frac{1}{2}", True),
        ("\\boxed{1 + x^2}", "$x^2+1$", True),
        ("The answer is 0.5", "1/2", True),
        ("\\boxed{(1, 2)}", "(1,2)", True),
        ("first \\boxed{3}, no: \\boxed{4}", "3", False),
        ("I cannot tell.", "42", False),
        ("", "42", False),
        ("\\boxed{\\frac{1}{", "42", False),
    ],
)
def test_expressions_are_compared_by_value(text: str, answer: str, is_right: bool) -> None:
    (outcome,) = verify([Response(response_text=text, answer=answer, verifier="math")])
    assert outcome == Verdict(accuracy=float(is_right))


def test_an_answer_without_an_expression_is_a_failure_of_the_data() -> None:
    (outcome,) = verify([Response(response_text="4", answer="$$", verifier="math")])
    assert isinstance(outcome, VerifierFailure)
    assert outcome.kind is FailureKind.BAD_ANSWER
