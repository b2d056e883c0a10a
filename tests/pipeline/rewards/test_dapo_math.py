from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.rewards import dapo_math
from pipeline.rewards.dapo_math import INVALID, last_boxed, normalize, score, verify
from pipeline.rewards.verifier import Response, Verdict

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "math_verifier.json").read_text(encoding="utf-8")
)["cases"]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_the_verifier_behaves_exactly_as_the_golden_one(case: dict[str, Any]) -> None:
    got = score(case["inputs"]["solution"], case["inputs"]["ground_truth"])
    assert {"score": got.score, "acc": got.acc, "pred": got.pred} == case["outputs"]


def test_only_the_last_300_characters_count() -> None:
    assert score("Answer: 42" + " " * 290, "42").acc
    assert not score("Answer: 42" + " " * 291, "42").acc


def test_a_box_counts_in_the_last_100_characters_and_without_an_answer_line_only() -> None:
    assert score("\\boxed{7}" + " " * 91, "7").acc
    assert score("\\boxed{7}" + " " * 92, "7").pred == INVALID
    assert score("Answer: 8 \\boxed{7}\nso \\boxed{7}", "7").pred != "7"


def test_an_unreadable_response_is_wrong_even_if_the_truth_reads_like_its_mark() -> None:
    assert not score("no idea", INVALID).acc


@given(st.text(alphabet=st.characters(exclude_characters="{}"), max_size=50))
def test_a_box_gives_its_content(content: str) -> None:
    assert last_boxed(f"\\boxed{{x{{{content}}}}} end") == f"x{{{content}}}"


@given(st.text(max_size=400), st.text(max_size=40))
def test_any_text_gets_a_verdict(text: str, answer: str) -> None:
    (outcome,) = verify([Response(response_text=text, answer=answer, verifier="dapo_math")])
    assert isinstance(outcome, Verdict)
    assert outcome.accuracy in (0.0, 1.0)


ORIGINAL = (
    (r".*?\$(.*?)\$.*", r"$\1$"),
    (r"\\text\{(.*?)\}", r"\1"),
    (r"\\textbf\{(.*?)\}", r"\1"),
    (r"\\overline\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"),
)
"""verl's patterns, whose time is quadratic."""

PIECES = (
    "$",
    "$",
    "{",
    "}",
    "}",
    "\\text{",
    "\\textbf{",
    "\\overline{",
    "\\boxed{",
    "x",
    "\n",
    "\r",
    "\\",
    "frac",
    "sqrt",
)


@given(st.lists(st.sampled_from(PIECES), max_size=24).map("".join))
@settings(max_examples=1000)
def test_the_searches_do_what_the_original_patterns_do(answer: str) -> None:
    expected = answer
    for pattern, replacement in ORIGINAL:
        expected = re.sub(pattern, replacement, expected)
    assert "\n".join(dapo_math._unwrapped(line) for line in answer.split("\n")) == expected


@pytest.mark.parametrize(
    "piece", [*PIECES, " ", "a ", "an ", "1,", "Answer:", "Answer : ", "\\text{\n", "\\text{$", "\\boxed{}", "\\frac1"]
)
def test_the_time_is_linear_in_answer_and_response(piece: str) -> None:
    """Processor time of 32 times the length: 32 times as long where it is linear, 1,024 times where
    it is quadratic."""

    def seconds(length: int) -> float:
        text = (piece * length)[:length]
        took: list[float] = []
        for _ in range(3):
            began = time.process_time()
            normalize("$" + text)
            score(text, text)
            took.append(time.process_time() - began)
        return min(took)

    assert seconds(64_000) < 200 * max(seconds(2_000), 1e-4)
