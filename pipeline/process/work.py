"""Progress reports from inside long work, so that slow but honest work is never taken for dead.

    a worker     with meter.task("update", tokens, "tokens"): ...     one long piece of work
    an engine    with work.part(0.25): ...                            a quarter of the surrounding block
                 work.step(0.1)                                       a finished step, a tenth of that block

Engines know neither workers nor heartbeats: they report to their thread's meter, if it has one.
Code that continues in another thread (a backward pass on a GPU) takes ``current()`` along. Finished
tasks measured in tokens are summed by kind (``ServiceSums``); work that overlaps other work of its
kind is added with ``served``.

A step is short when all is well: a layer of a pass, a decode step, a verdict, a file. How long it
takes depends on model and machine, so its limit is a multiple of the slowest of its kind so far,
and at least ``LEAST_S``."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import msgspec

LEAST_S = 60.0
"""Lower bound on a step's limit: a busy machine may stall for seconds."""
TOKENS = "tokens"
"""The unit of work whose size predicts its time."""
TIMES_SLOWEST = 5.0
"""A step's limit as a multiple of the slowest step of its kind."""
STANDS_S = 6.0
"""Shortest time without progress that is worth telling a person."""
_LONGER, _SHARE = 2.0, 0.1
_BEAT_S = 1.0


class WorkReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The progress of one thread's work, sent in heartbeats."""

    steps: int = 0
    """Steps finished since the process began; never decreases."""
    slowest_s: float = 0.0
    """Duration of the slowest step of this kind."""
    kind: str = ""
    """Name of the task in progress, such as ``update``; or empty."""
    share: float = 0.0
    """Finished share of the task, 0 to 1."""
    amount: float = 0.0
    """Size of the whole task in ``unit``; 0 if unknown."""
    unit: str = ""
    elapsed_s: float = 0.0
    """Time since the task began."""

    @property
    def per_s(self) -> float | None:
        """Units per second so far; None if unknown."""
        return self.amount * self.share / self.elapsed_s if self.amount and self.share and self.elapsed_s else None

    @property
    def remaining_s(self) -> float | None:
        """Estimated seconds left at the rate so far; None without a rate."""
        return self.elapsed_s * (1.0 - self.share) / self.share if self.share and self.elapsed_s else None


class ServiceSums(msgspec.Struct, frozen=True, array_like=True):
    """Totals of finished work of one kind since the process began; they never decrease."""

    pieces: int = 0
    """Chunks, responses or updates; decode steps for sampling."""
    seconds: float = 0.0
    """Sum of the wall-clock times; overlapping work counts more than once."""
    size: float = 0.0
    """Expected work in tokens, to which the time should be proportional."""

    def plus(self, pieces: int, seconds: float, size: float) -> ServiceSums:
        return ServiceSums(self.pieces + pieces, self.seconds + seconds, self.size + size)


def piece_limit_s(slowest_s: float, ceiling_s: float | None) -> float:
    """Return how long a piece of work (one step) may take.

    Args:
        slowest_s: Duration of the slowest step of its kind.
        ceiling_s: The configured limit, or None."""
    measured_s = max(LEAST_S, TIMES_SLOWEST * slowest_s)
    return measured_s if ceiling_s is None else min(measured_s, ceiling_s)


def standing_limit_s(longest_s: float, work_s: float) -> float:
    """Return how long a computation may go without progress before it counts as suspicious; all
    hang detectors use this.

    The limit is twice its longest normal pause, and at least a tenth of its longest task: a step of
    an update that takes minutes is sometimes seconds late, and a wrong repair throws all of that
    work away.

    Args:
        longest_s: Its longest pause, or slowest step, that was no fault.
        work_s: Its longest task, including the one in progress so far."""
    return max(STANDS_S, _LONGER * longest_s, _SHARE * work_s)


@dataclass(slots=True, eq=False)
class _Span:
    """A part of a task: begins at share ``begin`` and makes up ``size`` of the whole."""

    begin: float
    size: float


@dataclass(frozen=True, slots=True)
class _Task:
    kind: str
    amount: float
    unit: str
    began_s: float
    pieces: int


class Meter:
    """Counts the work of one thread and of the loop that feeds it. Any thread may report and read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._steps = 0
        self._moved_s = clock()
        self._slowest: dict[str, float] = {}
        self._task: _Task | None = None
        self._spans: list[_Span] = []
        self._done = 0.0
        self._service: dict[str, ServiceSums] = {}

    @property
    def moved_s(self) -> float:
        """When the last step ended or its work began, on the meter's clock."""
        return self._moved_s

    @contextmanager
    def task(self, kind: str, amount: float = 0.0, unit: str = "", *, pieces: int = 1) -> Generator[None]:
        """Report the block as one long task of ``amount`` units; inside another task only its steps
        count.

        A task in ``TOKENS`` that ends without an error adds ``pieces`` to the service of its kind."""
        nothing = _Span(0.0, 0.0)
        with self._lock:
            nothing.begin = self._done
            is_outer = self._task is None
            if is_outer:
                self._task = _Task(kind, amount, unit, self._clock(), pieces)
                self._done, self._spans = 0.0, [_Span(0.0, 1.0)]
                self._moved_s = self._clock()
            else:
                self._spans.append(nothing)
        try:
            yield
            if is_outer:
                self._end_task()
        finally:
            if not is_outer:
                self._leave(nothing)
            else:
                with self._lock:
                    self._task, self._spans, self._done = None, [], 0.0

    def _end_task(self) -> None:
        task = self._task
        if task is not None and task.unit == TOKENS:
            self.served(task.kind, seconds=self._clock() - task.began_s, size=task.amount, pieces=task.pieces)

    def served(self, kind: str, *, seconds: float, size: float, pieces: int = 1) -> None:
        """Add finished work to the totals of its kind. ``size``: in tokens."""
        with self._lock:
            self._service[kind] = self._service.get(kind, ServiceSums()).plus(pieces, seconds, size)

    def service(self) -> dict[str, ServiceSums]:
        with self._lock:
            return dict(self._service)

    @contextmanager
    def part(self, share: float) -> Generator[None]:
        """Report the block as ``share`` of the surrounding block, done when it ends."""
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
        """Start timing a step now; the time before it does not count."""
        with self._lock:
            self._moved_s = self._clock()

    def step(self, share: float = 0.0) -> None:
        """Report the end of a step, ``share`` of the surrounding block."""
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
    """Return this thread's meter; without one, a meter that nobody reads."""
    return _current.get()


@contextmanager
def listening(meter: Meter) -> Generator[None]:
    token = _current.set(meter)
    try:
        yield
    finally:
        _current.reset(token)


def step(share: float = 0.0) -> None:
    """Report the end of a step (:meth:`Meter.step`)."""
    _current.get().step(share)


@contextmanager
def task(kind: str, amount: float = 0.0, unit: str = "") -> Generator[None]:
    """Report the block as one long task (:meth:`Meter.task`)."""
    with _current.get().task(kind, amount, unit):
        yield


@contextmanager
def part(share: float) -> Generator[None]:
    """Report the block as a share of the surrounding block (:meth:`Meter.part`)."""
    with _current.get().part(share):
        yield


@asynccontextmanager
async def within_its_limit() -> AsyncGenerator[None]:
    """Report a step once a second while the block runs.

    For work that has its own time limit, which the block must enforce: until then it is not a hang.
    A main loop that is blocked reports nothing."""
    # imported late: commands that only read reports do not need it
    import asyncio

    loop = asyncio.get_running_loop()

    def beat() -> None:
        nonlocal timer
        step()
        timer = loop.call_later(_BEAT_S, beat)

    timer = loop.call_later(_BEAT_S, beat)
    try:
        yield
    finally:
        timer.cancel()
