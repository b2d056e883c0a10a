from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.rewards.arithmetic import _NUMBER, _canonical, exact_number, last_number, verify
from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierFailureKind, VerifierOutcome


def judged(text: str, answer: str) -> VerifierOutcome:
    (outcome,) = verify([Response(response_text=text, answer=answer, verifier="arithmetic")])
    return outcome


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a7b2c3=3", "3"),
        ("12 + 30 = 42.", "42"),
        ("It is 042", "42"),
        ("42.0", "42"),
        ("+42", "42"),
        ("x=-3", "-3"),
        ("x = −3 (minus three)", "-3"),
        ("5-3", "3"),
        ("(4)-3", "3"),
        ("-0", "0"),
        ("about .50", "0.5"),
        ("1,234,567 people", "1234567"),
        ("1,23", "23"),
        ("$1,000.50", "1000.5"),
        ("first 9, then 8", "8"),
        ("1e3", "3"),
        ("9" * 6000, "9" * 6000),
    ],
)
def test_the_last_number_is_right_when_its_value_is_the_answer(text: str, answer: str) -> None:
    assert judged(text, answer) == Verdict(accuracy=1.0)


@pytest.mark.parametrize(
    ("text", "answer"),
    [("", "0"), ("none", "0"), ("0.33", "0.333"), ("42 or 41", "42"), ("3", "-3"), ("٤٢", "42"), ("5-3", "-3")],
)
def test_anything_else_is_wrong(text: str, answer: str) -> None:
    assert judged(text, answer) == Verdict(accuracy=0.0)


@pytest.mark.parametrize("answer", ["blue", "1 2", "1/2", "--1", "4 apples", "."])
def test_an_answer_that_is_not_a_number_is_a_failure_of_the_data(answer: str) -> None:
    outcome = judged("1", answer)
    assert isinstance(outcome, VerifierFailure)
    assert outcome.kind is VerifierFailureKind.BAD_ANSWER


decimals = st.from_regex(r"[-+]?([0-9]{1,12}(\.[0-9]{1,8})?|\.[0-9]{1,8})", fullmatch=True)


@given(decimals, decimals)
def test_two_numbers_are_equal_exactly_when_their_values_are(left: str, right: str) -> None:
    assert (exact_number(left) == exact_number(right)) == (Fraction(left) == Fraction(right))


@given(st.integers(), st.text(alphabet=st.characters(exclude_characters=".,", exclude_categories=["Nd"]), max_size=30))
def test_text_without_digits_around_a_number_changes_nothing(value: int, text: str) -> None:
    assert last_number(f"{text} {value} {text}") == exact_number(str(value))


@given(st.integers(min_value=0, max_value=10**15))
def test_thousands_commas_change_nothing(value: int) -> None:
    assert exact_number(f"{value:,}") == exact_number(str(value))


@given(st.text(alphabet="0123,.-+−) x", max_size=40))
def test_reading_the_end_alone_finds_what_reading_all_finds(text: str) -> None:
    matches = list(_NUMBER.finditer(text))
    assert last_number(text) == (_canonical(matches[-1]) if matches else None)


@given(st.text())
def test_any_text_is_judged(text: str) -> None:
    assert judged(text, "1") in (Verdict(accuracy=0.0), Verdict(accuracy=1.0))
