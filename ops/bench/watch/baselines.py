"""The detectors that the watch is compared with, on the same windows.

Each gives a level a tick, and names a worker when its level exceeds a threshold. Thresholds come
from benign development windows, by size (``calibration``). The fixed timeouts have none to set."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ops.bench.watch.levels import Floats, Levels, roles_of
from ops.bench.watch.scoring import Alarm
from pipeline.watch.frame import Frame
from pipeline.watch.watcher import Watch

STEP_TICKS: Final = 5
"""Ticks from one look of a baseline of similarity to the next; Minder's is 1."""
WINDOW_TICKS: Final = 8
"""Minder's w."""
PERSISTENCE_S: Final = 60.0
"""Time that a worker must stay the candidate. Minder's 240 s leave no time for an alarm in 240."""
_WARM_UP_S: Final = 120.0


class Detector(Protocol):
    """A row of the comparison."""

    highest: float
    """The highest level so far, for the choice of a threshold; NaN where there is none."""

    def tick(self, frame: Frame, now_s: float) -> Sequence[Alarm]:
        """Return the alarms of this frame, ``now_s`` seconds after the window began."""
        ...


class WatchDetector:
    """The watch itself."""

    def __init__(self) -> None:
        self._watch = Watch()
        self.highest = math.nan

    def tick(self, frame: Frame, now_s: float) -> Sequence[Alarm]:
        """Return the watch's findings."""
        return [Alarm(now_s, found.worker, found.kind, found.metric) for found in self._watch.tick(frame)]


class HeartbeatDetector:
    """Names a worker whose last heartbeat is older than the threshold."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._named: set[str] = set()
        self.highest = 0.0

    def tick(self, frame: Frame, now_s: float) -> Sequence[Alarm]:
        """Look at the ages."""
        ages = frame.values[:, frame.metrics.index("heartbeat_age_s")]
        self.highest = max(self.highest, float(np.nanmax(ages, initial=0.0)))
        late = {frame.workers[place] for place in np.flatnonzero(ages > self._threshold)}
        new, self._named = late - self._named, self._named | late
        return [Alarm(now_s, worker, "silent", "heartbeat_age_s") for worker in sorted(new)]


class TimeoutDetector:
    """RobustRL's limits: 60 s without progress of a worker with work, 5 minutes of a learner, and a
    heartbeat that is 60 s old."""

    LEARNER_S, OTHERS_S = 300.0, 60.0
    LEARNERS = frozenset({"learner", "trainer"})

    def __init__(self) -> None:
        self._moved: dict[str, tuple[float, float]] = {}
        self._named: set[str] = set()
        self.highest = math.nan

    def tick(self, frame: Frame, now_s: float) -> Sequence[Alarm]:
        """Look at work that does not move."""
        at = frame.metrics.index
        rows = frame.values[:, [at("heartbeat_age_s"), at("progress"), at("in_flight")]].tolist()
        found: list[Alarm] = []
        for worker, role, (age, progress, held) in zip(frame.workers, frame.roles, rows, strict=True):
            limit = self.LEARNER_S if role in self.LEARNERS else self.OTHERS_S
            count, since = self._moved.get(worker, (math.nan, now_s))
            # a missing sample, and a worker without work, start the time anew
            if math.isnan(progress) or progress != count or held == 0.0:
                since = now_s
            self._moved[worker] = (progress, since)
            if (now_s - since > limit or age > self.OTHERS_S) and worker not in self._named:
                self._named.add(worker)
                found.append(Alarm(now_s, worker, "hung", "progress"))
        return found


class Persistence:
    """The level that one candidate has held for a time: the lowest of its last scores."""

    def __init__(self, num_looks: int) -> None:
        self._scores: deque[float] = deque(maxlen=num_looks)
        self._worker = ""

    def add(self, worker: str, score: float) -> float:
        """Take the candidate of a look; return the level held, 0 before the time is over."""
        if worker != self._worker:
            self._scores.clear()
            self._worker = worker
        self._scores.append(score)
        return min(self._scores) if len(self._scores) == self._scores.maxlen else 0.0


class CandidateDetector(ABC):
    """Names the worker with the highest score when it keeps it. Scores are by role and series: one
    for all metrics, or one a metric."""

    def __init__(self, threshold: float, only: tuple[str, ...] = ()) -> None:
        self._threshold = threshold
        self._levels = Levels(WINDOW_TICKS, only)
        self._held: dict[tuple[str, int], Persistence] = {}
        self._named: set[str] = set()
        self._ticks = 0
        self.highest = 0.0

    @abstractmethod
    def scores(self, role: str, window: Floats) -> Floats:
        """Return the workers' scores, [workers, series], of their last levels."""

    def tick(self, frame: Frame, now_s: float) -> Sequence[Alarm]:
        """Look at the last levels now and then."""
        self._levels.add(frame)
        self._ticks += 1
        if not self._levels.is_full() or self._ticks % STEP_TICKS:
            return []
        found: list[Alarm] = []
        for role, places in roles_of(frame).items():
            if len(places) < 2:
                continue
            scores = self.scores(role, self._levels.window(places))
            if now_s < _WARM_UP_S:
                continue
            for series, place in enumerate(scores.argmax(axis=0)):
                worker = frame.workers[places[place]]
                held = self._held.setdefault((role, series), Persistence(int(PERSISTENCE_S / STEP_TICKS)))
                level = held.add(worker, float(scores[place, series]))
                self.highest = max(self.highest, level)
                if level > self._threshold and worker not in self._named:
                    self._named.add(worker)
                    metric = self._levels.metrics[series] if scores.shape[1] > 1 else ""
                    found.append(Alarm(now_s, worker, "odd", metric))
        return found


class DistanceDetector(CandidateDetector):
    """Minder's similarity check: the sum of distances to all others, a metric at a time, over their
    median. Distances are Manhattan's, which Minder found as good as Euclid's. ``denoise`` gives the
    windows of a metric back without noise; without it they are raw."""

    def __init__(
        self,
        threshold: float,
        only: tuple[str, ...] = (),
        denoise: Callable[[Floats, tuple[str, ...]], Floats] | None = None,
    ) -> None:
        super().__init__(threshold, only)
        self._denoise = denoise

    def scores(self, role: str, window: Floats) -> Floats:
        """Return the sums over their medians."""
        low, high = window.min(axis=(0, 1)), window.max(axis=(0, 1))
        scaled = (window - low) / np.maximum(high - low, 1e-9)
        if self._denoise is not None:
            scaled = self._denoise(scaled, self._levels.metrics)
        sums = sums_of_distances(scaled).sum(axis=0)
        # less than a hundredth of the range a tick is no distance
        floor = 0.01 * len(window) * max(1, window.shape[1] - 1)
        return sums / np.maximum(np.median(sums, axis=0), floor)


def sums_of_distances(values: NDArray[np.floating]) -> Floats:
    """Return sum over j of |x_i - x_j| along axis 1 of [ticks, workers, metrics], by sorting."""
    number = values.shape[1]
    order = values.argsort(axis=1)
    sorted_values = np.take_along_axis(values, order, axis=1).astype(np.float64)
    below = np.cumsum(sorted_values, axis=1) - sorted_values
    total = sorted_values.sum(axis=1, keepdims=True)
    rank = np.arange(number)[None, :, None]
    sums = sorted_values * (2 * rank + 1 - number) + total - sorted_values - 2 * below
    result = np.empty_like(sums)
    np.put_along_axis(result, order, sums, axis=1)
    return result.astype(np.float32)


class MahalanobisDetector(CandidateDetector):
    """The distance of a worker's levels from its role's median. The scale is the covariance of such
    deviations so far, of all workers of the role."""

    _SHRINKAGE = 0.05
    _MEMORY = 0.98

    def __init__(self, threshold: float) -> None:
        super().__init__(threshold)
        self._covariance: dict[str, NDArray[np.float64]] = {}

    def scores(self, role: str, window: Floats) -> Floats:
        """Return one series: the distances over the square root of the number of metrics."""
        level = window.mean(axis=0, dtype=np.float64)
        middle = np.median(level, axis=0)
        scale = np.maximum(np.abs(middle), 1e-3)
        away = (level - middle) / scale
        now = away.T @ away / len(away)
        known = self._covariance.get(role)
        covariance = now if known is None else self._MEMORY * known + (1.0 - self._MEMORY) * now
        self._covariance[role] = covariance
        diagonal = np.diag(covariance) + 1e-4
        shrunk = (
            (1.0 - self._SHRINKAGE) * covariance
            + self._SHRINKAGE * np.diag(diagonal)
            + np.diag(np.full(len(diagonal), 1e-4))
        )
        squares = np.einsum("ij,ij->i", away, np.linalg.solve(shrunk, away.T).T)
        return np.sqrt(np.maximum(squares, 0.0) / away.shape[1]).astype(np.float32)[:, None]
