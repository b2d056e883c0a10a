"""The built-in environment ``textarena``: a game of the package textarena, with the model as one of its players.

A row has a ``seed``, which decides the game, what chance does in it, and (unless ``player`` is given) which side the model
plays. After each turn the model is told what the game has to say to it since its last one. The other players move by
``opponent``: ``random`` answers with one of the moves in brackets that it was told last, and loses a game in which those
are no moves; or your function of a text, all that the player was told, which returns its answer.

The reward is the game's own at its end, in most games from -1 to 1; the accuracy is 1 if it reaches the threshold. Counts:
``bad_actions`` of the model, which most games allow once in a row, and ``opponent_errors``, by which it won.

Games draw from the random numbers of the whole process, so one plays at a time and each has its own. An interrupted one
is played again from its seed and the model's turns."""

from __future__ import annotations

import difflib
import random
import re
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from pipeline.config.import_path import import_extra, import_own
from pipeline.environments.bridges.rows import seed_of
from pipeline.environments.contract import ChatMessage, Step
from protocol.errors import ConfigError, EnvironmentFailed

_PLAYING = threading.Lock()
_MAX_MOVES: Final = 10_000
"""Most moves of the others between two turns of the model."""
_MOVE: Final = re.compile(r"\[[^\[\]]+\]")
_MAX_CLOSE: Final = 3


class TextArenaEnvironment:
    def __init__(
        self,
        id: str,  # noqa: A002  textarena's own word
        kwargs: Mapping[str, Any] | None = None,
        *,
        opponent: str = "",
        player: int | None = None,
        num_players: int | None = None,
        threshold: float = 1.0,
    ) -> None:
        """``id`` and ``kwargs`` are those of ``textarena.make``. ``opponent`` is ``random`` or an import path; without one
        the model plays alone. ``num_players`` is 2 with an opponent, else 1. Raises ConfigError if the game cannot be
        made here."""
        what = f"textarena game {id!r}"
        arena = import_extra("textarena", "textarena", what)
        games = arena.envs.registration.ENV_REGISTRY
        if id not in games:
            plain = [name for name in games if not name.endswith(("-raw", "-train"))]
            close = difflib.get_close_matches(id, plain, n=_MAX_CLOSE) or sorted(plain)
            raise ConfigError(f"{what}: there is no such game; there are {', '.join(close)}")
        self._num_players = num_players or (2 if opponent else 1)
        if self._num_players > 1 and not opponent:
            raise ConfigError(f"{what} has {self._num_players} players; say who the others are: arguments.opponent")
        if player is not None and not 0 <= player < self._num_players:
            raise ConfigError(f"{what}: player is {player}; expected one from 0 to {self._num_players - 1}")
        self._opponent: Callable[[str], str] = _random_move
        if opponent not in ("", "random"):
            self._opponent = import_own("environment.arguments.opponent", opponent, "environment.folders")
        self._what, self._wanted, self._threshold = what, player, threshold
        self._chance: Any = None
        try:
            with self._own_chance():
                self._game: Any = arena.make(id, **(kwargs or {}))
        except LookupError as error:
            raise ConfigError(
                f"{what} needs word lists ({_line(error)}); run python -m nltk.downloader words averaged_perceptron_tagger_eng"
            ) from error
        except Exception as error:
            raise ConfigError(f"{what} cannot be made: {type(error).__name__}: {_line(error)}") from error
        # its wrappers repeat everything said so far; the conversation has it already
        self._table: Any = self._game
        while isinstance(self._table, arena.Wrapper):
            self._table = self._table.env
        self._arena = arena
        self._told: dict[int, list[str]] = {}

    def reset(self, row: dict[str, Any]) -> str:
        seed = seed_of(row, "TextArenaEnvironment.reset")
        self._player = seed % self._num_players if self._wanted is None else self._wanted
        with self._own_chance():
            random.seed(seed)
            np.random.seed(seed)
            try:
                self._game.reset(num_players=self._num_players, seed=seed)
            except (AssertionError, ValueError) as error:
                raise EnvironmentFailed(
                    f"{self._what} refuses {self._num_players} players: {_line(error)}; set arguments.num_players"
                ) from error
            if self._others_move():
                raise EnvironmentFailed(f"{self._what} with seed {seed} has ended before the model's first turn")
            return self._news()

    def step(self, message: ChatMessage) -> Step:
        with self._own_chance():
            is_over, _ = self._game.step(message.get("content") or "")
            if is_over or self._others_move():
                return self._end()
            told = self._news()
            return Step(told, counts={"bad_actions": 1} if "attempted an invalid move" in told else {})

    def _others_move(self) -> bool:
        """Let the others move until it is the model's turn; return whether the game is over."""
        for _ in range(_MAX_MOVES):
            other = self._table.state.current_player_id
            if other == self._player:
                return False
            self._news(other)
            is_over, _ = self._game.step(self._opponent("\n".join(self._told[other])))
            if is_over:
                return True
        raise EnvironmentFailed(f"{self._what}: the others moved {_MAX_MOVES} times, and the model was not asked")

    def _news(self, player: int | None = None) -> str:
        """Return what the player whose turn it is (by default the model) has been told since its last turn."""
        who, said = self._table.get_observation()
        assert who == (self._player if player is None else player)
        kinds = self._arena.ObservationType
        news = [text for sender, text, kind in said if (sender, kind) != (who, kinds.PLAYER_ACTION)]
        self._told.setdefault(who, []).extend(news)
        return "\n".join(news) or "It is your turn."

    def _end(self) -> Step:
        rewards, known = self._table.close()
        reward = float(rewards[self._player])
        faults = {who for who in range(self._num_players) if known[who].get("invalid_move")}
        counts = {"bad_actions": int(self._player in faults), "opponent_errors": len(faults - {self._player})}
        accuracy = float(reward >= self._threshold)
        return Step(reward=reward, accuracy=accuracy, done=True, counts={name: n for name, n in counts.items() if n})

    @contextmanager
    def _own_chance(self) -> Generator[None]:
        """Play alone in this process, with the random numbers of this game."""
        with _PLAYING:
            before = random.getstate(), np.random.get_state()
            if self._chance is not None:
                _set_chance(self._chance)
            try:
                yield
            finally:
                self._chance = random.getstate(), np.random.get_state()
                _set_chance(before)


def _set_chance(state: Any) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])


def _random_move(told: str) -> str:
    moves = next((found for line in reversed(told.splitlines()) if (found := _MOVE.findall(line))), [""])
    return random.choice(moves)


def _line(error: Exception) -> str:
    """Return the first line of a message that says anything."""
    return next((line.strip() for line in str(error).splitlines() if re.search(r"\w", line)), type(error).__name__)
