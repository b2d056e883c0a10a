"""The built-in environment: every call gets an answer, whose fault it was is counted, and the last turn is judged."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.cross_checks import BUILT_IN_TOOLS
from pipeline.environments import tools
from pipeline.environments.contract import checked_messages, checked_step, keeps_state, load_environment
from pipeline.environments.conversation import BAD_CALLS, ChatFormat, call_id
from pipeline.environments.tool_environment import ToolEnvironment
from protocol.errors import ConfigError, EnvironmentFailed
from tests.pipeline.environments.families import family_ends, family_tokenizer


def broken(text: str) -> str:
    raise RuntimeError(f"no {text} at 0x7f00")


async def slow(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return f"slept {seconds}"


BOTH = threading.Barrier(2)


def meeting() -> str:
    BOTH.wait(timeout=20)
    return "met"


def table(rows: int) -> list[dict[str, int]]:
    return [{"row": row} for row in range(rows)]


def turn(*calls: tuple[str, Any], bad: tuple[tuple[int, str], ...] = ()) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "I call."}
    numbers = iter(n for n in range(len(calls) + len(bad)) if n not in dict(bad))
    message["tool_calls"] = [
        {"id": call_id(next(numbers)), "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls
    ]
    if bad:
        message[BAD_CALLS] = [{"id": call_id(number), "status": status, "name": ""} for number, status in bad]
    return message


def texts(messages: Any) -> list[str]:
    return [message["content"] for message in messages]


async def test_every_call_of_a_turn_is_answered_in_order_whatever_the_others_did() -> None:
    environment = ToolEnvironment(["calculator", broken, slow], tool_timeout_s=0.2)
    calls = [
        ("slow", {"seconds": 0.01}),
        ("calculator", {"expression": "2+3"}),
        ("calculator", '{"expression": "2*3"}'),
        ("calculator", "2*3"),
        ("calculater", {}),
        ("broken", {"text": "way"}),
        ("slow", {"seconds": 30.0}),
        ("calculator", {"expression": "import os"}),
    ]
    message = turn(*calls, bad=((1, "invalid_json"), (3, "unclosed")))
    step = checked_step(await environment.step(message), "ToolEnvironment.step")
    assert not step.done
    assert [one["tool_call_id"] for one in step.messages] == [call_id(number) for number in range(10)]  # pyright: ignore[reportArgumentType, reportIndexIssue, reportCallIssue]
    found = texts(step.messages)
    assert (found[0], found[2], found[4]) == ("slept 0.01", "5", "6")
    assert json.loads(found[1])["error"].startswith("the call cannot be read")
    assert json.loads(found[3])["error"] == "the call has no end; close it"
    assert "arguments of calculator are a text" in found[5]
    assert json.loads(found[6])["error"] == "there is no tool 'calculater'; there are: calculator, broken, slow"
    assert json.loads(found[7])["error"] == "broken failed with RuntimeError: no way"
    assert "slow did not answer within 0.2 s" in found[8]
    assert "no arithmetic expression" in found[9]
    assert step.counts == {
        "calls_ok": 3,
        "calls_invalid_json": 1,
        "calls_unclosed": 1,
        "calls_bad_arguments": 2,
        "calls_unknown_tool": 1,
        "calls_tool_failed": 1,
        "calls_late": 1,
    }
    again = await ToolEnvironment(["calculator", broken, slow], tool_timeout_s=0.2).step(message)
    assert again == step


async def test_calls_of_a_turn_run_at_once() -> None:
    step = await ToolEnvironment([meeting]).step(turn(("meeting", {}), ("meeting", {})))
    assert texts(step.messages) == ["met"] * 2


async def test_a_turn_without_calls_ends_it_and_leaves_the_judgement_to_the_verifier() -> None:
    step = await ToolEnvironment(["calculator"]).step({"role": "assistant", "content": "5"})
    assert step.done
    assert step.accuracy is None
    assert step.reward == 0.0


async def test_no_call_is_run_again_when_a_trajectory_goes_on_elsewhere() -> None:
    environment = ToolEnvironment(["calculator"])
    assert keeps_state(environment)
    await environment.step(turn(("calculator", {"expression": "1+1"})))
    ToolEnvironment(["calculator"]).restore({}, environment.state())


async def test_a_long_result_is_cut_with_a_sentence_and_counted() -> None:
    step = await ToolEnvironment([table], max_tool_chars=40).step(turn(("table", {"rows": 100})))
    (text,) = texts(step.messages)
    assert text == '[{"row": 0}, {"row": 1}, {"row": 2}, {"r\n[cut: the result has 1290 characters]'
    assert step.counts == {"calls_ok": 1, "long_results": 1}


async def test_only_so_many_calls_of_a_turn_are_run() -> None:
    step = await ToolEnvironment(["calculator"]).step(turn(*[("calculator", {"expression": "1"})] * 20))
    assert step.counts == {"calls_ok": 16, "calls_bad_arguments": 4}
    assert len(step.messages) == 20


def test_it_begins_with_the_lines_messages_or_prompt() -> None:
    environment = ToolEnvironment()
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert checked_messages(environment.reset({"messages": messages}), "x", opening=True) == messages
    assert environment.reset({"prompt": "add"}) == [{"role": "user", "content": "add"}]
    with pytest.raises(EnvironmentFailed, match=r"ToolEnvironment\.reset: the line has neither"):
        environment.reset({})


def test_the_configuration_knows_the_built_in_tools(tmp_path: Path) -> None:
    for name in BUILT_IN_TOOLS:
        assert tools.load_tool(f"{name}:{tmp_path}" if name == "search" else name).name == name


def test_it_is_built_in_and_its_settings_are_checked() -> None:
    environment: Any = load_environment("tools", {"tools": ["calculator"], "max_tool_chars": 3})()
    assert [tool["function"]["name"] for tool in environment.tools] == ["calculator"]
    with pytest.raises(ConfigError, match="cannot be called with turns"):
        load_environment("tools", {"turns": 3})
    with pytest.raises(ConfigError, match="two tools 'calculator'"):
        ToolEnvironment(["calculator", "calculator"])
    with pytest.raises(ConfigError, match="above 0"):
        ToolEnvironment(max_tool_chars=0)


@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral", "gemma", "glm", "deepseek-v3", "smollm2", "granite"])
async def test_a_call_in_a_familys_own_format_is_run_and_its_result_follows_in_its_template(name: str) -> None:
    tokenizer, form = family_tokenizer(name), ChatFormat(family_tokenizer(name), family_ends(name))
    environment = ToolEnvironment(["calculator"])
    opening = environment.reset({"prompt": "add"})
    call = {"expression": "2+3"}
    text = {
        "llama3": f'{{"name": "calculator", "parameters": {json.dumps(call)}}}',
        "mistral": f'[TOOL_CALLS] [{{"name": "calculator", "arguments": {json.dumps(call)}}}]',
        "glm": "<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>2+3</arg_value>\n</tool_call>",
        "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n"
        f"{json.dumps(call)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    }.get(name, f'<tool_call>{{"name": "calculator", "arguments": {json.dumps(call)}}}</tool_call>')
    sampled = tokenizer.encode(text, add_special_tokens=False)
    turned = form.parse(sampled, environment.tools)
    step = checked_step(await environment.step(turned.message), "ToolEnvironment.step")
    assert step.counts == {"calls_ok": 1}
    given = form.following(
        [*opening, turned.message],
        list(step.messages),  # pyright: ignore[reportArgumentType]
        last_token=sampled[-1],
        tools=environment.tools,
    )
    assert "5" in given.text
    assert "calculator" not in given.text


async def test_calls_that_cannot_be_read_are_told_from_the_models_text_on() -> None:
    tokenizer, form = family_tokenizer("qwen3"), ChatFormat(family_tokenizer("qwen3"), family_ends("qwen3"))
    environment = ToolEnvironment(["calculator"])
    text = '<tool_call>{bad}</tool_call>\n<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'
    message = form.parse(tokenizer.encode(text, add_special_tokens=False), environment.tools).message
    step = await environment.step(message)
    assert step.counts == {"calls_invalid_json": 1, "calls_ok": 1}
    assert texts(step.messages)[1] == "2"
    alone = form.parse(tokenizer.encode("<tool_call>{bad}", add_special_tokens=False), environment.tools).message
    assert (await environment.step(alone)).counts == {"calls_unclosed": 1}
