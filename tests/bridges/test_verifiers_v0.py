"""Claims about environments of the real package verifiers before 0.4: what the package's own rollout does."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.import_path import import_extra
from pipeline.environments.contract import checked_messages, checked_step, load_environment
from protocol.errors import ConfigError, EnvironmentFailed
from tests.bridges.packages import needs

pytestmark = needs("verifiers.legacy")

MODULE = '''
import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"{n} + 1 =", "answer": str(n + 1), "info": {"n": n}} for n in range(4)]


def is_right(completion, answer) -> float:
    return float(completion[-1].content.strip() == answer)


async def num_messages(prompt, completion, info, state) -> float:
    assert info["n"] >= 0 and state["answer"]
    return float(len(prompt) + len(completion))


def breaks(completion) -> float:
    raise RuntimeError("no judge today")


def rubric(*funcs):
    return vf.Rubric(funcs=[is_right, num_messages, *funcs], weights=[1.0, 0.01, *(0.5 for _ in funcs)])


def single(system_prompt="Say the number."):
    data = Dataset.from_list(ROWS)
    return vf.SingleTurnEnv(dataset=data, eval_dataset=data.select([3]), system_prompt=system_prompt, rubric=rubric())


def broken():
    return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=rubric(breaks))


class Asking(vf.MultiTurnEnv):
    """Says higher or lower, three times at most; `setup_state` counts from there."""

    async def setup_state(self, state):
        state["asked"] = 10 * state["info"]["n"]

    async def env_response(self, messages, state, **kwargs):
        state["asked"] += 1
        said, answer = messages[-1].content, state["answer"]
        if said == "give up":
            state["final_env_response"] = [vf.UserMessage(content="A pity.")]
            return state["final_env_response"]
        if said == "crash":
            raise vf.Error("the game is lost")
        return [vf.UserMessage(content=f"{state['asked']}: " + ("higher" if int(said) < int(answer) else "lower"))]

    @vf.stop
    async def is_found(self, state):
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content == state["answer"]

    @vf.cleanup
    async def clean_up(self, state):
        CLEANED.append(state["asked"])


CLEANED = []


def asking():
    return Asking(dataset=Dataset.from_list(ROWS), rubric=rubric(), max_turns=3)


class Forgetful(Asking):
    """Shows only the last turn."""

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages if len(messages) < 3 else [messages[0], messages[-1]]


def forgetful():
    return Forgetful(dataset=Dataset.from_list(ROWS), rubric=rubric(), max_turns=3)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def tools():
    return vf.ToolEnv(dataset=Dataset.from_list(ROWS), rubric=rubric(), tools=[add])


def of_groups():
    def best(completions) -> list[float]:
        return [1.0 for _ in completions]

    return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[best]))


def load_environment(**arguments):
    return single(**arguments)
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "sums_v0" not in sys.modules:
        (tmp_path / "sums_v0.py").write_text(MODULE)
        monkeypatch.syspath_prepend(str(tmp_path))


def made(name: str, **arguments: Any) -> Any:
    return load_environment("verifiers-v0", {"environment": f"sums_v0:{name}", **arguments})()


def call(number: int, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


async def theirs(name: str, index: int, turns: list[dict[str, Any]]) -> tuple[list[Any], float]:
    """Return the conversation and the reward of the package's own rollout with a model that says these turns."""
    types = import_extra("verifiers.legacy.types", "verifiers-v0", "the test")
    client_type = import_extra("verifiers.legacy.clients", "verifiers-v0", "the test").Client
    left = iter(turns)

    async def get_response(self: Any, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
        turn = next(left)
        calls = [types.ToolCall(id=one["id"], **_with_text(one["function"])) for one in turn.get("tool_calls", ())]
        message = types.ResponseMessage(
            content=turn["content"], tool_calls=calls or None, finish_reason="stop", is_truncated=False
        )
        return types.Response(id="", created=0, model=model, message=message)

    scripted = {
        "__init__": lambda _: None,
        **dict.fromkeys(client_type.__abstractmethods__),
        "get_response": get_response,
    }
    environment = getattr(sys.modules["sums_v0"], name)()
    client = type("Scripted", (client_type,), scripted)()
    state = await environment.rollout(dict(environment.get_dataset()[index]), client, "policy", {})
    await environment.rubric.score_rollout(state)
    conversation = [*state["prompt"], *state["completion"]]
    return [(message.role, message.content) for message in conversation], state["reward"]


def _with_text(function: dict[str, Any]) -> dict[str, str]:
    import json

    return {"name": function["name"], "arguments": json.dumps(function["arguments"])}


async def ours(name: str, index: int, turns: list[dict[str, Any]]) -> tuple[list[Any], float]:
    environment = made(name)
    told = checked_messages(await environment.reset({"index": index}), "reset", opening=True)
    conversation = [(message["role"], message["content"]) for message in told]
    for turn in turns:
        step = checked_step(await environment.step({"role": "assistant", **turn}), "step")
        conversation.append(("assistant", turn["content"]))
        if step.done:
            assert step.accuracy == float(step.reward >= 1.0)
            return conversation, step.reward
        messages: Any = step.messages
        conversation += [(message["role"], message["content"]) for message in messages]
    raise AssertionError("it has not ended")


@pytest.mark.parametrize(
    ("name", "index", "turns"),
    [
        ("single", 2, [{"content": "3"}]),
        ("single", 2, [{"content": "4"}]),
        ("asking", 1, [{"content": "1"}, {"content": "7"}, {"content": "2"}]),
        ("asking", 1, [{"content": "1"}, {"content": "7"}, {"content": "8"}]),
        ("tools", 3, [{"content": "", "tool_calls": [call(0, "add", {"a": 3, "b": 1})]}, {"content": "4"}]),
        (
            "tools",
            3,
            [{"content": "", "tool_calls": [call(0, "sub", {"a": 3}), call(1, "add", {"a": 1})]}, {"content": "4"}],
        ),
    ],
)
async def test_conversation_and_reward_are_those_of_the_packages_own_rollout(
    name: str, index: int, turns: list[dict[str, Any]]
) -> None:
    assert await ours(name, index, turns) == await theirs(name, index, turns)


async def test_a_prompt_that_leaves_earlier_turns_out_begins_a_new_conversation() -> None:
    environment = made("forgetful")
    first = await environment.reset({"index": 1})
    steps = [checked_step(await environment.step({"content": text}), "step") for text in ("1", "7", "2")]
    assert [step.restarts for step in steps] == [True, True, False]
    assert steps[1].messages == [*first, {"role": "user", "content": "12: lower"}]
    assert (steps[2].done, steps[2].accuracy) == (True, 1.0)


async def test_a_final_answer_of_the_environment_ends_the_episode() -> None:
    environment = made("asking")
    await environment.reset({"index": 1})
    sys.modules["sums_v0"].CLEANED.clear()
    step = await environment.step({"content": "give up"})
    assert (step.done, round(step.reward, 2)) == (True, 0.03)
    assert sys.modules["sums_v0"].CLEANED == [11]


async def test_tools_reach_the_model_and_a_call_that_cannot_be_read_is_told() -> None:
    environment = made("tools")
    await environment.reset({"index": 0})
    (tool,) = environment.tools
    assert tool["type"] == "function" and tool["function"]["name"] == "add"
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    bad = {"id": "c0", "status": "invalid_json", "name": "add"}
    step = await environment.step({"content": "<tool_call>{", "bad_calls": [bad]})
    (told,) = step.messages
    assert (told["role"], told["tool_call_id"], step.done) == ("tool", "c0", False)


async def test_failures_of_environment_and_rewards_are_no_scores() -> None:
    environment = made("broken")
    await environment.reset({"index": 0})
    with pytest.raises(EnvironmentFailed, match="Error calling reward function breaks: no judge today"):
        await environment.step({"content": "1"})
    environment = made("asking")
    await environment.reset({"index": 0})
    with pytest.raises(EnvironmentFailed, match="Error: the game is lost"):
        await environment.step({"content": "crash"})


async def test_an_episode_that_a_limit_ends_is_cleaned_up() -> None:
    environment = made("asking")
    await environment.reset({"index": 3})
    sys.modules["sums_v0"].CLEANED.clear()
    await environment.close()
    assert sys.modules["sums_v0"].CLEANED == [30]


async def test_rows_name_examples_of_training_or_evaluation_and_arguments_reach_the_environment() -> None:
    environment: Any = load_environment(
        "verifiers-v0", {"environment": "sums-v0", "arguments": {"system_prompt": "Go."}}
    )()
    assert await environment.reset({"index": 0, "split": "eval"}) == [
        {"role": "system", "content": "Go."},
        {"role": "user", "content": "3 + 1 ="},
    ]
    with pytest.raises(EnvironmentFailed, match=r"has 1 examples; index is 1: remove that line"):
        await environment.reset({"index": 1, "split": "eval"})
    with pytest.raises(EnvironmentFailed, match=r"VerifiersV0Environment\.reset: index is None; give each line"):
        await environment.reset({})


def test_the_process_keeps_its_handlers_of_signals() -> None:
    before = signal.getsignal(signal.SIGTERM)
    load_environment("verifiers-v0", {"environment": "sums_v0:load_environment", "arguments": {"system_prompt": "new"}})
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("sums_v0:singel", r"has no 'singel'; did you mean 'single'"),
        ("no-such-environment", r"cannot be loaded: ValueError: Could not import 'no-such-environment'"),
        ("sums_v0:of_groups", r"has rewards of whole groups; name them in reward\.functions"),
        ("sums_v0:rubric", r"is a Rubric; expected a SingleTurnEnv, MultiTurnEnv or ToolEnv"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_environment("verifiers-v0", {"environment": name})
