"""How far each worker is from its peers, beyond its usual distance from them.

Readings are first made comparable: counters become rates, and a missing sample is filled for a
while. The catalogue says which metrics are counters, but the data may show otherwise: a counter
that falls again and again is a level, and an unknown metric that never falls is a counter.

A worker's deviation is the smallest that four explanations leave: its level is usually that much
above its peers, or that share above them; many peers are there, too; or the worker itself has not
moved. It is odd only if none of them explains the deviation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.fleet.peers.frame import CATALOGUE, Metric, metric
from pipeline.fleet.peers.groups import SMALL, TINY, Floats, Groups, WorkerArrays, medians
from pipeline.fleet.peers.thresholds import Tuning

_GATE = np.float32(2.0)
"""A deviation counts at most twice the distance to the peers, and twice the worker's own
movement."""


FEW_WORKERS = 64
"""Up to this fleet size each worker's past is trusted as it is."""
_FEWEST_OTHERS = 3
"""Workers of other roles that are needed to tell how the fleet has moved."""


class Floors:
    """What is known about each metric of a frame, as columns [metrics, 1] and as indices of
    metrics."""

    def __init__(self, metrics: list[Metric], tuning: Tuning) -> None:
        self._high = np.float32(tuning.high)
        lower = [tuning.high_normalised if one.is_normalised else tuning.high for one in metrics]
        self._wide_high = np.array(lower, np.float32)[:, None]
        self.share = np.array([one.floor for one in metrics], np.float32)[:, None]
        self.in_units = np.array([one.floor_in_units for one in metrics], np.float32)[:, None]
        self.patience = np.array([_patience(one, metrics) for one in metrics], np.float32)[:, None]
        """Factor on the evidence that a metric needs, and on how long it must last."""
        self.small_patience = np.array([_small_patience(one, metrics) for one in metrics], np.float32)[:, None]
        """The same factor in a role with few workers."""
        self.past = np.array([_WEAK_PAST if _is_weak(one, metrics) else 1.0 for one in metrics], np.float32)[:, None]
        """Factor on the length of its own past that a worker needs before this metric is judged."""
        self.bad = np.array([one.bad for one in metrics], np.float32)[:, None]
        self.of_size = np.flatnonzero([_is_weak(one, metrics) or one.is_use for one in metrics])
        """Metrics whose deviations larger pieces of work can explain."""
        self.sizes = np.flatnonzero([one.shows_size for one in metrics])
        self.normalised = np.flatnonzero([one.is_normalised for one in metrics])
        self.shared = np.flatnonzero([one.is_shared for one in metrics])
        self.counting = np.flatnonzero([one.counts_work for one in metrics])

    def high_of(self, groups: Groups) -> Floats:
        """Return the score above which there is evidence, [metrics, workers]. Small groups never
        get the lower score, since they have too few peers to trust it."""
        return np.where(groups.sizes() < SMALL, self._high, self._wide_high)


def _is_weak(one: Metric, metrics: list[Metric]) -> bool:
    """Return whether a metric is weak evidence: load, which also varies with the size of the work,
    or a metric of unknown meaning, if another metric accounts for sizes."""
    return (one.is_load or not one.unit) and any(each.is_normalised for each in metrics)


def _patience(one: Metric, metrics: list[Metric]) -> float:
    if one.shows_size:
        return _ENDLESS
    # a worker with less to do is used less, which does not make it slow
    is_idle = one.is_use and any(each.is_normalised for each in metrics)
    return _PATIENCE if is_idle or _is_weak(one, metrics) else 1.0


def _small_patience(one: Metric, metrics: list[Metric]) -> float:
    """Return the patience in small roles. Few workers may all be idle because of others, so if
    another metric accounts for sizes, their load and use are no evidence. Memory that is filled
    once is compared only in large roles."""
    if one.is_filled:
        return _ENDLESS
    if any(each.is_normalised for each in metrics) and (one.is_load or one.is_use):
        return _ENDLESS
    return _SMALL_PATIENCE * _patience(one, metrics)


_PATIENCE = 3.0
_WEAK_PAST = 6.0
_MOST_SWELL = 100.0
_SHARED_MOVE = 2.0
_ENDLESS = 1e6
_SMALL_PATIENCE = 1.5


@dataclass(frozen=True, slots=True)
class Deviations:
    """Deviations in the metrics' units. Arrays are [metrics, workers]; NaN: none."""

    left: Floats
    """Distance to the peers minus the usual distance, in units or as a share, whichever is
    smaller."""
    apart: Floats
    """Distance to the peers, reduced in roles that spread widely."""
    moved: Floats
    """Distance to the worker's own usual level."""
    floor: Floats
    """Smallest scale that counts."""
    swell: Floats
    """Factor, at least 1, by which a worker's noise exceeds its usual noise: it grows with the
    level that the worker is compared with."""


def believed(left: Floats, apart: Floats, moved: Floats, bad: Floats) -> Floats:
    """Return the size of each deviation in a bad direction that no explanation takes away."""
    with np.errstate(invalid="ignore"):
        is_explained = (left * moved < 0) | (left * apart < 0) | (bad * left < 0)
        size = np.minimum(np.abs(left), _GATE * np.minimum(np.abs(apart), np.abs(moved)))
        return np.where(is_explained, np.float32(0.0), size)


class Past:
    """Each worker's own usual level, and its usual distance from the peers."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self.state = state = WorkerArrays()
        state.add("offset", np.nan)
        state.add("level", np.nan)
        state.add("age_s", 0.0)
        state.add("learned_s", 0.0)

    def deviations(self, values: Floats, groups: Groups, floors: Floors) -> Deviations:
        """Return how far each worker is from where its peers and its past predict it to be."""
        offset, level = self.state["offset"], self.state["level"]
        sizes = groups.sizes()
        reference = _reference(values, groups)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            difference = values - reference
            added = difference - offset
            usual = level - offset
            shared = values - reference * (level / usual)
            is_share = reference * usual > 0
            left = np.where(is_share & (np.abs(shared) < np.abs(added)), shared, added)
            left = np.where(is_share & (shared * added < 0), np.float32(0.0), left)
            swell = np.where(sizes == 1, np.float32(1.0), np.abs(reference) / (np.abs(usual) + TINY))
            if len(floors.counting):
                # a mean over fewer pieces of work is noisier
                rare = np.abs(usual[floors.counting]) / (np.abs(reference[floors.counting]) + TINY)
                swell[floors.normalised] *= np.sqrt(np.fmax(np.float32(1.0), rare.max(axis=0)))
            self._follow_fleet(left, swell, values, groups)
            swell = np.clip(np.where(np.isnan(swell), 1.0, swell), 1.0, _MOST_SWELL).astype(np.float32)
            floor = floors.share * np.abs(np.where(sizes == 1, level, reference)) + floors.in_units
            near = np.fmax(groups.medians(np.abs(left))[:, groups.of], floor)
            wide = np.fmax(groups.medians(np.abs(difference))[:, groups.of], floor)
            # in a wide role a distance to the peers counts less
            apart = difference * np.minimum(near / (wide + TINY), np.float32(1.0))
            apart = np.where(sizes < SMALL, left, apart)
            return Deviations(left, apart, values - level, floor, swell)

    def _follow_fleet(self, left: Floats, swell: Floats, values: Floats, groups: Groups) -> None:
        """For a worker that is alone in its role, subtract the share by which the whole fleet has
        moved."""
        level = self.state["level"]
        for members in groups.members:
            if len(members) > 1 or len(groups.of) - len(members) < _FEWEST_OTHERS:
                continue
            moved = (values / level - 1.0).astype(np.float32)
            fleet = medians(np.delete(moved, members, axis=1))
            at = members[0]
            swell[:, at] = np.abs(1.0 + fleet)
            other = values[:, at] - level[:, at] * (1.0 + fleet)
            is_explained = np.isfinite(other) & ((other * left[:, at] < 0) | (np.abs(other) < np.abs(left[:, at])))
            left[:, at] = np.where(is_explained, np.where(other * left[:, at] < 0, 0.0, other), left[:, at])

    def learn(self, step_s: float, values: Floats, groups: Groups, is_odd: NDArray[np.bool_]) -> None:
        """Slowly follow each worker's own usual level, except while it is odd."""
        state = self.state
        difference = values - _reference(values, groups)
        is_known = np.isfinite(difference)
        age_s = state["age_s"]
        age_s += np.where(is_known, np.float32(step_s), np.float32(0.0))
        share = np.float32(step_s) / np.clip(age_s, step_s, self._tuning.memory_s)
        is_usual = is_known & ~is_odd
        state["learned_s"] += np.where(is_usual, np.float32(step_s), np.float32(0.0))
        rate = np.where(is_usual, share, np.float32(0.0)).astype(np.float32)
        for name, now in (("offset", difference), ("level", values)):
            old = np.where(np.isnan(state[name]), now, state[name])
            with np.errstate(invalid="ignore"):
                state[name] = np.where(rate > 0, old + rate * (now - old), state[name])

    def is_warm(self, floors: Floors) -> NDArray[np.bool_]:
        """Return where a worker has a long enough past, [metrics, workers]."""
        return self.state["age_s"] >= np.float32(self._tuning.warm_up_s) * floors.past

    def doubt(self, num_workers: int) -> Floats:
        """Return the factor, at least 1, by which deviations from a short past are discounted,
        [metrics, workers].

        Some workers' first minute is unusual. A larger fleet has more such workers, so a past must
        be longer to be trusted."""
        doubt_s = self._tuning.doubt_s * math.log(max(1.0, num_workers / FEW_WORKERS))
        learned_s = np.maximum(self.state["learned_s"], np.float32(self._tuning.warm_up_s))
        return np.sqrt(np.float32(1.0) + np.float32(doubt_s) / learned_s)

    def is_shared_move(self, values: Floats, groups: Groups, floors: Floors) -> bool:
        """Return whether something that all workers share has at least doubled for most of them."""
        if not len(floors.shared) or len(groups.of) <= _FEWEST_OTHERS:
            return False
        with np.errstate(invalid="ignore", divide="ignore"):
            moved = medians((values[floors.shared] / self.state["level"][floors.shared]).astype(np.float32))
        return bool((moved > _SHARED_MOVE).any())


def _reference(values: Floats, groups: Groups) -> Floats:
    """Return what each worker is compared with: its peers' median, or 0 for a worker alone."""
    reference = groups.others(values, groups.medians(values))
    reference[:, groups.sizes() == 1] = 0.0
    return reference


_FEWEST_CHANGES = 30
"""Changes of a metric, over all workers, before its nature is decided."""
_FALLS = 0.02
"""Largest share of falls among a counter's changes: restarting workers cause some."""
_UNDECIDED_S = 30.0


class Readings:
    """Turns each frame's values into levels and rates."""

    def __init__(self, filled_s: float) -> None:
        """``filled_s``: age up to which a worker's last sample replaces a missing one."""
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
        """Typical time between two samples of a worker."""

    def update(
        self, time_s: float, metrics: tuple[str, ...], workers: tuple[str, ...], values: Floats
    ) -> tuple[Floats, list[int]]:
        """Return comparable values [metrics, workers], and the metrics whose nature has changed,
        which makes their past void.

        ``values``: [metrics, workers], NaN for missing samples."""
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
