"""A file of the tokens that an emulated generator sampled, from which drills count the cost of a kill.

Each process has its own, with lines ``trajectory begin end``. The last line may be cut short."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from protocol.ids import TrajectoryId


class SamplingJournal:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lines: list[str] = []

    def note(self, trajectory: TrajectoryId, begin: int, end: int) -> None:
        """Buffer the tokens at response positions ``begin`` to ``end`` - 1."""
        self._lines.append(f"{trajectory} {begin} {end}\n")

    def flush(self) -> None:
        """Write the buffered lines at once."""
        if self._lines:
            os.write(self._file, "".join(self._lines).encode())
            self._lines.clear()


def read_journal(path: Path) -> Iterator[tuple[TrajectoryId, int, int]]:
    """Yield trajectory, first position and position after the last, in the order of sampling."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            name, begin, end = line.split()
            yield TrajectoryId.parse(name), int(begin), int(end)
