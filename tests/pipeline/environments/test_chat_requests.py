"""Claims about what a request for a turn is, and which ones are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.environments.chat_requests import ChatBody, ModelRequest, RequestRefused, TextBody, read_request

GO = {"role": "user", "content": "go"}
DEEP = b'{"messages": [{"role": "user", "content": "go"}], "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"


def read(kind: Any = ChatBody, **fields: Any) -> ModelRequest:
    _, (request,) = read_request(json.dumps({"messages": [GO], **fields}).encode(), kind)
    return request


def after(**fields: Any) -> bytes:
    return json.dumps({"messages": [GO, {"role": "assistant", "content": "x", **fields}, GO]}).encode()


def having(**fields: Any) -> bytes:
    return json.dumps({"messages": [GO], **fields}).encode()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "cannot be read"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "cannot be read"),
        (DEEP, "maximum recursion depth"),
        (having(max_tokens=2**70), "cannot be read"),
        (having(tools=[{"x": 2**70}]), "can't serialize ints"),
        (having(tools=[{}]), "has tool 0, {}; expected a function with a name"),
        (
            having(tools=[{"type": "function", "function": {"name": "add", "parameters": {"properties": None}}}]),
            "tool 0",
        ),
        (having(functions=[{"name": "add"}]), "use tools and tool_calls"),
        (after(function_call={"name": "add", "arguments": "{}"}), "use tools and tool_calls"),
        (after(tool_calls=5), "message 1 has tool_calls that are no list"),
        (after(tool_calls=[{"function": {"name": "add", "arguments": "{}"}}]), "each with an id and a name"),
        (after(tool_calls=[{"id": 1, "function": {"name": "add"}}]), "each with an id and a name"),
        (after(reasoning_content=5), "reasoning_content that is no text"),
        (having(messages=[{"role": "tool", "content": "5", "tool_call_id": 5}]), "tool_call_id or"),
        (having(messages=[{"role": "user", "content": [{"type": "text", "text": 5}]}]), "parts that are no text"),
        (having(messages=[{"role": "user", "content": None}]), "message 0 has no content"),
    ],
)
def test_a_request_of_the_wrong_form_is_refused_with_a_sentence(data: bytes, told: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        read_request(data, ChatBody)
    assert told in str(caught.value)


def test_settings_that_change_nothing_are_counted_also_those_of_other_servers() -> None:
    assert read(user="me", metadata={"a": "b"}, store=False, stream=False, temperature=None).counts == {"requests": 1}
    assert read(temperature=0.5, chat_template_kwargs={"enable_thinking": False}).counts["unused_settings"] == 2
    assert read(parallel_tool_calls=False, tool_choice="required", top_logprobs=3).counts["unused_settings"] == 3


def test_an_answer_without_any_content_goes_on() -> None:
    _, (request,) = read_request(after(content=None), ChatBody)
    assert request.messages[1]["content"] is None


def test_more_tokens_than_there_can_be_are_no_limit_of_a_turn() -> None:
    assert read(max_tokens=2**40).max_tokens == 2**31 - 1


def test_completions_have_log_probs_also_without_other_choices() -> None:
    assert [read(TextBody, prompt="go", logprobs=given).logprobs for given in (None, 0, 5)] == [False, True, True]
