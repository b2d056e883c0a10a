"""Verdicts of ``math`` and ``math_strict`` on right solutions and on corruptions of them: every ending
of endings.toml after every solution there."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.rewards.equivalence import verify, verify_loosely, verify_strictly
from pipeline.rewards.verifier import Response, Verdict, VerifierOutcome

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("endings.toml").read_text(encoding="utf-8"))
Verify = Callable[[Sequence[Response]], list[VerifierOutcome]]
BOTH = pytest.mark.parametrize("verifier", [verify, verify_strictly])
APART = (" ", ", ", ".", "\\,", "{,}", ",0")


def marks(answer: str, unit: str, turn: int) -> dict[str, str]:
    """The text of each mark; ``turn`` chooses the wrong numbers."""
    number, (whole, point, cents) = float(answer), answer.partition(".")
    near = [number + 1, number - 1, number * 10, number + 10, -number, number + 0.5, number * 2, abs(number - 100)]
    wrong = [f"{value:.10g}" for value in near if value != number]
    grouped, is_money = f"{int(whole):,}{point}{cents}", unit == "dollars"
    digits = answer if len(whole) > 1 else f"1{answer}"
    has_own_point = len(digits[1:].partition(".")[0]) > 2 or "." in digits
    apart = f".{digits.replace('.', '')}" if has_own_point else f"{digits[0]}{APART[turn % len(APART)]}{digits[1:]}"
    return {
        "right": answer, "wrong": wrong[turn % len(wrong)], "third": wrong[(turn + 3) % len(wrong)],
        "unit": unit, "grouped": grouped, "cents": "" if point else ".00", "whole": whole,
        "with unit": f"${grouped}" if is_money else f"{answer} {unit}",
        "with sign": f"${grouped}" if is_money else grouped,
        "with latex unit": f"\\${answer}" if is_money else f"{answer} \\text{{ {unit}}}",
        "seven more": f"{number + 7:.10g}", "digits": digits, "apart": apart,
    }  # fmt: skip


def accepted(part: str, kind: str, verifier: Verify) -> dict[str, bool]:
    """Judge all endings of a kind after all solutions: the verdict by the response."""
    asked: list[Response] = []
    for ending in TABLE[part][kind]:
        for solution in TABLE["solutions"]:
            found = marks(solution["answer"], solution["unit"], len(asked))
            said, answer = (
                re.sub(r"<([a-z ]+)>", lambda mark: found[mark[1]], text)  # noqa: B023 -- called at once
                for text in (ending, TABLE["answers"].get(kind, "<right>"))
            )
            text = solution["working"] + ("" if not said or said.startswith((" ", "\n")) else "\n") + said
            asked.append(Response(response_text=text, answer=answer, verifier="math"))
    outcomes = verifier(asked)
    return {
        one.response_text: isinstance(outcome, Verdict) and outcome.accuracy == 1.0
        for one, outcome in zip(asked, outcomes, strict=True)
    }


@BOTH
@pytest.mark.parametrize("kind", TABLE["right"])
def test_right_solutions_are_right_in_every_form(kind: str, verifier: Verify) -> None:
    found = accepted("right", kind, verifier)
    assert [text for text, is_accepted in found.items() if not is_accepted] == []


@pytest.mark.parametrize("kind", TABLE["in_the_last_line"])
def test_a_bare_answer_is_right_and_no_commitment(kind: str) -> None:
    found = accepted("in_the_last_line", kind, verify)
    assert [text for text, is_accepted in found.items() if not is_accepted] == []
    assert not any(accepted("in_the_last_line", kind, verify_strictly).values())


@BOTH
@pytest.mark.parametrize("kind", TABLE["another_value"])
def test_no_response_with_another_value_is_right(kind: str, verifier: Verify) -> None:
    found = accepted("another_value", kind, verifier)
    assert [text for text, is_accepted in found.items() if is_accepted] == []


@pytest.mark.parametrize("kind", TABLE["no_commitment"])
def test_the_strict_form_takes_no_response_without_commitment(kind: str) -> None:
    found = accepted("no_commitment", kind, verify_strictly)
    assert [text for text, is_accepted in found.items() if is_accepted] == []


@pytest.mark.long
def test_the_endings_can_tell_for_a_verifier_that_takes_any_last_expression_fails_them() -> None:
    kinds = [(part, kind) for part in ("another_value", "no_commitment") for kind in TABLE[part]]
    assert sum(any(accepted(*kind, verify_loosely).values()) for kind in kinds) >= 10
