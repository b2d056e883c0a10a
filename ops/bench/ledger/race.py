"""Starts one contender's processes together and times them.

Each part sets itself up, passes the gate, does its share, and passes the gate again. The time runs from the
common start to the last part's end, so starting and ending processes does not count. Parts that take too long
are killed."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from typing import Any

from protocol.errors import DataError

_SETUP_S = 60.0


class Gate:
    """The barriers of a race: all parts begin together, and none closes its sockets before all are done."""

    def __init__(self, begin: Barrier, end: Barrier) -> None:
        self._begin, self._end = begin, end
        self._marks: list[tuple[float, float]] = []

    def begin(self) -> None:
        # as a worker's process does, and for all contenders
        gc.freeze()
        self._begin.wait(_SETUP_S)
        self._mark()

    def end(self) -> None:
        """Stop this part's clock, then wait until every part is done."""
        self._mark()
        self._end.wait()

    @property
    def told(self) -> tuple[float, float, float]:
        """Begin, end, and processor seconds between them."""
        (begin, cpu_begin), (end, cpu_end) = self._marks
        return begin, end, cpu_end - cpu_begin

    def _mark(self) -> None:
        self._marks.append((time.perf_counter(), time.process_time()))


@dataclass(frozen=True, slots=True)
class Part:
    """One process: ``work`` is called with a ``Gate`` and the arguments."""

    work: Callable[..., None]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    seconds: float
    cpu_s: float
    """Processor seconds of all parts together; servers are not parts."""


def race(parts: Sequence[Part], *, limit_s: float = 120.0) -> Finish:
    """Run the parts. Raises DataError if one fails or they take too long."""
    context = multiprocessing.get_context("spawn")
    gate = Gate(context.Barrier(len(parts)), context.Barrier(len(parts)))
    results: SimpleQueue[tuple[float, float, float]] = context.SimpleQueue()
    processes = [
        context.Process(target=_run, args=(part.work, part.arguments, gate, results), daemon=True) for part in parts
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + _SETUP_S + limit_s
    try:
        while any(process.is_alive() for process in processes):
            if time.monotonic() > deadline or any(process.exitcode for process in processes):
                break
            time.sleep(0.01)
        if failed := [process.name for process in processes if process.exitcode != 0]:
            raise DataError(
                f"{', '.join(failed)} did not end well within {_SETUP_S + limit_s:g} s; see its traceback above"
            )
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    told = [results.get() for _ in parts]
    return Finish(max(end for _, end, _ in told) - min(begin for begin, _, _ in told), sum(cpu for _, _, cpu in told))


def _run(
    work: Callable[..., None], arguments: tuple[Any, ...], gate: Gate, results: SimpleQueue[tuple[float, float, float]]
) -> None:
    work(gate, *arguments)
    results.put(gate.told)
