from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.rewards.dapo_math import INVALID, last_boxed, score, verify
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


def test_an_unreadable_response_is_wrong_even_if_the_truth_reads_like_the_mark_of_one() -> None:
    assert not score("no idea", INVALID).acc


@given(st.text(alphabet=st.characters(exclude_characters="{}"), max_size=50))
def test_a_box_gives_its_content(content: str) -> None:
    assert last_boxed(f"\\boxed{{x{{{content}}}}} end") == f"x{{{content}}}"


@given(st.text(max_size=400), st.text(max_size=40))
def test_any_text_gets_a_verdict(text: str, answer: str) -> None:
    (outcome,) = verify([Response(response_text=text, answer=answer, verifier="dapo_math")])
    assert isinstance(outcome, Verdict)
    assert outcome.accuracy in (0.0, 1.0)
