"""The part of a run's history that the list of runs shows, read as the history grows.

Lines are read once, and few are parsed: the first, evaluations, and the last update."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipeline.files import GrowingFile

_EVALUATION: Final = b'{"kind": "evaluation"'
_UPDATE: Final = b'{"kind": "update"'
_PIECE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class RunCourse:
    """The part of a history that a row shows."""

    accuracies: Sequence[float]
    """Of the main set's evaluations."""
    num_updates: int
    first_s: float | None
    last_s: float | None
    """Time of the first and the last row."""
    num_skipped: int


class CourseReader:
    """Reads one history. A history that was replaced or cut short is read anew."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._num_replaced = 0
        self._forget()

    def read(self) -> RunCourse:
        """Read what is new; return the course until now. Raises OSError."""
        while lines := self._file.read(_PIECE_BYTES):
            self._restart()
            self._take(lines)
        self._restart()
        last = self._last_update
        times = [*self._times, *(float(row["at_s"]) for row in (self._first, last) if row is not None)]
        return RunCourse(
            accuracies=tuple(self._accuracies),
            num_updates=0 if last is None else int(last.get("update", 0)),
            first_s=min(times, default=None),
            last_s=max(times, default=None),
            num_skipped=self._num_damaged + self._num_damaged_after,
        )

    def _forget(self) -> None:
        self._has_begun = False
        self._first: dict[str, Any] | None = None
        self._last_update: dict[str, Any] | None = None
        self._accuracies: list[float] = []
        self._times: list[float] = []
        """The earliest and the latest of the evaluations."""
        self._num_damaged = 0
        """Of evaluations."""
        self._num_damaged_after = 0
        """Of updates after the last good one."""

    def _restart(self) -> None:
        """Forget a file that another took the place of."""
        if self._file.num_replaced != self._num_replaced:
            self._num_replaced = self._file.num_replaced
            self._forget()

    def _take(self, lines: list[bytes]) -> None:
        if not self._has_begun:
            self._has_begun, self._first = True, _row(lines[0])
        for line in lines:
            if line.startswith(_EVALUATION):
                self._evaluated(_row(line))
        num_damaged = 0
        for line in reversed(lines):
            if not line.startswith(_UPDATE):
                continue
            if (row := _row(line)) is not None:
                self._last_update, self._num_damaged_after = row, 0
                break
            num_damaged += 1
        self._num_damaged_after += num_damaged

    def _evaluated(self, row: dict[str, Any] | None) -> None:
        if row is None:
            self._num_damaged += 1
            return
        times = [*self._times, float(row["at_s"])]
        self._times = [min(times), max(times)]
        if row.get("is_main", True):
            self._accuracies.append(float(row["accuracy"]))


def _row(line: bytes) -> dict[str, Any] | None:
    """Return a line's row; None for a damaged one."""
    try:
        row = json.loads(line)
        _ = float(row["at_s"]), float(row.get("accuracy", 0.0))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return None
    return row
