"""Claims about the verifier ``math``. Its table of right and corrupted solutions:
test_endings.py."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.rewards.equivalence import verify, verify_loosely, verify_strictly
from pipeline.rewards.final_answer import TAIL_CHARS, commitment
from pipeline.rewards.math_values import read
from pipeline.rewards.quantities import Quantity
from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierFailureKind, VerifierOutcome


def judged(text: str, answer: str) -> Verdict:
    (outcome,) = verify_strictly([Response(response_text=text, answer=answer, verifier="math_strict")])
    assert isinstance(outcome, Verdict), outcome
    return outcome


@pytest.mark.parametrize(
    ("text", "answer", "is_right"),
    [
        ("thus $x = \\boxed{\\frac{2}{4}}$", "\\frac{1}{2}", True),
        ("\\boxed{1 + x^2}", "$x^2+1$", True),
        ("The answer is 0.5", "1/2", True),
        ("\\boxed{0.333333}", "1/3", False),
        ("\\boxed{(1, 2)}", "(1,2)", True),
        ("\\boxed{2, 1}", "1,2", True),
        ("\\boxed{x = 1 \\text{ or } x = 2}", "x=1 or x=2", True),
        ("\\boxed{x>3}", "x > 3", True),
        ("\\boxed{25\\%}", "0.25", True),
        ("\\boxed{3\\frac{1}{2}}", "3.5", True),
        ("The answer is $2\\sqrt{2}$.", "2\\sqrt{2}", True),
        ("The answer is (B).", "B", True),
        ("\\boxed{\\text{monday}}", "Monday", True),
        ("\\boxed{18}", "She sells 9 * 2 = 18 eggs.\n#### 18", True),
        ("\\boxed{18}", "$\\boxed{18}$", True),
        ("\\boxed{12:15}", "12:15", True),
        ("first \\boxed{3}, no: \\boxed{4}", "3", False),
        ("I cannot tell.", "42", False),
        ("", "42", False),
        ("\\boxed{\\frac{1}{", "42", False),
    ],
)
def test_expressions_are_compared_by_value(text: str, answer: str, is_right: bool) -> None:
    assert judged(text, answer).accuracy == float(is_right)


@pytest.mark.parametrize(
    "text",
    [
        "$\\boxed{18}$",
        "\\fbox{18}",
        "9 * 2 = 18\n#### 18",
        "The answer is 18",
        "The answer is 18 dollars every day at the farmers' market.",
        "The final answer is $18$. I hope it is correct.",
        "**Answer:** 18",
        "**Answer: 18**",
        "### Final Answer\n18",
        "Final answer:\n\\[\n18\n\\]",
        "The answer is $18.",
        "#### $18.00",
        "\\boxed{18 \\text{ dollars}}",
        "The answer is £18.",
        "The answer is 18 USD.",
        "The answer is 18 m^2.",
        "The answer is 18 more eggs than before.",
        "So if 9 could not come, 9 * 2 = 18 would be left \\boxed{18}",
        "Others say that they do not like cake\n\\boxed{18}",
        "If she sells 9, that might be 9 * 2 = 18 The answer is 18",
        "\\boxed{18~\\text{cm}}",
        "\\boxed{18\\%}",
        "The answer is x = 18.",
        "\\boxed{9 \\cdot 2 = 18}",
        "The answer is 18 because 9 * 2 = 18.",
        "The answer is 18 (9 times 2).",
        "Answer: Let us see, 9 * 2.\nThe answer is 18.",
        "#### Step 1: add\n9\n#### Step 2: double\n18\nThe answer is 18.",
        "The answer is 9, I thought. No: \\boxed{18}",
    ],
)
def test_a_committed_right_answer_is_right(text: str) -> None:
    verdict = judged(text, "18")
    assert verdict.accuracy == 1.0, verdict.reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("18", "no committed answer"),
        ("She makes 9 * 2 = 18 dollars.", "no committed answer"),
        ("The answer isn't 18.", "no committed answer"),
        ("9 * 2 = 18\n\\boxed{}", "an empty box"),
        ("#### 18\n#### ", "an empty answer"),
        ("\\boxed{18", "a box that is not closed"),
        ("The answer is 18 or 21.", "alternatives"),
        ("\\boxed{18} or \\boxed{21}", "alternatives"),
        ("\\boxed{21} or \\boxed{18}", "alternatives"),
        ("\\boxed{18 \\text{ or } 21}", "alternatives"),
        ("#### 18\nor 21", "taken back"),
        ("#### 18 #### 21", "alternatives"),
        ("The answer is 18, 21", "several numbers"),
        ("The answer is 18 and 21", "several numbers"),
        ("\\boxed{18} and \\boxed{21}", "'18, 21' is not the answer"),
        ("The answer is not 18.", "negated"),
        ("It is not true that the answer is 18.", "negated"),
        ("It is not \\boxed{18}", "negated"),
        ("It is not true that the answer is \\boxed{18}", "negated"),
        ("Some say it is \\boxed{18}", "hedged"),
        ("The answer is not:\n\\[\n\\boxed{18}\n\\]", "negated"),
        ("\\boxed{\\neq 18}", "negated"),
        ("I think the answer is 18.", "hedged"),
        ("Maybe \\boxed{18}", "hedged"),
        ("The answer is about 18.", "hedged"),
        ("The answer is 18, I guess.", "hedged"),
        ("I'm not sure. The answer is 18.", "hedged"),
        ("If the answer is 18, she is rich.", "hedged"),
        ("\\boxed{\\approx 18}", "hedged"),
        ("Is the answer 18? The answer is 18?", "a question"),
        ("\\boxed{18}. Wait, that is wrong: 21.", "taken back"),
        ("\\boxed{18}\nThe answer is 21.", "'21' is not the answer"),
        ("The answer is 18\n#### 21", "'21' is not the answer"),
        ("\\boxed{21 = 18}", "'21 = 18' is not the answer"),
        ("\\boxed{x > 18}", "hedged"),
        ("The answer is 18 thousand.", "'18 thousand' is not the answer"),
        ("\\boxed{18 \\text{ thousand}}", "'18 \\\\text{ thousand}' is not the answer"),
        ("\\boxed{18 \\ldots}", "not a number with its unit"),
        ("\\boxed{18_9}", "'18_9' is not the answer"),
        ("\\boxed{x = 18, y = 21}", "'x = 18, y = 21' is not the answer"),
        ("\\boxed{x = 21, y = 18}", "'x = 21, y = 18' is not the answer"),
        ("\\boxed{18} (or 21)", "alternatives"),
        ("\\boxed{18} -- not sure", "hedged"),
        ("One candidate is \\boxed{18}", "hedged"),
        ("The answer is half of 18.", "hedged"),
    ],
)
def test_what_is_no_commitment_to_one_answer_is_wrong_and_says_why(text: str, reason: str) -> None:
    assert judged(text, "18") == Verdict(accuracy=0.0, reason=reason)


def test_the_form_of_the_highest_precedence_decides_and_of_it_the_last_statement() -> None:
    assert judged("The answer is 9.\n#### 12\nso \\boxed{18}", "18").accuracy == 1.0
    assert judged("\\boxed{9}\n\\boxed{18}", "18").accuracy == 1.0
    assert judged("\\boxed{21}\n#### 18", "18").accuracy == 0.0
    assert judged("\\boxed{18}\n#### 18\nThe answer is 18.", "18").accuracy == 1.0


def test_the_loose_verifier_takes_any_last_expression() -> None:
    texts = ["It is 18", "The answer is not 18", "It is 21"]
    outcomes = verify_loosely([Response(response_text=text, answer="18", verifier="math_loose") for text in texts])
    assert [o.accuracy for o in outcomes if isinstance(o, Verdict)] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("judge", [verify, verify_loosely])
def test_an_answer_without_an_expression_is_a_failure_of_the_data(
    judge: Callable[[Sequence[Response]], list[VerifierOutcome]],
) -> None:
    (outcome,) = judge([Response(response_text="4", answer="$$", verifier="math")])
    assert isinstance(outcome, VerifierFailure)
    assert outcome.kind is VerifierFailureKind.BAD_ANSWER


def test_a_comparison_that_exhausts_its_limits_is_an_answer_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object, **__: object) -> bool:
        raise MemoryError

    monkeypatch.setattr("math_verify.verify", exhausted)
    verdict = judged("\\boxed{x+1}", "y")
    assert (verdict.accuracy, verdict.judged) == (0.0, False)
    assert "MemoryError" in verdict.reason


COMPARED = (
    ("\\frac{1}{2}+x", "x+0.5"),
    ("(-\\infty, 3]", "(-\\infty,3]"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}"),
    ("x^2-1", "(x-1)(x+1)"),
    ("\\tan^2 x + 1", "\\frac{1}{\\cos^2 x}"),
    ("\\log_2 8", "3"),
    ("\\sum_{i=1}^{10} i", "55"),
    ("\\int_0^2 x^2 dx", "\\frac{8}{3}"),
    ("\\binom{5}{2}", "10"),
    ("x \\in [1,2]", "[1,2]"),
    ("\\{1,2,3\\}", "\\{3,2,1\\}"),
)


@pytest.mark.long
def test_after_the_warm_up_no_comparison_has_anything_left_to_import() -> None:
    """The imports of a comparison would count towards its time limit."""
    code = (
        "import sys\n"
        "from pipeline.rewards.equivalence import verify, warm_up\n"
        "from pipeline.rewards.verifier import Response\n"
        "warm_up()\n"
        "before = set(sys.modules)\n"
        f"for answer, value in {COMPARED!r}:\n"
        "    verify([Response(response_text='The answer is ' + value, answer=answer, verifier='math')])\n"
        "    verify([Response(response_text=chr(92) + 'boxed{' + value + '}', answer=answer, verifier='math')])\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@given(
    st.fractions(max_denominator=10**6),
    st.sampled_from(["{}", "${}$", "\\${}", "{} dollars", "\\text{{{}}}"]),
)
def test_a_number_is_read_exactly_whatever_is_around_it(number: Fraction, form: str) -> None:
    found = read(form.format(number))
    assert isinstance(found, Quantity)
    assert found.value == number


PIECES = [
    *"\n.?!{}$ *#:=",
    "\\boxed{",
    "#### ",
    "The answer is ",
    "answer: ",
    "18",
    "or ",
    "not ",
    "maybe ",
    "\\text{",
    "x",
    "/",
]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_any_text_commits_to_values_or_says_why_not(text: str) -> None:
    found = commitment(text)
    assert bool(found.values) != bool(found.problem)
    assert all(found.values)


@pytest.mark.parametrize(
    "piece", [*PIECES, "answer ", "answer to ", "\\boxed{}", "\\boxed{1}", "if ", "i think ", "18 or ", "wait "]
)
def test_the_longest_response_is_read_in_a_second(piece: str) -> None:
    text = (piece * TAIL_CHARS)[: 2 * TAIL_CHARS]
    began = time.process_time()
    commitment(text)
    assert time.process_time() - began < (5.0 if sys.gettrace() else 1.0)
