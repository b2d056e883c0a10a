"""Layer 2: which worker differs from its peers, and from its own past, for long enough.

Every metric has two views. The fast one is an exponential mean of the samples. The slow one is a
running median of the deviations of blocks, which ignores bursts of less than half its length."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pipeline.watch.arrays import WorkerArrays
from pipeline.watch.evidence import Evidence, Suspect
from pipeline.watch.groups import SMALL, Floats, Groups, medians_and_nearer
from pipeline.watch.metrics import metric
from pipeline.watch.past import FEW_WORKERS, Floors, Past, believed
from pipeline.watch.readings import Readings
from pipeline.watch.thresholds import Thresholds
from pipeline.watch.tuning import Tuning


class Similarity:
    """Both views over the frames of one fleet."""

    def __init__(self, tuning: Tuning, thresholds: Thresholds) -> None:
        self._tuning = tuning
        self._readings = Readings(tuning.filled_s)
        self.past = Past(tuning)
        self.fast = Evidence(tuning, thresholds, tuning.fast_limit, tuning.fast_persistence_s, 0.0)
        behind_s = 0.5 * tuning.num_blocks * tuning.block_s
        self.slow = Evidence(tuning, thresholds, tuning.slow_limit, tuning.slow_persistence_s, behind_s)
        self.state = state = WorkerArrays()
        state.add("mean", np.nan)
        state.add("sum", 0.0)
        state.add("count", 0.0)
        state.add("apart", np.nan)
        state.add("moved", np.nan)
        state.add("swell", np.nan)
        # [metrics, blocks, workers] would be the natural order; the last two axes follow the fleet
        state.add("blocks", np.nan, lead=(tuning.num_blocks,))
        self._num_ended = 0
        self._begun_s = math.nan
        self._time_s = math.nan
        self._floors = Floors([], tuning)
        self._metrics: tuple[str, ...] = ()

    def tick(
        self,
        time_s: float,
        metrics: tuple[str, ...],
        workers: tuple[str, ...],
        groups: Groups,
        values: Floats,
        is_named: NDArray[np.bool_],
    ) -> list[Suspect]:
        """Take a frame's values [metrics, workers]; return the workers that are odd by now.

        ``is_named``: [workers], those that a finding has named already."""
        tuning, state = self._tuning, self.state
        if metrics != self._metrics:
            self._metrics, self._floors = metrics, Floors([metric(name) for name in metrics], tuning)
        state.align(metrics, workers)
        self.past.state.align(metrics, workers)
        for view in (self.fast, self.slow):
            view.align(metrics, workers, groups)
        value, changed = self._readings.take(time_s, metrics, workers, values)
        for at in changed:
            for one in (state, self.past.state, self.fast, self.slow):
                one.reset(at)
        step_s = time_s - self._time_s
        self._time_s = time_s
        if not step_s > 0.0:
            self._begun_s = time_s
            return []
        step_s = min(step_s, tuning.max_step_s)
        weight = np.float32(-math.expm1(-step_s / tuning.fast_s))
        mean = state["mean"]
        with np.errstate(invalid="ignore"):
            mean = state["mean"] = np.where(np.isfinite(mean), mean + weight * (value - mean), value)
        now = self.past.deviations(mean, groups, self._floors)
        size = believed(now.left, now.apart, now.moved, self._floors.bad) / self.past.doubt(len(workers))
        is_warm = self._is_judged(mean, groups)
        self.fast.judge(time_s, step_s, now, now.left, size, groups, self._floors, is_warm, is_named)
        found = self.fast.suspects(groups, is_named, self._floors)
        is_known = np.isfinite(value)
        state["sum"] += np.where(is_known, value, np.float32(0.0))
        state["count"] += is_known
        if time_s - self._begun_s >= tuning.block_s - 1e-6:
            found += self._end_block(time_s, groups, is_named)
        return found

    def _is_judged(self, values: Floats, groups: Groups) -> NDArray[np.bool_]:
        """Return where a worker has enough of a past, and peers enough while all are slower."""
        is_warm = self.past.is_warm(self._floors)
        if self.past.is_shared_move(values, groups, self._floors):
            is_warm = is_warm & (groups.sizes() >= SMALL)
        return is_warm

    def strengths(self, groups: Groups) -> Floats:
        """Return each worker's evidence over its need, the larger of both views, [workers]."""
        return np.maximum(self.fast.strengths(groups, self._floors), self.slow.strengths(groups, self._floors))

    def _end_block(self, time_s: float, groups: Groups, is_named: NDArray[np.bool_]) -> list[Suspect]:
        tuning, state = self._tuning, self.state
        block_s = min(time_s - self._begun_s, tuning.max_step_s)
        self._begun_s = time_s
        with np.errstate(invalid="ignore", divide="ignore"):
            block = np.divide(state["sum"], state["count"], dtype=np.float32)
        state["sum"][:] = 0.0
        state["count"][:] = 0.0
        now = self.past.deviations(block, groups, self._floors)
        state["blocks"][self._num_ended % tuning.num_blocks] = now.left
        weight = np.float32(-math.expm1(-block_s / tuning.burst_s))
        for name, value in (("apart", now.apart), ("moved", now.moved), ("swell", now.swell)):
            old = np.where(np.isfinite(state[name]), state[name], value)
            state[name] = np.where(np.isfinite(value), old + weight * (value - old), old)
        self._num_ended += 1
        is_odd = (self.fast.state["persisted_s"] > 0) | self.slow.is_suspicious() | is_named
        self.past.learn(block_s, block, groups, is_odd)
        # as many blocks as outlast the longest usual burst twice
        num = min(tuning.num_blocks, 2 * math.ceil(tuning.burst_s / block_s + 1.0) + 3)
        newest = [(self._num_ended - 1 - at) % tuning.num_blocks for at in range(num)]
        blocks = np.moveaxis(state["blocks"][newest], 0, -1)
        share = tuning.burst_share if len(groups.of) > FEW_WORKERS else 0.5
        left, nearer = medians_and_nearer(blocks, share)
        left[np.count_nonzero(np.isfinite(blocks), axis=-1) < 0.7 * num] = np.nan
        size = believed(
            np.where(np.isnan(left), left, nearer), state["apart"], state["moved"], self._floors.bad
        ) / self.past.doubt(len(groups.of))
        now = replace(now, swell=np.fmax(now.swell, state["swell"]))
        is_warm = self._is_judged(block, groups)
        self.slow.judge(time_s, block_s, now, left, size, groups, self._floors, is_warm, is_named)
        return self.slow.suspects(groups, is_named, self._floors)
