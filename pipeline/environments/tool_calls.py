"""Finds the tool calls in what a model wrote. Every attempt is returned with a status, not only the good ones.

    Hermes, Qwen   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    Qwen's XML     <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    GLM            <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    Mistral        [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]     or [TOOL_CALLS]add[ARGS]{"a": 1}
    DeepSeek       <｜tool▁call▁begin｜>function<｜tool▁sep｜>add ```json {"a": 1} ```<｜tool▁call▁end｜>
    Llama          {"name": "add", "parameters": {"a": 1}}, or the same after <|python_tag|>

All but Llama's bare JSON have marks that nothing else has, so they are found without knowing the model. The
maintained packages for this need the openai client and a second tokenizer, or drop what does not parse."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, cast

import msgspec


class CallStatus(StrEnum):
    OK = "ok"
    INVALID_JSON = "invalid_json"
    """it does not have the form of a call"""
    UNCLOSED = "unclosed"
    """it has no end"""
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    TOOL_FAILED = "tool_failed"
    """the tool raised"""
    LATE = "late"
    """the tool did not answer in time"""

    @property
    def is_models_fault(self) -> bool:
        return self not in (CallStatus.OK, CallStatus.TOOL_FAILED, CallStatus.LATE)


class CallAttempt(msgspec.Struct, frozen=True, kw_only=True):
    status: CallStatus = CallStatus.OK
    """Of its form alone: OK, INVALID_JSON or UNCLOSED. Whether there is such a tool is not known here."""
    name: str = ""
    arguments: Any = None
    """As written: whatever JSON it was."""


_TAGGED = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)(<｜tool▁call▁end｜>|(?=<｜tool▁call▁begin｜>)|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_FENCED = re.compile(r"(?:function)?<｜tool▁sep｜>\s*([\w.-]+)\s*```json\s*(.*?)\s*```", re.DOTALL)
_PLAIN = re.compile(r"([\w.-]+)\s*<｜tool▁sep｜>(.*)", re.DOTALL)
_NAME = re.compile(r"[\w.-]+")
_LEFTOVER = re.compile(r"<｜tool▁calls▁(?:begin|end)｜>")
_BARE = re.compile(r"\s*\{\s*\"(?:name|type)\"\s*:")
_INVALID = CallAttempt(status=CallStatus.INVALID_JSON)
_UNCLOSED = CallAttempt(status=CallStatus.UNCLOSED)


def attempted_calls(
    text: str, tools: Sequence[Mapping[str, Any]] = (), *, bare_json: bool = False
) -> tuple[str, list[CallAttempt]]:
    """Return the text without the calls, and every attempt at one in order.

    ``tools`` are the JSON schemas, by which XML's values get their types. ``bare_json``: an answer that is a JSON
    object with a name is a call, as in Llama's chat template."""
    tagged = [*_TAGGED.finditer(text), *_DEEPSEEK.finditer(text)]
    if tagged:
        content = _LEFTOVER.sub("", _DEEPSEEK.sub("", _TAGGED.sub("", text)))
        found = [_block(match, tools) for match in sorted(tagged, key=lambda match: match.start())]
        return content.strip(), found
    before, mark, after = text.partition("[TOOL_CALLS]")
    if mark:
        return before.strip(), list(_mistral(after))
    before, mark, after = text.partition("<|python_tag|>")
    if mark or (bare_json and _BARE.match(text)):
        return (before.strip(), list(_objects(after))) if mark else ("", list(_objects(text)))
    return text.strip(), []


def _block(match: re.Match[str], tools: Sequence[Mapping[str, Any]]) -> CallAttempt:
    body = match[1].strip()
    # a call that is cut off is unclosed, whatever there is of it
    if not match[2]:
        return _UNCLOSED
    if match[0].startswith("<｜"):
        found = _FENCED.fullmatch(body) or _PLAIN.fullmatch(body)
        return _with_json(found[1], found[2]) if found else _INVALID
    if body.startswith("<function="):
        name, closed, inside = body.removeprefix("<function=").partition(">")
        if not closed or not inside.rstrip().endswith("</function>"):
            return _UNCLOSED
        return _with_texts(name.strip(), dict(_PARAMETER.findall(inside)), tools)
    name = body.partition("<arg_key>")[0].strip()
    if _NAME.fullmatch(name):
        pairs = {key.strip(): value for key, value in _PAIR.findall(body)}
        return _with_texts(name, pairs, tools) if body.count("<arg_key>") == len(pairs) else _INVALID
    try:
        return _of_object(read_json(body))
    except (ValueError, RecursionError):
        return _INVALID


def _mistral(text: str) -> Iterator[CallAttempt]:
    # newer form: one name and arguments after each mark
    if "[ARGS]" in text:
        for part in text.split("[TOOL_CALLS]"):
            name, _, arguments = part.partition("[ARGS]")
            yield _with_json(name.partition("[CALL_ID]")[0].strip(), arguments)
        return
    try:
        calls = read_json(text)
    except (ValueError, RecursionError):
        yield _INVALID if _closes(text) else _UNCLOSED
        return
    for call in cast("list[Any]", calls) if isinstance(calls, list) else [calls]:
        yield _of_object(call)


def _objects(text: str) -> Iterator[CallAttempt]:
    """Read JSON objects one after another, apart by spaces or semicolons."""
    left = text.strip()
    while left:
        try:
            _, end = json.JSONDecoder().raw_decode(left)
            call = _of_object(read_json(left[:end]))
        except (ValueError, RecursionError):
            yield _INVALID if _closes(left) else _UNCLOSED
            return
        yield call
        left = left[end:].lstrip(" ;\n")


def _closes(text: str) -> bool:
    return text.rstrip().endswith(("}", "]"))


def _of_object(call: Any) -> CallAttempt:
    if not isinstance(call, dict):
        return _INVALID
    fields = cast("dict[str, Any]", call)
    # also {"type": "function", "function": {...}}
    inner = fields.get("function")
    fields = cast("dict[str, Any]", inner) if isinstance(inner, dict) else fields
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        return _INVALID
    return CallAttempt(name=name, arguments=fields.get("arguments", fields.get("parameters", {})))


def _with_json(name: str, arguments: str) -> CallAttempt:
    try:
        return CallAttempt(name=name, arguments=read_json(arguments)) if name else _INVALID
    except (ValueError, RecursionError):
        return _INVALID if _closes(arguments) else _UNCLOSED


def _with_texts(name: str, arguments: Mapping[str, str], tools: Sequence[Mapping[str, Any]]) -> CallAttempt:
    """Give values that are written without quotes the types that the tool's schema names."""
    functions = (tool.get("function", tool) for tool in tools)
    schema = next((function.get("parameters", {}) for function in functions if function.get("name") == name), {})
    typed: dict[str, Any] = {}
    for key, text in arguments.items():
        declared = json.dumps(schema.get("properties", {}).get(key, {"type": "string"} if schema else {}))
        typed[key] = text
        if '"string"' not in declared:
            with suppress(ValueError, RecursionError):
                typed[key] = read_json(text)
    return CallAttempt(name=name, arguments=typed)


def read_json(text: str) -> Any:
    """Return what JSON holds. Raises ValueError also for what other JSON readers refuse: numbers that are not finite
    or have more than 64 bits, and texts that are not Unicode."""
    found = json.loads(text, parse_int=_whole)
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    return found


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError("a number of more than 64 bits")
    return int(digits)
