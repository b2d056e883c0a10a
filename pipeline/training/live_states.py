"""A training state where it lies, and its loan to the copy that becomes a snapshot.

    compute thread    live = engine.live_state()     layout and note of this moment
                      loan = live.lend(pages)        from now on the engine changes nothing before it has waited
    another thread    loan.copy()                    fills the pages; the loan ends with it, also when it fails
    compute thread    loan.wait()                    the engine, before its next change: optimiser step, load, put_back

So the copy goes on beside the next update's forward and backward passes, which only read. A state
that is a copy already, as one gathered from ranks, is waited for by nothing."""

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
"""A copy without another piece for so long has failed."""


@dataclass(frozen=True, eq=False)
class BufferPages:
    """The pages of one buffer, by tensor. Views of them are kept by weak references, and so go with
    the buffer."""

    path: Path
    """Of the buffer's file, for other processes of this host."""
    arrays: list[np.ndarray]
    """uint8 [bytes]"""
    starts: list[int]
    """Of each in the file, in bytes."""


class StateLoan:
    """One copy of a live state, from its begin to its end."""

    def __init__(self, copy: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """``copy``: fills the pages, and reports its pieces (``pipeline.process.work``). ``clock``:
        monotonic seconds."""
        self._copy: Callable[[], None] | None = copy
        self._clock = clock
        self._meter = Meter(clock)
        self._ended = threading.Event()
        self.waited_s = 0.0
        """That the state's owner has waited."""

    @property
    def is_over(self) -> bool:
        """Whether the state may change again."""
        return self._ended.is_set()

    def copy(self) -> None:
        """Fill the pages; the loan ends, whatever comes of it. Blocks; raises the copy's errors."""
        copy, self._copy = self._copy, None
        try:
            if copy is not None:
                with listening(self._meter):
                    copy()
        finally:
            del copy
            self._ended.set()

    def wait(self) -> None:
        """Wait until the loan is over. Raises EngineDied when the copy stands still."""
        if self.is_over:
            return
        began_s, seen_s = self._clock(), self._meter.moved_s
        while not self._ended.wait(_TURN_S):
            moved_s = self._meter.moved_s
            if self._clock() - moved_s > _STALLED_S:
                raise EngineDied(
                    f"the copy of weights and optimiser for a snapshot has made no progress for {_STALLED_S:g} s, "
                    f"and training must wait for it; check the host's memory, or set checkpoint.snapshots = off"
                )
            if moved_s != seen_s:
                seen_s = moved_s
                work.step()
        self.waited_s += self._clock() - began_s


class OpenLoans:
    """The loans of one state, for its owner."""

    def __init__(self) -> None:
        self._loans: list[StateLoan] = []

    def add(self, loan: StateLoan) -> None:
        """Take note of a loan that begins."""
        self._loans = [*(one for one in self._loans if not one.is_over), loan]

    def wait(self) -> None:
        """Wait until all of them are over: the state is about to change. Raises EngineDied."""
        for loan in self._loans:
            loan.wait()


def _nothing(loan: StateLoan, pages: BufferPages) -> None:
    del loan, pages


@dataclass(frozen=True, slots=True)
class LiveState:
    """The state of an exact resume, where it lies."""

    specs: tuple[TensorSpec, ...]
    """In the order of a file (``tensorfile.in_order``)."""
    note: str
    """The backend's JSON: the state besides tensors."""
    copy: Callable[[BufferPages], None]
    """Fills the pages, one for each of ``specs``."""
    begin: Callable[[StateLoan, BufferPages], None] = _nothing
    """Takes note of a loan to these pages, before their copy: the state's owner waits for it."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(spec.num_bytes for spec in self.specs)

    def lend(self, pages: BufferPages) -> StateLoan:
        """Begin a loan. Its ``copy`` must be called, on any thread."""
        loan = StateLoan(partial(self.copy, pages))
        self.begin(loan, pages)
        return loan
