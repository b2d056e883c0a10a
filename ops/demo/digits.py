"""A game of several turns: the model finds a hidden digit in four guesses, told each time whether it is larger.

    python -m ops.demo.digits --out runs/digits-data

Guesses at random find it in a third of games, halving what is left in all of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ops.demo.task import write_lines
from pipeline.environments.contract import Step

GUESSES: Final = 4
OPENING: Final = "?"


class Digits:
    """The environment of the game."""

    def reset(self, row: dict[str, Any]) -> Step:
        self._hidden, self._left = str(row["hidden"]), GUESSES
        return _told(OPENING)

    def step(self, message: dict[str, Any]) -> Step:
        said = message["content"].strip()
        self._left -= 1
        if said == self._hidden or not self._left:
            found = float(said == self._hidden)
            return Step(reward=found, accuracy=found, done=True)
        if said not in tuple("0123456789"):
            return _told(OPENING)
        return _told("<" if self._hidden < said else ">")


def _told(what: str) -> Step:
    # one token a guess. With an end of the turn to be sampled, the model would unlearn that: lost games have most of them
    return Step(what, max_tokens=1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ops.demo.digits", description="Write the prompt file of the demo with a game."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/digits-data"), help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    path = options.out / "games.jsonl"
    write_lines(path, ({"hidden": digit} for digit in range(10)))
    print(f"{path}: 10 games")


if __name__ == "__main__":
    main()
