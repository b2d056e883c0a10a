"""Judges and rewards behind HTTP: a fault of the endpoint is tried again. It is no wrong answer."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import load_config
from pipeline.config.training import RewardSection
from pipeline.rewards.endpoint import RewardEndpoint, _FailedTry
from pipeline.rewards.functions import score_responses
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierFailureKind, VerifierOutcome
from protocol.errors import ConfigError
from tests.pipeline.rewards.served import Reply, Served, judgement, served
from tests.pipeline.rewards.test_functions import RUN
from tests.pipeline.rewards.test_pool import EVERYTHING

KEY = "sk-secret-of-the-judge"


def response(text: str, by: str = "endpoint/quality") -> Response:
    return Response(prompt_text="Why?", response_text=text, answer="so", verifier=by)


def section(server: Served | str, **settings: Any) -> RewardSection:
    url = server if isinstance(server, str) else f"{server.url}/v1"
    return RewardSection.model_validate({"endpoints": {"quality": {"url": url, "model": "judge", **settings}}})


async def judged(server: Served | str, *texts: str, **settings: Any) -> list[VerifierOutcome]:
    async with VerifierPool(section(server, **settings), configured=EVERYTHING) as pool:
        return await pool.score([response(text) for text in texts])


def by_length(body: dict[str, Any], number: int) -> Reply:
    prompt = body["messages"][0]["content"]
    text = prompt.partition("<response>\n")[2].partition("\n</response>")[0]
    return 200, judgement(f"Score: 1? No.\n**Score:** {len(text)}")


async def test_a_judges_last_score_is_the_accuracy_and_it_sees_prompt_answer_and_response() -> None:
    with served(by_length) as server:
        outcomes = await judged(server, "1234567", "{answer}")
    assert [outcome.accuracy for outcome in outcomes if isinstance(outcome, Verdict)] == [0.7, 0.8]
    (body, _) = sorted(server.requests, key=str)
    assert body["model"] == "judge"
    assert "Why?" in body["messages"][0]["content"] and "\nso\n" in body["messages"][0]["content"]


@pytest.mark.parametrize(
    "fault",
    [
        (429, {"error": "slow down"}),
        (503, b"away"),
        (200, b"{not json"),
        (200, judgement("I cannot judge this")),
        (200, judgement("Score: 11")),
        (200, {"choices": []}),
        (200, b"x" * (1 << 21)),
    ],
    ids=["rate limit", "down", "malformed", "no score", "out of range", "empty", "endless"],
)
async def test_a_fault_of_the_endpoint_is_tried_again_and_then_judged(fault: Reply) -> None:
    with served(lambda body, number: fault if number < 2 else by_length(body, number)) as server:
        assert [o.accuracy for o in await judged(server, "12345") if isinstance(o, Verdict)] == [0.5]
        assert len(server.requests) == 3
    with served(lambda body, number: fault) as server:
        (outcome,) = await judged(server, "12345", timeout_s=1.0)
        assert isinstance(outcome, VerifierFailure), "never a wrong answer"
        is_limited = fault[0] == 429
        assert outcome.kind is (VerifierFailureKind.OUTAGE if is_limited else VerifierFailureKind.UNREACHABLE)
        assert "no number within 1 s" in outcome.error
        assert len(server.requests) > 1


async def test_an_endpoint_that_is_gone_fails_each_response_by_its_deadline() -> None:
    outcomes = await judged("http://127.0.0.1:9/v1", "a", "b", timeout_s=0.6)
    kinds = [outcome.kind for outcome in outcomes if isinstance(outcome, VerifierFailure)]
    assert kinds == [VerifierFailureKind.OUTAGE] * 2, "no fault of the responses"
    assert "ConnectError" in str(outcomes[0])


async def test_a_response_that_no_try_judges_while_others_are_judged_is_no_outage() -> None:
    def reply(body: dict[str, Any], number: int) -> Reply:
        return (503, b"too long") if "odd" in str(body) else by_length(body, number)

    with served(reply) as server:
        async with VerifierPool(section(server, timeout_s=0.8), configured=EVERYTHING) as pool:
            outcomes = await pool.score([response("odd"), response("12345")])
    assert isinstance(outcomes[1], Verdict)
    assert isinstance(outcomes[0], VerifierFailure) and outcomes[0].kind is VerifierFailureKind.UNREACHABLE


async def test_every_request_retry_cached_number_and_failure_is_counted() -> None:
    counted: Counter[str] = Counter()

    def count(name: str, amount: float) -> None:
        counted[name] += 1
        assert amount == 1.0 or (name == "quality:request_s" and amount >= 0.0)

    replies: list[Reply] = [(429, b""), (503, b""), (200, judgement("Score: 5")), (401, b"no")]
    with served(lambda body, number: replies[number]) as server:
        async with VerifierPool(section(server), configured=EVERYTHING, count=count) as pool:
            for text in ("a", "a", "b"):
                await pool.score([response(text)])
    assert counted == {
        "quality:requests": 4,
        "quality:request_s": 4,
        "quality:retries": 2,
        "quality:rate_limited": 1,
        "quality:cached": 1,
        "quality:failed": 1,
    }


async def test_no_request_is_made_before_the_time_that_a_rate_limit_names() -> None:
    def reply(body: dict[str, Any], number: int) -> Reply:
        return (429, b"") if number == 0 else by_length(body, number)

    with served(reply) as server:
        server.retry_after = "1"
        outcomes = await judged(server, "a", "bb", "ccc", max_in_flight=1)
        assert all(isinstance(outcome, Verdict) for outcome in outcomes)
        first, second, *_ = server.began_s
        assert second - first >= 1.0
        assert len(server.requests) == 4
    with served(lambda body, number: (429, b"")) as server:
        server.retry_after = "30"
        (outcome,) = await judged(server, "a", timeout_s=0.5)
        assert isinstance(outcome, VerifierFailure) and outcome.kind is VerifierFailureKind.OUTAGE
        assert len(server.requests) == 1


async def test_the_trouble_of_an_endpoint_is_told_while_responses_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    replies: list[Reply] = [(429, {"slow down": KEY}), (200, judgement("Score: 5"))]
    with served(lambda body, number: replies[number]) as server:
        async with VerifierPool(section(server, api_key_env="JUDGE_KEY"), configured=EVERYTHING) as pool:
            assert pool.trouble == ""
            async with asyncio.TaskGroup() as tasks:
                judging = tasks.create_task(pool.score([response("a")]))
                async with asyncio.timeout(10.0):
                    while not pool.trouble:  # noqa: ASYNC110  the server's thread announces nothing
                        await asyncio.sleep(0.01)
                told = pool.trouble
                await judging
            assert told.startswith("endpoint quality, which limits the rate: status 429")
            assert KEY not in told
            assert pool.trouble == ""


async def test_a_refusal_that_no_repeat_mends_is_not_repeated_and_the_key_is_never_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with served(lambda body, number: (401, {"error": f"Incorrect API key provided: {KEY}"})) as server:
        (outcome,) = await judged(server, "a", api_key_env="JUDGE_KEY")
        assert server.keys == [f"Bearer {KEY}"]
        assert isinstance(outcome, VerifierFailure)
        assert "status 401" in outcome.error and "(the key)" in outcome.error
        assert KEY not in repr(outcome) and KEY not in repr(section(server, api_key_env="JUDGE_KEY"))


async def test_no_more_requests_are_in_flight_than_the_limit_and_all_are_judged() -> None:
    with served(by_length, latency_s=0.05) as server:
        outcomes = await judged(server, *(f"{n:03}" for n in range(40)), max_in_flight=4)
    assert all(isinstance(outcome, Verdict) for outcome in outcomes)
    assert 1 < server.most_at_once <= 4


async def test_equal_requests_cost_one_and_the_cache_is_bounded() -> None:
    with served(by_length) as server:
        async with VerifierPool(section(server, cache_entries=2), configured=EVERYTHING) as pool:
            for text in ("a", "a", "bb", "ccc", "bb", "a"):
                (outcome,) = await pool.score([response(text)])
                assert isinstance(outcome, Verdict) and outcome.accuracy == len(text) / 10
        assert len(server.requests) == 4, "a was pushed out by ccc"
    with served(by_length, latency_s=0.1) as server:
        assert len({str(outcome) for outcome in await judged(server, *(["same"] * 20))}) == 1
        assert len(server.requests) == 1, "also at one time"


async def test_a_spent_budget_fails_without_a_request() -> None:
    with served(by_length) as server:
        async with VerifierPool(section(server, max_requests=2), configured=EVERYTHING) as pool:
            kinds = [(await pool.score([response("x" * n)]))[0] for n in range(1, 5)]
        assert len(server.requests) == 2
    failed = kinds[2]
    assert isinstance(failed, VerifierFailure)
    assert failed.kind is VerifierFailureKind.BUDGET
    assert "--set reward.endpoints.quality.max_requests=N" in failed.error


async def test_a_reward_of_your_own_behind_http_adds_any_number_as_a_part() -> None:
    with served(lambda body, number: (200, {"scores": [-2.0 * len(body["responses"][0]["response"])]})) as server:
        told = {
            "endpoints": {"own": {"url": server.url}},
            "functions": {"own": {"verifier": "endpoint/own", "weight": 0.5}},
        }
        rewards = RewardSection.model_validate(told)
        async with VerifierPool(rewards, configured=EVERYTHING) as pool:
            one = Response(response_text="is 3", answer="3", verifier="arithmetic", extra={"level": 2})
            outcomes = await score_responses(pool, rewards.functions, [one])
        assert outcomes == [Verdict(accuracy=1.0, parts={"own": -4.0})]
        assert server.requests[0]["responses"][0]["extra"] == {"level": 2}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "does not answer"),
        ({"api_key_env": "NO_SUCH_KEY_HERE"}, "NO_SUCH_KEY_HERE, which is not set"),
    ],
)
async def test_a_judge_that_is_down_or_has_no_key_is_found_before_anything_starts(
    settings: dict[str, Any], says: str
) -> None:
    async with VerifierPool(section("http://127.0.0.1:9/v1", **settings), configured=EVERYTHING) as pool:
        with pytest.raises(ConfigError, match=says):
            await pool.start(["endpoint/quality"])
        with pytest.raises(ConfigError, match=r"\[reward.endpoints\] has endpoint/quality"):
            await pool.start(["endpoint/other"])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ('reward.endpoints.x.url="ftp://host"', "url is not an address"),
        ('reward.endpoints.x.url="https://me:secret@host/v1"', "no user or password"),
        ('reward.endpoints.x={url="http://h/v1", model="m", prompt="judge it"}', "add {response}"),
        (
            'reward.endpoints.x={url="http://h/v1", max_in_flight=257}',
            "raise reward.max_in_flight, or lower the endpoint's",
        ),
    ],
)
def test_settings_of_an_endpoint_that_cannot_work_are_refused(tmp_path: Path, given: str, says: str) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    with pytest.raises(ConfigError, match=says):
        load_config([tmp_path / "run.toml"], [given])


@pytest.mark.parametrize("escape", [str, lambda key: "".join(f"\\u{ord(one):04x}" for one in key)])
async def test_a_key_that_an_endpoint_echoes_is_masked_before_anything_is_cut_or_kept(
    escape: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    text = json.dumps(judgement(f"KEY{'x' * (183 - len(KEY))} Score: 7")).replace("KEY", escape(KEY)).encode()
    cut = ("y" * 190 + escape(KEY)).encode()
    with served(lambda body, number: (200, text) if "good" in str(body) else (401, cut)) as server:
        good, bad = await judged(server, "good", "bad", api_key_env="JUDGE_KEY")
    assert isinstance(good, Verdict) and good.accuracy == 0.7
    assert isinstance(bad, VerifierFailure)
    for kept in (good.reason, bad.error):
        assert not any(KEY[at : at + 8] in kept or escape(KEY[at : at + 8]) in kept for at in range(len(KEY) - 7)), kept


async def test_a_packed_reply_is_read_and_one_that_unpacks_without_end_is_a_failure() -> None:
    bomb = gzip.compress(bytes(64 << 20))
    fine = gzip.compress(json.dumps(judgement("Score: 7")).encode())
    with served(lambda body, number: (200, fine if "good" in str(body) else bomb)) as server:
        tracemalloc.start()
        good, bad = await judged(server, "good", "bad", timeout_s=1.0)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert isinstance(good, Verdict) and good.accuracy == 0.7
    assert isinstance(bad, VerifierFailure) and "more than 1048576 bytes" in bad.error
    assert most < 20 << 20


@pytest.mark.parametrize("packed", ["gzip", "deflate"])
async def test_a_packed_reply_is_bounded_while_it_arrives(packed: str) -> None:
    pack = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS | 16 if packed == "gzip" else zlib.MAX_WBITS)
    head, part = (pack.compress(bytes(32 << 20)) + pack.flush(zlib.Z_SYNC_FLUSH) for _ in range(2))

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Encoding: {packed}\r\n\r\n".encode() + head)
        with contextlib.suppress(OSError):
            while True:
                writer.write(part)
                await writer.drain()

    async with await asyncio.start_server(endless, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        judge_behind = RewardEndpoint("quality", section(url, timeout_s=20.0).endpoints["quality"])
        tracemalloc.start()
        async with asyncio.timeout(15.0):
            with pytest.raises(_FailedTry, match="more than 1048576 bytes"):
                await judge_behind._try(b"{}", lambda text: Verdict(accuracy=1.0), is_first=True)
            await judge_behind.check()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        await judge_behind.aclose()
    assert most < 20 << 20


async def test_a_look_for_an_endpoint_reads_no_body_without_end() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(OSError):
            while True:
                writer.write(bytes(1 << 16))
                await writer.drain()

    async with await asyncio.start_server(endless, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        judge_behind = RewardEndpoint("quality", section(url).endpoints["quality"])
        async with asyncio.timeout(4.0):
            await judge_behind.check()
        await judge_behind.aclose()
