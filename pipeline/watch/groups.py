"""Medians of groups of workers: of all metrics at once, without a loop over workers.

A group is a role, or a role in a phase. Missing values are NaN and count nowhere. The order of the
workers in a frame changes no result: medians are the only sums over workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
TINY = np.float32(1e-30)
"""Keeps a scale above zero."""
TO_DEVIATION = np.float32(1.4826)
"""Median absolute deviation to standard deviation, for normal noise."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Which worker is in which group."""

    names: tuple[tuple[str, str], ...]
    """Role and phase of each group, sorted."""
    of: NDArray[np.intp]
    """[workers]: index of the group."""
    members: tuple[NDArray[np.intp], ...]
    """Of each group, the indices of its workers."""
    rest: tuple[NDArray[np.intp] | None, ...]
    """Of each group with fewer than ``SMALL`` and more than one, each member's others."""

    @classmethod
    def by(cls, roles: Sequence[str], phases: Sequence[str] | None = None) -> Groups:
        """Group workers by role and phase."""
        keys = list(zip(roles, phases or [""] * len(roles), strict=True))
        names = tuple(sorted(set(keys)))
        number = {name: at for at, name in enumerate(names)}
        of = np.array([number[key] for key in keys], dtype=np.intp)
        members = tuple(np.flatnonzero(of == at) for at in range(len(names)))
        return cls(names, of, members, tuple(_others_of(one) for one in members))

    def sizes(self) -> NDArray[np.intp]:
        """Return the number of workers of each worker's group, [workers]."""
        return np.array([len(one) for one in self.members], dtype=np.intp)[self.of]

    def medians(self, values: Floats) -> Floats:
        """Return the median of each metric in each group, [metrics, groups], of values [metrics,
        workers]. NaN where no worker has a value."""
        found = np.empty((len(values), len(self.members)), dtype=np.float32)
        for at, members in enumerate(self.members):
            found[:, at] = medians(values if len(self.members) == 1 else values[:, members])
        return found

    def quantiles(self, values: Floats, share: float) -> Floats:
        """Return a quantile of each metric in each group, [metrics, groups]; 0 without a value."""
        found = np.zeros((len(values), len(self.members)), dtype=np.float32)
        for at, members in enumerate(self.members):
            place = int(share * (len(members) - 1))
            found[:, at] = np.partition(values[:, members], place, axis=1)[:, place]
        return found

    def others(self, values: Floats, of_group: Floats) -> Floats:
        """Return each worker's reference, [metrics, workers]: the group's median; in groups below
        ``SMALL`` workers the median of the others."""
        reference = of_group[:, self.of]
        for members, rest in zip(self.members, self.rest, strict=True):
            if rest is not None:
                reference[:, members] = medians(values[:, rest])
        return reference

    def shares(self, flags: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return how many workers of each group have a flag, and its size, of flags [metrics,
        workers]: [metrics, groups], [groups]."""
        counts = np.stack([flags[:, one].sum(axis=1) for one in self.members], axis=1)
        return counts, np.array([len(one) for one in self.members], dtype=np.intp)


def _others_of(members: NDArray[np.intp]) -> NDArray[np.intp] | None:
    """Return of each member of a small group the others, [members, members - 1]."""
    if not 1 < len(members) < SMALL:
        return None
    return np.array([np.delete(members, at) for at in range(len(members))])


SMALL = 5
"""Groups below it are judged against the other members, and each worker's own past."""


def medians(values: Floats) -> Floats:
    """Return medians along the last axis, of all values but NaN; NaN of none."""
    num = values.shape[-1]
    ordered = np.sort(values, axis=-1).reshape(-1, num)
    rows = np.arange(len(ordered))
    last = num - 1 - np.isnan(ordered).sum(axis=-1)
    low = ordered[rows, np.maximum(last // 2, 0)]
    high = ordered[rows, np.maximum((last + 1) // 2, 0)]
    return ((low + high) * np.float32(0.5)).reshape(values.shape[:-1])
