"""Every attempt at a tool call is found, with a status, in each family's format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.environments.tool_calls import CallAttempt, CallStatus, attempted_calls

OK, INVALID, UNCLOSED = CallStatus.OK, CallStatus.INVALID_JSON, CallStatus.UNCLOSED
JSON = '{"name": "add", "arguments": {"a": 1}}'
ADD = CallAttempt(name="add", arguments={"a": 1})


def schema(**types: Any) -> dict[str, Any]:
    properties = {name: {"type": kind} for name, kind in types.items()}
    return {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": properties}}}


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{JSON}\n</tool_call>",
        f"<tool_call>{JSON}</tool_call>",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        f"[TOOL_CALLS] [{JSON}]",
        '[TOOL_CALLS]add[ARGS]{"a": 1}',
        '[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1}',
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
        '<tool_call>{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}</tool_call>',
    ],
)
def test_a_call_of_each_format_is_read_and_leaves_the_text_before_it(text: str) -> None:
    assert attempted_calls(f"I add.\n{text}", [schema(a="integer")]) == ("I add.", [ADD])


def test_bare_json_is_a_call_only_where_the_template_writes_calls_so() -> None:
    text = '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}'
    assert attempted_calls(text, bare_json=True) == ("", [ADD, ADD])
    assert attempted_calls(text) == (text, [])
    assert attempted_calls("five", bare_json=True) == ("five", [])


@pytest.mark.parametrize(
    ("text", "statuses"),
    [
        (f"<tool_call>{JSON}", [UNCLOSED]),
        (f"<tool_call>{JSON}<tool_call>{JSON}</tool_call>", [UNCLOSED, OK]),
        ("<tool_call>{'name': 'add'}</tool_call>", [INVALID]),
        ("<tool_call>[1]</tool_call>", [INVALID]),
        ("<tool_call>{}</tool_call>", [INVALID]),
        ('<tool_call>{"name": 3}</tool_call>', [INVALID]),
        ("<tool_call></tool_call>", [INVALID]),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", [INVALID]),
        (f'<tool_call>{{"name": "add", "arguments": {{}}</tool_call><tool_call>{JSON}</tool_call>', [INVALID, OK]),
        ("<tool_call><function=add><parameter=a>1</parameter></tool_call>", [UNCLOSED]),
        ("<tool_call>add<arg_key>a</arg_key><arg_value>1</tool_call>", [INVALID]),
        ('[TOOL_CALLS] [{"name": "add", "arg', [UNCLOSED]),
        ("[TOOL_CALLS] [{add}]", [INVALID]),
        ('[TOOL_CALLS]add[ARGS]{"a": ', [UNCLOSED]),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>add", [UNCLOSED]),
        ("<｜tool▁call▁begin｜>add()<｜tool▁call▁end｜>", [INVALID]),
        ("<|python_tag|>print(1)", [UNCLOSED]),
        # what JSON of other readers cannot hold
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', [INVALID]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', [INVALID]),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', [INVALID]),
        (f'<tool_call>{{"name": "add", "arguments": {{"a": {2**64}}}}}</tool_call>', [INVALID]),
        (f'<tool_call>{{"name": "add", "arguments": {{"a": {2**63 - 1}}}}}</tool_call>', [OK]),
        (f'<tool_call>{{"name": "add", "arguments": {{"a": {-(2**63)}}}}}</tool_call>', [OK]),
    ],
)
def test_every_attempt_has_a_status(text: str, statuses: list[CallStatus]) -> None:
    assert [call.status for call in attempted_calls(text)[1]] == statuses


def test_values_without_quotes_get_the_types_of_the_schema() -> None:
    values = {"flag": "true", "word": "true", "list": "[1, 2]", "number": "x", "other": "7"}
    tools = [schema(flag="boolean", word="string", list="array", number="integer")]
    wanted = {"flag": True, "word": "true", "list": [1, 2], "number": "x", "other": "7"}
    xml = "".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in values.items())
    glm = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in values.items())
    for inside in (f"<function=add>{xml}</function>", f"add{glm}"):
        assert attempted_calls(f"<tool_call>{inside}</tool_call>", tools)[1][0].arguments == wanted


def test_four_kinds_are_the_models_fault() -> None:
    faults = {str(status) for status in CallStatus if status.is_models_fault}
    assert faults == {"invalid_json", "unclosed", "unknown_tool", "bad_arguments"}


def test_an_answer_that_speaks_of_json_is_no_call() -> None:
    text = f"Write {json.dumps({'a': 1})} and <tools>."
    assert attempted_calls(text) == (text, [])
