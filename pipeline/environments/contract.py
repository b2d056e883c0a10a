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
``tools``, a list of JSON schemas, tells the model which tools it may call; it is read after ``reset``. ``reset`` may
return a ``Step`` too, to say how the first turn is sampled. A class with ``wants_sampled = True`` finds in each message
``sampled``: what ``SampledTurn`` says.

A trajectory goes on in another process after a crash. There ``restore(row, data)`` continues from what ``state()``
last returned (plain data). An environment without these two methods is played again: ``reset``, then ``step``
with each earlier message, so the same messages must give the same answers."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypedDict, cast

import msgspec

from pipeline.config.import_path import import_own, is_import_path
from pipeline.rewards.verifier import number_of, shown
from protocol.errors import ConfigError, EnvironmentFailed

ChatMessage = dict[str, Any]
TEXT: Final = "text"
"""Role of a message that stands alone: the model goes on with its content, without a chat template."""
SAMPLED: Final = "sampled"
"""Key of a ``SampledTurn`` in the messages of an environment that ``wants_sampled``."""
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
    restarts: bool = False
    """``messages`` are a whole new conversation, which takes the place of what was said so far. What the model said
    before is still trained on, once, in the conversation in which it was said."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Of a new conversation; None for those of the one before."""
    max_tokens: int = 0
    """Most tokens of the model's next turn; 0 for no limit of its own."""
    stop: Sequence[str] = ()
    """Texts that end the model's next turn; they are not part of its message."""
    logprobs: bool = False
    """Whether ``message["sampled"]`` of the next turn has log-probs; then the turn is one window."""


class SampledTurn(TypedDict):
    """How the model's turn was sampled."""

    finish: str
    """``stop``, or ``length`` if ``max_tokens`` ended it."""
    num_context: int
    """Tokens of the conversation before the turn."""
    num_tokens: int
    logprobs: list[tuple[str, float]] | None
    """Each token's text and log-prob; None unless the turn was asked for with ``logprobs``, and if it was cut."""


class Environment(Protocol):
    def reset(self, row: dict[str, Any]) -> Said | Step | Awaitable[Said | Step]:
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
    "agent": "pipeline.environments.agent:AgentEnvironment",
}
MAX_TURN_CHARS: Final = 1_000_000
"""Longest messages of one turn, as JSON."""
MAX_STATE_BYTES: Final = 1 << 20
_MAX_COUNTS: Final = 64
_MAX_STOPS: Final = 16
_MAX_TOOLS_CHARS: Final = 1 << 18
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


def _check_call(called: Callable[..., Any], what: str, /, *arguments: Any, **settings: Any) -> None:
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
        _check_message(message, f"{who} returned message {number}", len(messages))
        if message["role"] == "assistant" and (not opening or number == len(messages) - 1):
            raise EnvironmentFailed(f"{who} returned message {number} of the assistant; only the model speaks for it")
    plain = _plain([dict(message) for message in messages], f"{who} returned messages", MAX_TURN_CHARS)
    return cast("list[ChatMessage]", json.loads(plain))


def checked_step(step: object, who: str, *, opening: bool = False) -> Step:
    """Return a step with messages of plain data and finite numbers; an ``opening`` may be messages only. Raises
    EnvironmentFailed."""
    if opening and not isinstance(step, Step):
        return Step(checked_messages(step, who, opening=True), restarts=True)
    if not isinstance(step, Step):
        raise EnvironmentFailed(f"{who} returned {_kind(step)}; return a Step")
    if opening and step.done:
        raise EnvironmentFailed(f"{who} returned a Step that is done; the model has not said anything yet")
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
    counts = {name: int(count) for name, count in step.counts.items()}
    if step.done:
        # what it says at the end is not read by anyone
        return Step((), reward, True, accuracy, counts)
    restarts = opening or bool(step.restarts)
    messages = checked_messages(step.messages, who, opening=restarts)
    if not isinstance(step.max_tokens, int) or not 0 <= step.max_tokens < 2**31:
        raise EnvironmentFailed(f"{who} returned max_tokens {shown(step.max_tokens)}; expected a whole number from 0")
    stop = step.stop
    if not isinstance(stop, list | tuple) or len(stop) > _MAX_STOPS or not all(isinstance(s, str) and s for s in stop):
        raise EnvironmentFailed(f"{who} returned stop {shown(stop)}; expected a list of at most {_MAX_STOPS} texts")
    tools = None if step.tools is None or not restarts else checked_tools(step.tools, who)
    sampling = {"max_tokens": step.max_tokens, "stop": tuple(stop), "logprobs": bool(step.logprobs)}
    return Step(messages, reward, False, accuracy, counts, restarts, tools, **sampling)


def checked_tools(tools: object, who: str) -> list[dict[str, Any]]:
    """Return JSON schemas of tools as plain data. Raises EnvironmentFailed."""
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in cast("list[Any]", tools)):
        raise EnvironmentFailed(f"{who} has tools that are {_kind(tools)}; expected a list of JSON schemas")
    for number, tool in enumerate(cast("list[dict[str, Any]]", tools)):
        function = tool.get("function", tool)
        schema = function.get("parameters", {}) if isinstance(function, dict) else None
        is_schema = isinstance(schema, dict) and isinstance(schema.get("properties", {}), dict)
        if not is_schema or not isinstance(function.get("name"), str):
            raise EnvironmentFailed(
                f"{who} has tool {number}, {shown(tool)}; expected a function with a name, and a JSON schema as parameters"
            )
    plain = _plain(list(cast("list[Any]", tools)), f"{who} has tools", _MAX_TOOLS_CHARS)
    return cast("list[dict[str, Any]]", json.loads(plain))


def checked_state(state: object, who: str) -> Any:
    """Return a copy of a state of plain data. Raises EnvironmentFailed if JSON cannot hold it."""
    return json.loads(_plain(state, f"{who} returned a state", MAX_STATE_BYTES))


def _check_message(message: object, what: str, num_messages: int) -> None:
    if not isinstance(message, Mapping):
        raise EnvironmentFailed(f"{what}, which is {_kind(message)}; expected a dict with role and content")
    fields = cast("Mapping[str, Any]", message)
    if not isinstance(fields.get("role"), str) or not fields["role"]:
        raise EnvironmentFailed(
            f"{what} with role {shown(fields.get('role'))}; expected user, tool, system or assistant"
        )
    content = fields.get("content")
    if fields["role"] == TEXT and (num_messages > 1 or not isinstance(content, str) or not content):
        raise EnvironmentFailed(f"{what} of the role {TEXT}; expected it alone, with a text that is not empty")
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
