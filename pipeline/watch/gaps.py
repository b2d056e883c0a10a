"""Usual lengths of standstills of a role, as a histogram of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_EDGES_S = np.geomspace(0.25, 7200.0, 96)
_FEWEST = 5
_KNOWN_S = 300.0
"""Time of all workers of a role after which its gaps are known."""
_UNKNOWN_S = 20.0
"""A role's usual longest gap before that."""
_MOST = 1e5
"""Gaps that are remembered with full weight; older ones fade."""


class Gaps:
    """Counts the time between two steps of progress, by role."""

    def __init__(self) -> None:
        self._counts: dict[str, NDArray[np.float64]] = {}

    def add(self, role: str, gaps_s: NDArray[np.float64]) -> None:
        """Count gaps that have ended."""
        counts = self._counts.setdefault(role, np.zeros(len(_EDGES_S) + 1))
        np.add.at(counts, np.searchsorted(_EDGES_S, gaps_s), 1.0)
        if counts.sum() > _MOST:
            counts *= 0.5

    def usual_s(self, role: str, share: float = 0.99) -> float:
        """Return the gap below which this share of a role's gaps is, seconds, rounded up."""
        counts = self._counts.get(role)
        if counts is None or counts.sum() < _FEWEST:
            return _UNKNOWN_S
        return _edge(int(np.searchsorted(np.cumsum(counts), share * counts.sum())))

    def longest_s(self, role: str) -> float:
        """Return the longest gap that a role is known to have, seconds, rounded up."""
        counts = self._counts.get(role)
        if counts is None or np.sum(counts[:-1] * _EDGES_S) < _KNOWN_S:
            return _UNKNOWN_S
        return _edge(int(np.flatnonzero(counts >= 0.5)[-1]))

    def keep(self, roles: Sequence[str]) -> None:
        """Forget the roles that are gone."""
        self._counts = {role: counts for role, counts in self._counts.items() if role in roles}


def _edge(at: int) -> float:
    return float(_EDGES_S[min(at, len(_EDGES_S) - 1)])
