"""Claims about which answers are equal, by the table ``answers.txt``: a gold answer, ``is`` or ``is
not``, a response's answer, with two spaces between them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.rewards.equivalence import verify, verify_strictly
from pipeline.rewards.verifier import Response, Verdict

LINES = Path(__file__).with_name("answers.txt").read_text(encoding="utf-8").splitlines()
ROWS = [re.split(r" {2,}", line) for line in LINES if line and not line.startswith("#")]


@pytest.mark.parametrize(("gold", "relation", "value"), ROWS)
def test_an_answer_is_right_where_its_value_is_the_gold_one(gold: str, relation: str, value: str) -> None:
    (outcome,) = verify([Response(response_text=f"So it is \\boxed{{{value}}}.", answer=gold, verifier="math")])
    assert isinstance(outcome, Verdict), outcome
    assert outcome.accuracy == float(relation == "is"), outcome.reason


@pytest.mark.parametrize(("gold", "relation", "value"), ROWS)
def test_the_strict_form_reads_values_in_the_same_way(gold: str, relation: str, value: str) -> None:
    (outcome,) = verify_strictly([Response(response_text=f"\\boxed{{{value}}}", answer=gold, verifier="math_strict")])
    assert isinstance(outcome, Verdict), outcome
    assert outcome.accuracy == float(relation == "is"), outcome.reason
