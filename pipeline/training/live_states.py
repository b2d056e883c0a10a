"""A training state in place, and its loan to the copy that becomes a snapshot.

    compute thread    live = engine.live_state()     layout and note of this moment
                      loan = live.lend(pages)        from here on the engine waits before it changes anything
    another thread    loan.copy()                    fills the pages; the loan then ends, even if it failed
    compute thread    loan.wait()                    the engine, before its next change: optimiser step, load, put_back

So copying overlaps the next update's forward and backward passes, which only read. A state that is
already a copy, such as one gathered from ranks, never makes its owner wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from pipeline.process import work
from pipeline.process.work import LEAST_S, Meter, listening
from pipeline.weights.tensorfile import TensorSpec
from protocol.errors import EngineDied

_TURN_S = 0.5
_STALLED_S = LEAST_S
"""A copy that makes no progress for this long has failed."""
_SNAPSHOT = (
    "the copy of weights and optimiser for a snapshot; check the host's memory, or set checkpoint.snapshots = off"
)


@dataclass(frozen=True, eq=False)
class BufferPages:
    """The pages of one buffer, one array per tensor. Hold views of them by weak references only, so
    that they are freed with the buffer."""

    path: Path
    """The buffer's file, for other processes on this host."""
    arrays: list[np.ndarray]
    """uint8 [bytes]"""
    starts: list[int]
    """Offset of each array in the file, in bytes."""


class StateLoan:
    """One copy of a live state, from start to end. A version is published under a loan, too."""

    def __init__(
        self, copy: Callable[[], None], clock: Callable[[], float] = time.monotonic, *, what: str = _SNAPSHOT
    ) -> None:
        """``copy`` fills the pages and reports progress (``pipeline.process.work``); ``clock``
        gives monotonic seconds; ``what`` is it in words, with advice after a semicolon."""
        self._what = what
        self._copy: Callable[[], None] | None = copy
        self._clock = clock
        self._meter = Meter(clock)
        self._ended = threading.Event()
        self.waited_s = 0.0
        """How long the state's owner has waited."""

    @property
    def is_over(self) -> bool:
        """Whether the state may change again."""
        return self._ended.is_set()

    def copy(self) -> None:
        """Fill the pages, then end the loan, even on failure. Blocks; raises the copy's errors."""
        copy, self._copy = self._copy, None
        try:
            if copy is not None:
                with listening(self._meter):
                    copy()
        finally:
            del copy
            self._ended.set()

    def wait(self) -> None:
        """Wait until the loan is over. Raises EngineDied when the copy makes no progress."""
        if self.is_over:
            return
        began_s, seen_s = self._clock(), self._meter.moved_s
        while not self._ended.wait(_TURN_S):
            self.check()
            moved_s = self._meter.moved_s
            if moved_s != seen_s:
                seen_s = moved_s
                work.step()
        self.waited_s += self._clock() - began_s

    def join(self, limit_s: float) -> None:
        """Wait until the loan is over, at most ``limit_s``."""
        self._ended.wait(limit_s)

    def check(self) -> None:
        """Raise EngineDied when the copy makes no progress."""
        if not self.is_over and self._clock() - self._meter.moved_s > _STALLED_S:
            what, advice = self._what.split("; ")
            raise EngineDied(
                f"{what} has made no progress for {_STALLED_S:g} s, and training must wait for it; {advice}"
            )


class OpenLoans:
    def __init__(self) -> None:
        self._loans: list[StateLoan] = []

    def add(self, loan: StateLoan) -> None:
        self._loans = [*(one for one in self._loans if not one.is_over), loan]

    def wait(self) -> None:
        """Wait until all loans are over, before changing the state. Raises EngineDied."""
        for loan in self._loans:
            loan.wait()


def _nothing(loan: StateLoan, pages: BufferPages) -> None:
    del loan, pages


@dataclass(frozen=True, slots=True)
class LiveState:
    """The state for an exact resume, in place."""

    specs: tuple[TensorSpec, ...]
    """In file order (``tensorfile.in_order``)."""
    note: str
    """The backend's JSON: everything in the state that is not a tensor."""
    copy: Callable[[BufferPages], None]
    """Fills the pages, one array per spec."""
    begin: Callable[[StateLoan, BufferPages], None] = _nothing
    """Called with each new loan and its pages before the copy, so that the state's owner waits for it."""

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    def lend(self, pages: BufferPages) -> StateLoan:
        """Start a loan. The caller must call its ``copy``, on any thread."""
        loan = StateLoan(partial(self.copy, pages))
        self.begin(loan, pages)
        return loan
