"""Layer 2: finds workers that differ from their peers and from their own past for long enough.

Every metric has two views. The fast one is an exponential mean of the samples. The slow one is a
running median of the deviations of blocks, which ignores bursts of less than half its length.

In each view a deviation is scored in robust deviations of the role and of the worker's own noise.
Evidence accumulates while the score is high (CUSUM), and must persist. It must also exceed the
largest anomalies of this fleet that ended by themselves, in height and in length."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipeline.fleet.peers.frame import metric
from pipeline.fleet.peers.groups import SMALL, TINY, TO_DEVIATION, Floats, Groups, WorkerArrays, medians_and_nearer
from pipeline.fleet.peers.past import FEW_WORKERS, Deviations, Floors, Past, Readings, believed
from pipeline.fleet.peers.thresholds import TIME_POWER, Thresholds, Tuning

_UP_S, _DOWN_S = 20.0, 300.0
"""Time constants of the role's spread when it grows and when it shrinks."""
_LARGE, _SLOW, _LARGE_S = 1.5, 2.0, 45.0
"""Score from which a worker's oldest piece is old; score from which its work is slow; seconds for
which the first is remembered, since pieces end one by one and the next oldest is younger."""
_SUSPICIOUS = 2.0
"""Score above which a deviation does not yet count as usual."""
_NOISY_SHARE = 0.75
"""Quantile of the workers' own noise that applies to the whole role."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A worker whose evidence on one metric is complete."""

    worker: int
    metric: int
    strength: float
    """Evidence divided by its limit."""
    since_s: float
    deviations: float
    """Current score, in robust deviations."""


class Evidence:
    """Accumulates the evidence against each worker on each metric, in one view."""

    def __init__(
        self, tuning: Tuning, thresholds: Thresholds, limit: float, persistence_s: float, delay_s: float
    ) -> None:
        """``limit``: of the evidence, in robust deviations times seconds. ``persistence_s``: how
        long a worker must stay odd. ``delay_s``: how far this view lags behind the samples."""
        self._tuning, self._limit, self._persistence_s, self._delay_s = tuning, limit, persistence_s, delay_s
        self._thresholds = thresholds
        self.state = state = WorkerArrays()
        for name in (
            "noise",
            "noisy_s",
            "large_s",
            "pending",
            "pending_s",
            "evidence",
            "persisted_s",
            "peak_s",
            "peak",
            "z",
        ):
            state.add(name, 0.0)
        state.add("since_s", np.nan, np.float64)
        self._group_names: tuple[tuple[str, str], ...] = ()
        self._metrics: tuple[str, ...] = ()
        self._spread_s = 0.0
        self._step_s = 1.0
        self._spread = self._record = self._record_s = np.zeros((0, 0), np.float32)

    def align(self, metrics: tuple[str, ...], workers: tuple[str, ...], groups: Groups) -> None:
        self.state.align(metrics, workers)
        if self._group_names != groups.names or self._metrics != metrics:
            shape = (len(metrics), len(groups.names))
            self._spread = np.full(shape, np.nan, np.float32)
            self._record, self._record_s = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
            self._group_names, self._metrics = groups.names, metrics

    def reset(self, at: int) -> None:
        self.state.reset(at)
        self._spread[at] = np.nan
        self._record[at] = self._record_s[at] = 0.0

    def judge(
        self,
        time_s: float,
        step_s: float,
        now: Deviations,
        left: Floats,
        believed: Floats,
        groups: Groups,
        floors: Floors,
        is_warm: NDArray[np.bool_],
        is_named: NDArray[np.bool_],
    ) -> None:
        """Score the current deviations: ``now``, what is ``left`` of them in this view, and their
        ``believed`` sizes, [metrics, workers]."""
        tuning, state = self._tuning, self.state
        self._step_s = step_s
        size = np.abs(left)
        is_known = np.isfinite(left)
        usable = np.where(is_warm, size, np.float32(np.nan))
        spread = TO_DEVIATION * groups.medians(usable)
        # with few workers, the odd one itself makes most of the spread
        spread[:, [len(members) < SMALL for members in groups.members]] = 0.0
        with np.errstate(invalid="ignore", divide="ignore"):
            tau_s = np.where(spread > self._spread, _UP_S, _DOWN_S)
            self._spread_s += step_s
            rate = np.minimum(1.0, step_s / np.minimum(self._spread_s, tau_s)).astype(np.float32)
            moved = self._spread + rate * (spread - self._spread)
            self._spread = np.where(np.isnan(moved), np.where(np.isnan(spread), self._spread, spread), moved)
            noise = np.sqrt(state["noise"])
            usual = np.fmax(self._spread, spread)[:, groups.of]
            noisy = np.fmax(groups.quantiles(noise, _NOISY_SHARE)[:, groups.of], noise)
            scale = np.fmax(np.fmax(usual, noisy * now.swell), now.floor) + TINY
            z = np.minimum(believed / scale, np.float32(tuning.most))
        is_warm = is_warm & ((state["noisy_s"] >= tuning.warm_up_s) | (groups.sizes() >= SMALL))
        z = np.where(is_known & is_warm, z, np.float32(0.0))
        z = self._explained(z, step_s, floors)
        high = floors.high_of(groups)
        is_high = z > high
        counts, sizes = groups.shares(is_high)
        is_common = (counts > np.maximum(np.ceil(tuning.common_share * sizes), 1))[:, groups.of]
        # while the whole role moves, evidence neither grows nor falls
        z = state["z"] = np.where(is_common, np.float32(0.0), z)
        is_known &= ~is_common
        self._gather(time_s, z, high, is_known, is_high & ~is_common)
        self._keep_record(groups, is_named)
        self._listen(np.divide(size, now.swell, dtype=np.float32), scale, is_known & ~is_named)

    def _explained(self, z: Floats, step_s: float, floors: Floors) -> Floats:
        """Return the scores without those that larger pieces of work explain.

        The worker's oldest piece is then old, but its work takes no longer than its size
        suggests."""
        if not (len(floors.sizes) and len(floors.normalised)):
            return z
        is_slow = (z[floors.normalised] > _SLOW).any(axis=0)
        is_large = (z[floors.sizes] > _LARGE).any(axis=0) & ~is_slow
        left_s = self.state["large_s"]
        left_s[:] = np.where(is_large, np.float32(_LARGE_S), np.maximum(left_s - np.float32(step_s), 0.0))
        weak = floors.of_size
        z[weak] = np.where((left_s[weak] > 0) & ~is_slow, np.float32(0.0), z[weak])
        return z

    def _gather(
        self, time_s: float, z: Floats, high: Floats, is_known: NDArray[np.bool_], is_high: NDArray[np.bool_]
    ) -> None:
        state, step_s = self.state, self._step_s
        grown = state["evidence"] + (z - high) * np.float32(step_s)
        grown = np.clip(grown, 0.0, np.float32(20.0 * self._limit))
        state["evidence"] = np.where(is_known, grown, state["evidence"])
        lasted = state["persisted_s"] + np.where(is_high, np.float32(step_s), np.float32(-3.0 * step_s))
        persisted = np.where(is_known, np.clip(lasted, 0.0, 600.0), state["persisted_s"]).astype(np.float32)
        started = (persisted > 0) & (state["persisted_s"] <= 0)
        np.copyto(state["since_s"], time_s - step_s, where=started)
        state["persisted_s"] = persisted

    def _keep_record(self, groups: Groups, is_named: NDArray[np.bool_]) -> None:
        """Remember the longest and the largest anomaly that ended by itself."""
        state = self.state
        is_on = state["persisted_s"] > 0
        is_over = ~is_on & (state["peak_s"] > 0) & ~is_named
        fade = np.float32(0.5 ** (self._step_s / self._tuning.record_s))
        for record, peak in ((self._record_s, "peak_s"), (self._record, "peak")):
            record *= fade
            if is_over.any():
                for at, members in enumerate(groups.members):
                    ended = np.where(is_over[:, members], state[peak][:, members], np.float32(0.0))
                    record[:, at] = np.maximum(record[:, at], ended.max(axis=1))
        for peak, now in (("peak_s", "persisted_s"), ("peak", "evidence")):
            state[peak] = np.where(is_on, np.maximum(state[peak], state[now]), np.float32(0.0))

    def _listen(self, size: Floats, scale: Floats, is_used: NDArray[np.bool_]) -> None:
        """Learn each worker's own noise. Noise during an anomaly counts once that has ended by
        itself."""
        state, step_s = self.state, np.float32(self._step_s)
        with np.errstate(invalid="ignore"):
            square = np.square(np.minimum(size, np.float32(4.0) * scale))
        state["pending"] += np.where(is_used, square, np.float32(0.0)) * step_s
        state["pending_s"] += np.where(is_used, step_s, np.float32(0.0))
        pending_s = state["pending_s"]
        is_ready = ~self.is_suspicious() & (pending_s > 0)
        state["noisy_s"] += np.where(is_ready, pending_s, np.float32(0.0))
        share = np.minimum(pending_s / np.clip(state["noisy_s"], 60.0, self._tuning.memory_s), np.float32(1.0))
        with np.errstate(invalid="ignore", divide="ignore"):
            noise = state["noise"] + share * (state["pending"] / pending_s - state["noise"])
        state["noise"] = np.where(is_ready, noise, state["noise"])
        for name in ("pending", "pending_s"):
            state[name] = np.where(is_ready, np.float32(0.0), state[name])

    def is_suspicious(self) -> NDArray[np.bool_]:
        """Return where a worker may be odd, [metrics, workers]. Nothing is learned from it then."""
        state = self.state
        is_learned = state["noisy_s"] >= 0.5 * self._tuning.memory_s
        return (state["persisted_s"] > 0) | (is_learned & (state["z"] > _SUSPICIOUS))

    def _needs(self, groups: Groups, floors: Floors) -> tuple[Floats, Floats]:
        """Return how long each anomaly must last, in seconds, and its limit of evidence, [metrics,
        workers]."""
        tuning = self._tuning
        small = np.array([len(members) < SMALL for members in groups.members])
        more = np.where(small, floors.small_patience, floors.patience)
        factor = self._thresholds.factor(len(groups.of))
        longer_s = np.float32(self._persistence_s * factor**TIME_POWER) * more + self._step_s
        needed_s = np.maximum(longer_s, tuning.record_margin * self._record_s)
        limit = np.maximum(np.float32(self._limit * factor) * more, tuning.record_margin * self._record)
        return needed_s[:, groups.of], limit[:, groups.of]

    def strengths(self, groups: Groups, floors: Floors) -> Floats:
        """Return each worker's evidence divided by what an alarm needs, for its strongest metric,
        [workers]. Above 1 is an alarm."""
        needed_s, limit = self._needs(groups, floors)
        lasted = (self.state["persisted_s"] / needed_s) ** np.float32(1.0 / TIME_POWER)
        return np.minimum(lasted, self.state["evidence"] / limit).max(axis=0)

    def suspects(self, groups: Groups, is_named: NDArray[np.bool_], floors: Floors) -> list[Suspect]:
        """Return the workers whose evidence is complete and persists, most evidence first.

        If more than ``max_named`` workers are odd on one metric at once, the cause is common and
        none is returned. ``floors`` says how much more each metric needs."""
        tuning, state = self._tuning, self.state
        needed_s, limit = self._needs(groups, floors)
        is_nearly = (state["persisted_s"] >= 0.6 * needed_s) & (state["evidence"] > 0.5 * limit) & ~is_named
        counts, sizes = groups.shares(is_nearly)
        allowed = np.minimum(tuning.max_named, np.maximum(np.ceil(tuning.common_share * sizes), 1))
        is_crowd = (counts > allowed)[:, groups.of]
        is_complete = (
            (state["persisted_s"] >= needed_s) & (state["evidence"] > limit) & (state["z"] > floors.high_of(groups))
        )
        rows, columns = np.nonzero(is_complete & ~is_crowd & ~is_named)
        found = [
            Suspect(
                int(worker),
                int(at),
                float(state["evidence"][at, worker] / limit[at, worker]),
                float(state["since_s"][at, worker]) - self._delay_s,
                float(state["z"][at, worker]),
            )
            for at, worker in zip(rows, columns, strict=True)
        ]
        return sorted(found, key=lambda one: -one.strength)


class Similarity:
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
        # the blocks come first because the last two axes follow the fleet
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
        """Add a frame's values [metrics, workers]; return the workers that are now odd.

        ``is_named``: [workers], those that a finding has already named."""
        tuning, state = self._tuning, self.state
        if metrics != self._metrics:
            self._metrics, self._floors = metrics, Floors([metric(name) for name in metrics], tuning)
        state.align(metrics, workers)
        self.past.state.align(metrics, workers)
        for view in (self.fast, self.slow):
            view.align(metrics, workers, groups)
        value, changed = self._readings.update(time_s, metrics, workers, values)
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
        """Return where a worker has a long enough past and, while all are slower, enough peers."""
        is_warm = self.past.is_warm(self._floors)
        if self.past.is_shared_move(values, groups, self._floors):
            is_warm = is_warm & (groups.sizes() >= SMALL)
        return is_warm

    def strengths(self, groups: Groups) -> Floats:
        """Return each worker's evidence divided by what an alarm needs, [workers]: the larger of
        both views."""
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
        # enough blocks to outlast the longest usual burst twice
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
