"""The built-in environment ``gymnasium``: an environment of the package gymnasium, told in text.

A row has a ``seed``, and may have ``options`` of ``reset``. The model sees what ``render_mode="ansi"`` draws, colours as
brackets, else the observation's value. Its action is the last one that it names, or if it names none the last number;
where actions are neither text nor numbers, its whole answer is read as JSON. An answer without an action is told to it,
counted as ``bad_actions``, and costs a turn but no step.

The reward is the sum of the rewards. The accuracy is 1 if that reaches the threshold, else 0. An episode that a crash
interrupts is played again from its seed and its actions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from pipeline.config.import_path import import_extra, import_own
from pipeline.environments.bridges.rows import seed_of
from pipeline.environments.contract import ChatMessage, Step
from protocol.errors import ConfigError

_KNOWN: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "FrozenLake": (
        ("left", "down", "right", "up"),
        "Cross the frozen lake from S to G without falling into a hole H. [ ] is where you are.",
    ),
    "CliffWalking": (("up", "right", "down", "left"), "Walk to T. C is a cliff. x is where you are."),
    "Taxi": (
        ("south", "north", "east", "west", "pickup", "dropoff"),
        "Bring the passenger, blue( ), to the place that is magenta( ). [ ] is your taxi; | is a wall.",
    ),
    "Blackjack": (
        ("stick", "hit"),
        "Play blackjack. You see your sum, the dealer's card, and 1 if you have a usable ace.",
    ),
}
"""Names of the actions and what to do, by the environment's name."""
_MAX_NUMBERS: Final = 256
"""Observations with more numbers are no text."""
_COLOURED: Final = re.compile(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0m", re.DOTALL)
_COLOURS: Final = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


class GymnasiumEnvironment:
    def __init__(
        self,
        id: str,  # noqa: A002  gymnasium's own word
        kwargs: Mapping[str, Any] | None = None,
        *,
        actions: Sequence[str] = (),
        instructions: str = "",
        threshold: float | None = None,
        describe: str = "",
    ) -> None:
        """``id`` and ``kwargs`` are those of ``gymnasium.make``; ``actions`` names the actions in order; ``instructions``
        replaces what is said before the first observation; ``threshold`` is the total reward from which an episode is
        right, by default the environment's ``reward_threshold``; ``describe`` is the import path of a function
        (observation, environment) that returns what the model sees. Raises ConfigError if there is no such environment,
        or it cannot be told in text."""
        what = f"gymnasium environment {id!r}"
        gym = import_extra("gymnasium", "gymnasium", what)
        try:
            given = {"disable_env_checker": True, **(kwargs or {})}
            self._env: Any = gym.make(id, **given)
            modes = self._env.metadata.get("render_modes") or ()
            if "ansi" in modes and not describe and "render_mode" not in given:
                self._env = gym.make(id, **given, render_mode="ansi")
        except (gym.error.Error, ImportError, TypeError) as error:
            raise ConfigError(f"{what}: {error}") from error
        spec = self._env.spec
        found = spec.reward_threshold if threshold is None else threshold
        if found is None:
            raise ConfigError(
                f"{what} has no reward_threshold; say from which total reward an episode is right: arguments.threshold"
            )
        self._threshold = float(found)
        self._describe = (
            import_own("environment.arguments.describe", describe, "environment.folders") if describe else None
        )
        seen, self._space = self._env.observation_space, self._env.action_space
        self._is_drawn = self._env.render_mode == "ansi"
        is_array = isinstance(seen, gym.spaces.Box) and np.prod(seen.shape) > _MAX_NUMBERS
        if is_array and not self._is_drawn and not describe:
            raise ConfigError(
                f"{what}: its observation, {seen}, is no text; give arguments.describe, package.module:function"
            )
        known, rules = _KNOWN.get(spec.name, ((), f"You act in {spec.name}. Observations: {seen}."))
        self._is_discrete = isinstance(self._space, gym.spaces.Discrete)
        self._is_text = isinstance(self._space, gym.spaces.Text)
        first, count = (int(self._space.start), int(self._space.n)) if self._is_discrete else (0, 0)
        names = tuple(actions) or known
        if names and len(names) != count:
            raise ConfigError(
                f"{what} has {count} actions, and {len(names)} names: {', '.join(names)}; name each of them"
            )
        self._numbers = {name.lower(): first + place for place, name in enumerate(names)}
        self._pattern = re.compile(rf"\b({'|'.join(map(re.escape, self._numbers))})\b", re.IGNORECASE)
        listed = ", ".join(names) or f"the numbers from {first} to {first + count - 1}"
        self._asks = f"Answer with one action: {listed if self._is_discrete else self._space}."
        self._begins = instructions or f"{rules} {self._asks}"
        self._total = 0.0

    def reset(self, row: dict[str, Any]) -> str:
        seed = seed_of(row, "GymnasiumEnvironment.reset")
        observation, _ = self._env.reset(seed=seed, options=row.get("options"))
        return f"{self._begins}\n\n{self._seen(observation)}"

    def step(self, message: ChatMessage) -> Step:
        action = self._action(message.get("content") or "")
        if action is None:
            return Step(f"There is no action in your answer. {self._asks}", counts={"bad_actions": 1})
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._total += float(reward)
        if terminated or truncated:
            return Step(reward=float(reward), done=True, accuracy=float(self._total >= self._threshold))
        return Step(self._seen(observation), reward=float(reward))

    def close(self) -> None:
        self._env.close()

    def _seen(self, observation: Any) -> str:
        if self._describe is not None:
            return self._describe(observation, self._env)
        if self._is_drawn:
            return _COLOURED.sub(_bracketed, self._env.render()).strip("\n")
        return (
            observation if isinstance(observation, str) else json.dumps(observation, default=lambda item: item.tolist())
        )

    def _action(self, text: str) -> Any:
        """Return the action that an answer names; None if there is none."""
        if self._is_discrete:
            named = self._pattern.findall(text) if self._numbers else []
            numbers = re.findall(r"-?\d+", text)[-1:]
            action = self._numbers[named[-1].lower()] if named else int(numbers[0]) if numbers else None
        elif self._is_text:
            action = text.strip()
        else:
            try:
                (action,) = self._space.from_jsonable([json.loads(text)])
            except (ValueError, TypeError, KeyError, IndexError):
                return None
        return action if action is not None and self._space.contains(action) else None


def _bracketed(found: re.Match[str]) -> str:
    """Return a coloured text with its colour in words, or in square brackets if the background is coloured."""
    codes, text = found[1].split(";"), found[2]
    if any(code.startswith("4") for code in codes):
        return f"[{text}]"
    return next((f"{_COLOURS[int(code[1])]}({text})" for code in codes if re.fullmatch("3[0-7]", code)), text)
