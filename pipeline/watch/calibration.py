"""The largest strengths of healthy workers, of which thresholds are fitted."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pipeline.watch.frame import Frame
from pipeline.watch.watcher import Watch

WINDOW_S = 900.0


def largest_strengths(frames: Iterable[Frame]) -> NDArray[np.float64]:
    """Return the largest strength of each worker and window of 15 minutes. The fleet is healthy."""
    watch = Watch()
    largest = dict[tuple[str, int], float]()
    begin_s = None
    for frame in frames:
        begin_s = frame.time_s if begin_s is None else begin_s
        watch.tick(frame)
        window = int((frame.time_s - begin_s) / WINDOW_S)
        for worker, strength in zip(frame.workers, watch.strengths().tolist(), strict=True):
            key = (worker, window)
            largest[key] = max(largest.get(key, 0.0), strength)
    return np.array(list(largest.values()))
