"""Medians over groups of workers, of all metrics at once, without a loop over workers.

A group is a role, or a role in a phase. Missing values are NaN and are ignored. The order of
workers in a frame does not change results, since medians are the only reductions over workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class WorkerArrays:
    """Named arrays whose last two axes are metrics and workers.

    ``align`` adapts them to the metrics and workers of the next frame: those that remain keep their
    state, new ones start with the array's fill value."""

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

    def align(self, metrics: Sequence[str], workers: Sequence[str]) -> None:
        """Adapt the arrays to a frame's metrics and workers."""
        if workers is self.workers and metrics == self.metrics:
            return
        if tuple(workers) == self.workers and tuple(metrics) == self.metrics:
            self.workers = tuple(workers)
            return
        rows, columns = _places(self.metrics, metrics), _places(self.workers, workers)
        for name, old in self._arrays.items():
            new = np.full((*old.shape[:-2], len(metrics), len(workers)), self._fills[name], old.dtype)
            if (rows >= 0).any() and (columns >= 0).any():
                kept = np.ix_(rows[rows >= 0], columns[columns >= 0])
                new[(..., *np.ix_(rows >= 0, columns >= 0))] = old[(..., *kept)]
            self._arrays[name] = new
        self.metrics, self.workers = tuple(metrics), tuple(workers)

    def reset(self, metric: int) -> None:
        for name, array in self._arrays.items():
            array[..., metric, :] = self._fills[name]


def _places(old: Sequence[str], new: Sequence[str]) -> NDArray[np.intp]:
    """Return the index of each new name among the old ones, or -1."""
    place = {name: at for at, name in enumerate(old)}
    return np.array([place.get(name, -1) for name in new], dtype=np.intp)


Floats = NDArray[np.float32]
TINY = np.float32(1e-30)
"""Added to a scale to keep it above zero."""
TO_DEVIATION = np.float32(1.4826)
"""Factor from median absolute deviation to standard deviation, for normal noise."""


SMALL = 5
"""Smaller groups are judged by the other members, and by each worker's own past."""
_MOST_AT_ONCE = 512
"""Most cells of ``Groups.table``."""


@dataclass(frozen=True, slots=True)
class Groups:
    names: tuple[tuple[str, str], ...]
    """Role and phase of each group, sorted."""
    of: NDArray[np.intp]
    """[workers]: index of the group."""
    members: tuple[NDArray[np.intp], ...]
    """The indices of each group's workers."""
    table: NDArray[np.intp] | None
    """[groups, largest size]: the members, padded with the number of workers. None for a large
    fleet, whose groups are processed one by one."""
    in_small: NDArray[np.intp]
    """Workers of groups with at least two and fewer than ``SMALL`` members."""
    others_in_small: NDArray[np.intp]
    """[those workers, ``SMALL`` - 2]: the other members, padded in the same way."""
    is_in: NDArray[np.float32]
    """[workers, groups]: 1 in the worker's group, else 0."""

    @classmethod
    def by(cls, roles: Sequence[str], phases: Sequence[str] | None = None) -> Groups:
        keys = list(zip(roles, phases or [""] * len(roles), strict=True))
        names = tuple(sorted(set(keys)))
        number = {name: at for at, name in enumerate(names)}
        of = np.array([number[key] for key in keys], dtype=np.intp)
        members = tuple(np.flatnonzero(of == at) for at in range(len(names)))
        largest = max((len(one) for one in members), default=0)
        fits = len(members) > 1 and len(members) * largest <= _MOST_AT_ONCE
        small = [one for one in members if 1 < len(one) < SMALL]
        return cls(
            names,
            of,
            members,
            _filled(members, largest, len(of)) if fits else None,
            np.concatenate(small) if small else np.zeros(0, np.intp),
            _filled([one[one != own] for one in small for own in one], SMALL - 2, len(of)),
            (of[:, None] == np.arange(len(names))).astype(np.float32),
        )

    def sizes(self) -> NDArray[np.intp]:
        """Return the size of each worker's group, [workers]."""
        return np.array([len(one) for one in self.members], dtype=np.intp)[self.of]

    def medians(self, values: Floats) -> Floats:
        """Return each metric's median in each group, [metrics, groups], of values [metrics,
        workers]. NaN for a group without values."""
        if len(self.members) == 1:
            return medians(values)[:, None]
        if self.table is not None:
            return medians(_with_filler(values)[:, self.table])
        return np.stack([medians(values[:, members]) for members in self.members], axis=1)

    def quantiles(self, values: Floats, share: float) -> Floats:
        """Return each metric's quantile ``share`` in each group, [metrics, groups], of values
        without NaN."""
        places = [int(share * (len(members) - 1)) for members in self.members]
        if self.table is not None:
            ordered = np.sort(_with_filler(values)[:, self.table], axis=-1)
            return ordered[:, np.arange(len(places)), places]
        found = np.zeros((len(values), len(self.members)), dtype=np.float32)
        for at, (members, place) in enumerate(zip(self.members, places, strict=True)):
            found[:, at] = np.partition(values[:, members], place, axis=1)[:, place]
        return found

    def others(self, values: Floats, of_group: Floats) -> Floats:
        """Return each worker's reference, [metrics, workers]: the group's median, or in groups of
        fewer than ``SMALL`` workers the median of the others."""
        reference = of_group[:, self.of]
        if len(self.in_small):
            reference[:, self.in_small] = medians(_with_filler(values)[:, self.others_in_small])
        return reference

    def shares(self, flags: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return how many workers of each group have a flag, [metrics, groups], and the group
        sizes, [groups]. ``flags`` is [metrics, workers]."""
        counts = (flags.astype(np.float32) @ self.is_in).astype(np.intp)
        return counts, np.array([len(one) for one in self.members], dtype=np.intp)


def _filled(rows: Sequence[NDArray[np.intp]], width: int, filler: int) -> NDArray[np.intp]:
    table = np.full((len(rows), width), filler, dtype=np.intp)
    for row, members in zip(table, rows, strict=True):
        row[: len(members)] = members
    return table


def _with_filler(values: Floats) -> Floats:
    """Append a column of NaN to values [metrics, workers]."""
    return np.concatenate([values, np.full((len(values), 1), np.nan, values.dtype)], axis=1)


def medians(values: Floats) -> Floats:
    """Return medians along the last axis, ignoring NaN; NaN if there are no values."""
    return medians_and_nearer(values, 0.5)[0]


def medians_and_nearer(values: Floats, share: float) -> tuple[Floats, Floats]:
    """Return medians along the last axis, and values between these and 0. A share 1 - ``share`` of
    the values lies beyond such a value, on the same side of 0; if fewer do, it is 0. NaN is
    ignored."""
    num = values.shape[-1]
    ordered = np.sort(values, axis=-1).reshape(-1, num)
    rows = np.arange(len(ordered))
    last = num - 1 - np.isnan(ordered).sum(axis=-1)
    low = ordered[rows, np.maximum(last // 2, 0)]
    high = ordered[rows, np.maximum((last + 1) // 2, 0)]
    middle = ((low + high) * np.float32(0.5)).reshape(values.shape[:-1])
    if share >= 0.5:
        return middle, middle
    place = np.maximum((share * last).astype(np.intp), 0)
    low, high = ordered[rows, place], ordered[rows, np.maximum(last - place, 0)]
    nearer = np.where(low > 0, low, np.where(high < 0, high, np.float32(0.0))).reshape(values.shape[:-1])
    return middle, np.where(np.isnan(middle), middle, nearer)
