"""Tokens that are generated again because a generator died, counted to the decode step.

*Consumes* what each generator sampled, from a small file of its own that a kill does not take away,
and what the ledger stored of it. *Produces* one row an incarnation. *Waits for* nothing.

A trajectory goes on from its last chunk in the ledger, so what is sampled twice is what its
generator had sampled since: at most one window for each trajectory that it held.
``<run_dir>/tallies/<worker>.<epoch>`` holds three numbers, written in place after every decode
step.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from protocol.ids import Incarnation

FOLDER: Final = "tallies"
_NUMBERS = struct.Struct("<QQQ")


class SampledTokenCounts:
    """The numbers of one living generator."""

    def __init__(self, run_dir: Path, who: Incarnation) -> None:
        folder = run_dir / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        self._file = os.open(folder / f"{who.worker}.{who.epoch}", os.O_WRONLY | os.O_CREAT, 0o600)

    def write(self, *, num_sampled: int, num_refused: int, num_held: int) -> None:
        """Say how many tokens were sampled, how many of them the ledger refused, how many
        trajectories are held.
        """
        os.pwrite(self._file, _NUMBERS.pack(num_sampled, num_refused, num_held), 0)

    def close(self) -> None:
        """Close the file; it stays."""
        os.close(self._file)


@dataclass(frozen=True, slots=True)
class RegeneratedTokens:
    """What became of the tokens of one incarnation of a generator."""

    who: str
    """``generator-0#3``"""
    is_live: bool
    num_sampled: int
    num_stored: int
    num_refused: int
    """Sampled, but not stored while it lived: it had lost the trajectory, or the engine gave the
    window up.
    """
    num_held: int
    """Trajectories that it held at its last decode step."""
    window_tokens: int

    @property
    def num_unwritten(self) -> int:
        """Tokens in hand: of a living generator they are under way, of a dead one
        generated again.
        """
        return max(0, self.num_sampled - self.num_stored - self.num_refused)

    @property
    def num_again(self) -> int:
        """Tokens that are generated again, if their trajectories go on at all."""
        return self.num_refused + (0 if self.is_live else self.num_unwritten)

    @property
    def limit(self) -> int:
        """One window for each trajectory in hand, which ``num_unwritten`` does not exceed."""
        return self.num_held * self.window_tokens


def read_regenerated(
    run_dir: Path, stored: Mapping[str, int], live: Collection[str], *, window_tokens: int
) -> list[RegeneratedTokens]:
    """Return one row for every incarnation that ever sampled, by name.

    Args:
        run_dir: The run's folder.
        stored: Tokens in the ledger by incarnation (``Audit.tokens_stored``).
        live: Incarnations that are alive.
        window_tokens: The run's longest window.
    """
    rows: list[RegeneratedTokens] = []
    for path in sorted((run_dir / FOLDER).glob("*.*")):
        worker, _, epoch = path.name.rpartition(".")
        content = path.read_bytes()
        if len(content) != _NUMBERS.size or not epoch.isdecimal():
            # it has not sampled anything
            continue
        sampled, refused, held = _NUMBERS.unpack(content)
        who = f"{worker}#{epoch}"
        rows.append(RegeneratedTokens(who, who in live, sampled, stored.get(who, 0), refused, held, window_tokens))
    return rows


def in_words(rows: Collection[RegeneratedTokens]) -> str:
    """Return the sum in a sentence."""
    dead = [row for row in rows if not row.is_live and row.num_unwritten]
    unwritten, limit = sum(row.num_unwritten for row in dead), sum(row.limit for row in dead)
    refused = sum(row.num_refused for row in rows)
    sampled = sum(row.num_sampled for row in rows)
    text = f"{sum(row.num_again for row in rows):,} of {sampled:,} sampled tokens are generated again"
    if dead:
        text += f": {unwritten:,} of {len(dead)} generators that ended with windows in hand (at most {limit:,})"
    if refused:
        text += f"{',' if dead else ':'} {refused:,} of windows that the ledger refused"
    return text


def regenerated_rows(rows: Collection[RegeneratedTokens]) -> list[dict[str, object]]:
    """Return the rows with what follows from them, for JSON."""
    derived = ("num_unwritten", "num_again", "limit")
    return [asdict(row) | {name: getattr(row, name) for name in derived} for row in rows]
