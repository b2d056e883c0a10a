"""Counts the tokens that are generated again because a generator died, exact to the decode step.

A trajectory continues from its last chunk in the ledger, so the tokens its dead generator sampled after
that are sampled again: at most one window per trajectory. After every decode step, each generator
overwrites three numbers in ``<run_dir>/tallies/<worker>.<epoch>``, which survive a kill."""

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
    """The file of a live generator."""

    def __init__(self, run_dir: Path, who: Incarnation) -> None:
        folder = run_dir / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        self._file = os.open(folder / f"{who.worker}.{who.epoch}", os.O_WRONLY | os.O_CREAT, 0o600)

    def write(self, *, num_sampled: int, num_refused: int, num_held: int) -> None:
        """Write the tokens sampled, the tokens the ledger refused, and the trajectories held."""
        os.pwrite(self._file, _NUMBERS.pack(num_sampled, num_refused, num_held), 0)

    def close(self) -> None:
        """Close the file without removing it."""
        os.close(self._file)


@dataclass(frozen=True, slots=True)
class RegeneratedTokens:
    """Token counts of one incarnation of a generator."""

    who: str
    """``generator-0#3``"""
    is_live: bool
    num_sampled: int
    num_stored: int
    num_refused: int
    """Sampled but never stored: of a trajectory lost to another generator, or an abandoned window."""
    num_held: int
    """Trajectories held at its last decode step."""
    window_tokens: int

    @property
    def num_unwritten(self) -> int:
        """Sampled but not written; if the generator is dead, these are generated again."""
        return max(0, self.num_sampled - self.num_stored - self.num_refused)

    @property
    def num_again(self) -> int:
        """Tokens generated again, if their trajectories continue."""
        return self.num_refused + (0 if self.is_live else self.num_unwritten)

    @property
    def limit(self) -> int:
        """Upper bound of ``num_unwritten``: one window for each trajectory held."""
        return self.num_held * self.window_tokens


def read_regenerated(
    run_dir: Path, stored: Mapping[str, int], live: Collection[str], *, window_tokens: int
) -> list[RegeneratedTokens]:
    """Return one row for each incarnation that has sampled, by name.

    ``stored``: tokens in the ledger by incarnation (``Audit.tokens_stored``). ``live``: living
    incarnations."""
    rows: list[RegeneratedTokens] = []
    for path in sorted((run_dir / FOLDER).glob("*.*")):
        worker, _, epoch = path.name.rpartition(".")
        content = path.read_bytes()
        # An incarnation that has not sampled yet has an empty file.
        if len(content) != _NUMBERS.size or not epoch.isdecimal():
            continue
        sampled, refused, held = _NUMBERS.unpack(content)
        who = f"{worker}#{epoch}"
        rows.append(RegeneratedTokens(who, who in live, sampled, stored.get(who, 0), refused, held, window_tokens))
    return rows


def in_words(rows: Collection[RegeneratedTokens]) -> str:
    """Summarise the rows in a sentence."""
    dead = [row for row in rows if not row.is_live and row.num_unwritten]
    unwritten, limit = sum(row.num_unwritten for row in dead), sum(row.limit for row in dead)
    refused = sum(row.num_refused for row in rows)
    sampled = sum(row.num_sampled for row in rows)
    text = f"{sum(row.num_again for row in rows):,} of {sampled:,} sampled tokens were sampled again"
    causes: list[str] = []
    if dead:
        generators = "generator" if len(dead) == 1 else "generators"
        causes.append(f"{unwritten:,} lost with {len(dead)} dead {generators} (at most {limit:,} can be)")
    if refused:
        causes.append(f"{refused:,} in windows that the ledger refused")
    return f"{text}: {', '.join(causes)}" if causes else text


def regenerated_rows(rows: Collection[RegeneratedTokens]) -> list[dict[str, object]]:
    """Return the rows with their derived figures, for JSON."""
    derived = ("num_unwritten", "num_again", "limit")
    return [asdict(row) | {name: getattr(row, name) for name in derived} for row in rows]
