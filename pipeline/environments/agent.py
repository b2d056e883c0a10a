"""An agent that owns its loop, as an environment: a function of yours that talks to an OpenAI-compatible endpoint.

    async def run(row, base_url, api_key):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        answer = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": row["question"]}])
        return float(row["answer"] in answer.choices[0].message.content)

The model's turns are its answers to requests. A request whose messages begin with the conversation so far continues
it; any other one begins a new conversation, and so does each further choice of ``n``. Requests that are made at once are
answered one after another.

A number that the function returns is the trajectory's reward, and, between 0 and 1, its accuracy. It may return a
``Step`` instead. None, or an error, is a failure of the agent and never a wrong answer. A function with the attribute
``judged_by_verifier`` leaves the verdict to the verifier of the row, which judges its last answer, by ``Step()``.

After a crash the function is called again and gets the same answers, as far as there were any, so it must ask the
same things again."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from pipeline.config.import_path import import_own
from pipeline.environments.calling import call_user
from pipeline.environments.chat_requests import ModelRequest
from pipeline.environments.contract import SAMPLED, TEXT, ChatMessage, Step
from pipeline.environments.conversation import call_id
from pipeline.environments.tool_calls import read_json
from pipeline.rewards.verifier import number_of, shown
from protocol.errors import ConfigError, EnvironmentFailed

if TYPE_CHECKING:
    from pipeline.environments.endpoint import Endpoint

_CALLS_OF_A_TURN = 100
_MAX_THREADS = 512
"""Agents that are no coroutines and run at once in one process; each has a thread while it runs."""
_STACK_BYTES = 1 << 20
_END_S = 10.0
"""How long an agent that was cancelled may take to end."""
_KEPT = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


class Exchange:
    """A request for one turn of the model, from its arrival to its answer."""

    def __init__(self, request: ModelRequest) -> None:
        self.request = request
        self.answer: asyncio.Future[ChatMessage] = asyncio.get_running_loop().create_future()


class AgentEnvironment:
    """Runs one agent. Made for each trajectory."""

    wants_sampled = True

    def __init__(self, run: str, **arguments: Any) -> None:
        self._name = run
        self._run = load_agent(run, arguments)
        self._arguments = arguments
        self.judged_by_verifier = bool(getattr(self._run, "judged_by_verifier", False))
        self._exchanges: deque[Exchange] = deque()
        """Not answered, in order of arrival; the model works on the first."""
        self._unread: list[Exchange] = []
        """Those whose client is gone: it will ask again."""
        self._news = asyncio.Event()
        self._said: list[ChatMessage] = []
        """The conversation as the agent knows it, with the model's answers."""
        self._tools: list[dict[str, Any]] = []
        self._stop: tuple[str, ...] = ()
        self._num_turns = 0
        self._agent: asyncio.Task[Any] | None = None
        self._endpoint: Endpoint | None = None
        self._key = ""

    async def reset(self, row: dict[str, Any]) -> Step:
        self._endpoint = _endpoint()
        self._key = self._endpoint.admit(self.exchange)
        # it goes on between the calls, and ends in close
        self._agent = asyncio.create_task(self._call(row))  # noqa: TID251
        self._agent.add_done_callback(lambda _: self._news.set())
        step = await self._next()
        if step.done:
            raise EnvironmentFailed(f"agent {self._name} returned before it had asked the model anything")
        return step

    async def step(self, message: ChatMessage) -> Step:
        assert self._agent is not None
        exchange = self._exchanges.popleft()
        if self._agent.done():
            # whatever it left behind that still waits, the reward is not for this answer
            self._unread.append(exchange)
        answer = self._told(message)
        self._said.append(answer)
        if not exchange.answer.done():
            exchange.answer.set_result(answer)
        return await self._next()

    async def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.dismiss(self._key)
        for exchange in [*self._exchanges, *self._unread]:
            exchange.answer.cancel()
        if self._agent is not None and not self._agent.done():
            self._agent.cancel()
            # one that does not end after a hang has its process killed
            await asyncio.wait({self._agent}, timeout=_END_S)

    async def exchange(self, requests: Sequence[ModelRequest]) -> list[ChatMessage]:
        """Return the model's answers to the choices of a request. A client that was cut off and asks the same again gets
        the answers to its first request."""
        exchanges = [self._exchange(request) for request in requests]
        try:
            return [await asyncio.shield(exchange.answer) for exchange in exchanges]
        except asyncio.CancelledError:
            for exchange in exchanges:
                if exchange in self._exchanges and exchange is not self._exchanges[0]:
                    self._exchanges.remove(exchange)
                elif not exchange.answer.cancelled():
                    self._unread.append(exchange)
            raise

    def _exchange(self, request: ModelRequest) -> Exchange:
        for exchange in self._unread:
            if exchange.request.key == request.key:
                self._unread.remove(exchange)
                return exchange
        exchange = Exchange(request)
        self._exchanges.append(exchange)
        self._news.set()
        return exchange

    async def _call(self, row: dict[str, Any]) -> Any:
        assert self._endpoint is not None
        given = (row, self._endpoint.base_url, self._key)
        try:
            return await call_user(_threads(), self._run, *given, **self._arguments)
        except SystemExit as error:
            raise EnvironmentFailed(f"agent {self._name} ended by sys.exit({error.code}); return its reward") from error

    async def _next(self) -> Step:
        """Wait for the agent's next request, or its end."""
        assert self._agent is not None
        while not self._exchanges and not self._agent.done():
            self._news.clear()
            await self._news.wait()
        if self._agent.done():
            return self._ended(self._agent)
        return self._asked(self._exchanges[0].request)

    def _ended(self, agent: asyncio.Task[Any]) -> Step:
        if agent.cancelled():
            raise EnvironmentFailed(f"agent {self._name} was cancelled")
        found = agent.result()
        if any(exchange.answer.done() for exchange in self._unread):
            raise EnvironmentFailed(
                f"agent {self._name} ended without an answer of the model that it had asked for: its client gave up before, or "
                "it did not wait; give the client a longer timeout, and await every request"
            )
        if isinstance(found, Step):
            return Step(reward=found.reward, accuracy=found.accuracy, counts=found.counts, done=True)
        reward = number_of(found)
        if reward is None:
            raise EnvironmentFailed(
                f"agent {self._name} returned {shown(found)}; expected its reward as a number, or a Step: None says that "
                "this attempt does not count"
            )
        return Step(reward=reward, accuracy=min(max(reward, 0.0), 1.0), done=True)

    def _asked(self, request: ModelRequest) -> Step:
        """Return what the model is asked: what is new in the conversation, or a whole new one."""
        new = self._continuation(request)
        restarts = new is None
        messages = list(request.messages) if new is None else new
        said = [_plain(message, self._said + messages) for message in messages]
        self._said, self._tools, self._stop = list(request.messages), list(request.tools), request.stop
        return Step(
            said,
            restarts=restarts,
            tools=self._tools if restarts else None,
            max_tokens=request.max_tokens,
            stop=request.stop,
            logprobs=request.logprobs,
            counts=request.counts,
        )

    def _continuation(self, request: ModelRequest) -> list[ChatMessage] | None:
        """Return the messages after the conversation so far; None if the request does not continue it."""
        if not self._said or self._said[-1]["role"] != "assistant" or self._tools != list(request.tools):
            return None
        if self._said[0]["role"] == TEXT:
            return self._text_after(request)
        asked = list(request.messages)
        before, last, new = asked[: len(self._said) - 1], asked[len(self._said) - 1 :][:1], asked[len(self._said) :]
        if not new or any(message["role"] == "assistant" for message in new):
            return None
        # a client may write the text that ended the turn
        answers = [{**self._said[-1], "content": _text(self._said[-1]) + stop} for stop in ("", *self._stop)]
        if canonical(last[0]) not in [canonical(answer) for answer in answers]:
            return None
        return new if [*map(canonical, before)] == [*map(canonical, self._said[:-1])] else None

    def _text_after(self, request: ModelRequest) -> list[ChatMessage] | None:
        before, answer, asked = self._said[0], self._said[-1], request.messages[0]
        # after an end token or a stop string the model has read something that the client does not write
        if asked["role"] != TEXT or answer[SAMPLED]["finish"] != "length":
            return None
        rest = _text(asked).removeprefix(_text(before) + _text(answer))
        return [{"role": TEXT, "content": rest}] if rest and rest != _text(asked) else None

    def _told(self, message: ChatMessage) -> ChatMessage:
        """Return the model's message as the agent gets it: with ids of calls that occur once in a conversation."""
        told = {key: value for key, value in message.items() if key in (*_KEPT, SAMPLED)}
        if "tool_calls" in told:
            first = self._num_turns * _CALLS_OF_A_TURN
            told["tool_calls"] = [
                {**call, "id": call_id(first + int(call["id"].removeprefix("call")))} for call in told["tool_calls"]
            ]
        self._num_turns += 1
        return told


def canonical(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what makes two messages the same to the model, however a client writes them."""
    calls = [
        (call["id"], call["function"]["name"], parsed(call["function"].get("arguments")))
        for call in message.get("tool_calls") or []
    ]
    return message["role"], _text(message).strip(), message.get("tool_call_id"), calls


def _plain(message: ChatMessage, conversation: Sequence[ChatMessage]) -> ChatMessage:
    """Return a client's message as an environment says it, with the ids that calls have within a turn."""
    plain = {key: value for key, value in message.items() if key in _KEPT and value is not None}
    plain["content"] = _text(message)
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [
            {
                "id": _inner_id(call["id"]),
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": parsed(call["function"].get("arguments"))},
            }
            for call in calls
        ]
    if (name := message.get("tool_call_id")) is not None:
        plain["tool_call_id"] = _inner_id(name)
        called = [call for one in conversation for call in one.get("tool_calls") or [] if call["id"] == name]
        plain |= {"name": called[-1]["function"]["name"]} if called and "name" not in plain else {}
    return plain


def _inner_id(name: str) -> str:
    digits = name.removeprefix("call")
    return call_id(int(digits) % _CALLS_OF_A_TURN) if digits.isdecimal() and name.startswith("call") else name


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part[part["type"]] for part in cast("list[dict[str, Any]]", content))
    return content or ""


def parsed(arguments: Any) -> Any:
    """Return a call's arguments, which clients write as JSON, as plain data."""
    with suppress(ValueError, TypeError, RecursionError):
        return read_json(arguments)
    return arguments


def load_agent(path: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function at ``package.module:function``. Raises ConfigError if there is none, or it does not take
    these arguments."""
    found: Any = import_own("agent", path)
    if not callable(found):
        raise ConfigError(
            f"agent {path!r} is a {type(found).__name__}; expected a function run(row, base_url, api_key)"
        )
    try:
        inspect.signature(found).bind(None, "", "", **arguments)
    except TypeError as error:
        raise ConfigError(
            f"agent {path!r} cannot be called with row, base_url, api_key"
            f"{''.join(f', {name}' for name in arguments)}: {error}; correct its parameters"
        ) from None
    return cast("Callable[..., Any]", found)


def _endpoint() -> Endpoint:
    try:
        from pipeline.environments.endpoint import Endpoint
    except ImportError as error:
        raise EnvironmentFailed(
            f"an agent's endpoint needs {error.name}, which is not installed; pip install 'headrace[web]'"
        ) from error
    return Endpoint.of_process()


@cache
def _threads() -> ThreadPoolExecutor:
    threading.stack_size(_STACK_BYTES)
    return ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="agent")
