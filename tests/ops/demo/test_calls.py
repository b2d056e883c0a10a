"""The task of the demo with a real model and a tool."""

from __future__ import annotations

import pytest

from ops.demo.calls import Calls
from pipeline.data.tokenizer import TextTokenizer
from pipeline.environments.conversation import ChatFormat
from tests.pipeline.environments.families import family_ends, family_tokenizer


def smollm2() -> tuple[ChatFormat, TextTokenizer]:
    tokenizer = family_tokenizer("smollm2")
    return ChatFormat(tokenizer, family_ends("smollm2"), keep_thinking=False), tokenizer


def test_the_first_messages_show_calls_in_the_models_own_template() -> None:
    form, tokenizer = smollm2()
    read = tokenizer.decode(form.opening(Calls().reset({"question": "23*45"}), ()).tokens, skip_special_tokens=False)
    assert read.count('"expression": "') == 2 and read.rstrip().endswith("assistant")
    assert "23*45" in read


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "23*45"}}\n</tool_call>', 1.0),
        ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "23*"}}\n</tool_call>', 0.0),
        ('<tool_call>\n{"name": "calc", "arguments": {"expression": "23*45"}}\n</tool_call>', 0.0),
        ("1035", 0.0),
    ],
)
async def test_a_turn_is_right_if_it_is_one_call_that_works(said: str, reward: float) -> None:
    task = Calls()
    task.reset({"question": "23*45"})
    form, tokenizer = smollm2()
    message = form.parse(tokenizer.encode(said, add_special_tokens=False)).message
    step = await task.step(message)
    assert (step.reward, step.accuracy, step.done) == (reward, reward, True)
