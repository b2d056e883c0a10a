"""The newest rows of a run's history, in bounded memory, as progress."""

from __future__ import annotations

from pathlib import Path

from pipeline.observability.history import HISTORY_NAME, EvaluationRow, HistoryTail, UpdateRow
from pipeline.observability.progress import RunProgress

MAX_UPDATES = 256
"""Newest updates that are kept."""
MAX_EVALUATIONS = 256


class ProgressReader:
    """The newest rows of a run's history, and the first evaluation of each set."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = HistoryTail(run_dir / HISTORY_NAME)
        self._updates: list[UpdateRow] = []
        self._first: dict[str, EvaluationRow] = {}
        self._evaluations: list[EvaluationRow] = []

    def read(self, num_wanted: int) -> RunProgress:
        """Read the new rows; return the run's progress."""
        rows = self._tail.read()
        for row in rows:
            if isinstance(row, UpdateRow):
                if self._updates and row.update <= self._updates[-1].update:
                    # A learner that went back has written the file anew.
                    self._updates = [kept for kept in self._updates if kept.update < row.update]
                self._updates.append(row)
            elif isinstance(row, EvaluationRow):
                if self._first.get(row.set_name, row).number >= row.number:
                    self._first[row.set_name] = row
                self._evaluations = [
                    kept
                    for kept in self._evaluations
                    if (kept.set, kept.number) < (row.set, row.number) or kept.set != row.set
                ]
                self._evaluations.append(row)
        rows.clear()
        del self._updates[:-MAX_UPDATES]
        del self._evaluations[:-MAX_EVALUATIONS]
        kept = {id(row): row for row in (*self._first.values(), *self._evaluations)}
        return RunProgress.of([*kept.values(), *self._updates], num_wanted)
