"""Claims about ``headrace ledger peek``: the list of chunks, the newest, and one chunk as text, on a real
ledger with chunks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis.asyncio
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.cli import peek as cli
from pipeline.ledger.redis import keys
from pipeline.ledger.redis.admin import RedisAdmin
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from protocol.codec import to_blob
from protocol.errors import ConfigError
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import Field, Guidance, GuidanceScore, RewardScore, Turn
from tests.pipeline.algorithms.conversations import converse
from tests.pipeline.ledger.builders import (
    GENERATOR,
    SCORER,
    make_chunk,
    make_spec,
    make_turn_chunk,
    reference,
    reward,
)

FIRST, SECOND = TrajectoryId("t", 0, 0), TrajectoryId("t", 0, 1)


@asynccontextmanager
async def _ledger(url: str) -> AsyncIterator[tuple[redis.asyncio.Redis, RedisLedger]]:
    client = connect(url)
    ledger = RedisLedger(client, "test")
    try:
        yield client, ledger
    finally:
        await ledger.aclose()
        await client.aclose()


@pytest.fixture
def server(redis_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A server with an open ledger that the command finds."""

    @asynccontextmanager
    async def look_at(_: Path | None) -> AsyncIterator[SimpleNamespace]:
        async with _ledger(redis_server) as (_client, ledger):
            config = SimpleNamespace(model=SimpleNamespace(path=Path("/no/such")))
            yield SimpleNamespace(ledger=ledger, admin=RedisAdmin(ledger), config=config)

    monkeypatch.setattr(cli, "look_at", look_at)

    async def open_it() -> None:
        async with _ledger(redis_server) as (client, ledger):
            await client.flushall()
            await ledger.open(make_spec(group_size=2, fields=frozenset({Field.REWARD, Field.REFERENCE})))

    asyncio.run(open_it())
    return redis_server


@pytest.fixture
def filled(server: str) -> str:
    """The same with two responses, of which the second, written later, is finished and scored."""

    async def fill() -> None:
        async with _ledger(server) as (client, ledger):
            await client.hset(keys.epochs("test"), GENERATOR.worker, str(GENERATOR.epoch))  # pyright: ignore
            await ledger.lease(GENERATOR, max_trajectories=2)
            await ledger.write_chunk(GENERATOR, make_chunk(FIRST, 0, final=False))
            await ledger.write_chunk(GENERATOR, make_chunk(SECOND, 0))
            await ledger.write_score(SCORER, ChunkId(SECOND, 0), reference())
            await ledger.write_score(SCORER, ChunkId(SECOND, 0), reward())

    asyncio.run(fill())
    return server


def _peek(*words: str) -> str:
    return (
        CliRunner().invoke(headrace, ["ledger", "peek", *words], standalone_mode=False, catch_exceptions=False).output
    )


@pytest.mark.usefixtures("filled")
def test_without_a_name_it_tells_what_there_is_the_newest_first() -> None:
    lines = [line.split() for line in _peek().splitlines()]
    assert lines[0] == ["chunk", "tokens", "response", "has", "written"]
    assert [line[0] for line in lines[1:]] == ["t.0.1.0", "t.0.0.0"]
    assert lines[1][2:5] == ["finished", "reward", "reference"]
    assert lines[2][2:5] == ["goes", "on", "–"]
    assert [one["chunk"] for one in json.loads(_peek("--json"))] == ["t.0.1.0", "t.0.0.0"]
    assert len(_peek("--limit", "1").splitlines()) == 2


@pytest.mark.usefixtures("filled")
def test_the_newest_is_shown_as_text_with_its_scores() -> None:
    assert _peek("--latest").splitlines() == [
        "t.0.1.0: 3 tokens, 3 of the response so far, stop, sampled by version 0 on an",
        "  unknown worker",
        "  reward +1.00, accuracy 1",
        "  reference log-probs of 3 tokens, mean 0.000 nats",
        "  prompt   1+1=",
        "  response 2",
        "  answer   2",
        "  verifier arithmetic",
    ]


@pytest.mark.usefixtures("filled")
def test_one_that_goes_on_is_shown_up_to_where_it_is() -> None:
    text = _peek("t.0.0.0")
    assert "window" in text
    assert "3 tokens; their text is not known" in text, "the model of this run is not at hand"


@pytest.mark.usefixtures("filled")
def test_its_messages_are_shown_on_request() -> None:
    assert "'behavior_logprobs:<f4'" in _peek("t.0.0.0", "--raw")
    assert json.loads(_peek("--latest", "--json"))[0]["body"]["response_text"] == "2"


@pytest.mark.usefixtures("server")
def test_an_empty_ledger_says_so() -> None:
    assert "holds no chunk" in (told := _peek())
    assert "headrace samples" in told, "what was trained on is there alone"
    with pytest.raises(ConfigError, match="holds no chunk"):
        _peek("--latest")
    with pytest.raises(ConfigError, match=r"t\.9\.0\.0 is not in the ledger"):
        _peek("t.9.0.0")


def test_a_turn_is_shown_with_what_the_environment_said() -> None:
    answered = Turn(tokens=np.zeros(4, np.int32), text="5 is too low")
    assert cli.as_text(make_turn_chunk(FIRST, 1), [answered], "guess 5")[-1] == "  turn     5 is too low"


def test_a_guided_response_is_shown_with_its_texts_columns_and_what_is_absent() -> None:
    told = Guidance(gold_text="13", judge_text="step 3 says 14, should be 13")
    scores = (
        RewardScore(reward=-1.0, accuracy=0.0, guidance=told),
        GuidanceScore(
            standard_logprobs=np.zeros(4, np.float32), judge_logprobs=np.zeros(4, np.float32), guide_version="abc"
        ),
    )
    shown = "\n".join(cli.as_text(make_chunk(FIRST, 0), scores, "1 2"))
    assert "guidance of 4 standard and 4 judge log-probs, by abc" in shown
    assert "step 3 says 14, should be 13" in shown and "gold" in shown and "absent" not in shown
    lacking = GuidanceScore(
        standard_logprobs=np.zeros(4, np.float32),
        judge_logprobs=np.zeros(0, np.float32),
        guide_version="abc",
        absent="the judgment has 600 tokens",
    )
    shown = "\n".join(cli.as_text(make_chunk(FIRST, 0), [lacking], "1 2"))
    assert "guidance of 4 standard log-probs, by abc" in shown
    assert "the judgment has 600 tokens" in shown


def test_a_conversation_is_shown_up_to_the_turns_end_with_the_environments_answer() -> None:
    talk = converse(np.random.default_rng(0), 0, 0, RewardScore(reward=1.0, accuracy=1.0), num_turns=3, replaces=0.0)
    at: Any = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(path=Path("/no/such"))))
    last = talk.chunks[-1]
    shown = "\n".join(cli.described(at, [to_blob(last.chunk), *map(to_blob, last.scores.values())]))
    assert f"{last.chunk.response_length} tokens; their text is not known" in shown, "with the environment's words"
    assert f"{len(talk.tokens)} of the response so far" in shown
    assert "the environment's answer of 0 tokens, the end, reward so far +0.00" in shown
