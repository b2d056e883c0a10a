"""What an environment is, and the checks of what one returns.

    class Guess:
        def reset(self, row):
            self.secret = row["secret"]
            return "Guess a number from 1 to 9."

        def step(self, message):
            if message["content"].strip() == self.secret:
                return Step(reward=1.0, accuracy=1.0, done=True)
            return Step("Wrong, try again.")

Each trajectory has its own object. Both methods may be async. A message is a dict as chat templates read it: ``role``,
``content`` (a text, a list of parts, or None beside ``tool_calls``), and what else the template knows. An attribute
``tools``, a list of JSON schemas, tells the model which tools it may call; it is read after ``reset``.

A trajectory goes on in another process after a crash. There ``restore(row, data)`` continues from what ``state()``
last returned (plain data). An environment without these two methods is played again: ``reset``, then ``step``
with each earlier message, so the same messages must give the same answers."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol, cast

import msgspec

from pipeline.config.import_path import import_own, is_import_path
from pipeline.rewards.verifier import number_of, shown
from protocol.errors import ConfigError, EnvironmentFailed

ChatMessage = dict[str, Any]
Said = str | Sequence[Mapping[str, Any]]
"""What an environment says: messages, or the text of one user message."""


class Step(msgspec.Struct, frozen=True):
    """The environment's answer to a turn of the model."""

    messages: Said = ()
    """May only be empty if ``done``."""
    reward: float = 0.0
    """Of this step; a trajectory's reward is the sum."""
    done: bool = False
    accuracy: float | None = None
    """Correctness of the trajectory in [0, 1], by which dynamic sampling filters. None at the end leaves it to the
    verifier of the prompt's line, which judges the text of the last turn."""
    counts: Mapping[str, int] = {}
    """Things to be counted, such as ``{"calls_ok": 1}``."""


class Environment(Protocol):
    def reset(self, row: dict[str, Any]) -> Said | Awaitable[Said]:
        """Begin a trajectory with the prompt's line; return the messages that the model answers first."""
        ...

    def step(self, message: ChatMessage) -> Step | Awaitable[Step]:
        """Answer the model's turn: ``role``, ``content``, and if there are any ``reasoning_content`` (its thinking),
        ``tool_calls``, and ``bad_calls``: those that cannot be read, with ``id``, ``status`` and ``name``."""
        ...


BUILT_IN: Final = {
    "tools": "pipeline.environments.tool_environment:ToolEnvironment",
    "gymnasium": "pipeline.environments.bridges.gymnasium:GymnasiumEnvironment",
    "textarena": "pipeline.environments.bridges.textarena:TextArenaEnvironment",
    "verifiers": "pipeline.environments.bridges.verifiers:VerifiersEnvironment",
    "verifiers-v0": "pipeline.environments.bridges.verifiers_v0:VerifiersV0Environment",
}
MAX_TURN_CHARS: Final = 1_000_000
"""Longest messages of one turn, as JSON."""
MAX_STATE_BYTES: Final = 1 << 20
_MAX_COUNTS: Final = 64
_MAX_REWARD: Final = 1e12


def load_environment(path: str, settings: Mapping[str, Any] | None = None) -> Callable[[], Environment]:
    """Return what makes an environment for a new trajectory: the class at ``package.module:Class`` or of a built-in
    name, called with ``settings``. Raises ConfigError if there is none, its methods are missing, or it does not take
    these settings."""
    if path not in BUILT_IN and not is_import_path(path):
        raise ConfigError(
            f"environment {path!r}: expected one of {', '.join(BUILT_IN)}, or your own class as package.module:Class"
        )
    found: Any = import_own("environment", BUILT_IN.get(path, path), "environment.folders")
    if not callable(found):
        raise ConfigError(f"environment {path!r} is a {type(found).__name__}; expected a class with reset and step")
    methods = {"reset": "row", "step": "message"}
    if callable(getattr(found, "state", None)) != callable(getattr(found, "restore", None)):
        missing, present = ("state", "restore") if hasattr(found, "restore") else ("restore", "state")
        raise ConfigError(f"environment {path!r} has {present} but no {missing}: add it, or remove {present}")
    for method, argument in methods.items() if isinstance(found, type) else ():
        if not callable(getattr(found, method, None)):
            raise ConfigError(f"environment {path!r} has no method {method}; add {method}(self, {argument})")
        _check_call(getattr(found, method), f"environment {path!r}: {method}", None, argument)
    given = dict(settings or {})
    _check_call(found, f"environment {path!r}", **given)
    make = cast("Callable[..., Environment]", found)
    if path in BUILT_IN:
        make(**given)  # a wrong tool or id is found at the start
    return lambda: make(**given)


def _check_call(called: Callable[..., Any], what: str, *arguments: Any, **settings: Any) -> None:
    try:
        inspect.signature(called).bind(*arguments, **settings)
    except TypeError as error:
        names = ", ".join(settings) or ", ".join(map(str, arguments[1:])) or "no arguments"
        raise ConfigError(f"{what} cannot be called with {names}: {error}; correct its parameters") from None
    except ValueError:
        return  # a built-in class has no signature


def keeps_state(environment: object) -> bool:
    """Return whether it is restored from its state; otherwise its earlier actions are played again."""
    return callable(getattr(environment, "state", None)) and callable(getattr(environment, "restore", None))


def checked_messages(said: object, who: str, *, opening: bool = False) -> list[ChatMessage]:
    """Return what ``who`` (class and method) returned as messages of plain data. Raises EnvironmentFailed unless they
    are messages that the model can answer. Only an opening may have turns of an assistant, but not at its end."""
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    if not isinstance(said, Sequence) or isinstance(said, bytes):
        raise EnvironmentFailed(f"{who} returned {_kind(said)}; return a list of messages, or a text")
    messages = cast("Sequence[Any]", said)
    if not messages:
        raise EnvironmentFailed(f"{who} returned no message; the model needs one to answer")
    for number, message in enumerate(messages):
        _check_message(message, f"{who} returned message {number}")
        if message["role"] == "assistant" and (not opening or number == len(messages) - 1):
            raise EnvironmentFailed(f"{who} returned message {number} of the assistant; only the model speaks for it")
    plain = _plain([dict(message) for message in messages], f"{who} returned messages", MAX_TURN_CHARS)
    return cast("list[ChatMessage]", json.loads(plain))


def checked_step(step: object, who: str) -> Step:
    """Return a step with messages of plain data and finite numbers. Raises EnvironmentFailed."""
    if not isinstance(step, Step):
        raise EnvironmentFailed(f"{who} returned {_kind(step)}; return a Step")
    reward, accuracy = number_of(step.reward), None if step.accuracy is None else number_of(step.accuracy)
    if reward is None or not abs(reward) <= _MAX_REWARD:
        raise EnvironmentFailed(f"{who} returned reward {shown(step.reward)}; expected a finite number")
    if step.accuracy is not None and (accuracy is None or not 0.0 <= accuracy <= 1.0):
        raise EnvironmentFailed(f"{who} returned accuracy {shown(step.accuracy)}; expected one in [0, 1], or None")
    if not isinstance(step.counts, Mapping) or len(step.counts) > _MAX_COUNTS:
        raise EnvironmentFailed(f"{who} returned counts that are no dict of at most {_MAX_COUNTS} numbers")
    for name, count in step.counts.items():
        if not isinstance(name, str) or not isinstance(count, int) or not 0 <= count < 2**53:
            raise EnvironmentFailed(
                f"{who} returned count {name!r:.40} = {shown(count)}; expected a whole number from 0"
            )
    # what it says at the end is not read by anyone
    messages = [] if step.done else checked_messages(step.messages, who)
    return Step(messages, reward, bool(step.done), accuracy, {name: int(count) for name, count in step.counts.items()})


def checked_state(state: object, who: str) -> Any:
    """Return a copy of a state of plain data. Raises EnvironmentFailed if JSON cannot hold it."""
    return json.loads(_plain(state, f"{who} returned a state", MAX_STATE_BYTES))


def _check_message(message: object, what: str) -> None:
    if not isinstance(message, Mapping):
        raise EnvironmentFailed(f"{what}, which is {_kind(message)}; expected a dict with role and content")
    fields = cast("Mapping[str, Any]", message)
    if not isinstance(fields.get("role"), str) or not fields["role"]:
        raise EnvironmentFailed(
            f"{what} with role {shown(fields.get('role'))}; expected user, tool, system or assistant"
        )
    content = fields.get("content")
    if content is None:
        if not fields.get("tool_calls"):
            raise EnvironmentFailed(f"{what} without content; only a message with tool_calls may have none")
    elif isinstance(content, list):
        for part in cast("list[Any]", content):
            if not isinstance(part, dict) or not isinstance(cast("dict[str, Any]", part).get("type"), str):
                raise EnvironmentFailed(f"{what} with the part {shown(part)}; expected a dict with a type")
    elif not isinstance(content, str):
        raise EnvironmentFailed(f"{what} with content of {_kind(content)}; expected a text or a list of parts")


def _plain(data: object, what: str, most: int) -> str:
    """Return JSON. Raises EnvironmentFailed if ``data`` is not plain, or longer than ``most`` characters."""
    try:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailed(
            f"{what} that cannot be stored: {error}; use dicts, lists, texts, finite numbers, booleans and None"
        ) from None
    if len(text) > most:
        raise EnvironmentFailed(f"{what} of {len(text)} characters; at most {most} are allowed: shorten them")
    return text


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
