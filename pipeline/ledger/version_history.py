"""Maps policy versions to updates after the learner went back to a checkpoint.

A version number always names the same weights, so a learner that goes back publishes the restored weights
under a new, higher number. After that, versions and updates differ:

    version   0  1  2  3  4  5 | 6  7  8           restored from version 3, published again as 6
    updates   0  1  2  3  4  5 | 3  4  5

Credit and staleness count updates. Tokens of the abandoned versions 4 and 5 keep their numbers and are as old
as tokens of 7 and 8. ``redis/scripts/parts/versions.lua`` mirrors these pure functions."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from pipeline.ledger.types import Restart


@dataclass(frozen=True, slots=True)
class VersionHistory:
    """The restarts of a run, in ascending order of version."""

    restarts: tuple[Restart, ...] = ()

    def updates(self, version: int) -> int:
        """Return the number of updates in a version's weights."""
        index = bisect_right(self.restarts, version, key=lambda restart: restart.policy_version)
        if index == 0:
            return version
        restart = self.restarts[index - 1]
        return restart.num_updates + version - restart.policy_version

    def updates_of(self, versions: np.ndarray) -> np.ndarray:
        """Return ``updates`` for an array of versions of any shape."""
        known, places = np.unique(versions, return_inverse=True)
        return np.array([self.updates(int(version)) for version in known], np.int64)[places].reshape(versions.shape)

    def after(self, restart: Restart) -> VersionHistory:
        """Return the history with one more restart; restarts from its version on are dropped."""
        kept = (known for known in self.restarts if known.policy_version < restart.policy_version)
        return VersionHistory((*kept, restart))
