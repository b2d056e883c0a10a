"""Runs the watch over tables and over a run's records, and fits thresholds to healthy ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.files.columns import Cell, Column, read_columns
from pipeline.fleet.incidents.records import RunIncidents
from pipeline.fleet.peers.frame import Finding, Frame
from pipeline.fleet.peers.segments import observed_files
from pipeline.fleet.peers.tables import MOST_PHASES, TableForm, frames, read_rows
from pipeline.fleet.peers.thresholds import FEWEST, NO_THRESHOLDS, Tail, Thresholds, Tuning, fit
from pipeline.fleet.peers.watcher import Watch
from protocol.errors import DataError

_PIECE_S = 90.0


@dataclass(frozen=True, slots=True)
class OfflineWatch:
    findings: list[Finding]
    notes: list[str]
    """Sentences about columns that were ignored or are absent."""
    num_workers: int


def watch_table(
    paths: Sequence[Path], kind: TableForm, tuning: Tuning | None = None, thresholds: Thresholds | None = None
) -> OfflineWatch:
    """Watch a table in one or several files, from its first moment to its last. Raises DataError."""
    rows, table = read_rows(paths, kind)
    path = paths[0] if len(paths) == 1 else paths[0].parent
    notes = [f"{path}: the columns {', '.join(table.unknown)} are ignored"] if table.unknown else []
    if rows.phase is None and "phase" in table.texts and "phase" not in table.absent:
        notes.append(f"{path}: the column phase has more than {MOST_PHASES} words, and is ignored")
    if table.absent:
        notes.append(f"{path}: without {', '.join(table.absent)}")
    tuning = tuning or Tuning()
    if kind is TableForm.WORK:
        # a worker's last piece counts until its next one is finished
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
    """Watch what a run's observer has recorded, in files of two minutes. Open incidents that the
    observer found after the last file are findings, too.

    ``progress`` gets the number of files read so far and of all files. Raises DataError if nothing
    was recorded and no incident is open; raises OSError."""
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
    """Yield the frames in one file of recorded metrics. Raises DataError."""
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


WINDOW_S = 900.0
_FULL = 0.9
"""Share of a window that its frames must cover."""


@dataclass(frozen=True, slots=True)
class Strengths:
    num_workers: int
    """Median over the windows."""
    num_windows: int
    largest: NDArray[np.float64]
    """One per worker and window; 1 is the need of a single worker."""


def largest_strengths(given: Iterable[Frame], window_s: float = WINDOW_S) -> Strengths:
    """Return the largest strength of each worker of a healthy fleet in each full window."""
    watch = Watch(thresholds=NO_THRESHOLDS)
    largest: dict[int, dict[str, float]] = {}
    last: dict[int, float] = {}
    begin_s = None
    for frame in given:
        begin_s = frame.time_s if begin_s is None else begin_s
        watch.tick(frame)
        window = int((frame.time_s - begin_s) / window_s)
        last[window] = frame.time_s - begin_s - window * window_s
        own = largest.setdefault(window, {})
        for worker, strength in zip(frame.workers, watch.strengths().tolist(), strict=True):
            own[worker] = max(own.get(worker, 0.0), strength)
    full = [largest[window] for window in sorted(largest) if last[window] >= _FULL * window_s]
    usual = int(np.median([len(one) for one in full])) if full else 0
    return Strengths(usual, len(full), np.array([strength for one in full for strength in one.values()]))


def strengths_of_tables(paths: Sequence[Path], form: TableForm) -> Strengths:
    """Return the strengths in a table of one healthy fleet. Raises DataError."""
    rows, _ = read_rows(paths, form)
    return largest_strengths(frames(rows))


def size_of(num_workers: int) -> int:
    """Return the power of two that stands for fleets of about this size."""
    return 2 ** max(0, round(math.log2(max(1, num_workers))))


def calibrated(fleets: Iterable[Strengths]) -> Thresholds:
    """Return thresholds for the sizes of these healthy fleets.

    Raises DataError, with what is missing, for sizes with too few windows."""
    by_size: dict[int, list[Strengths]] = {}
    for one in fleets:
        if one.num_windows:
            by_size.setdefault(size_of(one.num_workers), []).append(one)
    if not by_size:
        raise DataError("no run has a full window of 15 minutes; expected longer runs, without faults")
    lacking = missing({size: sum(len(one.largest) for one in of) for size, of in by_size.items()})
    if lacking:
        raise DataError("; ".join(lacking))
    return Thresholds({size: fitted(of) for size, of in by_size.items()})


def fitted(fleets: Sequence[Strengths]) -> Tail:
    highest = [float(one.max()) for each in fleets for one in np.array_split(each.largest, each.num_windows)]
    num_workers = int(np.median([each.num_workers for each in fleets]))
    return fit(np.concatenate([each.largest for each in fleets]), highest, num_workers)


def missing(counts: Mapping[int, int]) -> list[str]:
    """Return a sentence for each size that has too few workers and windows for a fit."""
    return [
        f"fleets of about {size} workers: {count // size} windows of 15 minutes; expected at least"
        f" {math.ceil(FEWEST / size)}, {math.ceil((FEWEST - count) / size)} more"
        for size, count in sorted(counts.items())
        if count < FEWEST
    ]
