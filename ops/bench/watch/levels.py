"""The last seconds of every metric as levels, for the baselines: counters as rates, gaps filled."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipeline.watch.frame import Frame

COUNTERS: Final = frozenset({"progress", "turns", "done", "errors", "retries", "refused"})
LEFT_OUT: Final = frozenset({"heartbeat_age_s", "clock_ahead_ms"})
"""Metrics without a peer to compare with: baselines of similarity do not read them."""

Floats = NDArray[np.float32]


class Levels:
    """Holds the last ``num_ticks`` frames as levels."""

    def __init__(self, num_ticks: int, only: tuple[str, ...] = ()) -> None:
        self._ticks: deque[Floats] = deque(maxlen=num_ticks)
        self._only = only
        self._before: Floats | None = None
        self._level: Floats | None = None
        self._frame: Frame | None = None
        self.metrics: tuple[str, ...] = ()
        self._columns: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._counts: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)

    def add(self, frame: Frame) -> None:
        """Take a frame. Workers that come begin with gaps, those that go are forgotten."""
        if self._frame is None or frame.metrics != self._frame.metrics:
            wanted = self._only or tuple(name for name in frame.metrics if name not in LEFT_OUT)
            self.metrics = tuple(name for name in wanted if name in frame.metrics)
            self._columns = np.array([frame.metrics.index(name) for name in self.metrics], dtype=np.int64)
            self._counts = np.array([name in COUNTERS for name in self.metrics])
        elif frame.workers is not self._frame.workers:
            self._move(self._frame, frame)
        values = frame.values[:, self._columns]
        before = values if self._before is None else self._before
        rates = np.where(self._counts, values - before, values)
        level = rates if self._level is None else np.where(np.isfinite(rates), rates, self._level)
        self._before = np.where(np.isfinite(values), values, before)
        self._level = level
        self._ticks.append(level)
        self._frame = frame

    def _move(self, old: Frame, new: Frame) -> None:
        place = {name: at for at, name in enumerate(old.workers)}
        source = np.array([place.get(name, -1) for name in new.workers])

        def moved(table: Floats) -> Floats:
            rows = table[source]
            rows[source < 0] = np.nan
            return rows

        self._before = None if self._before is None else moved(self._before)
        self._level = None if self._level is None else moved(self._level)
        self._ticks = deque(map(moved, self._ticks), maxlen=self._ticks.maxlen)

    def is_full(self) -> bool:
        """Whether as many frames were taken as are held."""
        return len(self._ticks) == self._ticks.maxlen

    def window(self, places: NDArray[np.int64]) -> Floats:
        """Return these workers' last levels, [ticks, workers, metrics]. A gap has the median of the
        others at that tick, or 0 when no worker has the metric."""
        levels = np.stack([tick[places] for tick in self._ticks])
        gaps = np.isnan(levels)
        if gaps.any():
            has_some = ~gaps.all(axis=1, keepdims=True)
            filled = np.where(has_some, levels, np.float32(0.0))
            middle = np.nanmedian(filled, axis=1, keepdims=True)
            levels = np.where(gaps, middle, filled)
        return levels


def roles_of(frame: Frame) -> dict[str, NDArray[np.int64]]:
    """Return the places of each role's workers."""
    names = np.array(frame.roles)
    return {name: np.flatnonzero(names == name) for name in dict.fromkeys(frame.roles)}
