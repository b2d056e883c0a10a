"""Thresholds of healthy fleets: each worker's largest strength in a window of 15 minutes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.watch.frame import Frame
from pipeline.watch.tables import TableForm, frames, read_rows
from pipeline.watch.thresholds import FEWEST, NO_THRESHOLDS, Tail, Thresholds, fit
from pipeline.watch.watcher import Watch
from protocol.errors import DataError

WINDOW_S = 900.0
_FULL = 0.9
"""Share of a window that its frames must span."""


@dataclass(frozen=True, slots=True)
class Strengths:
    """Of one healthy fleet."""

    num_workers: int
    """Of most windows."""
    num_windows: int
    largest: NDArray[np.float64]
    """One a worker and window; 1 is the need of a single worker."""


def largest_strengths(given: Iterable[Frame], window_s: float = WINDOW_S) -> Strengths:
    """Return the largest strength of each worker in each full window. The fleet is healthy."""
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
    """Return the size under which fleets of about so many workers are counted: a power of two."""
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
    """Return the tail of fleets of about one size."""
    highest = [float(one.max()) for each in fleets for one in np.array_split(each.largest, each.num_windows)]
    num_workers = int(np.median([each.num_workers for each in fleets]))
    return fit(np.concatenate([each.largest for each in fleets]), highest, num_workers)


def missing(counts: Mapping[int, int]) -> list[str]:
    """Return a sentence for each size with too few workers and windows for a fit."""
    return [
        f"fleets of about {size} workers: {count // size} windows of 15 minutes; expected at least"
        f" {math.ceil(FEWEST / size)}, {math.ceil((FEWEST - count) / size)} more"
        for size, count in sorted(counts.items())
        if count < FEWEST
    ]
