"""Verdicts of ``math`` and ``math_strict`` on right solutions and on corruptions of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.bench.verdicts.__main__ import LEAST_GOLD, Verify, corruption_row, form_row
from ops.bench.verdicts.corruptions import CORRUPTIONS, UNCOMMITTED, Corruption
from ops.bench.verdicts.forms import BARE_FORMS, FORMS, Form
from ops.bench.verdicts.solutions import read_gsm8k, solutions
from pipeline.rewards import equivalence

GIVEN = solutions(96, seed=7)
"""Eight of each template, of another seed than the page's."""


BOTH = pytest.mark.parametrize("verify", [equivalence.verify, equivalence.verify_strictly])


@BOTH
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_right_solutions_are_right_in_every_form(form: Form, verify: Verify) -> None:
    row = form_row(form, GIVEN, verify)
    assert row.accepted >= LEAST_GOLD * row.total, row.first


@pytest.mark.parametrize("form", BARE_FORMS, ids=lambda form: form.__name__)
def test_a_bare_answer_is_right_and_no_commitment(form: Form) -> None:
    row = form_row(form, GIVEN)
    assert row.accepted >= LEAST_GOLD * row.total, row.first
    assert form_row(form, GIVEN, equivalence.verify_strictly).accepted == 0


@BOTH
@pytest.mark.parametrize("kind", CORRUPTIONS, ids=lambda kind: kind.__name__)
def test_no_response_with_another_value_is_right(kind: Corruption, verify: Verify) -> None:
    row = corruption_row(kind, GIVEN, verify)
    assert row.accepted == 0, row.first


@pytest.mark.parametrize("kind", UNCOMMITTED, ids=lambda kind: kind.__name__)
def test_the_strict_form_takes_no_response_without_commitment(kind: Corruption) -> None:
    row = corruption_row(kind, GIVEN, equivalence.verify_strictly)
    assert row.accepted == 0, row.first


def test_the_check_can_tell_for_a_verifier_that_takes_any_last_expression_fails_it() -> None:
    given = GIVEN[:24]
    kinds = (*CORRUPTIONS, *UNCOMMITTED)
    accepted = sum(corruption_row(kind, given, equivalence.verify_loosely).accepted > 0 for kind in kinds)
    assert accepted >= 10


def test_gsm8ks_own_file_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(
        json.dumps({"question": "?", "answer": "It costs 70 * 1000 = $<<70*1000=70000>>70,000\n#### 70,000"})
    )
    (solution,) = read_gsm8k(path)
    assert (solution.answer, solution.unit) == ("70000", "dollars")
    assert all(form_row(form, [solution]).accepted == 1 for form in FORMS)
