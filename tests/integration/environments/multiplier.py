"""An agent for a fleet, in a module that imports no more than it needs: each of its processes imports it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from tests.integration.environments.slow_calculator import SlowCalculator


@cache
def http_client() -> Any:
    """One for all agents of a process: to make one takes 50 ms, because it reads certificates."""
    return DefaultAsyncHttpxClient()


async def multiplies(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """The task of ``SlowCalculator``, by the official client."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client())
    task = SlowCalculator()
    messages: list[Any] = task.reset(row)
    tools: Any = task.tools
    while True:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        said = answer.choices[0].message.model_dump(exclude_none=True)
        messages.append(said)
        calls = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in said.get("tool_calls", [])
        ]
        step = await task.step({"content": said.get("content", ""), "tool_calls": calls})
        if step.done:
            return step.reward
        messages += step.messages
