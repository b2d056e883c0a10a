"""Which evaluation of the main set is the best so far, and for how many none was better.

A pure fold over the rows of a history, so a resumed learner and a reader after the run agree."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.observability.history import EvaluationRow


class BestEvaluation:
    """The first of the evaluations with the highest accuracy."""

    def __init__(self, rows: Iterable[EvaluationRow] = ()) -> None:
        self.row: EvaluationRow | None = None
        self.num_since = 0
        """Evaluations of the main set after it, none of them better."""
        for row in rows:
            self.add(row)

    def add(self, row: EvaluationRow) -> None:
        """Count an evaluation; those of other sets change nothing."""
        if not row.is_main:
            return
        if self.row is None or row.accuracy > self.row.accuracy:
            self.row, self.num_since = row, 0
        else:
            self.num_since += 1
