"""Claims about equations in texts: a wrong one is found and quoted, and a right one never is."""

from __future__ import annotations

import string
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.rewards.judgments.by_arithmetic import judgments
from pipeline.rewards.judgments.equations import equations, value_of
from pipeline.rewards.verifier import Response


def judgment(text: str) -> str | None:
    (found,) = judgments([Response(prompt_text="How many?", response_text=text, answer="", verifier="arithmetic")])
    return found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("So the total is 3 * 4 = 13 dollars.", "step 1 says 3 * 4 = 13, should be 12"),
        ("Cost = 3 * 4 = 12. Then 12 + 1 = 14.", "step 2 says 12 + 1 = 14, should be 13"),
        ("3 apples + 4 apples = 8 apples", "step 1 says 3 apples + 4 apples = 8, should be 7"),
        ("48/2 = <<48/2=24>>24. 48+24 = <<48+24=73>>73", "step 2 says 48+24=73, should be 72"),
        ("1. 3 + 4 = 7\n2. 7 × 2 = 15", "step 2 says 7 × 2 = 15, should be 14"),
        ("- 3 + 4 = 8", "step 1 says 3 + 4 = 8, should be 7"),
        ("(1 + 2) * 3 = 10", "step 1 says (1 + 2) * 3 = 10, should be 9"),
        ("Now -3 + 5 = 3.", "step 1 says -3 + 5 = 3, should be 2"),
        ("12 = 3 * 5", "step 1 says 12 = 3 * 5, should be 15"),
        ("1,200 + 300 = 1,600", "step 1 says 1,200 + 300 = 1,600, should be 1500"),
        ("$3 + $4 = $8", "step 1 says 3 + $4 = $8, should be 7"),
        ("\\(\\frac{3}{4} + 1 = 2\\)", "step 1 says \\frac{3}{4} + 1 = 2, should be 1.75"),
        ("10 / 3 = 3.34", "step 1 says 10 / 3 = 3.34, should be 10/3"),
        ("7 / 2 = 3", "step 1 says 7 / 2 = 3, should be 3.5"),
        ("2^10 = 1000", "step 1 says 2^10 = 1000, should be 1024"),
        ("2(3 + 4) = 15", "step 1 says 2(3 + 4) = 15, should be 14"),
        ("3 * 4 = 13 + 1 = 14", "step 1 says 3 * 4 = 13 + 1, should be 12"),
        ("Total: 2 + 3 = **6**", "step 1 says 2 + 3 = **6, should be 5"),
        ("3 + 4 = 8 (since two are lost)", "step 1 says 3 + 4 = 8, should be 7"),
    ],
)
def test_the_first_equation_that_does_not_hold_is_quoted_and_put_right(text: str, says: str) -> None:
    assert judgment(text) == says


@pytest.mark.parametrize(
    "text",
    [
        "3 * 4 = 12 + 1 = 13",
        "10 / 3 = 3.33 and 2 / 3 = 0.67 or 0.66",
        "0.1 + 0.2 = 0.3",
        "9 * 2 = 18 3 + 4 = 7",
    ],
)
def test_a_line_that_goes_on_and_a_rounded_decimal_hold(text: str) -> None:
    assert equations(text)
    assert judgment(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "x + 3 = 7",
        "y = 2x + 3 = 9",
        "f(3) = 9",
        "5² + 3 = 28",
        "5! + 3 = 123",
        "20% * 50 = 12",
        "100 - 20% = 80",
        "2 days * 24 hours = 48 minutes",
        "3 * 60 minutes = 3 hours",
        "2 days = 48 hours",
        "9:00 + 3 = 12:00",
        "7 + 5 = 2 (mod 10)",
        "17 / 5 = 3 with a remainder of 2",
        "17 / 5 = 3 R 2",
        "1.2 + 3.8 = 5 million",
        "2\\frac{1}{2} + 1 = 3.5",
        "2 (3 + 4) = 14",
        "Day 2 - 3 * 4 = 12",
        "Total of week 3 = 4 + 5",
        "3 + 4 = 7x",
        "3 + 4 = ?",
        "2 + 3 != 6, 2 + 3 <= 6",
        "16 / (4 - 4) = 0",
        "9^9^9 = 3",
        "3 + 4 = 7.5.2",
        "half of 3 + 4 = 5 and a half",
    ],
)
def test_what_cannot_be_read_for_certain_is_never_called_wrong(text: str) -> None:
    assert judgment(text) is None


OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
FILLERS = ["", "So ", "Then we get ", "The rest: ", "- ", "Total cost = ", "First, "]
ENDS = ["", ".", " apples.", " dollars in all", ", which is enough.", " (since some are left)"]


@st.composite
def texts(draw: st.DrawFn) -> list[tuple[str, int, int, str, int, str]]:
    number = st.integers(0, 9999)
    step = st.tuples(st.sampled_from(FILLERS), number, number, st.sampled_from("+-*"), st.integers(1, 99))
    return [(*one, draw(st.sampled_from(ENDS))) for one in draw(st.lists(step, min_size=1, max_size=6))]


@given(texts(), st.floats(0.0, 1.0, exclude_max=True))
def test_one_wrong_equation_among_right_ones_is_named_and_right_ones_never(
    steps: list[tuple[str, int, int, str, int, str]], place: float
) -> None:
    wrong = int(place * len(steps))
    right_text, wrong_text = "", ""
    for index, (filler, left, right, sign, shift, end) in enumerate(steps):
        value = OPERATIONS[sign](left, right)
        said = value + shift if index == wrong else value
        right_text += f"{filler}{left} {sign} {right} = {value}{end}\n"
        wrong_text += f"{filler}{left} {sign} {right} = {said}{end}\n"
    assert judgment(right_text) is None
    _, left, right, sign, shift, _ = steps[wrong]
    value = OPERATIONS[sign](left, right)
    said = f"step {wrong + 1} says {left} {sign} {right} = {value + shift}, should be {value}"
    assert judgment(wrong_text) == said


@settings(max_examples=200)
@given(st.text(alphabet=string.digits + " =+-*/^().,$%\\xyzab{}\n<>:²", max_size=60))
def test_any_text_is_read_to_its_end(text: str) -> None:
    for equation in equations(text):
        assert "=" in equation.quoted
        assert text[equation.place] == "="


@pytest.mark.parametrize(
    "text",
    [
        "1+1=2\n" * 4_000,
        "1=" * 10_000,
        "(" * 20_000 + "=1",
        "1+" * 10_000 + "=1",
        "\\frac{1}{" * 2_000 + "}" * 2_000,
        "9^" * 30 + "9=1",
    ],
    ids=["many sums", "many equals", "brackets", "a long sum", "nested fractions", "a tower"],
)
def test_a_hostile_text_takes_little_time(text: str) -> None:
    began_s = time.process_time()
    judgment(text)
    assert time.process_time() - began_s < 2.0
    assert len(equations(text)) <= 400


def test_powers_and_digits_are_bounded_and_names_have_no_value() -> None:
    assert value_of(["2", "^", "64"]) == 2**64
    assert value_of(["9", "^", "65"]) is None
    assert value_of(["9", "^", "60", "^", "60"]) is None
    assert value_of(["1", "/", "(", "1", "-", "1", ")"]) is None
    assert value_of([]) is None
    assert value_of(["(", "1"]) is None
