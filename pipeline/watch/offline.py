"""The watch over a table of the past."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.watch.findings import Finding
from pipeline.watch.tables import TableForm, frames, read_rows
from pipeline.watch.tuning import Tuning
from pipeline.watch.watcher import Watch

_PIECE_S = 90.0


@dataclass(frozen=True, slots=True)
class Hindsight:
    """The findings in one table."""

    findings: list[Finding]
    notes: list[str]
    """Sentences on columns that were ignored or are absent."""
    num_workers: int


def watch_table(paths: Sequence[Path], kind: TableForm, tuning: Tuning | None = None) -> Hindsight:
    """Watch a table of one file or several, from first moment to last. Raises DataError."""
    rows, table = read_rows(paths, kind)
    path = paths[0] if len(paths) == 1 else paths[0].parent
    notes = [f"{path}: the columns {', '.join(table.unknown)} are ignored"] if table.unknown else []
    if table.absent:
        notes.append(f"{path}: without {', '.join(table.absent)}")
    tuning = tuning or Tuning()
    if kind is TableForm.WORK:
        # the last piece stands for the worker until the next is finished
        tuning = replace(tuning, filled_s=_PIECE_S)
    watch = Watch(tuning)
    findings = [one for frame in frames(rows) for one in watch.tick(frame)]
    return Hindsight(findings, notes, len(rows.workers))
