"""What long work has done so far, told from inside of it, so that honest work is never taken for
dead.

*Consumes* marks: a piece is done, a tenth of the whole. *Produces* reports for heartbeats, and how
long a piece may take. *Waits for* nothing.

    a worker     with meter.task("update", tokens, "tokens"): ...     one thing that takes long, as people see it
    an engine    with work.part(0.25): ...                            the block is a quarter of what surrounds it
                 work.step(0.1)                                       a piece is done, a tenth of what surrounds it

Engines know neither workers nor heartbeats: they tell the meter of the thread that they run on, or
no meter at all. Code that goes on in another thread (a backward pass on a GPU) takes ``current()``
with it.

A piece is what must end soon if all is well: a layer of a pass, a decode step, a verdict, a file.
How long that takes depends on model and machine, so it is measured: a piece may take several times
the slowest of its kind so far, and a floor in any case.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import msgspec

LEAST_S = 60.0
"""A piece may take this long in any case: a machine that is used by others as well stands still for
seconds.
"""
TIMES_SLOWEST = 5.0
"""... and so many times what the slowest of its kind took."""


class WorkReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one thread's work has done so far, in a heartbeat."""

    steps: int = 0
    """Pieces that ended, since the process began; only grows."""
    slowest_s: float = 0.0
    """What the slowest piece of this kind took so far."""
    kind: str = ""
    """What is being done, as ``update``; empty when nothing that takes long is."""
    share: float = 0.0
    """Of that, from 0 to 1."""
    amount: float = 0.0
    """The whole of it, in ``unit``; 0 when it was not said."""
    unit: str = ""
    elapsed_s: float = 0.0
    """Since it began."""

    @property
    def per_s(self) -> float | None:
        """Units a second so far; None when that cannot be said."""
        return self.amount * self.share / self.elapsed_s if self.amount and self.share and self.elapsed_s else None

    @property
    def remaining_s(self) -> float | None:
        """How long the rest takes at the rate so far; None before there is one."""
        return self.elapsed_s * (1.0 - self.share) / self.share if self.share and self.elapsed_s else None


def piece_limit_s(slowest_s: float, ceiling_s: float | None) -> float:
    """Return how long a piece may take.

    Args:
        slowest_s: What the slowest of its kind took so far.
        ceiling_s: What a person allows at most; None when that was not said.
    """
    measured_s = max(LEAST_S, TIMES_SLOWEST * slowest_s)
    return measured_s if ceiling_s is None else min(measured_s, ceiling_s)


@dataclass(slots=True, eq=False)
class _Span:
    """A part of a task: from ``begin`` on, ``size`` of the whole."""

    begin: float
    size: float


@dataclass(frozen=True, slots=True)
class _Task:
    kind: str
    amount: float
    unit: str
    began_s: float


class Meter:
    """Counts the work of one thread, and of the loop that gives it work. Any thread may mark and
    read.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: monotonic seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._steps = 0
        self._moved_s = clock()
        self._slowest: dict[str, float] = {}
        self._task: _Task | None = None
        self._spans: list[_Span] = []
        self._done = 0.0

    @property
    def moved_s(self) -> float:
        """When the last piece ended, or its work began, by the meter's clock."""
        return self._moved_s

    @contextmanager
    def task(self, kind: str, amount: float = 0.0, unit: str = "") -> Generator[None]:
        """Say that the block is one thing that takes long: so much of ``unit``. Within another task
        it only counts pieces.
        """
        nothing = _Span(0.0, 0.0)
        with self._lock:
            nothing.begin = self._done
            is_outer = self._task is None
            if is_outer:
                self._task = _Task(kind, amount, unit, self._clock())
                self._done, self._spans = 0.0, [_Span(0.0, 1.0)]
                self._moved_s = self._clock()
            else:
                self._spans.append(nothing)
        try:
            yield
        finally:
            if not is_outer:
                self._leave(nothing)
            else:
                with self._lock:
                    self._task, self._spans, self._done = None, [], 0.0

    @contextmanager
    def part(self, share: float) -> Generator[None]:
        """Say that the block is ``share`` of what surrounds it; at its end that much is done."""
        with self._lock:
            surrounding = self._spans[-1] if self._spans else None
            span = _Span(self._done, 0.0 if surrounding is None else share * surrounding.size)
            self._spans.append(span)
        try:
            yield
        finally:
            self._leave(span)

    def _leave(self, span: _Span) -> None:
        with self._lock:
            if span in self._spans:
                del self._spans[self._spans.index(span) :]
                self._done = max(self._done, min(1.0, span.begin + span.size))

    def begin(self) -> None:
        """Say that a piece begins: what came before it was none."""
        with self._lock:
            self._moved_s = self._clock()

    def step(self, share: float = 0.0) -> None:
        """Say that a piece is done: ``share`` of what surrounds it."""
        with self._lock:
            now = self._clock()
            kind = self._task.kind if self._task else ""
            self._slowest[kind] = max(self._slowest.get(kind, 0.0), now - self._moved_s)
            self._moved_s = now
            self._steps += 1
            if self._spans:
                span = self._spans[-1]
                self._done = min(span.begin + span.size, self._done + share * span.size)

    def report(self) -> WorkReport:
        """Return the state at this moment."""
        with self._lock:
            task = self._task
            slowest_s = self._slowest.get(task.kind if task else "", 0.0)
            if task is None:
                return WorkReport(steps=self._steps, slowest_s=slowest_s)
            return WorkReport(
                steps=self._steps,
                slowest_s=slowest_s,
                kind=task.kind,
                share=self._done,
                amount=task.amount,
                unit=task.unit,
                elapsed_s=self._clock() - task.began_s,
            )


_NOT_READ = Meter()
_current: ContextVar[Meter] = ContextVar("meter", default=_NOT_READ)


def current() -> Meter:
    """Return the meter of this thread; one that is never read when there is none."""
    return _current.get()


@contextmanager
def listening(meter: Meter) -> Generator[None]:
    """Let ``meter`` count what this thread tells while the block runs."""
    token = _current.set(meter)
    try:
        yield
    finally:
        _current.reset(token)


def step(share: float = 0.0) -> None:
    """Say that a piece is done; see :meth:`Meter.step`."""
    _current.get().step(share)


@contextmanager
def task(kind: str, amount: float = 0.0, unit: str = "") -> Generator[None]:
    """Say that the block is one thing that takes long; see :meth:`Meter.task`."""
    with _current.get().task(kind, amount, unit):
        yield


@contextmanager
def part(share: float) -> Generator[None]:
    """Say that the block is ``share`` of what surrounds it; see :meth:`Meter.part`."""
    with _current.get().part(share):
        yield
