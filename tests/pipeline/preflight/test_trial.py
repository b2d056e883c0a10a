"""Claims about what `headrace try` says of a model's responses."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.cli.trial import render
from pipeline.preflight.trial import Trial, TriedPrompt, TriedResponse


def response(accuracy: float | None, **changes: Any) -> TriedResponse:
    parts = {"correct": 2.0 * accuracy - 1.0} if accuracy is not None else {}
    settings = {"text": "22<|im_end|>", "num_tokens": 3, "finish_reason": "stop", "reward": accuracy, "parts": parts}
    return TriedResponse(accuracy=accuracy, **settings | changes)


def trial(*groups: list[TriedResponse]) -> Trial:
    prompts = [
        TriedPrompt(
            prompt_id=f"p{n}", text="<|im_start|>1+1", num_tokens=4, answer="2", verifier="math", responses=group
        )
        for n, group in enumerate(groups)
    ]
    return Trial(model="m", temperature=1.0, prompts=prompts)


def remarks(*groups: list[TriedResponse]) -> str:
    return "\n".join(trial(*groups).remarks())


def test_a_trial_with_right_and_wrong_responses_has_nothing_to_remark() -> None:
    found = trial([response(1.0), response(0.0)], [response(0.0), response(0.0)])
    assert list(found.remarks()) == []
    assert found.num_with_signal == 1
    assert (found.accuracy and found.accuracy.value) == 0.25
    pass_at_2 = found.pass_at(2)
    assert pass_at_2 and pass_at_2.value == 0.5


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([[response(0.0), response(0.0)]], "no response is right"),
        ([[response(1.0), response(1.0)]], "every response is right"),
        ([[response(1.0, finish_reason="length"), response(0.0, finish_reason="length")]], "every response was cut"),
        ([[response(1.0, finish_reason="length"), response(0.0)]], "1 of 2 responses were cut"),
        ([[response(None), response(None)]], "no response has a verdict"),
        ([[response(None), response(1.0), response(0.0)]], "1 of 3 responses have no verdict"),
        ([[response(1.0, text=""), response(0.0, text=" ")]], "every response is empty"),
    ],
)
def test_what_would_keep_a_run_from_learning_is_said(groups: list[list[TriedResponse]], said: str) -> None:
    assert said in remarks(*groups)


def test_a_function_that_gave_one_number_throughout_is_named_and_one_that_differs_is_not() -> None:
    def with_parts(accuracy: float, style: float, form: float) -> TriedResponse:
        return response(accuracy, parts={"correct": accuracy, "overlong": 0.0, "style": style, "format": form})

    said = remarks([with_parts(1.0, 0.1, 0.0), with_parts(0.0, 0.2, 0.0)])
    assert "format gave 0 for every response" in said
    assert "style" not in said and "overlong" not in said


def test_prompt_response_verdict_and_reason_are_shown_safe_for_a_terminal() -> None:
    shown = "\n".join(render(trial([response(0.0, text="\x1b[2Jno<|im_end|>", reason="2 is not 3")]), 1))
    for text in ("<|im_start|>1+1", "no<|im_end|>", "wrong", "2 is not 3", "answer: 2", "pass@1 0.0%"):
        assert text in shown
    assert "\x1b[2J" not in shown
