"""Claims about agents that own their loop: real clients and real processes; the test is the model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from pipeline.environments import agent
from pipeline.environments.agent import AgentEnvironment
from pipeline.environments.chat_requests import ModelRequest
from pipeline.environments.contract import SAMPLED
from pipeline.environments.conversation import call_id
from pipeline.environments.host import EpisodeCall, EpisodeReply
from pipeline.environments.processes import EnvironmentPool
from protocol.errors import EnvironmentFailed
from tests.pipeline.environments.pools import pool_of

AGENTS = "tests.pipeline.environments.user_agents"
ROW = {"question": "2+3", "answer": "5"}


def pool(agent: str, **settings: Any) -> AbstractAsyncContextManager[EnvironmentPool]:
    return pool_of(agent=f"{AGENTS}:{agent}", **settings)


def turn(
    text: str, *, finish: str = "stop", logprobs: list[tuple[str, float]] | None = None, **more: Any
) -> dict[str, Any]:
    sampled = {"finish": finish, "num_context": 10, "num_tokens": 2, "logprobs": logprobs}
    return {"role": "assistant", "content": text, SAMPLED: sampled, **more}


def calling(number: int, **arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"id": call_id(number), "type": "function", "function": function}


class Talk:
    """An episode, played by a model that says what it is told to."""

    def __init__(self, environments: EnvironmentPool, row: dict[str, Any] | None = None) -> None:
        self._environments, self._row = environments, row or ROW
        self.actions: list[dict[str, Any]] = []
        self.last: EpisodeReply | None = None

    async def begin(self) -> EpisodeReply:
        self.last = await self._environments.answer(EpisodeCall(number=0, episode="t.0.0", row=self._row))
        return self.last

    async def say(self, action: dict[str, Any] | str) -> EpisodeReply:
        assert self.last is not None
        action = turn(action) if isinstance(action, str) else action
        call = EpisodeCall(
            number=0,
            episode="t.0.0",
            row=self._row,
            actions=tuple(self.actions),
            action=action,
            digest=self.last.digest,
        )
        self.last = await self._environments.answer(call)
        self.actions.append(action)
        return self.last


def texts(reply: EpisodeReply) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in reply.messages]


async def played(agent: str, answers: Sequence[dict[str, Any] | str], **settings: Any) -> list[EpisodeReply]:
    async with pool(agent, **settings) as environments:
        talk = Talk(environments)
        return [await talk.begin(), *[await talk.say(answer) for answer in answers]]


async def failure(agent: str, answers: Sequence[dict[str, Any] | str], **settings: Any) -> str:
    async with pool(agent, **settings) as environments:
        talk = Talk(environments)
        with pytest.raises(EnvironmentFailed) as caught:
            await talk.begin()
            for answer in answers:
                await talk.say(answer)
    return str(caught.value)


async def test_what_the_agent_asks_is_what_the_environment_says_and_what_it_returns_is_the_reward() -> None:
    begun, went, ended = await played("asks_twice", ["4", "5"], arguments={"greeting": "be right"})
    assert texts(begun) == [("system", "be right"), ("user", "2+3")]
    # only what is new, though the client sends everything
    assert (texts(went), went.restarts) == ([("user", "are you sure?")], False)
    assert (ended.is_done, ended.reward, ended.accuracy) == (True, 1.0, 1.0)
    assert begun.counts == {"requests": 1, "unused_settings": 1}, "the run decides how tokens are sampled"


async def test_an_agent_may_be_an_ordinary_function() -> None:
    _, ended = await played("in_a_thread", ["5"])
    assert (ended.is_done, ended.reward, ended.accuracy) == (True, 0.5, 0.5)


async def test_calls_of_tools_come_back_with_the_ids_of_their_turn_and_their_names() -> None:
    first = turn("", tool_calls=[calling(0, a=1, b=2), calling(1, a=3, b=4)])
    begun, called, again, ended = await played("adds", [first, turn("so", tool_calls=[calling(0, a=5, b=6)]), "5"])
    assert begun.tools is not None and begun.tools[0]["function"]["name"] == "add"
    assert [(one["content"], one["tool_call_id"], one["name"]) for one in called.messages] == [
        ('called with {"a": 1, "b": 2}', call_id(0), "add"),
        ('called with {"a": 3, "b": 4}', call_id(1), "add"),
    ]
    assert (again.restarts, [one["tool_call_id"] for one in again.messages]) == (False, [call_id(0)])
    assert (ended.reward, ended.accuracy) == (2.0, 1.0)
    assert ended.counts == {"calls": 3, "ids": 3}, "an id occurs once in a conversation"


async def test_messages_that_do_not_continue_the_conversation_begin_a_new_one() -> None:
    begun, forked, ended = await played("forgets", ["a walk", "done"])
    assert (texts(begun), begun.restarts) == ([("user", "plan")], True)
    assert (texts(forked), forked.restarts) == ([("system", "be short"), ("user", "do a walk")], True)
    assert ended.reward == 1.0


@pytest.mark.parametrize(
    ("what", "restarts"),
    [
        ("nothing", False),
        ("the form", False),
        ("the stop string", False),
        ("the system message", True),
        ("the answer", True),
        ("the tools", True),
    ],
)
async def test_a_history_that_the_agent_has_rewritten_is_another_conversation(what: str, restarts: bool) -> None:
    _, second, _ = await played("rewrites", ["done", "so"], arguments={"what": what})
    assert (second.restarts, len(second.messages)) == (restarts, 4 if restarts else 1)
    assert bool(second.tools) == (what == "the tools")


async def test_several_choices_are_turns_of_their_own_with_the_limits_of_the_request() -> None:
    one = turn("one", logprobs=[("o", -0.5), ("ne", -0.25)])
    begun, second, ended = await played("wants_all", [one, turn("two", finish="length")])
    for reply in (begun, second):
        assert (reply.restarts, reply.max_tokens, reply.stop, reply.logprobs) == (True, 5, ("END",), True)
    assert ended.reward == 1.0


async def test_an_answer_can_be_streamed() -> None:
    _, ended = await played("streams", ["done"])
    assert ended.reward == 1.0


async def test_a_text_goes_on_where_it_was_cut_and_another_text_begins_anew() -> None:
    begun, went, other, ended = await played(
        "completes", [turn(" upon", finish="length"), turn(" then", finish="length"), " over"]
    )
    assert texts(begun) == [("text", "Once")]
    assert (texts(went), went.restarts) == ([("text", ", and")], False)
    assert (texts(other), other.restarts, other.max_tokens) == ([("text", "Twice")], True, 0)
    assert ended.reward == 1.0


async def test_a_client_that_is_cut_off_and_asks_again_gets_the_answer_to_its_first_request() -> None:
    async with pool("is_impatient") as environments:
        talk = Talk(environments)
        await talk.begin()
        await asyncio.sleep(1.5)
        ended = await talk.say("done")
        assert (ended.is_done, ended.reward) == (True, 1.0)


async def test_an_answer_that_the_agent_never_read_makes_its_trajectory_fail() -> None:
    async with pool("gives_up") as environments:
        talk = Talk(environments)
        await talk.begin()
        await asyncio.sleep(1.0)
        with pytest.raises(EnvironmentFailed, match="ended without an answer of the model that it had asked for"):
            await talk.say("done")


async def test_of_a_request_that_is_cut_off_between_its_choices_none_is_sampled_again() -> None:
    async with pool("wants_two_in_time") as environments:
        talk = Talk(environments)
        await talk.begin()
        await talk.say("one")
        await asyncio.sleep(1.5)
        ended = await talk.say("two")
        assert (ended.is_done, ended.reward) == (True, 1.0)


async def ends_when_told(row: dict[str, Any], base_url: str, api_key: str) -> float:
    await row["end"].wait()
    return 1.0


class NoListener:
    """In place of the endpoint: the test hands in requests itself, to decide their order."""

    base_url = "http://127.0.0.1:1/v1"

    def admit(self, exchange: Any) -> str:
        return "key"

    def dismiss(self, key: str) -> None:
        pass


async def test_of_two_equal_requests_that_were_cut_off_none_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_endpoint", NoListener)
    environment, end = AgentEnvironment(f"{__name__}:ends_when_told"), asyncio.Event()
    request = [ModelRequest(messages=({"role": "user", "content": "go"},), key="same")]
    async with asyncio.TaskGroup() as clients:
        beginning = clients.create_task(environment.reset({"end": end}))
        first = clients.create_task(environment.exchange(request))
        second = clients.create_task(environment.exchange(request))
        await beginning
        first.cancel()
        await asyncio.wait({first})
        await environment.step(turn("one"))
        second.cancel()
        await asyncio.wait({second})
        third = clients.create_task(environment.exchange(request))
        (answer,) = await third
        assert answer["content"] == "one"
        end.set()
        with pytest.raises(EnvironmentFailed, match="ended without an answer of the model that it had asked for"):
            await environment.step(turn("two"))
        await environment.close()


async def test_an_answer_that_comes_after_the_agents_end_has_no_reward() -> None:
    async with pool("leaves_a_request_behind") as environments:
        talk = Talk(environments)
        await talk.begin()
        await asyncio.sleep(1.5)
        with pytest.raises(EnvironmentFailed, match="ended without an answer of the model that it had asked for"):
            await talk.say("done")


async def test_an_agent_that_hangs_in_a_thread_ends_with_its_process() -> None:
    async with pool("hangs_in_a_thread", timeout_s=2.0) as environments:
        talk = Talk(environments)
        await talk.begin()
        (pid,) = environments.pids
        with pytest.raises(EnvironmentFailed, match="no answer within 2 s"):
            await talk.say("done")
        assert environments.pids != [pid]


async def test_what_the_endpoint_does_not_have_is_told_by_its_address() -> None:
    _, ended = await played("asks_for_another_page", ["done"])
    assert ended.reward == 1.0


async def test_a_request_that_cannot_be_served_is_refused_with_a_sentence_and_the_agent_goes_on() -> None:
    begun, ended = await played("asks_wrongly", ["done"])
    assert texts(begun) == [("user", "go")]
    assert ended.reward == 1.0


@pytest.mark.parametrize(
    ("agent", "answers", "told"),
    [
        ("never_asks", [], "returned before it had asked the model anything"),
        ("declines", ["x"], "declines returned None; expected its reward as a number"),
        ("raises", ["x"], "LookupError: its database is away"),
        ("exits", ["x"], "ended by sys.exit(3)"),
        ("exits_in_a_thread", ["x"], "ended by sys.exit(3)"),
        ("hangs", ["x"], "step gave no answer within 3 s"),
        ("takes_too_little", [], "cannot be called with row, base_url, api_key"),
        ("absent", [], "has no 'absent'"),
    ],
)
async def test_an_agent_without_a_reward_has_failed_and_is_not_wrong(agent: str, answers: list[str], told: str) -> None:
    assert told in await failure(agent, answers, timeout_s=3.0)


async def test_after_a_crash_the_agent_is_called_again_and_gets_the_same_answers() -> None:
    async with pool("asks_twice") as environments:
        talk = Talk(environments)
        await talk.begin()
        await talk.say("4")
        await environments.aclose()
        ended = await talk.say("5")
        assert (ended.is_done, ended.reward) == (True, 1.0)


async def test_an_agent_that_asks_something_else_when_it_is_called_again_has_failed() -> None:
    async with pool("is_fickle") as environments:
        talk = Talk(environments)
        await talk.begin()
        await talk.say("1")
        await environments.aclose()
        with pytest.raises(EnvironmentFailed, match="said something else when its earlier actions were played again"):
            await talk.say("2")


async def test_an_agent_that_asks_for_more_at_once_than_may_wait_is_refused_the_rest() -> None:
    async with pool("asks_too_much") as environments:
        talk = Talk(environments)
        begun = await talk.begin()
        assert texts(begun) == [("user", "go")]
        # while the model takes its time, more requests come, and their clients give up
        await asyncio.sleep(3.0)
        ended = await talk.say("done")
        assert (ended.is_done, ended.reward) == (True, 1.0)


async def test_an_agent_of_smolagents_runs_unchanged() -> None:
    product = {"id": call_id(0), "type": "function", "function": {"name": "product", "arguments": {"a": 12, "b": 13}}}
    final = {"id": call_id(0), "type": "function", "function": {"name": "final_answer", "arguments": {"answer": "156"}}}
    async with pool("of_smolagents") as environments:
        talk = Talk(environments, {"question": "12*13", "answer": "156"})
        begun = await talk.begin()
        assert begun.tools is not None and {one["function"]["name"] for one in begun.tools} == {
            "product",
            "final_answer",
        }
        told = await talk.say(turn("", tool_calls=[product]))
        assert "156" in str(told.messages)
        ended = await talk.say(turn("", tool_calls=[final]))
        assert (ended.is_done, ended.reward) == (True, 1.0)
