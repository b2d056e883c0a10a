"""Turns tables of a fleet's metrics, or of its finished work, into frames.

Order and repetition of rows do not matter. A worker is in the frames from its first row until a few
intervals after its last one, so joining and leaving are not anomalies. The kind of a table is
recognised by its columns.

In a table of finished work a piece's service ratio is its duration divided by the expected one: the
median of pieces of its kind and about its size, over all workers and the whole table. So a long
piece on a healthy worker is not an anomaly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.files.columns import Cell, Column, Columns, column_names, joined, read_columns
from pipeline.fleet.peers.frame import CATALOGUE, Frame
from protocol.errors import DataError

METRIC_COLUMNS = ("time_s", "worker", "metric", "value")
WORK_COLUMNS = ("worker", "start_s", "duration_s")
_STAYS = 3.0
"""Intervals for which a worker stays in the frames after its last row."""
_SHORTEST_S, _LONGEST_S = 0.5, 60.0
_MAX_FRAMES = 200_000
MOST_PHASES = 32
"""With more phases hardly any worker would have peers."""
_OF_PIECES = ("finished_age_s", "longest_piece_s")


class TableForm(StrEnum):
    METRICS = "metrics"
    WORK = "finished work"


@dataclass(frozen=True, slots=True)
class Pieces:
    """Finished pieces of work, in order of their start."""

    worker: NDArray[np.intp]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    longest_s: NDArray[np.float32]
    """[workers]: the longest piece of each worker's role."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Samples in any order. Each is one metric of one worker at one time."""

    time_s: NDArray[np.float64]
    worker: NDArray[np.intp]
    metric: NDArray[np.intp]
    value: NDArray[np.float64]
    workers: tuple[str, ...]
    roles: tuple[str, ...]
    """Role of each worker."""
    metrics: tuple[str, ...]
    phase: NDArray[np.intp] | None = None
    """Phase of the worker at that time; None in a table without phases."""
    phases: tuple[str, ...] = ()
    pieces: Pieces | None = None
    """Only in a table of finished work: each frame then has the time since a worker's last
    piece."""


def table_kind(path: Path) -> TableForm | None:
    """Return the kind of a table by its columns, or None if it is neither. Raises DataError."""
    names = set(column_names(path))
    if names.issuperset(METRIC_COLUMNS):
        return TableForm.METRICS
    return TableForm.WORK if names.issuperset(WORK_COLUMNS) else None


def read_rows(paths: Sequence[Path], kind: TableForm) -> tuple[Measured, Columns]:
    """Read the files of one table as samples. Raises DataError that names file, row and column."""
    return _metric_rows(paths) if kind is TableForm.METRICS else _work_rows(paths)


def _read(paths: Sequence[Path], wanted: Sequence[Column]) -> Columns:
    return joined([read_columns(path, wanted) for path in paths])


def _metric_rows(paths: Sequence[Path]) -> tuple[Measured, Columns]:
    table = _read(
        paths,
        [
            Column("time_s", Cell.SECONDS),
            Column("worker", Cell.TEXT),
            Column("role", Cell.TEXT, ""),
            Column("phase", Cell.TEXT, ""),
            Column("metric", Cell.TEXT),
            Column("value", Cell.NUMBER, math.nan),
        ],
    )
    worker, metric = table.texts["worker"], table.texts["metric"]
    workers, codes = _by_name(worker.words, worker.codes)
    metrics, metric_codes = _by_name(metric.words, metric.codes)
    role = table.texts["role"]
    roles = _roles(workers, codes, np.asarray(role.words, dtype=object)[role.codes] if any(role.words) else None)
    value = table.numbers["value"].copy()
    # a learner's loss or norm of nan is a sample, not a missing one
    for at, name in enumerate(metrics):
        if name in ("loss", "grad_norm"):
            value[(metric_codes == at) & np.isnan(value)] = np.inf
    kept = ~np.isnan(value)
    phases, phase_codes = _by_name(table.texts["phase"].words, table.texts["phase"].codes)
    has_phases = 1 < len(phases) <= MOST_PHASES
    return (
        Measured(
            table.numbers["time_s"][kept], codes[kept], metric_codes[kept], value[kept], workers, roles, metrics,
            phase_codes[kept] if has_phases else None, phases if has_phases else (),
        ),
        table,
    )  # fmt: skip


def _work_rows(paths: Sequence[Path]) -> tuple[Measured, Columns]:
    table = _read(
        paths,
        [
            Column("worker", Cell.TEXT),
            Column("kind", Cell.TEXT, ""),
            Column("start_s", Cell.SECONDS),
            Column("duration_s", Cell.NUMBER),
            Column("size", Cell.NUMBER, math.nan),
            Column("ok", Cell.FLAG, 1.0),
        ],
    )
    durations = table.numbers["duration_s"]
    wrong = np.flatnonzero(~(np.isfinite(durations) & (durations >= 0)))
    if len(wrong):
        raise DataError(
            f"{table.path}: {len(wrong)} durations below 0 or not finite, the first {durations[wrong[0]]:g}; expected seconds"
        )
    worker, kind = table.texts["worker"], table.texts["kind"]
    workers, codes = _by_name(worker.words, worker.codes)
    kinds, kind_codes = _by_name(kind.words, kind.codes)
    samples = work_rows(
        codes, kind_codes, table.numbers["start_s"], durations, table.numbers["size"], table.numbers["ok"] != 0.0
    )
    # workers whose work is mostly of the same kind are peers
    counts = np.zeros((len(workers), max(len(kinds), 1)), np.intp)
    np.add.at(counts, (codes, kind_codes), 1)
    roles = tuple(kinds[at] for at in counts.argmax(axis=1)) if kinds else ()
    pieces = _pieces(codes, roles, table.numbers["start_s"], durations)
    return Measured(*samples, workers, roles, METRICS, pieces=pieces), table


def _pieces(
    codes: NDArray[np.intp], roles: tuple[str, ...], start_s: NDArray[np.float64], duration_s: NDArray[np.float64]
) -> Pieces:
    own = np.zeros(len(roles), np.float32)
    np.maximum.at(own, codes, duration_s.astype(np.float32))
    of_role = np.array(roles, dtype=object)
    longest_s = np.array([own[of_role == role].max(initial=0.0) for role in roles], np.float32)
    order = np.argsort(start_s, kind="stable")
    return Pieces(codes[order], start_s[order], (start_s + duration_s)[order], longest_s)


def _by_name(words: tuple[str, ...], codes: NDArray[np.int32]) -> tuple[tuple[str, ...], NDArray[np.intp]]:
    """Return the words in alphabetical order, and the codes that match it."""
    order = sorted(range(len(words)), key=words.__getitem__)
    place = np.empty(len(words), np.intp)
    place[order] = np.arange(len(words))
    return tuple(words[at] for at in order), place[codes] if len(codes) else codes.astype(np.intp)


def _roles(workers: tuple[str, ...], codes: NDArray[np.intp], role: NDArray[np.object_] | None) -> tuple[str, ...]:
    """Return each worker's role: the first in alphabetical order, if there are several. In a table
    without roles it is the worker's name without numbers, if that makes only a few groups."""
    found = [""] * len(workers)
    if role is not None:
        pairs = sorted({(int(code), str(name)) for code, name in zip(codes, role, strict=True)}, reverse=True)
        for code, name in pairs:
            found[code] = name or found[code]
        return tuple(found)
    stems = ["".join("0" if sign.isdigit() else sign for sign in name) for name in workers]
    stems = ["0".join(part for part in stem.split("0") if part) for stem in stems]
    groups = {stem: stems.count(stem) for stem in set(stems)} if len(set(stems)) <= _MOST_STEMS else {}
    return tuple(stems) if groups and min(groups.values()) >= _FEWEST_ALIKE else tuple(found)


_MOST_STEMS = 12
_FEWEST_ALIKE = 4


def interval_s(rows: Measured) -> float:
    """Return the usual time between samples of one metric of one worker, in seconds."""
    if not len(rows.time_s):
        return 1.0
    series = rows.worker * len(rows.metrics) + rows.metric
    order = np.lexsort((rows.time_s, series))
    gaps = np.diff(rows.time_s[order])
    gaps = gaps[(np.diff(series[order]) == 0) & (gaps > 1e-6)]
    usual = float(np.median(gaps)) if len(gaps) else 1.0
    usual = min(max(usual, _SHORTEST_S), _LONGEST_S)
    return max(usual, float(np.ptp(rows.time_s)) / _MAX_FRAMES)


def frames(rows: Measured) -> Iterator[Frame]:
    """Yield the frames of samples, one usual interval apart. Of several samples in one frame, the
    last counts."""
    if not len(rows.time_s):
        return
    step_s = interval_s(rows)
    begin_s = float(rows.time_s.min())
    place = np.rint((rows.time_s - begin_s) / step_s).astype(np.int64)
    value = _from_first(rows)
    phase = np.zeros(len(place), np.intp) if rows.phase is None else rows.phase
    order = np.lexsort((value, phase, rows.time_s, place))
    place, worker, metric, value = place[order], rows.worker[order], rows.metric[order], value[order]
    phase, phase_of = phase[order], np.zeros(len(rows.workers), np.intp)
    first = np.full(len(rows.workers), np.iinfo(np.int64).max)
    last = np.full(len(rows.workers), -1)
    np.minimum.at(first, worker, place)
    np.maximum.at(last, worker, place)
    # a worker that finishes no more pieces stays, and a rule compares it with its peers
    leaves = np.full(len(last), np.iinfo(np.int64).max) if rows.pieces else last + 1 + round(_STAYS)
    metrics = (*rows.metrics, *_OF_PIECES) if rows.pieces else rows.metrics
    ended_s, begun = np.full(len(rows.workers), -np.inf), 0
    ends = np.searchsorted(place, np.arange(int(place[-1]) + 1), side="right")
    full = np.empty((len(rows.workers), len(metrics)), np.float32)
    changes = set(first.tolist()) | set(leaves.tolist())
    present, names, roles = np.empty(0, np.intp), tuple[str, ...](), tuple[str, ...]()
    begin = 0
    for at, end in enumerate(ends.tolist()):
        if at in changes:
            present = np.flatnonzero((first <= at) & (at < leaves))
            names, roles = tuple(rows.workers[one] for one in present), tuple(rows.roles[one] for one in present)
        full.fill(np.nan)
        full[worker[begin:end], metric[begin:end]] = value[begin:end]
        if rows.pieces:
            now_s = begin_s + at * step_s
            until = int(np.searchsorted(rows.pieces.start_s, now_s, side="right"))
            np.maximum.at(ended_s, rows.pieces.worker[begun:until], rows.pieces.end_s[begun:until])
            begun = until
            # a worker that is working on a piece is not idle
            full[:, -2] = np.where(np.isinf(ended_s), np.nan, np.maximum(now_s - ended_s, 0.0))
            full[:, -1] = rows.pieces.longest_s
        phase_of[worker[begin:end]] = phase[begin:end]
        begin = end
        phases = tuple(rows.phases[phase_of[one]] for one in present) if rows.phase is not None else None
        yield Frame(begin_s + at * step_s, names, roles, metrics, full[present], phases)


def _from_first(rows: Measured) -> NDArray[np.float64]:
    """Return the values, with each worker's first value subtracted from counters, so that float32
    can hold them."""
    value = rows.value.copy()
    for at, name in enumerate(rows.metrics):
        if name not in CATALOGUE or not CATALOGUE[name].is_counter:
            continue
        own = np.flatnonzero(rows.metric == at)
        order = own[np.lexsort((rows.value[own], rows.time_s[own], rows.worker[own]))]
        starts = np.flatnonzero(np.diff(rows.worker[order], prepend=-1))
        lengths = np.diff(np.append(starts, len(order)))
        value[order] -= np.repeat(rows.value[order][starts], lengths)
    return value


METRICS = ("errors", "service_ratio", "work_done")
"""Of finished work: errors so far, the service ratio, and expected seconds of work so far."""
_MOST_BINS = 24
_FEWEST_IN_BIN = 20
_LEAST_DURATION_S = 1e-6


def expected_s(size: NDArray[np.float64], duration_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the duration expected for each piece's size, in seconds. All pieces are of one kind.

    Interpolates between medians of pieces in order of size, and extrapolates in proportion to the
    size. For pieces without a size it is the median of all."""
    usual = max(float(np.median(duration_s)), _LEAST_DURATION_S)
    expected = np.full(len(size), usual)
    sized = np.flatnonzero(np.isfinite(size) & (size > 0))
    if len(sized) < 2 * _FEWEST_IN_BIN or np.ptp(size[sized]) == 0:
        return expected
    order = sized[np.argsort(size[sized], kind="stable")]
    bins = np.array_split(order, min(_MOST_BINS, len(order) // _FEWEST_IN_BIN))
    sizes = np.array([np.median(size[one]) for one in bins])
    medians = np.maximum([np.median(duration_s[one]) for one in bins], _LEAST_DURATION_S)
    own = size[sized]
    found = np.interp(own, sizes, medians)
    found = np.where(own > sizes[-1], medians[-1] * own / sizes[-1], found)
    expected[sized] = np.maximum(found, _LEAST_DURATION_S)
    return expected


def work_rows(
    worker: NDArray[np.intp],
    kind: NDArray[np.intp],
    start_s: NDArray[np.float64],
    duration_s: NDArray[np.float64],
    size: NDArray[np.float64],
    is_ok: NDArray[np.bool_],
) -> tuple[NDArray[np.float64], NDArray[np.intp], NDArray[np.intp], NDArray[np.float64]]:
    """Return the samples at the ends of finished pieces, as time, worker, index into ``METRICS``, and value. The
    arguments are [pieces]."""
    expected = np.empty(len(worker))
    for one in np.unique(kind).tolist():
        own = kind == one
        good = own & is_ok if (own & is_ok).any() else own
        expected[own] = expected_s(np.append(size[own], size[good]), np.append(duration_s[own], duration_s[good]))[
            : np.count_nonzero(own)
        ]
    end_s = start_s + duration_s
    # a repeated row is one piece
    keys = np.stack([worker, kind, start_s, duration_s, np.nan_to_num(size, nan=-1.0), is_ok], axis=1)
    _, once = np.unique(keys, axis=0, return_index=True)
    order = once[np.lexsort((duration_s[once], end_s[once], worker[once]))]
    worker, end_s, expected = worker[order], end_s[order], expected[order]
    ok, ratio = is_ok[order], duration_s[order] / expected
    errors = _running(np.where(ok, 0.0, 1.0), worker)
    done = _running(np.where(ok, expected, 0.0), worker)
    good = np.flatnonzero(ok)
    return (
        np.concatenate([end_s, end_s[good], end_s]),
        np.concatenate([worker, worker[good], worker]),
        np.repeat(np.arange(3), [len(worker), len(good), len(worker)]),
        np.concatenate([errors, ratio[good], done]),
    )


def _running(values: NDArray[np.float64], worker: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return each worker's running sums. Values are ordered by worker."""
    total = np.cumsum(values)
    starts = np.flatnonzero(np.diff(worker, prepend=-1))
    before = np.append(0.0, total)[starts]
    return total - np.repeat(before, np.diff(np.append(starts, len(worker))))
