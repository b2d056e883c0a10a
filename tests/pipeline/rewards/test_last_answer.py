"""Claims about where the verifier ``math`` finds the final answer of a response. What answers equal:
``answers.txt``."""

from __future__ import annotations

import time

import pytest

from pipeline.rewards.equivalence import verify, warm_up
from pipeline.rewards.final_answer import TAIL_CHARS
from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierFailureKind


def judged(text: str, answer: str = "22") -> Verdict:
    (outcome,) = verify([Response(response_text=text, answer=answer, verifier="math")])
    assert isinstance(outcome, Verdict), outcome
    return outcome


@pytest.mark.parametrize(
    "text",
    [
        "22",
        "22.",
        "22 dollars",
        "**22**",
        "`22`",
        "$22$.",
        "\\[22\\]",
        "$22",
        "\\frac{44}{2}",
        "x = 22",
        "= 22",
        "Total cost = $22",
        "51 - 29 = 22.",
        "51 − 29 = 22",
        "51 - 29 = 22 marbles.",
        "So 51 - 29 = 22.",
        "11 + 11 = 20 + 2 = 22",
        "First 51 of them.\n\n51 - 29 = 22\n",
        "21 or so\n22",
    ],
)
def test_a_last_line_that_is_one_value_or_one_equation_is_the_answer(text: str) -> None:
    verdict = judged(text)
    assert verdict.accuracy == 1.0, verdict.reason


@pytest.mark.parametrize(
    "text",
    [
        "",
        "She makes 9 * 2 + 4 = 22 dollars every day.",
        "22 apples are left in the basket",
        "So 22 it comes to",
        "There are 22",
        "22\nI hope it is correct.",
        "The answer isn't 22",
        "Total: 22",
    ],
)
def test_a_last_line_of_prose_is_no_answer(text: str) -> None:
    assert judged(text).accuracy == 0.0


@pytest.mark.parametrize(
    "text", ["51 - 29 = 21", "51 - 30 = 22", "21\n51", "22\n21", "22 or 21", "22, 21", "2 2", "22x", "- 22", "22 = 21"]
)
def test_a_last_line_with_another_value_or_a_false_equation_is_wrong(text: str) -> None:
    assert judged(text).accuracy == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{22}",
        "first \\boxed{21}, then \\boxed{22}",
        "\\boxed{22}\n#### 21\nThe answer is 21\n21",
        "\\boxed{ 22 }",
        "\\boxed {22}",
        "$\\boxed 22$",
        "\\fbox{22}",
        "\\boxed{\\boxed{22}}",
        "\\boxed{\\text{22}}",
        "I think it is \\boxed{22}, but I am not sure",
        "#### 22\nThe answer is 21\n21",
        "#### 21\n#### 22",
        "####22",
        "#### $22.00",
        "#### Step 1: subtract\n51 - 29\n#### 22",
        "The answer is 21. No, the answer is 22.\n21",
        "The final answer is **22**",
        "The answer is **22** apples.",
        "The answer is: $\\$22$.",
        "The answer is 22 because 2 * 11 = 22.",
        "The answer is 22 (51 - 29).",
        "The answer is 22 dollars every day at the farmers' market.",
        "**Answer:** 22",
        "ANSWER: 22",
        "Final answer:\n\\[\n22\n\\]",
        "The final answer is $22$. I hope it is correct.",
        "The answer is twenty-two.",
        "The answer is 51 - 29 = 22.",
        "The answer is (B) 22",
        "\\text{The answer is } 22",
    ],
)
def test_the_last_box_comes_before_the_last_hashes_and_these_before_the_last_answer_is(text: str) -> None:
    verdict = judged(text)
    assert verdict.accuracy == 1.0, verdict.reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("It is \\boxed{22", "a box that is not closed"),
        ("22 \\boxed{}", "an empty box"),
        ("22\n####", "an empty answer"),
        ("The answer is 22, 21", "'22, 21' is not the answer"),
        ("The answer is not 22.", "'not 22' is not the answer"),
        ("The answer is about 22.", "'about 22' is not the answer"),
        ("The answer is 22 minus 1.", "'22 minus 1' is not the answer"),
        ("The answer is between 21 and 22.", "'between 21 and 22' is not the answer"),
        ("\\boxed{22} \\boxed{21}", "'21' is not the answer"),
        ("I cannot tell.", "no final answer"),
    ],
)
def test_another_answer_is_wrong_and_says_why(text: str, reason: str) -> None:
    assert judged(text) == Verdict(accuracy=0.0, reason=reason)


def test_a_unit_after_the_answer_is_compared_too() -> None:
    assert judged("The answer is 5 cm.", "5 cm").accuracy == 1.0
    assert judged("The answer is 5 kg.", "5 cm").accuracy == 0.0
    assert judged("#### 5 kg", "5\\text{ cm}").accuracy == 0.0
    assert judged("5 kg", "5 cm").accuracy == 0.0


def test_a_gsm8k_solution_is_an_answer_by_what_follows_its_hashes() -> None:
    assert judged("\\boxed{70000}", "It costs 70 * 1000 = $<<70*1000=70000>>70,000\n#### 70,000").accuracy == 1.0


@pytest.mark.parametrize("answer", ["", "$$", "\\boxed{}", "9" * 5_000, "{" * 500 + "1" + "}" * 500])
def test_a_gold_answer_that_nothing_can_equal_is_a_failure_of_the_data(answer: str) -> None:
    (outcome,) = verify([Response(response_text="4", answer=answer, verifier="math")])
    assert isinstance(outcome, VerifierFailure)
    assert outcome.kind is VerifierFailureKind.BAD_ANSWER


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("9" * 5_000, "a number of more than 4,000 digits"),
        ("1e999999999", "a number of more than 4,000 digits"),
        ("3 \\times 10^{99999}", "a number of more than 4,000 digits"),
        ("{" * 500 + "1" + "}" * 500, "more than 60 brackets within one another"),
        ("(" * 4_000 + "1" + ")" * 4_000, "more than 60 brackets within one another"),
    ],
)
def test_a_number_too_long_or_nested_too_deep_is_refused_at_once(value: str, reason: str) -> None:
    assert judged(f"\\boxed{{{value}}}") == Verdict(accuracy=0.0, reason=reason)


PIECES = [
    "{",
    "}",
    "(",
    ")",
    "\\{",
    "9",
    "1,",
    "1,000",
    "=1",
    "x<",
    "\\pm1",
    "or 1 ",
    "\\cup 1 ",
    "$",
    "*",
    "1e3 ",
    "{,}",
    "\\,",
    "1/",
]
PIECES += [
    "one ",
    "\\text{",
    "\\frac1",
    "(1,2),",
    "1:",
    ".",
    "\\overline{",
    "\\sqrt(",
    "a ",
    "\\boxed{",
    "#### ",
    "the answer is ",
    "'",
]


@pytest.mark.parametrize("piece", PIECES)
def test_the_longest_answer_of_one_piece_is_judged_within_a_second(piece: str) -> None:
    warm_up()
    long = (piece * TAIL_CHARS)[: TAIL_CHARS - 10]
    for text in (long, f"\\boxed{{{long}}}"):
        began = time.process_time()
        judged(text)
        assert time.process_time() - began < 2.0
