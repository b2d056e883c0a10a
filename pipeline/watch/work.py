"""Finished pieces of work to metrics of their workers.

A piece's service ratio is its duration over the one that its size lets expect. Expected is the
median duration of pieces of its kind and about its size, over all workers and the whole table. A
long piece on a healthy worker is no oddity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

METRICS = ("errors", "service_ratio", "work_done")
_MOST_BINS = 24
_FEWEST_IN_BIN = 20
_SHORTEST_S = 1e-6


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    """Samples at the ends of pieces of work."""

    time_s: NDArray[np.float64]
    worker: NDArray[np.intp]
    metric: NDArray[np.intp]
    """Index into ``metrics``."""
    value: NDArray[np.float64]
    metrics: tuple[str, ...]


def expected_s(size: NDArray[np.float64], duration_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the duration that each piece's size lets expect, of pieces of one kind, in seconds.

    Medians of pieces in order of size, with lines between; beyond the ends in proportion to the
    size. Pieces without a size have the median of all."""
    usual = max(float(np.median(duration_s)), _SHORTEST_S)
    expected = np.full(len(size), usual)
    sized = np.flatnonzero(np.isfinite(size) & (size > 0))
    if len(sized) < 2 * _FEWEST_IN_BIN or np.ptp(size[sized]) == 0:
        return expected
    order = sized[np.argsort(size[sized], kind="stable")]
    bins = np.array_split(order, min(_MOST_BINS, len(order) // _FEWEST_IN_BIN))
    sizes = np.array([np.median(size[one]) for one in bins])
    medians = np.maximum([np.median(duration_s[one]) for one in bins], _SHORTEST_S)
    own = size[sized]
    found = np.interp(own, sizes, medians)
    found = np.where(own > sizes[-1], medians[-1] * own / sizes[-1], found)
    expected[sized] = np.maximum(found, _SHORTEST_S)
    return expected


def work_rows(
    worker: NDArray[np.intp],
    kind: NDArray[np.intp],
    start_s: NDArray[np.float64],
    duration_s: NDArray[np.float64],
    size: NDArray[np.float64],
    is_ok: NDArray[np.bool_],
) -> MeasuredWork:
    """Return service ratio, errors so far and expected seconds of work so far, [pieces] each."""
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
    return MeasuredWork(
        np.concatenate([end_s, end_s[good], end_s]),
        np.concatenate([worker, worker[good], worker]),
        np.repeat(np.arange(3), [len(worker), len(good), len(worker)]),
        np.concatenate([errors, ratio[good], done]),
        METRICS,
    )


def _running(values: NDArray[np.float64], worker: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return sums so far of each worker, in an order by worker."""
    total = np.cumsum(values)
    starts = np.flatnonzero(np.diff(worker, prepend=-1))
    before = np.append(0.0, total)[starts]
    return total - np.repeat(before, np.diff(np.append(starts, len(worker))))
