"""Agents as users write them, good and bad, for the tests. All but one talk by the official client, unchanged."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from typing import Any

from openai import APIStatusError, APITimeoutError, AsyncOpenAI, OpenAI

from pipeline.environments.contract import Step

Row = dict[str, Any]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def asks_twice(row: Row, base_url: str, api_key: str, *, greeting: str = "hello") -> float:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "system", "content": greeting}, user(row["question"])]
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages, temperature=0.0)
        said = answer.choices[0].message
        messages += [said.model_dump(), user("are you sure?")]
    return float(messages[-2]["content"] == row["answer"])


def in_a_thread(row: Row, base_url: str, api_key: str) -> float:
    client = OpenAI(base_url=base_url, api_key=api_key)
    answer = client.chat.completions.create(model="policy", messages=[user(row["question"])])
    return 0.5 if answer.choices[0].message.content == row["answer"] else 0.0


async def adds(row: Row, base_url: str, api_key: str) -> Step:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [user(row["question"])]
    ids: list[str] = []
    while True:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        choice = answer.choices[0]
        messages.append(choice.message)
        if not choice.message.tool_calls:
            is_right = choice.message.content == row["answer"]
            return Step(reward=2.0 * is_right, accuracy=float(is_right), counts={"calls": len(ids), "ids": len({*ids})})
        assert choice.finish_reason == "tool_calls"
        for call in choice.message.tool_calls:
            assert call.type == "function"
            ids.append(call.id)
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": f"called with {call.function.arguments}"}
            )


async def forgets(row: Row, base_url: str, api_key: str) -> float:
    """Shows the model only the last answer, in a conversation of another kind."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    first = await client.chat.completions.create(model="policy", messages=[user("plan")])
    told: list[Any] = [{"role": "developer", "content": "be short"}, user(f"do {first.choices[0].message.content}")]
    second = await client.chat.completions.create(model="policy", messages=told)
    return float(second.choices[0].message.content == "done")


async def rewrites(row: Row, base_url: str, api_key: str, *, what: str) -> float:
    """Sends its second request with another history than it got."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "system", "content": "be short"}, user("go")]
    answer = await client.chat.completions.create(model="policy", messages=messages, stop=["END"])
    messages += [answer.choices[0].message.model_dump(), user("on")]
    if what == "the system message":
        messages[0]["content"] = "be long"
    elif what == "the answer":
        messages[2]["content"] = "else"
    elif what == "the stop string":
        messages[2]["content"] += "END"
    elif what == "the form":
        messages[2] = {"role": "assistant", "content": [{"type": "text", "text": messages[2]["content"]}]}
    elif what == "the tools":
        await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        return 1.0
    await client.chat.completions.create(model="policy", messages=messages)
    return 1.0


async def wants_all(row: Row, base_url: str, api_key: str) -> float:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    assert [model.id async for model in await client.models.list()] == ["policy"]
    answer = await client.chat.completions.create(
        model="policy",
        messages=[user("go")],
        n=2,
        max_tokens=5,
        stop=["END"],
        logprobs=True,
    )
    texts = [choice.message.content for choice in answer.choices]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [(one.token, one.logprob) for one in logprobs.content] == [("o", -0.5), ("ne", -0.25)]
    assert answer.choices[1].finish_reason == "length" and answer.choices[1].logprobs is None
    assert answer.usage is not None and answer.usage.completion_tokens == 4
    return float(texts == ["one", "two"])


async def streams(row: Row, base_url: str, api_key: str) -> float:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    text, reasons, used = "", [], 0
    options: Any = {"include_usage": True}
    async for part in await client.chat.completions.create(
        model="policy",
        messages=[user("go")],
        stream=True,
        stream_options=options,
    ):
        used = part.usage.total_tokens if part.usage else used
        for choice in part.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return float((text, reasons, used) == ("done", ["stop"], 12))


async def completes(row: Row, base_url: str, api_key: str) -> float:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    text = "Once"
    for _ in range(2):
        answer = await client.completions.create(model="policy", prompt=text, max_tokens=2)
        text += answer.choices[0].text + ", and"
    other = await client.completions.create(model="policy", prompt="Twice")
    return float(text + other.choices[0].text == "Once upon, and then, and over")


async def is_impatient(row: Row, base_url: str, api_key: str) -> float:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=0.3, max_retries=50)
    answer = await client.chat.completions.create(model="policy", messages=[user("go")])
    return float(answer.choices[0].message.content == "done")


async def gives_up(row: Row, base_url: str, api_key: str) -> float:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=0.2, max_retries=0)
    try:
        await client.chat.completions.create(model="policy", messages=[user("go")])
    except APITimeoutError:
        await asyncio.sleep(2.0)
    return 1.0


async def asks_wrongly(row: Row, base_url: str, api_key: str) -> float:
    """Returns 1 if each mistake was refused with its sentence."""
    client, stranger = AsyncOpenAI(base_url=base_url, api_key=api_key), AsyncOpenAI(base_url=base_url, api_key="other")
    assistant = {"role": "assistant", "content": "x"}
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    wrong: list[tuple[str, AsyncOpenAI, dict[str, Any]]] = [
        ("no agent of this run has this key", stranger, {"messages": [user("x")]}),
        ("messages is empty", client, {"messages": []}),
        ("the last message is the assistant's", client, {"messages": [user("x"), assistant]}),
        ("parts that are no text", client, {"messages": [picture]}),
        ("n is 99", client, {"messages": [user("x")], "n": 99}),
        ("response_format", client, {"messages": [user("x")], "response_format": {"type": "json_object"}}),
        ("max_tokens is -1", client, {"messages": [user("x")], "max_tokens": -1}),
    ]
    for told, by, request in wrong:
        try:
            await by.chat.completions.create(model="policy", **request)
        except APIStatusError as error:
            assert told in str(error), (told, str(error))
        else:
            raise AssertionError(told)
    answer = await client.chat.completions.create(model="policy", messages=[user("go")])
    return float(answer.choices[0].message.content == "done")


async def wants_two_in_time(row: Row, base_url: str, api_key: str) -> float:
    """Its client is cut off between the two choices."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=0.5, max_retries=50)
    answer = await client.chat.completions.create(model="policy", messages=[user("go")], n=2)
    return float([choice.message.content for choice in answer.choices] == ["one", "two"])


async def leaves_a_request_behind(row: Row, base_url: str, api_key: str) -> float:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    asking = client.chat.completions.create(model="policy", messages=[user("go")])
    _BEHIND.append(asyncio.create_task(asking))  # noqa: TID251
    await asyncio.sleep(0.5)
    return 1.0


_BEHIND: list[Any] = []


async def exits(row: Row, base_url: str, api_key: str) -> None:
    await declines(row, base_url, api_key)
    sys.exit(3)


def exits_in_a_thread(row: Row, base_url: str, api_key: str) -> None:
    in_a_thread(row, base_url, api_key)
    sys.exit(3)


def hangs_in_a_thread(row: Row, base_url: str, api_key: str) -> float:
    in_a_thread(row, base_url, api_key)
    time.sleep(3600.0)
    return 1.0


async def asks_for_another_page(row: Row, base_url: str, api_key: str) -> float:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    try:
        await client.responses.create(model="policy", input="go")
    except APIStatusError as error:
        assert "/v1/responses is not known; expected /v1/chat/completions" in str(error), str(error)
    answer = await client.chat.completions.create(model="policy", messages=[user("go")])
    return float(answer.choices[0].message.content == "done")


async def never_asks(row: Row, base_url: str, api_key: str) -> float:
    return 1.0


async def declines(row: Row, base_url: str, api_key: str) -> None:
    await AsyncOpenAI(base_url=base_url, api_key=api_key).chat.completions.create(
        model="policy",
        messages=[user("go")],
    )


async def raises(row: Row, base_url: str, api_key: str) -> None:
    await declines(row, base_url, api_key)
    raise LookupError("its database is away")


async def hangs(row: Row, base_url: str, api_key: str) -> None:
    await declines(row, base_url, api_key)
    await asyncio.sleep(3600.0)


async def is_fickle(row: Row, base_url: str, api_key: str) -> float:
    """Asks something else each time that it is called."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [user(str(random.random()))]
    for _ in itertools.count():
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message, user("again")]
    return 0.0


def takes_too_little(row: Row) -> float:
    return 0.0


def of_smolagents(row: Row, base_url: str, api_key: str) -> float:
    """An agent of another library, with a tool of its own."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def product(a: int, b: int) -> int:
        """Multiply.

        Args:
            a: one number
            b: the other
        """
        return a * b

    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent(tools=[product], model=model, max_steps=4, verbosity_level=0)
    return float(str(agent.run(row["question"])) == row["answer"])


async def asks_too_much(row: Row, base_url: str, api_key: str) -> float:
    """Returns 1 if what is too much at once is refused, and what is not is answered."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    waiting = asyncio.create_task(client.chat.completions.create(model="policy", messages=[user("go")]))  # noqa: TID251
    await asyncio.sleep(0.3)
    told: list[str] = []
    async with asyncio.TaskGroup() as tasks:

        async def ask(number: int) -> None:
            try:
                await client.chat.completions.create(model="policy", messages=[user(str(number))], n=32, timeout=1.0)
            except (APIStatusError, APITimeoutError) as error:
                told.append(str(error))

        for number in range(9):
            tasks.create_task(ask(number))
    answer = await waiting
    return float(sum("turns of this agent wait already" in text for text in told) == 2 and bool(answer.choices))
