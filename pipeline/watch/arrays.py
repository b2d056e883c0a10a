"""State of the watch by metric and worker: arrays that follow the workers as they come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class WorkerArrays:
    """Named arrays whose last axes are metrics and workers.

    ``align`` gives them the workers and metrics of the next frame: kept ones keep their state, new
    ones start with the array's fill."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}
        self._fills: dict[str, float] = {}
        self.metrics: tuple[str, ...] = ()
        self.workers: tuple[str, ...] = ()

    def add(self, name: str, fill: float, dtype: DTypeLike = np.float32, lead: tuple[int, ...] = ()) -> None:
        """Add an array of shape [*lead, metrics, workers]."""
        self._fills[name] = fill
        self._arrays[name] = np.full((*lead, len(self.metrics), len(self.workers)), fill, dtype)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[name]

    def __setitem__(self, name: str, values: NDArray[Any]) -> None:
        self._arrays[name] = values

    def align(self, metrics: Sequence[str], workers: Sequence[str]) -> bool:
        """Follow a frame's metrics and workers; return whether any changed."""
        if workers is self.workers and metrics == self.metrics:
            return False
        if tuple(workers) == self.workers and tuple(metrics) == self.metrics:
            self.workers = tuple(workers)
            return False
        rows, columns = _places(self.metrics, metrics), _places(self.workers, workers)
        for name, old in self._arrays.items():
            new = np.full((*old.shape[:-2], len(metrics), len(workers)), self._fills[name], old.dtype)
            if (rows >= 0).any() and (columns >= 0).any():
                kept = np.ix_(rows[rows >= 0], columns[columns >= 0])
                new[(..., *np.ix_(rows >= 0, columns >= 0))] = old[(..., *kept)]
            self._arrays[name] = new
        self.metrics, self.workers = tuple(metrics), tuple(workers)
        return True

    def reset(self, metric: int) -> None:
        """Set the state of one metric to that of a new one."""
        for name, array in self._arrays.items():
            array[..., metric, :] = self._fills[name]


def _places(old: Sequence[str], new: Sequence[str]) -> NDArray[np.intp]:
    """Return where each new name is among the old ones; -1 for none."""
    place = {name: at for at, name in enumerate(old)}
    return np.array([place.get(name, -1) for name in new], dtype=np.intp)
