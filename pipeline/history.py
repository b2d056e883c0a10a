"""What happened in a run, one JSON object a line: ``<run_dir>/history.jsonl``.

*Consumes* rows from the learner, its only writer. *Produces* the same rows for the report, the live view and people with
``jq``. A row is written whole and flushed; a line cut short by a crash is skipped when read, and a learner that resumes from
an older checkpoint first drops the rows after it, so that no update is told twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

HISTORY_NAME = "history.jsonl"


@dataclass(frozen=True, slots=True)
class UpdateRow:
    """One update of the policy."""

    update: int
    """1 for the first."""
    policy_version: int
    """Published by this update."""
    at_s: float
    """Seconds since 1970."""
    num_trajectories: int
    num_response_tokens: int
    num_trained_tokens: int
    """Response tokens that carried loss."""
    reward: float
    """Mean over the batch."""
    accuracy: float
    """Mean raw accuracy of the batch, which holds informative groups only when dynamic sampling is on."""
    response_length: float
    """Mean tokens a response."""
    staleness_mean: float
    """Versions between the learner and each token."""
    staleness_max: int
    num_segments_mean: float
    """Policy versions a trajectory spans."""
    loss: float
    grad_norm: float
    learning_rate: float
    num_refused_steps: int
    """Optimiser steps that were not finite and so not applied."""
    wait_s: float
    """Waiting for enough ready units."""
    logprob_s: float
    step_s: float
    publish_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Means of the objective's metrics over the optimiser steps."""


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One finished evaluation."""

    number: int
    policy_version: int
    """Requested."""
    at_s: float
    num_responses: int
    num_failed: int
    accuracy: float
    """Mean over all responses (avg@k)."""
    response_length: float
    oldest_version: int
    newest_version: int
    """The versions that really sampled it."""


Row = UpdateRow | EvaluationRow
_KINDS: dict[str, type[Row]] = {"update": UpdateRow, "evaluation": EvaluationRow}


class History:
    """Appends rows."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    @classmethod
    def resume(cls, path: Path, *, last_version: int) -> Self:
        """Open for appending after dropping what came after ``last_version``."""
        if path.exists():
            rows = [row for row in read_history(path) if row.policy_version <= last_version]
            partial = path.with_suffix(".partial")
            partial.write_text("".join(_line(row) for row in rows), encoding="utf-8")
            partial.replace(path)
        return cls(path)

    def append(self, row: Row) -> None:
        """Write one row and flush it."""
        self._file.write(_line(row))
        self._file.flush()

    def sync(self) -> None:
        """Force what was written to the disk, before a checkpoint that counts on it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_history(path: Path) -> Iterator[Row]:
    """Yield every whole row, oldest first; nothing when there is no file."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                return  # cut short by a crash
            values: dict[str, Any] = json.loads(line)
            kind = _KINDS[values.pop("kind")]
            yield kind(**values)


def _line(row: Row) -> str:
    kind = "update" if isinstance(row, UpdateRow) else "evaluation"
    return json.dumps({"kind": kind, **asdict(row)}) + "\n"
