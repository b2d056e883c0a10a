"""The built-in environment ``tools``: answers a turn's tool calls, and ends with the first turn that has none.

The text of that last turn is judged by the verifier of the prompt's line, as any response is. Without tools it is the
single answer.

Every attempted call gets a message of the role ``tool``, in the order of the calls, and the calls of a turn run at
once. A call that is the model's fault is told to it in the same words each time. Counts of a turn: ``calls_ok``, and
for each other status ``calls_`` and its name (``CallStatus``); and ``long_results`` that were cut."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.config.cross_checks import TOOL_TIMEOUT_S
from pipeline.environments.contract import ChatMessage, Step
from pipeline.environments.conversation import BAD_CALLS
from pipeline.environments.tool_calls import CallStatus
from pipeline.environments.tools import BadArguments, load_tool
from protocol.errors import ConfigError, EnvironmentFailed

_MAX_CALLS = 16
"""Calls of one turn that are run."""
_TOLD = {
    CallStatus.INVALID_JSON: "the call cannot be read; write it as one JSON object with name and arguments",
    CallStatus.UNCLOSED: "the call has no end; close it",
}
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class ToolEnvironment:
    judged_by_verifier = True

    def __init__(
        self,
        tools: Sequence[str | Callable[..., Any]] = (),
        *,
        max_tool_chars: int = 8_000,
        tool_timeout_s: float = TOOL_TIMEOUT_S,
        allow_network: bool = False,
    ) -> None:
        """``tools``: names of built-in tools, import paths or functions. A longer result than ``max_tool_chars`` is cut.
        ``allow_network``: programs of the tool ``python`` may use the network.
        Raises ConfigError if a tool cannot be used."""
        found = [load_tool(tool, allow_network=allow_network) for tool in tools]
        self._tools = {tool.name: tool for tool in found}
        if len(self._tools) < len(found):
            names = sorted(name for name, times in Counter(tool.name for tool in found).items() if times > 1)
            raise ConfigError(f"there are two tools {names[0]!r}; rename one of them")
        if max_tool_chars < 1 or tool_timeout_s <= 0:
            raise ConfigError("max_tool_chars and tool_timeout_s of the tools must be above 0")
        self.tools = [tool.schema for tool in found]
        self._max_chars, self._timeout_s = max_tool_chars, tool_timeout_s

    def reset(self, row: dict[str, Any]) -> list[ChatMessage]:
        messages = row.get("messages")
        if messages:
            return [dict(message) for message in messages]
        prompt = row.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise EnvironmentFailed("ToolEnvironment.reset: the line has neither messages nor a prompt; add one")
        return [{"role": "user", "content": prompt}]

    def state(self) -> None:
        """Return nothing; but with a state, tools are not run again for earlier turns."""

    def restore(self, row: dict[str, Any], data: None) -> None:
        """Go on; there is nothing to remember."""

    async def step(self, message: ChatMessage) -> Step:
        calls = [*(message.get("tool_calls") or []), *message.get(BAD_CALLS, ())]
        if not calls:
            return Step(done=True)
        calls.sort(key=lambda call: call["id"])
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._answer(number, call)) for number, call in enumerate(calls)]
        counts: Counter[str] = Counter()
        messages: list[ChatMessage] = []
        for call, task in zip(calls, running, strict=True):
            status, text = task.result()
            counts[f"calls_{status}"] += 1
            if len(text) > self._max_chars:
                counts["long_results"] += 1
                text = f"{text[: self._max_chars]}\n[cut: the result has {len(text)} characters]"
            function = call.get("function", call)
            messages.append({"role": "tool", "content": text, "tool_call_id": call["id"], "name": function["name"]})
        return Step(messages, counts=dict(counts))

    async def _answer(self, number: int, call: dict[str, Any]) -> tuple[CallStatus, str]:
        """Run a call; return its status and what the model is told."""
        if number >= _MAX_CALLS:
            return _fault(CallStatus.BAD_ARGUMENTS, f"only the first {_MAX_CALLS} calls of a turn are run")
        if "status" in call:
            status = CallStatus(call["status"])
            return _fault(status, _TOLD[status])
        name = call["function"]["name"]
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return _fault(CallStatus.UNKNOWN_TOOL, f"there is no tool {name!r:.100}; there are: {known}")
        try:
            run = tool.bound(call["function"]["arguments"])
            async with asyncio.timeout(self._timeout_s):
                found = await (run() if tool.is_async else asyncio.to_thread(run))
        except BadArguments as error:
            return _fault(CallStatus.BAD_ARGUMENTS, str(error))
        except TimeoutError:
            return _fault(CallStatus.LATE, f"{name} did not answer within {self._timeout_s:g} s")
        except Exception as error:  # noqa: BLE001  whatever a tool raises is told to the model and counted
            what = _ADDRESS.sub("", f"{type(error).__name__}: {error}")
            return _fault(CallStatus.TOOL_FAILED, f"{name} failed with {what}")
        return CallStatus.OK, _text(found)


def _fault(status: CallStatus, error: str) -> tuple[CallStatus, str]:
    return status, json.dumps({"error": error.encode("utf-8", "replace").decode()}, ensure_ascii=False)


def _text(result: Any) -> str:
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace").decode()
