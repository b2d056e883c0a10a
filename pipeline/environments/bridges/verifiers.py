"""The built-in environment ``verifiers``: a taskset of the package verifiers (0.4), whose tasks are answered in one turn.

A row has an ``index``: which task of ``load()``. The model sees the task's system prompt and prompt; the reward is what the
task's rewards and judges, with their weights, add up to for its answer; the accuracy is 1 if that reaches the threshold.

What a harness or a runtime would do is not done here: a task with tools, a container, a hook or reward that gets a
``runtime``, or a conversation that its user opens is refused. An exception in a reward is a failure, never a score."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pipeline.config.import_path import import_extra, import_own, is_import_path
from pipeline.environments.bridges.rows import index_of
from pipeline.environments.contract import ChatMessage, Step
from protocol.errors import ConfigError, EnvironmentFailed

_HOOKS = ("setup", "finalize")


class VerifiersEnvironment:
    def __init__(self, taskset: str, config: Mapping[str, Any] | None = None, *, threshold: float = 1.0) -> None:
        """``taskset`` is the id of an installed one, or the import path of a class; ``config`` its settings. Raises
        ConfigError if there is no such taskset, or it cannot be used here."""
        self._tasks = _tasks_of(taskset, json.dumps(dict(config or {}), sort_keys=True))
        self._threshold = threshold

    # async, so that only one at a time loads more tasks
    async def reset(self, row: dict[str, Any]) -> list[ChatMessage]:
        self._task = self._tasks.at(index_of(row, "VerifiersEnvironment.reset", "the task's place in load()"))
        return self._opening()

    def _opening(self) -> list[ChatMessage]:
        data = self._task.data
        asked = data.prompt if isinstance(data.prompt, list) else [{"role": "user", "content": data.prompt}]
        opening = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        return [*opening, *(one if isinstance(one, dict) else one.model_dump(exclude_none=True) for one in asked)]

    async def step(self, message: ChatMessage) -> Step:
        from verifiers.v1 import trace as traces  # pyright: ignore[reportMissingImports]
        from verifiers.v1.configs.agent import AgentConfig  # pyright: ignore[reportMissingImports]
        from verifiers.v1.graph import MessageNode  # pyright: ignore[reportMissingImports]
        from verifiers.v1.state import state_cls  # pyright: ignore[reportMissingImports]

        task = self._task
        known = traces.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        answer = {name: message.get(name) for name in ("role", "content", "reasoning_content")}
        said = [*self._opening(), answer]
        nodes = [
            MessageNode(parent=number - 1 if number else None, message=one, sampled=one is answer)
            for number, one in enumerate(said)
        ]
        trace = traces.Trace(
            task=known,
            state=state_cls(type(task))(),
            agent=traces.AgentInfo(config=AgentConfig()),
            nodes=nodes,
            is_completed=True,
            ok=True,
        )
        await task.score(trace)
        return Step(reward=trace.reward, accuracy=float(trace.reward >= self._threshold), done=True)


class _Tasks:
    """The tasks of one taskset, loaded as far as they have been asked for."""

    def __init__(self, what: str, taskset: Any) -> None:
        self._what, self._more = what, iter(taskset)
        self._found: list[Any] = []

    def at(self, index: int) -> Any:
        """Return a task. Raises EnvironmentFailed if there is none, or it needs more than an answer."""
        self._found += itertools.islice(self._more, max(0, index + 1 - len(self._found)))
        if index >= len(self._found):
            raise EnvironmentFailed(
                f"{self._what} has {len(self._found)} tasks; index is {index}: remove that line, or give the taskset more"
            )
        task = self._found[index]
        if need := _unmet(task):
            raise EnvironmentFailed(f"{self._what}: task {index} {need}, which this environment does not have")
        return task


@lru_cache(maxsize=16)
def _tasks_of(taskset: str, config: str) -> _Tasks:
    what = f"verifiers taskset {taskset!r}"
    loaders = import_extra("verifiers.v1.utils.loaders", "verifiers", what)
    generic = import_extra("verifiers.v1.utils.generic", "verifiers", what)
    try:
        if is_import_path(taskset):
            found = import_own("environment.arguments.taskset", taskset, "environment.folders")
        else:
            found = loaders.taskset_class(taskset)
        settings = generic.concrete_type(found, loaders.TasksetConfig, origin=loaders.Taskset) or loaders.TasksetConfig
        made = found(settings(**json.loads(config)))
        if found.toolsets(made.config):
            raise ConfigError(f"{what} has tool servers, which this environment does not have")
        return _Tasks(what, made)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} cannot be loaded: {type(error).__name__}: {error}") from error


def _unmet(task: Any) -> str:
    """Return what a task needs besides an answer; "" if nothing."""
    kind, data = type(task), task.data
    base = next(each for each in kind.__mro__ if each.__module__ == "verifiers.v1.task")
    if data.prompt is None:
        return "has no prompt: its user opens the conversation"
    if kind.NEEDS_CONTAINER or data.image:
        return "needs a container"
    if kind.toolsets(task.config):
        return "has tools"
    for name in _HOOKS:
        if getattr(kind, name) is not getattr(base, name):
            return f"has {name}(), which gets a runtime"
    for reward in (*task.hooks("reward"), *task.hooks("metric")):
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return f"has {reward.__name__}(), which gets a runtime"
    return ""
