"""Verifiers with the signatures of Headrace, TRL and verl, plain and async."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from pipeline.rewards.signature import Judge, Style
from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierOutcome, checked
from protocol.errors import ConfigError

RESPONSES = [
    Response(
        prompt_text=f"2+{n}=", response_text=str(n), answer="1", verifier="", extra={"level": n, "data_source": "sums"}
    )
    for n in (0, 1)
]


def judged(function: Callable[..., Any], responses: Sequence[Response] = RESPONSES) -> list[VerifierOutcome]:
    judge = Judge(function, "m:f")
    try:
        return checked(judge(responses), len(responses))
    finally:
        judge.close()


def own(responses: list[Response]) -> list[float]:
    return [float(response.response_text == response.answer) for response in responses]


async def own_async(responses: list[Response]) -> list[float]:
    await asyncio.sleep(0.0)
    return own(responses)


def trl(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    assert prompts == ["2+0=", "2+1="]
    assert kwargs == {"answer": ["1", "1"], "level": [0, 1], "data_source": ["sums", "sums"]}
    return [float(c == a) for c, a in zip(completions, kwargs["answer"], strict=True)]


def trl_by_columns(completions: list[str], answer: list[str], level: list[int]) -> np.ndarray:
    assert level == [0, 1]
    return np.array([float(c == a) for c, a in zip(completions, answer, strict=True)])


async def trl_async(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> float:
    assert data_source == "sums"
    assert extra_info == {"level": int(solution_str), "data_source": "sums"}
    return float(solution_str == ground_truth)


def verl_dict(data_source: str, solution_str: str, ground_truth: str, **kwargs: Any) -> dict[str, Any]:
    is_right = solution_str == ground_truth
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": solution_str}


async def verl_async(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    await asyncio.sleep(0.0)
    return float(solution_str == ground_truth)


def verl_batch(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[str], extra_infos: list[Any]
) -> list[float]:
    assert len(data_sources) == len(extra_infos) == 2
    return [float(s == g) for s, g in zip(solution_strs, ground_truths, strict=True)]


class AsAnObject:
    async def __call__(self, responses: list[Response]) -> list[float]:
        return own(responses)


@pytest.mark.parametrize(
    ("function", "style"),
    [
        (own, Style.OWN),
        (own_async, Style.OWN),
        (AsAnObject(), Style.OWN),
        (trl, Style.TRL),
        (trl_by_columns, Style.TRL),
        (trl_async, Style.TRL),
        (verl, Style.VERL),
        (verl_dict, Style.VERL),
        (verl_async, Style.VERL),
        (verl_batch, Style.VERL_BATCH),
    ],
)
def test_each_signature_is_recognised_and_called_as_its_own_trainer_calls_it(
    function: Callable[..., Any], style: Style
) -> None:
    assert Judge(function, "m:f").style is style
    assert judged(function) == [Verdict(accuracy=0.0), Verdict(accuracy=1.0)]


def test_async_calls_share_one_event_loop_so_that_clients_live_on() -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def judge(responses: list[Response]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return own(responses)

    called = Judge(judge, "m:f")
    called(RESPONSES)
    called(RESPONSES)
    called.close()
    assert loops[0] is loops[1]


def response_and_answer(response: str, answer: str) -> float:
    return 1.0


def no_parameters() -> list[float]:
    return []


def keywords_only(**kwargs: Any) -> list[float]:
    return []


@pytest.mark.parametrize("function", [response_and_answer, no_parameters, keywords_only])
def test_another_signature_is_refused_with_those_that_are_known(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        Judge(function, "m:f")
    said = str(refused.value)
    for signature in (
        "judge(responses)",
        "reward(prompts, completions, **columns)",
        "compute_score(data_source, solution_str",
    ):
        assert signature in said


def test_what_only_the_other_trainer_can_give_is_refused_by_name() -> None:
    def wants_ids(prompts: list[str], completions: list[str], completion_ids: list[list[int]]) -> list[float]:
        return []

    def wants_router(solution_str: str, ground_truth: str, reward_router_address: str) -> float:
        return 0.0

    with pytest.raises(ConfigError, match="needs completion_ids"):
        Judge(wants_ids, "m:f")
    with pytest.raises(ConfigError, match="needs reward_router_address"):
        Judge(wants_router, "m:f")


def test_a_column_that_the_line_does_not_have_is_named() -> None:
    def wants_solution(completions: list[str], solution: list[str]) -> list[float]:
        return [1.0] * len(completions)

    with pytest.raises(TypeError, match="needs the column solution; the line has answer, data_source, level"):
        judged(wants_solution)


@pytest.mark.parametrize("returned", [-1.0, 2.0, float("nan"), "right", None, {"score": -1.0}, {"acc": "yes"}])
def test_what_verls_functions_return_is_an_accuracy_or_refused_with_what_is_needed(returned: object) -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> object:
        return returned

    for outcome in judged(compute_score):
        assert isinstance(outcome, VerifierFailure)
        assert "`acc` in [0, 1]" in outcome.error


@pytest.mark.parametrize("size", [0, -1, 1025, "many", 1.5])
def test_a_batch_that_is_no_size_is_refused(size: object) -> None:
    def judge(responses: list[Response]) -> list[float]:
        return own(responses)

    judge.max_batch = size  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="max_batch"):
        Judge(judge, "m:f")
