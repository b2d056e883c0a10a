"""Claims about judgments by functions, data and endpoints: one that is not there is a state with
its reason, and changes no score."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.training import RewardSection
from pipeline.rewards.functions import absent_reason, guidance_for
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.verifier import Response
from protocol.errors import ConfigError
from protocol.trajectory import Guidance, RewardScore
from tests.pipeline.rewards.served import Reply, Served, judgement, served

KEY = "sk-secret-of-the-judge"
OWN = "tests.pipeline.rewards.user_judgments"
WRONG = RewardScore(reward=-1.0, accuracy=0.0)
RIGHT = RewardScore(reward=1.0, accuracy=1.0)
ENDPOINT = "endpoint/quality"


def response(text: str, **columns: Any) -> Response:
    return Response(prompt_text="3 * 4?", response_text=text, answer="12", verifier="arithmetic", extra=columns)


def section(server: Served | str, **settings: Any) -> RewardSection:
    url = server if isinstance(server, str) else f"{server.url}/v1"
    given = {"url": url, "model": "judge", "timeout_s": 2.0, **settings}
    return RewardSection.model_validate({"endpoints": {"quality": given}})


async def guided(
    judgments: str, *responses: Response, config: RewardSection | None = None, score: RewardScore = WRONG
) -> list[Guidance]:
    async with VerifierPool(config or RewardSection(timeout_s=3.0)) as pool:
        return await asked(pool, judgments, *responses, score=score)


async def asked(pool: VerifierPool, judgments: str, *responses: Response, score: RewardScore = WRONG) -> list[Guidance]:
    return await guidance_for(pool, judgments, responses, [score] * len(responses), right_above=0.5)


def reasons(found: list[Guidance]) -> list[str]:
    assert all(bool(one.absent) != bool(one.judge_text) for one in found)
    return [absent_reason(one) for one in found]


def by_quote(body: dict[str, Any], number: int) -> Reply:
    prompt = body["messages"][0]["content"]
    step = prompt.partition("<response>\n")[2].partition("\n</response>")[0].partition(". ")[0]
    return 200, judgement(f"Step: {step}\nWrong: it should be 12")


async def test_a_right_response_has_its_gold_text_and_no_judgment_is_asked_for() -> None:
    with served(by_quote) as server:
        (found,) = await guided(ENDPOINT, response("3 * 4 = 12"), config=section(server), score=RIGHT)
        assert server.requests == []
    assert found == Guidance(gold_text="12")


@pytest.mark.parametrize(
    ("columns", "gold"),
    [
        ({}, "12"),
        ({"solution": "3 * 4 = 12"}, "3 * 4 = 12"),
        ({"solution": "3 * 4", "gold": "twelve"}, "twelve"),
        ({"gold": " ", "solution": 12}, "12"),
    ],
)
async def test_the_gold_text_is_the_answer_or_the_lines_own_column(columns: dict[str, Any], gold: str) -> None:
    for score in (RIGHT, WRONG):
        (found,) = await guided("recorded", response("13", **columns), score=score)
        assert found.gold_text == gold


async def test_a_recorded_judgment_is_the_lines_and_may_be_absent() -> None:
    said, none, odd = await guided(
        "recorded", response("13", judgment="13 is wrong"), response("13"), response("13", judgment=3)
    )
    assert said == Guidance(gold_text="12", judge_text="13 is wrong")
    assert reasons([none, odd]) == ["nothing_found"] * 2
    assert "column `judgment`" in none.absent


async def test_without_judgments_and_without_loss_nothing_is_asked_for() -> None:
    masked = RewardScore(reward=-1.0, accuracy=0.0, masked=True)
    assert reasons(await guided("", response("13"))) == ["not_asked_for"]
    assert reasons(await guided("arithmetic", response("3 * 4 = 13"), score=masked)) == ["masked"]
    (found,) = await guided("arithmetic", response("3 * 4 = 13"))
    assert found.judge_text == "step 1 says 3 * 4 = 13, should be 12"


@pytest.mark.parametrize("name", ["says", "of_columns", "of_one"])
async def test_a_function_of_any_signature_writes_judgments(name: str) -> None:
    found = await guided(f"{OWN}:{name}", response("13"), response("14"))
    assert [one.judge_text for one in found] == ["13 is not 12", "14 is not 12"]


async def test_a_function_that_fails_leaves_that_response_without_a_judgment() -> None:
    texts = ["raise", "number", "long", "too few", "nothing", "blank", "13"]
    found = await guided(f"{OWN}:says", *map(response, texts))
    assert reasons(found) == ["raised", *["bad_verdict"] * 3, *["nothing_found"] * 2, ""]
    assert found[0].absent == "raised: KeyError: 'no rule'"


async def test_a_function_that_is_late_leaves_the_response_without_a_judgment() -> None:
    found = await guided(f"{OWN}:says", response("hang"), response("13"), config=RewardSection(timeout_s=0.5))
    assert reasons(found) == ["late", ""]
    assert found[1].judge_text == "13 is not 12"


async def test_a_function_judges_several_a_call_and_may_find_nothing() -> None:
    found = await guided(f"{OWN}:together", *map(response, ["a", "b", "c", "d"]))
    assert reasons(found) == ["nothing_found"] * 4
    found = await guided(f"{OWN}:together", *map(response, ["a", "bb", "c", "dd"]))
    assert [one.judge_text for one in found] == ["", "one of 4", "", "one of 4"]


async def test_mathematics_is_judged_in_a_sandbox() -> None:
    found = await guided("math", response("$2^{3} = 9$"), response("$2^{3} = 8$"), config=RewardSection(timeout_s=30.0))
    assert found[0].judge_text == "step 1 says 2^{3} = 9, should be 8"
    assert reasons(found) == ["", "nothing_found"]


async def test_an_endpoint_quotes_the_wrong_step_and_sees_question_gold_and_response() -> None:
    with served(by_quote) as server:
        wrong = response("3 * 4 = 13. So 13", solution="3 * 4 = 12")
        (found,) = await guided(ENDPOINT, wrong, config=section(server))
        (body,) = server.requests
    assert found.judge_text == 'the step "3 * 4 = 13" is wrong: it should be 12'
    content = body["messages"][0]["content"]
    assert "3 * 4?" in content and "3 * 4 = 12" in content and "3 * 4 = 13. So 13" in content


@pytest.mark.parametrize(
    "said",
    [
        "I cannot help with that.",
        "",
        "Step: 3 * 5 = 13\nWrong: it is 15",
        "Step: \nWrong: all of it",
        "Step: 3 * 4 = 13",
        None,
    ],
    ids=["a refusal", "nothing", "a quotation of nothing there", "no quotation", "no reason", "no choices"],
)
async def test_a_reply_that_quotes_nothing_of_the_response_is_no_judgment(said: str | None) -> None:
    reply: Reply = (200, {"choices": []} if said is None else judgement(said))
    with served(lambda body, number: reply) as server:
        found = await guided(ENDPOINT, response("3 * 4 = 13"), config=section(server))
        assert len(server.requests) == 1, "the same prompt would get the same reply"
    assert reasons(found) == ["unreachable"]


async def test_a_quotation_may_differ_in_white_space_and_marks() -> None:
    with served(lambda body, number: (200, judgement('**Step:** "3 *  4 = 13"\n**Wrong:** it is 12'))) as server:
        (found,) = await guided(ENDPOINT, response("So 3 * 4\n= 13."), config=section(server))
    assert found.judge_text == 'the step "3 * 4 = 13" is wrong: it is 12'


async def test_an_endpoint_that_is_down_is_left_alone_and_no_response_waits_for_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone, ahead_s = section("http://127.0.0.1:9/v1", timeout_s=0.6), 0.0
    real = time.monotonic
    monkeypatch.setattr("pipeline.rewards.endpoint.time", SimpleNamespace(monotonic=lambda: real() + ahead_s))
    async with VerifierPool(gone) as pool:
        assert reasons(await asked(pool, ENDPOINT, response("a"))) == ["outage"]
        found = await asked(pool, ENDPOINT, *(response(f"{n}") for n in range(20)))
        assert reasons(found) == ["outage"] * 20
        assert all("left alone for a while" in one.absent for one in found)
        ahead_s = 0.7
        assert "left alone for a while" not in (await asked(pool, ENDPOINT, response("b")))[0].absent


async def test_a_passing_fault_of_an_endpoint_is_tried_again_within_its_time() -> None:
    def reply(body: dict[str, Any], number: int) -> Reply:
        return [(503, b"away"), (429, b"")][number] if number < 2 else by_quote(body, number)

    with served(reply) as server:
        found = await guided(ENDPOINT, response("3 * 4 = 13. So 13"), config=section(server, timeout_s=10.0))
        assert len(server.requests) == 3
    assert reasons(found) == [""]


async def test_a_slow_endpoint_costs_its_limit_and_the_response_goes_on() -> None:
    with served(by_quote, latency_s=1.0) as server:
        found = await guided(ENDPOINT, response("13"), config=section(server, timeout_s=0.3))
    assert reasons(found) == ["unreachable"]


async def test_a_spent_budget_leaves_responses_without_judgments() -> None:
    with served(by_quote) as server:
        async with VerifierPool(section(server, max_requests=2)) as pool:
            found = [(await asked(pool, ENDPOINT, response(f"3 * 4 = {n}")))[0] for n in range(13, 17)]
        assert len(server.requests) == 2
    assert reasons(found) == ["", "", "budget", "budget"]


async def test_equal_responses_cost_one_request_and_scores_are_kept_apart() -> None:
    def reply(body: dict[str, Any], number: int) -> Reply:
        return by_quote(body, number) if "wrong step" in str(body) else (200, judgement("Score: 5"))

    with served(reply) as server:
        async with VerifierPool(section(server), configured=[ENDPOINT]) as pool:
            one = response("3 * 4 = 13")
            first = await asked(pool, ENDPOINT, one, one)
            again = await asked(pool, ENDPOINT, one)
            (verdict,) = await pool.score([Response(**{**_fields(one), "verifier": ENDPOINT})])
        assert len(server.requests) == 2
    assert first[0] == first[1] == again[0]
    assert "accuracy=0.5" in repr(verdict)


def _fields(one: Response) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


async def test_the_key_of_an_endpoint_is_in_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with served(lambda body, number: (401, {"error": f"Incorrect API key provided: {KEY}"})) as server:
        found = await guided(ENDPOINT, response("13"), config=section(server, api_key_env="JUDGE_KEY"))
        assert server.keys == [f"Bearer {KEY}"]
        assert KEY not in str(server.requests)
    assert reasons(found) == ["unreachable"]
    assert KEY not in repr(found) and "(the key)" in found[0].absent


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("record", "choose one of arithmetic, math, recorded"),
        ("endpoint/other", r"\[reward.endpoints\] has endpoint/quality"),
        ("endpoint/quality", "does not answer"),
        ("no_such_module:judgments", "reward.path"),
        (f"{OWN}:nothing", "nothing"),
    ],
)
async def test_what_cannot_write_judgments_is_found_before_anything_starts(name: str, says: str) -> None:
    async with VerifierPool(section("http://127.0.0.1:9/v1")) as pool:
        with pytest.raises(ConfigError, match=says):
            await pool.start_judgments(name)
    if "quality" not in name:
        async with VerifierPool(section("http://127.0.0.1:9/v1")) as pool:
            assert reasons(await asked(pool, name, response("13"))) == ["unknown_verifier"]
