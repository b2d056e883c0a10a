"""The OpenAI API's requests and answers, as data: chat completions and completions.

What a request wants that a run cannot give, such as answers in a JSON schema, is refused with a sentence. How tokens
are sampled is a setting of the run, since the learner relies on it; a request's ``temperature`` and its like
change nothing, and are counted (``unused_settings``)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from pipeline.environments.contract import SAMPLED, TEXT, ChatMessage, checked_tools
from protocol.errors import EnvironmentFailed

_MAX_CHOICES: Final = 32
_MAX_TOKENS: Final = 2**31 - 1
_ROLES: Final = ("system", "user", "assistant", "tool")
_HARMLESS: Final = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Fields that change no answer. All others that are not known here are counted as unused."""
_CHOICES: Final = (None, "auto", "none")
"""Of a tool: that the model must call one cannot be enforced, and most agents that ask for it live with an answer."""


class RequestRefused(Exception):
    """The request asks for what is not there; the text says what to do."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one turn of the model."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    counts: dict[str, int] = {}
    key: str = ""
    """The same for the same request and choice."""


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    model: str = ""
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None


class ChatBody(_Body, frozen=True, kw_only=True):
    """A request for chat completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    functions: Any = None
    logprobs: bool | None = None


class TextBody(_Body, frozen=True, kw_only=True):
    """A request for completions of a text."""

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


Body = ChatBody | TextBody


def read_request(data: bytes, kind: type[Body]) -> tuple[Body, list[ModelRequest]]:
    """Return a request and what it asks of the model, once for each choice. Raises RequestRefused."""
    try:
        body = msgspec.json.decode(data, type=kind)
        given = msgspec.json.decode(data)
        # what is passed on has whole numbers of 64 bits
        msgspec.msgpack.encode(given)
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise RequestRefused(f"the request cannot be read: {error}") from None
    unknown = given.keys() - _HARMLESS - {*kind.__struct_fields__}
    unused = sum(given[name] is not None for name in unknown) + (given.get("tool_choice") not in _CHOICES)
    choices = 1 if body.n is None else body.n
    if not 1 <= choices <= _MAX_CHOICES:
        raise RequestRefused(f"n is {choices}; expected 1 to {_MAX_CHOICES}")
    most = (body.max_completion_tokens if isinstance(body, ChatBody) else None) or body.max_tokens or 0
    if most < 0:
        raise RequestRefused(f"max_tokens is {most}; expected at least 1")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > 16 or not all(stop):
        raise RequestRefused("stop must be one to 16 texts that are not empty")
    messages, tools = (_chat(body), body.tools or []) if isinstance(body, ChatBody) else (_text(body), [])
    request = ModelRequest(
        messages=tuple(messages),
        tools=tuple(tools) if not isinstance(body, ChatBody) or body.tool_choice != "none" else (),
        max_tokens=min(most, _MAX_TOKENS),
        stop=stop,
        # of a text, 0 asks for those of the sampled tokens
        logprobs=body.logprobs is not None and body.logprobs is not False,
        counts={"requests": 1} | ({"unused_settings": unused} if unused else {}),
    )
    digest = hashlib.blake2b(msgspec.json.encode(request, order="sorted"), digest_size=16).hexdigest()
    return body, [msgspec.structs.replace(request, key=f"{digest}/{choice}") for choice in range(choices)]


def _chat(body: ChatBody) -> list[ChatMessage]:
    if body.response_format is not None and body.response_format.get("type", "text") != "text":
        raise RequestRefused("response_format cannot be enforced; leave it out, and ask for the format in a message")
    if body.functions or any(message.get("function_call") for message in body.messages):
        raise RequestRefused("functions and function_call are not known; use tools and tool_calls")
    try:
        checked_tools(body.tools or [], "the request")
    except EnvironmentFailed as error:
        raise RequestRefused(str(error)) from None
    messages = [dict(message) for message in body.messages]
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role == "developer":
            message["role"] = role = "system"
        if role not in _ROLES:
            raise RequestRefused(
                f"message {number} has the role {json.dumps(role)}; expected one of {', '.join(_ROLES)}"
            )
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(map(_is_call, calls)):
            raise RequestRefused(
                f"message {number} has tool_calls that are no list of calls of functions, each with an id and a name"
            )
        if any(not isinstance(message.get(key), str | None) for key in ("name", "tool_call_id", "reasoning_content")):
            raise RequestRefused(f"message {number} has a name, tool_call_id or reasoning_content that is no text")
        parts = content if isinstance(content, list) else []
        if not all(map(_is_text, parts)):
            raise RequestRefused(f"message {number} has parts that are no text; the model reads only text")
        if not isinstance(content, str | list) and not (content is None and role == "assistant"):
            raise RequestRefused(f"message {number} has no content; only an assistant's may have none")
    if not messages:
        raise RequestRefused("messages is empty; expected at least one")
    if messages[-1]["role"] == "assistant":
        raise RequestRefused("the last message is the assistant's; expected one that the model answers")
    return messages


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and isinstance(call.get("id"), str)


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") in ("text", "refusal") and isinstance(part.get(part["type"]), str)
    )


def _text(body: TextBody) -> list[ChatMessage]:
    prompt = body.prompt[0] if isinstance(body.prompt, list) and len(body.prompt) == 1 else body.prompt
    if not isinstance(prompt, str) or not prompt:
        raise RequestRefused("prompt must be one text that is not empty; send several in requests of their own")
    if body.echo or body.suffix or (body.best_of or 1) > 1:
        raise RequestRefused("echo, suffix and best_of are not known; leave them out")
    return [{"role": TEXT, "content": prompt}]


def completion(body: Body, answers: Sequence[ChatMessage]) -> dict[str, Any]:
    """Return the answer to a request: its choices in order."""
    is_chat = isinstance(body, ChatBody)
    sampled = [answer[SAMPLED] for answer in answers]
    num_tokens = sum(one["num_tokens"] for one in sampled)
    num_context = sampled[0]["num_context"]
    return _head(body, "chat.completion" if is_chat else "text_completion") | {
        "choices": [_choice(body, index, answer) for index, answer in enumerate(answers)],
        "usage": {
            "prompt_tokens": num_context,
            "completion_tokens": num_tokens,
            "total_tokens": num_context + num_tokens,
        },
    }


def events(body: Body, answers: Sequence[ChatMessage]) -> Iterator[str]:
    """Yield the same as a stream of server-sent events. A turn is streamed when it has ended."""
    whole = completion(body, answers)
    is_chat = isinstance(body, ChatBody)
    head = _head(body, "chat.completion.chunk" if is_chat else "text_completion") | {"id": whole["id"]}
    for choice in whole["choices"]:
        finish = {key: choice.pop(key) for key in ("finish_reason",)}
        if is_chat:
            delta = choice.pop("message")
            delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(delta.get("tool_calls", []))] or None
            yield _event(head | {"choices": [choice | {"delta": _without_none(delta), "finish_reason": None}]})
            yield _event(head | {"choices": [{"index": choice["index"], "delta": {}, **finish}]})
        else:
            yield _event(head | {"choices": [choice | finish]})
    if (body.stream_options or {}).get("include_usage"):
        yield _event(head | {"choices": [], "usage": whole["usage"]})
    yield "data: [DONE]\n\n"


def _head(body: Body, kind: str) -> dict[str, Any]:
    created = time.time_ns()
    return {"id": f"{kind[:4]}-{created:x}", "object": kind, "created": created // 10**9, "model": body.model}


def _choice(body: Body, index: int, answer: ChatMessage) -> dict[str, Any]:
    sampled = answer[SAMPLED]
    finish = sampled["finish"]
    pairs = sampled["logprobs"]
    if isinstance(body, TextBody):
        logprobs = pairs and {"tokens": [text for text, _ in pairs], "token_logprobs": [value for _, value in pairs]}
        return {"index": index, "text": answer["content"], "finish_reason": finish, "logprobs": logprobs}
    message = {"role": "assistant", "content": answer.get("content"), "refusal": None}
    if thinking := answer.get("reasoning_content"):
        message["reasoning_content"] = thinking
    if calls := answer.get("tool_calls"):
        finish = "tool_calls"
        message["tool_calls"] = [
            call | {"function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    content = pairs and [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in pairs
    ]
    logprobs = None if content is None else {"content": content, "refusal": None}
    return {"index": index, "message": message, "finish_reason": finish, "logprobs": logprobs}


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
