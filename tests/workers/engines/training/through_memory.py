"""A training state's way through a snapshot in memory."""

from __future__ import annotations

from pathlib import Path

from pipeline.training.snapshots import FilledBuffer, KeptState, SnapshotFolder
from workers.engines.training.seam import TrainingBackend
from workers.engines.value.seam import ValueEngine


class ThroughMemory:
    """Two incarnations, one after the other, with a folder of snapshots."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._first = SnapshotFolder(root, owner="learner#1", run="run")
        self._first.take_over()

    def fill(self, backend: TrainingBackend | ValueEngine) -> FilledBuffer:
        """Copy the present state."""
        filled = self._first.fill(backend.live_state())
        assert filled is not None
        return filled

    def read(self, filled: FilledBuffer) -> KeptState:
        """Seal a copy, and read it as the second incarnation."""
        self._first.seal(filled, version=1, num_updates=1, state={})
        second = SnapshotFolder(self._root, owner="learner#2", run="run")
        return second.read(second.take_over()[0])
