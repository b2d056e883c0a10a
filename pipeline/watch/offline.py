"""The watch over a table of the past, and over what a run has recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipeline.files.columns import Cell, Column, read_columns
from pipeline.incidents.file import RunIncidents
from pipeline.watch.findings import Finding
from pipeline.watch.frame import Frame
from pipeline.watch.segments import observed_files
from pipeline.watch.tables import MOST_PHASES, TableForm, frames, read_rows
from pipeline.watch.thresholds import Thresholds
from pipeline.watch.tuning import Tuning
from pipeline.watch.watcher import Watch
from protocol.errors import DataError

_PIECE_S = 90.0


@dataclass(frozen=True, slots=True)
class OfflineWatch:
    """The findings in one table."""

    findings: list[Finding]
    notes: list[str]
    """Sentences on columns that were ignored or are absent."""
    num_workers: int


def watch_table(
    paths: Sequence[Path], kind: TableForm, tuning: Tuning | None = None, thresholds: Thresholds | None = None
) -> OfflineWatch:
    """Watch a table of one file or several, from first moment to last. Raises DataError."""
    rows, table = read_rows(paths, kind)
    path = paths[0] if len(paths) == 1 else paths[0].parent
    notes = [f"{path}: the columns {', '.join(table.unknown)} are ignored"] if table.unknown else []
    if rows.phase is None and "phase" in table.texts and "phase" not in table.absent:
        notes.append(f"{path}: the column phase has more than {MOST_PHASES} words, and is ignored")
    if table.absent:
        notes.append(f"{path}: without {', '.join(table.absent)}")
    tuning = tuning or Tuning()
    if kind is TableForm.WORK:
        # the last piece stands for the worker until the next is finished
        tuning = replace(tuning, filled_s=_PIECE_S)
    watch = Watch(tuning, thresholds)
    findings = [one for frame in frames(rows) for one in watch.tick(frame)]
    return OfflineWatch(findings, notes, len(rows.workers))


_METRICS = (
    Column("time_s", Cell.SECONDS),
    Column("worker", Cell.TEXT),
    Column("role", Cell.TEXT, ""),
    Column("phase", Cell.TEXT, ""),
    Column("metric", Cell.TEXT),
    Column("value"),
)


def watch_run(
    run_dir: Path, progress: Callable[[int, int], None] = lambda *_: None, thresholds: Thresholds | None = None
) -> OfflineWatch:
    """Watch what a run's observer has recorded, two minutes at a time. Incidents that are open and
    that the observer found later than that are findings, too.

    ``progress`` gets the numbers of files that were read and of all. Raises DataError: nothing was
    recorded and no incident is open. Raises OSError."""
    files, watch = observed_files(run_dir, "metrics"), Watch(thresholds=thresholds)
    found, notes, num_damaged, workers, last_s = list[Finding](), list[str](), 0, set[str](), 0.0
    for number, file in enumerate(files, 1):
        try:
            for frame in recorded_frames(file):
                found += watch.tick(frame)
                last_s = frame.time_s
                workers.update(frame.workers)
        except DataError:
            num_damaged += 1
        progress(number, len(files))
    since = [one for one in RunIncidents(run_dir).read() if one.is_open and one.opened_s > last_s]
    if not files and not since:
        raise DataError(
            f"{run_dir} has no recorded metrics: the observer writes them every two minutes, and at the run's end"
        )
    if num_damaged:
        notes.append(f"{num_damaged} of {len(files)} recorded files are damaged, and were skipped")
    for one in since:
        last = one.records[-1]
        found.append(
            Finding(one.component, one.role, one.since_s, one.opened_s, one.kind, "", last.score, one.sentence)
        )
    return OfflineWatch(found, notes, len(workers))


def recorded_frames(file: Path) -> Iterator[Frame]:
    """Yield the frames that an observer recorded in one file of metrics. Raises DataError."""
    table = read_columns(file, _METRICS)
    worker, metric, role, phase = (table.texts[name] for name in ("worker", "metric", "role", "phase"))
    order = np.argsort(table.numbers["time_s"], kind="stable")
    time_s = table.numbers["time_s"][order]
    worker_codes, metric_codes, role_codes, phase_codes = (
        column.codes[order] for column in (worker, metric, role, phase)
    )
    value = table.numbers["value"][order].astype(np.float32)
    starts = np.flatnonzero(np.diff(time_s, prepend=-np.inf))
    present, names, roles = np.empty(0, np.intp), tuple[str, ...](), tuple[str, ...]()
    for begin, end in zip(starts.tolist(), [*starts[1:].tolist(), len(time_s)], strict=True):
        mine = worker_codes[begin:end]
        there, first = np.unique(mine, return_index=True)
        if not np.array_equal(there, present):
            present = there
            names = tuple(worker.words[code] for code in there)
            roles = tuple(role.words[role_codes[begin + at]] for at in first)
        phases = tuple(phase.words[code] for code in phase_codes[begin + first])
        values = np.full((len(there), len(metric.words)), np.nan, np.float32)
        values[np.searchsorted(there, mine), metric_codes[begin:end]] = value[begin:end]
        yield Frame(float(time_s[begin]), names, roles, metric.words, values, phases)
