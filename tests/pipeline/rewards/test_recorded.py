"""The verifier of recorded verdicts: right and wrong ones, and lines without one."""

from __future__ import annotations

import pytest

from pipeline.rewards.recorded import verify
from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierFailureKind


def told(**columns: object) -> Verdict | VerifierFailure:
    (found,) = verify([Response(prompt_text="1+1=", response_text="2", answer="2", verifier="recorded", extra=columns)])
    return found


@pytest.mark.parametrize("value", [True, 1, 1.0, "right", " Right "])
def test_a_response_that_is_recorded_as_right_is_right(value: object) -> None:
    found = told(verdict=value)
    assert isinstance(found, Verdict)
    assert (found.accuracy, found.reason) == (1.0, "recorded as right")


@pytest.mark.parametrize("value", [False, 0, 0.0, "wrong"])
def test_a_response_that_is_recorded_as_wrong_is_wrong_whatever_its_text(value: object) -> None:
    found = told(verdict=value)
    assert isinstance(found, Verdict)
    assert (found.accuracy, found.reason) == (0.0, "recorded as wrong")


@pytest.mark.parametrize("columns", [{}, {"verdict": None}, {"verdict": 0.5}, {"verdict": "maybe"}, {"verdict": []}])
def test_a_line_without_a_verdict_is_a_failure_and_never_wrong(columns: dict[str, object]) -> None:
    found = told(**columns)
    assert isinstance(found, VerifierFailure)
    assert found.kind is VerifierFailureKind.BAD_ANSWER
    assert "expected" in found.error and "verdict" in found.error
