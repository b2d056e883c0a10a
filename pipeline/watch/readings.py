"""Readings to comparable values: counters become rates, and a missing sample is filled for a while.

The catalogue knows which metrics are counters. The data may show otherwise: a counter that falls
again and again is a level. An unknown metric that never falls is a counter."""

from __future__ import annotations

import numpy as np

from pipeline.watch.arrays import WorkerArrays
from pipeline.watch.groups import Floats
from pipeline.watch.metrics import CATALOGUE, metric

_FEWEST_CHANGES = 30
"""Changes of a metric, over all workers, by which its nature is decided."""
_FALLS = 0.02
"""Largest share of falls among a counter's changes: a worker that starts anew is one."""
_UNDECIDED_S = 30.0


class Readings:
    """Turns each frame's values into levels and rates."""

    def __init__(self, filled_s: float) -> None:
        """``filled_s``: age up to which a worker's last sample stands for a missing one."""
        self._filled_s = filled_s
        self._state = state = WorkerArrays()
        state.add("raw", np.nan)
        state.add("at", -np.inf, np.float64)
        state.add("value", np.nan)
        self._rises: dict[str, int] = {}
        self._falls: dict[str, int] = {}
        self._is_counter: dict[str, bool] = {}
        self._since_s: dict[str, float] = {}
        self.usual_gap_s = 1.0
        """Typical time between samples of one worker."""

    def take(
        self, time_s: float, metrics: tuple[str, ...], workers: tuple[str, ...], values: Floats
    ) -> tuple[Floats, list[int]]:
        """Return comparable values [metrics, workers], and the metrics whose nature has changed,
        so that their past is void.

        ``values``: [metrics, workers], NaN where there is no sample."""
        state = self._state
        state.align(metrics, workers)
        is_new = np.isfinite(values)
        gap = (time_s - state["at"]).astype(np.float32)
        delta = values - state["raw"]
        np.copyto(state["raw"], values, where=is_new)
        np.copyto(state["at"], time_s, where=is_new)
        changed = self._learn(time_s, metrics, delta)
        counts = np.array([self._counts(name) for name in metrics])
        value = state["value"]
        with np.errstate(invalid="ignore", divide="ignore"):
            rate = np.where(delta >= 0, delta / gap, np.float32(np.nan))
        fresh = np.where(counts[:, None], rate, values)
        is_new &= np.isfinite(fresh)
        np.copyto(value, fresh, where=is_new)
        value[(time_s - state["at"]) > max(self._filled_s, 3.5 * self.usual_gap_s)] = np.nan
        known = gap[np.isfinite(gap) & is_new]
        if known.size:
            self.usual_gap_s += 0.1 * (float(np.median(known[:4096])) - self.usual_gap_s)
        for at in changed:
            value[at] = np.nan
        return value.copy(), changed

    def _counts(self, name: str) -> bool:
        return self._is_counter.get(name, metric(name).is_counter)

    def _learn(self, time_s: float, metrics: tuple[str, ...], delta: Floats) -> list[int]:
        """Count rises and falls; return the metrics whose nature has changed."""
        with np.errstate(invalid="ignore"):
            rises, falls = np.count_nonzero(delta > 0, axis=1), np.count_nonzero(delta < 0, axis=1)
        changed = list[int]()
        for at, name in enumerate(metrics):
            since_s = self._since_s.setdefault(name, time_s)
            rose = self._rises[name] = self._rises.get(name, 0) + int(rises[at])
            fell = self._falls[name] = self._falls.get(name, 0) + int(falls[at])
            if rose + fell < _FEWEST_CHANGES or time_s - since_s < _UNDECIDED_S:
                continue
            if name in CATALOGUE and not CATALOGUE[name].is_counter:
                continue
            counts = fell <= _FALLS * (rose + fell)
            if counts != self._counts(name):
                changed.append(at)
            self._is_counter[name] = counts
        return changed
