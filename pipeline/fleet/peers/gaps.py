"""How long a role's workers usually pause, as a histogram of bounded size, and which worker pauses
longer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.fleet.peers.frame import Frame
from pipeline.fleet.peers.groups import Floats, Groups, WorkerArrays, medians
from pipeline.fleet.peers.thresholds import Tuning

LONGER = 1.5
"""Factor by which a hang must exceed the longest pause that its role has had."""
_EDGES_S = np.geomspace(0.25, 7200.0, 96)
_FEWEST = 5
_KNOWN_S = 300.0
"""Total time of a role's workers, in seconds, after which its pauses are known."""
_UNKNOWN_S = 20.0
"""Assumed longest usual pause of a role before that."""
_MOST = 1e5
"""Gaps that are remembered with full weight; older ones fade."""


class Gaps:
    """Histograms of the time between two steps of progress, by role."""

    def __init__(self) -> None:
        self._counts: dict[str, NDArray[np.float64]] = {}

    def add(self, role: str, gaps_s: NDArray[np.float64]) -> None:
        counts = self._counts.setdefault(role, np.zeros(len(_EDGES_S) + 1))
        np.add.at(counts, np.searchsorted(_EDGES_S, gaps_s), 1.0)
        if counts.sum() > _MOST:
            counts *= 0.5

    def usual_s(self, role: str, share: float = 0.99) -> float:
        """Return the quantile ``share`` of a role's gaps, in seconds, rounded up."""
        counts = self._counts.get(role)
        if counts is None or counts.sum() < _FEWEST:
            return _UNKNOWN_S
        return _edge(int(np.searchsorted(np.cumsum(counts), share * counts.sum())))

    def longest_s(self, role: str) -> float:
        """Return the longest known gap of a role, in seconds, rounded up."""
        counts = self._counts.get(role)
        if counts is None or np.sum(counts[:-1] * _EDGES_S) < _KNOWN_S:
            return _UNKNOWN_S
        return _edge(int(np.flatnonzero(counts >= 0.5)[-1]))

    def keep_roles(self, roles: Sequence[str]) -> None:
        self._counts = {role: counts for role, counts in self._counts.items() if role in roles}


def _edge(at: int) -> float:
    return float(_EDGES_S[min(at, len(_EDGES_S) - 1)])


class Stillness:
    """How long each worker has not moved, compared with the usual pauses of its role.

    A pause ends with a move. The time between two samples counts towards it up to its usual length,
    since a worker may have moved unseen."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._gaps = Gaps()
        self._state = state = WorkerArrays()
        state.add("moved_at_s", np.nan, np.float64)
        state.add("seen_at_s", np.nan, np.float64)

    def evaluate(
        self,
        frame: Frame,
        groups: Groups,
        moved: NDArray[np.bool_],
        known: NDArray[np.bool_],
        holds: NDArray[np.bool_],
    ) -> tuple[Floats, Floats]:
        """Return how long each worker has stood still, and its role's limit, [workers], in seconds.

        ``moved``, ``known`` and ``holds``, [workers]: who moved in this frame, who has a sample,
        who holds work. A worker without work is idle, which is not standing still."""
        state = self._state
        state.align(("",), frame.workers)
        self._gaps.keep_roles(frame.roles)
        moved_at_s, seen_at_s = state["moved_at_s"][0], state["seen_at_s"][0]
        unseen_s = frame.time_s - seen_at_s
        usual_s = medians(np.where(known, unseen_s, np.nan).astype(np.float32))
        paused_s = (seen_at_s - moved_at_s) + np.fmin(unseen_s, LONGER * usual_s)
        limits = np.empty(len(groups.members), np.float32)
        for at, members in enumerate(groups.members):
            role = groups.names[at][0]
            ended = members[moved[members] & np.isfinite(paused_s[members])]
            if len(ended):
                self._gaps.add(role, paused_s[ended])
            usual, longest = self._gaps.usual_s(role), self._gaps.longest_s(role)
            limits[at] = max(self._tuning.hung_s, self._tuning.hung_gaps * usual, LONGER * longest)
        np.copyto(moved_at_s, frame.time_s, where=moved | (known & (~holds | np.isnan(moved_at_s))))
        np.copyto(seen_at_s, frame.time_s, where=known)
        return (frame.time_s - moved_at_s).astype(np.float32), limits[groups.of]
