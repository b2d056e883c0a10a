"""What an environment may return, and what it is told otherwise."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.cross_checks import BUILT_IN_ENVIRONMENTS
from pipeline.environments.contract import (
    BUILT_IN,
    Step,
    checked_messages,
    checked_state,
    checked_step,
    keeps_state,
    load_environment,
)
from protocol.errors import ConfigError, EnvironmentFailed

MODULE = """
from pipeline.environments.contract import Step

class Guess:
    def __init__(self, secret="7"):
        self.secret = secret
    def reset(self, row):
        return "Guess."
    async def step(self, message):
        return Step("No.") if message["content"] != self.secret else Step(done=True)

class NoStep:
    def reset(self, row): ...

class NoReset:
    def step(self, message): ...

class NoArgument:
    def reset(self): ...
    def step(self, message): ...

class HalfState:
    def reset(self, row): ...
    def step(self, message): ...
    def state(self): ...

NUMBER = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "guessing_games.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "guessing_games", raising=False)
    return "guessing_games"


def test_a_class_is_loaded_by_its_path_and_made_anew_for_each_trajectory(module: str) -> None:
    make = load_environment(f"{module}:Guess", {"secret": "5"})
    first, second = make(), make()
    assert first is not second
    assert first.reset({}) == "Guess."
    assert vars(first) == vars(second) == {"secret": "5"}


@pytest.mark.parametrize(
    ("path", "settings", "wanted"),
    [
        ("{}:Guesss", {}, "did you mean 'Guess'"),
        ("no_such_module:Guess", {}, "no module named 'no_such_module'"),
        ("guess", {}, "package.module:Class"),
        ("{}:NoStep", {}, "NoStep' has no method step; add step(self, message)"),
        ("{}:NoReset", {}, "NoReset' has no method reset; add reset(self, row)"),
        ("{}:NoArgument", {}, "NoArgument': reset cannot be called with row"),
        ("{}:HalfState", {}, "has state but no restore"),
        ("{}:NUMBER", {}, "is a int; expected a class"),
        ("{}:Guess", {"sekret": "5"}, "cannot be called with sekret"),
    ],
)
def test_what_cannot_be_an_environment_is_refused_by_name(
    module: str, path: str, settings: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_environment(path.format(module), settings)
    assert wanted in str(caught.value)


def test_a_built_in_name_is_accepted_and_names_the_package_that_it_needs() -> None:
    assert BUILT_IN.keys() - {"agent"} == set(BUILT_IN_ENVIRONMENTS), "an agent has a setting of its own"
    known: dict[str, dict[str, Any]] = {
        "gymnasium": {"id": "FrozenLake-v1"},
        "textarena": {"id": "Nim-v0", "opponent": "random"},
        "verifiers": {"taskset": "none"},
        "verifiers-v0": {"environment": "none"},
    }
    assert known.keys() == BUILT_IN.keys() - {"tools", "agent"}
    for name, settings in known.items():
        package = name.partition("-")[0]
        words = rf"^{package} .*: {package} cannot be imported .*'headrace\[{name}\]'"
        with pytest.raises(ConfigError, match=words) if find_spec(package) is None else suppress(ConfigError):
            load_environment(name, settings)


def test_a_text_is_one_user_message() -> None:
    assert checked_messages("Hello", "Game.reset") == [{"role": "user", "content": "Hello"}]


def test_legal_messages_come_back_as_plain_copies() -> None:
    parts = [{"type": "text", "text": "look"}]
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    given: list[dict[str, Any]] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": "a"},
    ]
    found = checked_messages(given, "Game.reset", opening=True)
    assert found == given
    parts.clear()
    assert found[0]["content"]


NESTED: list[Any] = []
NESTED.append(NESTED)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (None, "returned nothing"),
        ([], "returned no message"),
        (3, "a int"),
        (b"text", "a bytes"),
        (["text"], "message 0, which is a str"),
        ([{"content": "a"}], "with role None"),
        ([{"role": "user"}], "without content"),
        ([{"role": "user", "content": None, "tool_calls": []}], "without content"),
        ([{"role": "user", "content": 3}], "content of a int"),
        ([{"role": "user", "content": ["text"]}], "with the part 'text'"),
        ([{"role": "user", "content": "a", "extra": {1, 2}}], "cannot be stored"),
        ([{"role": "user", "content": "a", "extra": float("nan")}], "cannot be stored"),
        ([{"role": "user", "content": "\ud800"}], "cannot be stored"),
        ([{"role": "user", "content": "a", "extra": NESTED}], "cannot be stored"),
        ("a" * 1_000_001, "at most 1000000"),
        ([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}], "only the model speaks"),
    ],
)
def test_what_no_model_could_answer_is_refused_with_class_and_method(said: object, wanted: str) -> None:
    with pytest.raises(EnvironmentFailed) as caught:
        checked_messages(said, "Game.step")
    assert str(caught.value).startswith("Game.step returned")
    assert wanted in str(caught.value)


def test_an_opening_may_show_the_assistant_but_not_end_with_it() -> None:
    shown = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert len(checked_messages([*shown, {"role": "user", "content": "c"}], "Game.reset", opening=True)) == 3
    with pytest.raises(EnvironmentFailed, match="only the model"):
        checked_messages(shown, "Game.reset", opening=True)


def test_a_step_has_numbers_of_any_library_and_messages_only_before_the_end() -> None:
    step = checked_step(Step("Next.", np.float32(0.5), counts={"moves": 2}), "Game.step")  # pyright: ignore[reportArgumentType]
    assert step == Step([{"role": "user", "content": "Next."}], 0.5, counts={"moves": 2})
    assert checked_step(Step(done=True, accuracy=1), "Game.step").accuracy == 1.0
    assert not checked_step(Step("Bye.", done=True), "Game.step").messages


@pytest.mark.parametrize(
    ("step", "wanted"),
    [
        (("text", 1.0), "a tuple; return a Step"),
        (None, "nothing; return a Step"),
        (Step(), "no message"),
        (Step("a", float("nan")), "reward nan"),
        (Step("a", float("inf")), "reward inf"),
        (Step("a", "1"), "reward '1'"),  # pyright: ignore[reportArgumentType]
        (Step("a", accuracy=2.0), "accuracy 2.0"),
        (Step("a", accuracy=float("nan")), "accuracy nan"),
        (Step("a", counts={"a": -1}), "count 'a'"),
        (Step("a", counts={"a": 0.5}), "count 'a'"),  # pyright: ignore[reportArgumentType]
        (Step("a", counts=["a"]), "no dict"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_a_step_that_cannot_be_used_is_refused(step: object, wanted: str) -> None:
    with pytest.raises(EnvironmentFailed) as caught:
        checked_step(step, "Game.step")
    assert wanted in str(caught.value)


def test_a_state_is_plain_data_within_a_limit() -> None:
    state = {"board": [1, 2]}
    copied = checked_state(state, "Game.state")
    state["board"].append(3)
    assert copied == {"board": [1, 2]}
    for bad in (object(), float("inf"), "a" * (2 << 20)):
        with pytest.raises(EnvironmentFailed, match=r"^Game\.state returned a state"):
            checked_state(bad, "Game.state")


def test_an_environment_keeps_state_only_with_both_methods() -> None:
    class Keeps:
        def state(self) -> int:
            return 1

        def restore(self, row: object, data: object) -> None: ...

    class Plays: ...

    assert keeps_state(Keeps())
    assert not keeps_state(Plays())
