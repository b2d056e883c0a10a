"""Takes a worker's vitals for its heartbeats.

The main loop writes at its ticks, twice a second. The heartbeat thread takes the vitals. Each value
is one reference, which the interpreter makes whole; the loop's lag has a lock, since both write
it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from pipeline.process.work import Meter, ServiceSums
from pipeline.runtime.clock import Clock
from pipeline.runtime.host_watch import HostState
from pipeline.runtime.registry.vitals import Vitals

ERROR_COUNTERS: Final = ("failed", "refused_steps", "failed_checkpoints")
"""Counters of heartbeats that count failed pieces of work."""
_RETRIES_END: Final = ":retries"
"""Of an endpoint's counter."""


class Answering(Protocol):
    """A connection that measures its server's answers."""

    @property
    def rtt_s(self) -> float:
        """Return the moving mean of an answer's time, or the age of an older open call."""
        ...

    @property
    def num_repeats(self) -> int:
        """Return how many calls were repeated."""
        ...


class LoopLag:
    """The delay of a timer on the main loop."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._worst_s = 0.0
        self._due_s: float | None = None

    def expect(self, after_s: float) -> None:
        """Expect the loop's next turn after so many seconds."""
        with self._lock:
            self._due_s = self._monotonic() + after_s

    def woke(self) -> None:
        """Record the expected turn."""
        with self._lock:
            if self._due_s is not None:
                self._worst_s = max(self._worst_s, self._monotonic() - self._due_s)
                self._due_s = None

    def take(self) -> float:
        """Return the longest delay since the last call, in seconds; a present one counts too."""
        with self._lock:
            worst_s, self._worst_s = self._worst_s, 0.0
            if self._due_s is not None:
                worst_s = max(worst_s, self._monotonic() - self._due_s)
            return worst_s


class VitalSigns:
    """A worker's vitals, as far as they are known.

    Attributes:
        lag: the main loop's delay.
        host: returns the latest figures of the host.
        ledger: the connection to the ledger's server; None before there is one.
        begun_s: when the oldest work that is held began, by the monotonic clock; None for none.
        input_depth, output_depth: as in ``Vitals``."""

    def __init__(self, clock: Clock, work: Meter, cpu_s: Callable[[], float] = time.process_time) -> None:
        """``work``: the meter of the main loop's work. ``cpu_s``: processor seconds so far."""
        self._clock, self._work, self._cpu_s = clock, work, cpu_s
        self.lag = LoopLag(clock.monotonic)
        self.host: Callable[[], HostState] = HostState
        self.ledger: Answering | None = None
        self.begun_s: float | None = None
        self.input_depth: int | None = None
        self.output_depth: int | None = None
        self.refused = 0
        """Messages that mailboxes refused."""
        self._taken_s, self._spent_s = clock.monotonic(), cpu_s()

    def take(self, counters: Mapping[str, float], *, held: int) -> Vitals:
        """Return the vitals since the last call; called from the heartbeat thread alone."""
        now_s, begun_s, host, ledger = self._clock.monotonic(), self.begun_s, self.host(), self.ledger
        share = host.disk_free_share
        return Vitals(
            loop_lag_ms=round(1e3 * self.lag.take(), 1),
            cpu=self._cpu(now_s),
            num_fds=host.num_fds,
            disk_free_bytes=host.disk_free_bytes,
            disk_free_share=None if share is None else round(share, 4),
            gpu_util=host.gpu.util,
            gpu_mem_bytes=host.gpu.mem_bytes,
            gpu_power_w=host.gpu.power_w,
            gpus=host.gpu.ids,
            service={kind: _rounded(sums) for kind, sums in self._work.service().items()},
            errors=int(sum(counters.get(name, 0) for name in ERROR_COUNTERS)),
            retries=_retries(counters) + (0 if ledger is None else ledger.num_repeats),
            refused=self.refused,
            ledger_rtt_ms=0.0 if ledger is None else round(1e3 * ledger.rtt_s, 2),
            oldest_age_s=round(max(0.0, now_s - begun_s), 2) if held and begun_s is not None else 0.0,
            input_depth=self.input_depth,
            output_depth=self.output_depth,
        )

    def _cpu(self, now_s: float) -> float:
        spent_s = self._cpu_s()
        passed_s, used_s = now_s - self._taken_s, spent_s - self._spent_s
        self._taken_s, self._spent_s = now_s, spent_s
        return round(max(0.0, used_s) / passed_s, 3) if passed_s > 0.0 else 0.0


def earliest(times_s: Iterable[float | None]) -> float | None:
    """Return the earliest of these times; None without one."""
    return min((at_s for at_s in times_s if at_s is not None), default=None)


def _retries(counters: Mapping[str, float]) -> int:
    return int(sum(value for name, value in counters.items() if name.endswith(_RETRIES_END)))


def _rounded(sums: ServiceSums) -> ServiceSums:
    """Return the sums to the millisecond: a heartbeat is short."""
    return ServiceSums(sums.pieces, round(sums.seconds, 3), int(sums.size))
