"""Rates from counters that are read again and again. Pure: the time is an argument.

A counter of a process begins at 0 with each of its incarnations. A counter of the ledger goes back
when its server has lost its last writes, or the learner went back to an older checkpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeline.runtime.registry.contract import Heartbeat

WINDOW_S = 10.0
"""A rate is the mean over the readings of this many last seconds."""
_MAX_READINGS = 64
_MAX_COUNTERS = 8192


class ProcessCount(NamedTuple):
    """One process's counter."""

    epoch: int
    """The incarnation that counts."""
    value: float


class ProcessCounters:
    """The sum of one counter over many processes: it never falls, whichever of them restart."""

    def __init__(self) -> None:
        self.total = 0.0
        """Counted since the first reading."""
        self._seen: dict[str, ProcessCount] = {}
        self._has_begun = False

    def see(self, readings: Mapping[str, ProcessCount]) -> float:
        """Take the present readings by process; return the total. A process that is new since the
        last call counts from 0."""
        for name, reading in readings.items():
            before = self._seen.pop(name, None)
            if before is None:
                self.total += reading.value if self._has_begun else 0.0
            elif before.epoch != reading.epoch:
                self.total += reading.value
            else:
                # An incarnation that forgets a peer takes its part out of a sum.
                self.total += max(0.0, reading.value - before.value)
            self._seen[name] = reading
        while len(self._seen) > _MAX_COUNTERS:
            del self._seen[next(iter(self._seen))]
        self._has_begun = True
        return self.total


class LedgerCounter:
    """A counter of the ledger: what it has grown by since the first reading. A fall counts 0."""

    def __init__(self) -> None:
        self.total = 0.0
        self._value: float | None = None

    def see(self, value: float) -> float:
        """Take the present value; return the total."""
        if self._value is not None:
            self.total += max(0.0, value - self._value)
        self._value = value
        return self.total


class Rate:
    """The slope of a total over the last seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._readings: deque[tuple[float, float]] = deque(maxlen=_MAX_READINGS)

    def see(self, total: float, now_s: float) -> float | None:
        """Take a total at ``now_s``, monotonic; return its growth a second, None before the second
        reading."""
        readings = self._readings
        if not readings or now_s > readings[-1][0]:
            readings.append((now_s, total))
        while len(readings) > 2 and readings[1][0] <= now_s - self._window_s:
            readings.popleft()
        (begin_s, begin), (end_s, end) = readings[0], readings[-1]
        return (end - begin) / (end_s - begin_s) if end_s > begin_s else None


@dataclass(slots=True)
class Meters:
    """Counters and rates between readings."""

    counters: dict[str, ProcessCounters | LedgerCounter] = field(
        default_factory=dict[str, ProcessCounters | LedgerCounter]
    )
    rates: dict[str, Rate] = field(default_factory=dict[str, Rate])

    def of_processes(self, name: str, beats: Iterable[Heartbeat], counter: str) -> float:
        """Return the total of a counter of heartbeats."""
        found = {b.who.worker: ProcessCount(b.who.epoch, b.counters[counter]) for b in beats if counter in b.counters}
        return self.sums(name, found)

    def sums(self, name: str, readings: Mapping[str, ProcessCount]) -> float:
        """Return the total of readings by process."""
        meter = self.counters.setdefault(name, ProcessCounters())
        assert isinstance(meter, ProcessCounters)
        return meter.see(readings)

    def of_ledger(self, name: str, value: float) -> float:
        """Return the growth of a counter of the ledger."""
        meter = self.counters.setdefault(name, LedgerCounter())
        assert isinstance(meter, LedgerCounter)
        return meter.see(value)

    def forget(self, name: str) -> None:
        """Begin anew with a counter and its rate."""
        self.counters.pop(name, None)
        self.rates.pop(name, None)

    def rate(self, name: str, total: float, now_s: float) -> float | None:
        """Return a total's growth a second."""
        return self.rates.setdefault(name, Rate()).see(total, now_s)
