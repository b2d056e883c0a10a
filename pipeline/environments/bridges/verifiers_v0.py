"""The built-in environment ``verifiers-v0``: a SingleTurnEnv, MultiTurnEnv or ToolEnv of the package verifiers before 0.4.

A row has an ``index`` into the environment's own dataset, of its evaluation if ``split`` is ``eval``. What the package's
rollout does around the model's turns is done here, in its order: ``setup_state``, ``env_response`` between turns,
the stop conditions, then clean-up and the rubric. The reward is the rubric's weighted sum; the accuracy is 1 if that
reaches the threshold. A reward function that raises is a failure: the package would count it as 0."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from pipeline.config.import_path import import_extra, import_own, is_import_path
from pipeline.environments.bridges.rows import index_of
from pipeline.environments.contract import ChatMessage, Step
from pipeline.environments.conversation import BAD_CALLS
from protocol.errors import ConfigError, EnvironmentFailed

_ROOT = "verifiers.legacy"
_REWARD_ERRORS: ContextVar[list[str]] = ContextVar("reward errors")


class VerifiersV0Environment:
    def __init__(self, environment: str, arguments: Mapping[str, Any] | None = None, *, threshold: float = 1.0) -> None:
        """``environment`` is the id of an installed one, or the import path of a function that returns it; ``arguments`` are
        that function's. Raises ConfigError if there is none, or it cannot be used here."""
        self._what = f"verifiers environment {environment!r}"
        self._env = _loaded(environment, json.dumps(dict(arguments or {}), sort_keys=True))
        self._threshold = threshold
        self._state: Any = None

    async def reset(self, row: dict[str, Any]) -> list[ChatMessage]:
        index = index_of(row, "VerifiersV0Environment.reset", "its place in the environment's dataset")
        data = self._env.get_eval_dataset() if row.get("split") == "eval" else self._env.get_dataset()
        if index >= len(data):
            raise EnvironmentFailed(f"{self._what} has {len(data)} examples; index is {index}: remove that line")
        client = import_extra(f"{_ROOT}.clients", "verifiers-v0", self._what).Client
        # stands for the model's server, which is not asked here
        nobody = type("Nobody", (client,), {"__init__": lambda _: None, **dict.fromkeys(client.__abstractmethods__)})
        state = await self._env.init_state(dict(data[index]), nobody(), "policy", {})
        self._state = await self._env.setup_state(state) or state
        self.tools = [{"type": "function", "function": _plain(tool)} for tool in self._state["tool_defs"]]
        if await self._env.is_completed(self._state):
            raise EnvironmentFailed(f"{self._what}: example {index} has ended before the model's first turn")
        self._asked: list[Any] = await self._prompt()
        return list(map(_plain, self._asked))

    async def step(self, message: ChatMessage) -> Step:
        types = import_extra(f"{_ROOT}.types", "verifiers-v0", self._what)
        turn = types.ResponseMessage(
            content=message.get("content"),
            reasoning_content=message.get("reasoning_content"),
            tool_calls=[types.ToolCall(**call) for call in _calls(message)] or None,
            finish_reason="stop",
            is_truncated=False,
        )
        response = types.Response(id="", created=0, model="policy", message=turn)
        await self._env.add_model_response(self._state, self._asked, response)
        said = [*self._asked, *self._state["trajectory"][-1]["completion"]]
        while not await self._env.is_completed(self._state):
            asked = await self._prompt()
            if self._state.get("final_env_response") is not None:
                continue
            self._asked = asked
            grows = asked[: len(said)] == said
            return Step(list(map(_plain, asked[len(said) :] if grows else asked)), restarts=not grows)
        return await self._scored()

    async def close(self) -> None:
        """Clean up after an episode that a limit has ended."""
        state, self._state = self._state, None
        if state is not None:
            await self._env.cleanup(state)

    async def _prompt(self) -> list[Any]:
        """Return the messages that the model answers next. An error of the environment's own goes into the state, where
        a stop condition finds it."""
        errors = import_extra(f"{_ROOT}.errors", "verifiers-v0", self._what)
        messages = import_extra(f"{_ROOT}.utils.message_utils", "verifiers-v0", self._what)
        try:
            asked = await self._env.get_prompt_messages(self._state)
        except errors.Error as error:
            raise EnvironmentFailed(f"{self._what}: {type(error).__name__}: {error}") from error
        return list(messages.maybe_normalize_messages(asked, field_name="prompt_messages"))

    async def _scored(self) -> Step:
        state, self._state = self._state, None
        await self._env.cleanup(state)
        if state.get("error") is not None:
            raise EnvironmentFailed(f"{self._what}: {type(state['error']).__name__}: {state['error']}")
        raised: list[str] = []
        _REWARD_ERRORS.set(raised)
        await self._env.rubric.score_rollout(state)
        await self._env.rubric.cleanup(state)
        if raised:
            raise EnvironmentFailed(f"{self._what}: {raised[0]}")
        reward = float(state["reward"])
        return Step(reward=reward, accuracy=float(reward >= self._threshold), done=True)


def _calls(message: ChatMessage) -> list[dict[str, str]]:
    """Return the turn's tool calls as the package has them; of one that cannot be read, arguments that cannot either."""
    calls = [*(message.get("tool_calls") or ()), *message.get(BAD_CALLS, ())]
    found: list[dict[str, str]] = []
    for call in sorted(calls, key=lambda call: call["id"]):
        function = call.get("function", {"name": call.get("name") or "", "arguments": ""})
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        found.append({"id": call["id"], "name": function["name"], "arguments": text})
    return found


def _plain(item: Any) -> dict[str, Any]:
    return item if isinstance(item, dict) else item.model_dump(exclude_none=True)


class _RewardErrors(logging.Handler):
    """Finds the exceptions of reward functions, which the package logs and counts as 0."""

    def emit(self, record: logging.LogRecord) -> None:
        found = _REWARD_ERRORS.get(None)
        if found is not None and "reward function" in record.getMessage():
            found.append(record.getMessage())


@lru_cache(maxsize=16)
def _loaded(environment: str, arguments: str) -> Any:
    what = f"verifiers environment {environment!r}"
    vf = import_extra(_ROOT, "verifiers-v0", what)
    given = json.loads(arguments)
    try:
        with _own_signals():
            if is_import_path(environment):
                made = import_own("environment.arguments.environment", environment, "environment.folders")(**given)
            else:
                made = vf.load_environment(environment, **given)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(made, vf.MultiTurnEnv):
        raise ConfigError(f"{what} is a {type(made).__name__}; expected a SingleTurnEnv, MultiTurnEnv or ToolEnv")
    if type(made).get_model_response is not vf.MultiTurnEnv.get_model_response:
        raise ConfigError(f"{what} asks the model itself (get_model_response); expected one that answers its turns")
    if made.requires_group_rollouts:
        raise ConfigError(f"{what} has rewards of whole groups; name them in reward.functions, with whole_group")
    if not any(isinstance(handler, _RewardErrors) for handler in logging.getLogger("verifiers").handlers):
        logging.getLogger("verifiers").addHandler(_RewardErrors(logging.ERROR))
    return made


@contextmanager
def _own_signals() -> Generator[None]:
    """Keep this process's handlers of signals, which the package replaces."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
