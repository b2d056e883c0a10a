"""Verifiers with the signatures of Headrace, TRL and verl, plain and async."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from pipeline.rewards.signature import RewardFunction, Style
from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierOutcome, checked
from protocol.errors import ConfigError

RESPONSES = [
    Response(
        prompt_text=f"2+{n}=", response_text=str(n), answer="1", verifier="", extra={"level": n, "data_source": "sums"}
    )
    for n in (0, 1)
]


def judged(function: Callable[..., Any], responses: Sequence[Response] = RESPONSES) -> list[VerifierOutcome]:
    judge = RewardFunction(function, "m:f")
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
    ids = kwargs.pop("completion_ids")
    assert ids == [[], []], "there are none where only texts are known"
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
    assert RewardFunction(function, "m:f").style is style
    assert judged(function) == [Verdict(accuracy=0.0), Verdict(accuracy=1.0)]


def test_async_calls_share_one_event_loop_so_that_clients_live_on() -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def judge(responses: list[Response]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return own(responses)

    called = RewardFunction(judge, "m:f")
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
        RewardFunction(function, "m:f")
    said = str(refused.value)
    for signature in (
        "judge(responses)",
        "reward(prompts, completions, **columns)",
        "compute_score(data_source, solution_str",
    ):
        assert signature in said


def test_what_only_the_other_trainer_can_give_is_refused_by_name() -> None:
    def wants_state(prompts: list[str], completions: list[str], trainer_state: object) -> list[float]:
        return []

    def wants_router(solution_str: str, ground_truth: str, reward_router_address: str) -> float:
        return 0.0

    with pytest.raises(ConfigError, match="needs trainer_state"):
        RewardFunction(wants_state, "m:f")
    with pytest.raises(ConfigError, match="needs reward_router_address"):
        RewardFunction(wants_router, "m:f")


def test_a_column_that_the_line_does_not_have_is_named() -> None:
    def wants_solution(completions: list[str], solution: list[str]) -> list[float]:
        return [1.0] * len(completions)

    with pytest.raises(TypeError, match="needs the column solution; the line has answer, data_source, level"):
        judged(wants_solution)


@pytest.mark.parametrize(
    "returned",
    [-1.0, 2.0, float("nan"), "right", None, {"score": -1.0}, {"acc": "yes"}, 10**9000],
    ids=range(8),
)
def test_what_verls_functions_return_is_an_accuracy_or_refused_with_what_is_needed(returned: object) -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> object:
        return returned

    for outcome in judged(compute_score):
        assert isinstance(outcome, VerifierFailure)
        assert "`acc` in [0, 1]" in outcome.error
        shown = "thousands of digits" if isinstance(returned, int) else repr(returned)
        assert "m:f" in outcome.error and shown in outcome.error


@pytest.mark.parametrize("size", [0, -1, 1025, "many", 1.5])
def test_a_batch_that_is_no_size_is_refused(size: object) -> None:
    def judge(responses: list[Response]) -> list[float]:
        return own(responses)

    judge.max_batch = size  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="max_batch"):
        RewardFunction(judge, "m:f")


THOUGHT = Response(
    response_text="add 3",
    raw_text="<think>add</think><answer>3</answer>",
    token_ids=[7, 8, 9, 2],
    answer="3",
    verifier="",
    extra={"task": "sums"},
)
PLAIN = Response(response_text="3", token_ids=[9, 2], answer="3", verifier="", extra={"task": "other"})


def is_well_formed(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """The usual format reward."""
    return [float(bool(re.fullmatch(r"<think>.*</think><answer>.*</answer>", text))) for text in completions]


def of_sums(completions: list[str], task: list[str], **kwargs: Any) -> list[float | None]:
    return [0.5 if one == "sums" else None for one in task]


def test_a_trl_function_sees_special_tokens_that_were_written_and_the_tokens_themselves() -> None:
    seen: list[Any] = []

    def spy(completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        seen.append(completion_ids)
        return is_well_formed([], completions)

    assert judged(spy, [THOUGHT, PLAIN]) == [Verdict(accuracy=1.0), Verdict(accuracy=0.0)]
    assert seen == [[[7, 8, 9, 2], [9, 2]]]


def test_a_function_that_skips_special_tokens_sees_none_whatever_its_signature() -> None:
    def own_text(responses: list[Response]) -> list[float]:
        return [float(response.written_text == "add 3") for response in responses]

    def trl_text(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(text == "add 3") for text in completions]

    def verl_text(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
        return float(solution_str == "add 3")

    for function in (own_text, trl_text, verl_text):
        assert judged(function, [THOUGHT]) == [Verdict(accuracy=0.0)]
        function.skip_special_tokens = True  # type: ignore[attr-defined]
        assert judged(function, [THOUGHT]) == [Verdict(accuracy=1.0)]
    trl_text.skip_special_tokens = "yes"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="skip_special_tokens = 'yes'"):
        RewardFunction(trl_text, "m:f")


def test_none_says_that_a_further_reward_does_not_apply_and_no_verdict_of_the_verifier() -> None:
    judge = RewardFunction(of_sums, "m:of_sums")
    found = checked(judge([THOUGHT, PLAIN], any_number=True), 2, who="m:of_sums", any_number=True)
    assert [(one.applies, one.accuracy) for one in found if isinstance(one, Verdict)] == [(True, 0.5), (False, 0.0)]
    _, refused = checked(judge([THOUGHT, PLAIN]), 2, who="m:of_sums")
    assert isinstance(refused, VerifierFailure)
    assert "m:of_sums" in refused.error and "does not apply" in refused.error


@pytest.mark.parametrize(
    "number",
    [True, np.bool_(True), np.float32(1), np.int64(1), np.array(1.0), np.array(True), Decimal(1), Fraction(2, 2)],
    ids=repr,
)
@pytest.mark.parametrize("any_number", [False, True])
def test_every_kind_of_number_is_one(number: object, any_number: bool) -> None:
    assert checked([number], 1, any_number=any_number) == [Verdict(accuracy=1.0)]
    assert checked([Verdict(accuracy=number)], 1, any_number=any_number) == [Verdict(accuracy=1.0)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "number",
    [
        float("inf"),
        float("nan"),
        1e308,
        10**400,
        10**9000,
        Decimal("1E+400"),
        np.float32("inf"),
        -1e13,
        1 + 0j,
        "1",
        b"1",
        [1.0],
    ],
    ids=range(12),
)
def test_what_is_no_number_or_overflows_is_refused_by_function_and_value(number: object) -> None:
    (refused,) = checked([number], 1, who="m:style", any_number=True)
    assert isinstance(refused, VerifierFailure)
    shown = "thousands of digits" if isinstance(number, int) and number > 10**4000 else repr(number)[:20]
    assert "m:style" in refused.error and shown in refused.error
    (part,) = checked([Verdict(accuracy=1.0, parts={"style": number})], 1, who="m:style")  # type: ignore[dict-item]
    assert isinstance(part, VerifierFailure) and "'style'" in part.error


@pytest.mark.parametrize("returned", [np.ones(2), (1.0, 1.0)])
def test_an_array_or_a_tuple_is_a_list_in_every_signature(returned: object) -> None:
    def own_array(responses: list[Response]) -> object:
        return returned

    assert judged(own_array) == [Verdict(accuracy=1.0)] * 2
