"""Claims about real games of the package textarena."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from pipeline.config.import_path import import_extra
from pipeline.environments.contract import Step, load_environment
from protocol.errors import ConfigError, EnvironmentFailed
from tests.bridges.packages import needs

# nltk, which it uses, looks for its lists without a network
pytestmark = [needs("textarena"), pytest.mark.filterwarnings("ignore::ResourceWarning")]
GUESS: dict[str, Any] = {"id": "GuessTheNumber-v0"}
BOARD: dict[str, Any] = {"id": "TicTacToe-v0", "opponent": "random"}


def made(**arguments: Any) -> Any:
    return load_environment("textarena", arguments)()


def played(environment: Any, seed: int, texts: list[str]) -> list[Step]:
    environment.reset({"seed": seed})
    steps: list[Step] = []
    for text in texts:
        steps.append(environment.step({"role": "assistant", "content": text}))
        if steps[-1].done:
            break
    return steps


def secret(seed: int) -> int:
    arena = import_extra("textarena", "textarena", "the test")
    game = arena.make("GuessTheNumber-v0-raw")
    before = random.getstate()
    game.reset(num_players=1, seed=seed)
    random.setstate(before)
    return game.game_number


def test_a_game_alone_is_the_packages_own_and_each_turn_is_told_what_is_new() -> None:
    numbers = [secret(seed) for seed in range(6)]
    assert len(set(numbers)) > 1
    for seed, number in enumerate(numbers):
        wrong = 1 if number != 1 else 20
        assert "guess the number between 1 and 20" in made(**GUESS).reset({"seed": seed})
        missed, won = played(made(**GUESS), seed, [f"I say [{wrong}].", str(number)])
        assert missed.messages == f"The target number is {'higher' if wrong < number else 'lower'}."
        assert (won.done, won.reward, won.accuracy, won.counts) == (True, 1.0, 1.0, {})


def test_a_bad_answer_is_told_once_and_then_ends_the_game() -> None:
    number = secret(0)
    near = number - 1 if number > 1 else number + 1
    steps = played(made(**GUESS), 0, ["I wait", f"[{near}]", "[77]", "[0]"])
    assert [step.counts for step in steps] == [{"bad_actions": 1}, {}, {"bad_actions": 1}, {"bad_actions": 1}]
    assert "outside the range" in str(steps[2].messages)
    assert (steps[3].done, steps[3].reward, steps[3].accuracy) == (True, pytest.approx(1 - 1 / 19), 0.0)
    assert played(made(**GUESS, threshold=0.9), 0, [f"[{near}]", "no", "no"])[-1].accuracy == 1.0


def row_by_row(told: str) -> str:
    """Take the lowest free square."""
    (*_, moves) = (line for line in told.splitlines() if line.startswith("Available Moves"))
    return re.findall(r"\[\d\]", moves)[0]


def test_the_model_plays_either_side_against_a_function() -> None:
    opponent = f"{__name__}:row_by_row"
    opening = made(id="TicTacToe-v0", opponent=opponent, player=0).reset({"seed": 0})
    assert "you will be 'O'" in opening and "placed" not in opening
    # the other takes 0, 1, 2
    lost = played(made(id="TicTacToe-v0", opponent=opponent, player=0), 0, ["[4]", "[8]", "[7]"])
    assert (lost[-1].done, lost[-1].reward, lost[-1].accuracy) == (True, -1.0, 0.0)
    won = played(made(id="TicTacToe-v0", opponent=opponent, player=1), 0, ["[2]", "[4]", "[6]"])
    assert (won[-1].done, won[-1].reward, won[-1].accuracy) == (True, 1.0, 1.0)
    assert "Player 0 placed their symbol (O) in cell 0." in made(**BOARD | {"opponent": opponent}).reset({"seed": 1})


def speechless(told: str) -> str:
    return "I do not know"


def test_a_game_that_the_other_loses_by_its_faults_is_counted_so() -> None:
    steps = played(made(id="TicTacToe-v0", opponent=f"{__name__}:speechless", player=0), 0, ["[4]"])
    assert (steps[-1].done, steps[-1].reward, steps[-1].counts) == (True, 1.0, {"opponent_errors": 1})


def game(seed: int) -> list[Any]:
    environment = made(**BOARD)
    told = [environment.reset({"seed": seed})]
    while True:
        step = environment.step({"content": row_by_row(told[-1])})
        if step.done:
            return [*told, step.reward]
        told.append(step.messages)


def in_threads(play: Callable[[int], Any], count: int) -> list[Any]:
    found: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda seed=seed: found.update({seed: play(seed)})) for seed in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[seed] for seed in range(count)]


def test_games_at_the_same_time_do_not_share_their_chance() -> None:
    alone = [game(seed) for seed in range(8)]
    assert len({str(one) for one in alone}) > 4
    random.seed(77)
    before = random.getstate()
    assert in_threads(game, 8) == alone
    assert random.getstate() == before, "the rest of the process keeps its own"


BOTH = threading.Barrier(2)
MET: list[str] = []


def waiting_for_another(told: str) -> str:
    with suppress(threading.BrokenBarrierError):
        BOTH.wait(0.2)
        MET.append(told)
    return row_by_row(told)


def test_one_game_plays_at_a_time() -> None:
    opponent = f"{__name__}:waiting_for_another"
    in_threads(lambda seed: played(made(id="TicTacToe-v0", opponent=opponent), seed, ["[4]", "[8]"]), 2)
    assert BOTH.broken and not MET


def test_chance_within_a_game_is_its_own_too() -> None:
    texts = ["[hit]", "[stand]"] * 6
    first, second = made(id="Blackjack-v0"), made(id="Blackjack-v0")
    first.reset({"seed": 4})
    second.reset({"seed": 5})
    told: list[Any] = []
    for text in texts:
        told.append(first.step({"content": text}))
        second.step({"content": text})
        if told[-1].done:
            break
    assert told == played(made(id="Blackjack-v0"), 4, texts)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"id": "TicTacTo-v0"}, r"'TicTacTo-v0': there is no such game; there are TicTacToe-v0, "),
        ({"id": "TicTacToe-v0", "num_players": 2}, r"has 2 players; say who the others are: arguments\.opponent"),
        ({"id": "TicTacToe-v0", "opponent": "random", "player": 2}, r"player is 2; expected one from 0 to 1"),
        ({"id": "GuessTheNumber-v0", "kwargs": {"most": 3}}, r"cannot be made: TypeError: .*'most'"),
        ({"id": "TicTacToe-v0", "opponent": f"{__name__}:nobody"}, r"opponent .* has no 'nobody'"),
    ],
)
def test_what_is_no_game_is_refused_in_a_sentence(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        made(**arguments)


def test_rows_and_players_that_do_not_fit_are_told() -> None:
    with pytest.raises(
        EnvironmentFailed, match=r"TextArenaEnvironment\.reset: seed is None; give each line a column seed"
    ):
        made(**GUESS).reset({})
    with pytest.raises(EnvironmentFailed, match=r"refuses 1 players: .*; set arguments\.num_players"):
        made(id="TicTacToe-v0").reset({"seed": 1})
