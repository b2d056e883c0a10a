"""Verdicts of the verifier ``math`` on right solutions in eleven forms and on twenty-one kinds of
corruption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.bench.verdicts.__main__ import LEAST_GOLD, corruption_row, form_row
from ops.bench.verdicts.corruptions import CORRUPTIONS, Corruption
from ops.bench.verdicts.forms import FORMS, Form
from ops.bench.verdicts.solutions import read_gsm8k, solutions
from pipeline.rewards import equivalence

GIVEN = solutions(240, seed=7)
"""Twenty of each template, of another seed than the page's."""


def test_there_are_eleven_forms_and_twenty_one_kinds_of_corruption() -> None:
    assert len({form.__name__ for form in FORMS}) == 11
    assert len({kind.__name__ for kind in CORRUPTIONS}) == 21


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_right_solutions_are_right_in_every_form(form: Form) -> None:
    row = form_row(form, GIVEN)
    assert row.accepted >= LEAST_GOLD * row.total, row.first


@pytest.mark.parametrize("kind", CORRUPTIONS, ids=lambda kind: kind.__name__)
def test_no_corrupted_response_is_right(kind: Corruption) -> None:
    row = corruption_row(kind, GIVEN)
    assert row.accepted == 0, row.first


def test_the_check_can_tell_for_a_verifier_that_takes_any_last_expression_fails_it() -> None:
    given = GIVEN[:24]
    accepted = sum(corruption_row(kind, given, equivalence.verify_loosely).accepted > 0 for kind in CORRUPTIONS)
    assert accepted >= 10


def test_gsm8ks_own_file_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(
        json.dumps({"question": "?", "answer": "It costs 70 * 1000 = $<<70*1000=70000>>70,000\n#### 70,000"})
    )
    (solution,) = read_gsm8k(path)
    assert (solution.answer, solution.unit) == ("70000", "dollars")
    assert all(form_row(form, [solution]).accepted == 1 for form in FORMS)
