"""A training state's way through a snapshot in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from pipeline.training.live_states import StateLoan
from pipeline.training.snapshots import KeptState, OpenBuffer, SnapshotFolder
from workers.engines.training.seam import TrainingBackend
from workers.engines.value.seam import ValueEngine

T = TypeVar("T")
_LIMIT_S = 60.0


def during(loan: StateLoan, change: Callable[[], T], monkeypatch: pytest.MonkeyPatch) -> T:
    """Begin a change of a state that is lent. Copy the state once the change waits for that, or is
    made; return what the change returned."""
    wait, has_come = StateLoan.wait, threading.Event()

    def tell(lent: StateLoan) -> None:
        has_come.set()
        wait(lent)

    with ThreadPoolExecutor(1) as compute, monkeypatch.context() as patch:
        patch.setattr(StateLoan, "wait", tell)
        changing = compute.submit(change)
        changing.add_done_callback(lambda _: has_come.set())
        assert has_come.wait(_LIMIT_S)
        loan.copy()
        return changing.result(_LIMIT_S)


class ThroughMemory:
    """Two incarnations, one after the other, with a folder of snapshots."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._first = SnapshotFolder(root, owner="learner#1", run="run")
        self._first.take_over()

    def fill(self, backend: TrainingBackend | ValueEngine) -> OpenBuffer:
        """Copy the present state."""
        return self._first.fill(backend.live_state())

    def lend(self, backend: TrainingBackend | ValueEngine) -> tuple[OpenBuffer, StateLoan]:
        """Begin a loan of the present state."""
        live = backend.live_state()
        placed = self._first.place(live)
        return placed, live.lend(placed.pages)

    def read(self, filled: OpenBuffer) -> KeptState:
        """Seal a copy, and read it as the second incarnation."""
        self._first.seal(filled, version=1, num_updates=1, state={})
        second = SnapshotFolder(self._root, owner="learner#2", run="run")
        return second.read(second.take_over()[0])
