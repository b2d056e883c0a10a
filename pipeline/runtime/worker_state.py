"""The state that heartbeats report.

Only the main loop's thread writes it, and only the heartbeat thread reads it. Each read is one reference or
one dict copy, which is atomic in the interpreter. If the loop is dead, ``progress`` no longer grows."""

from __future__ import annotations

import math
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec

from pipeline.process.records import worker_pid
from pipeline.process.work import Meter, ServiceSums
from pipeline.runtime.clock import Clock
from pipeline.runtime.host_watch import HostState
from pipeline.runtime.registry.contract import (
    MAX_DETAIL_CHARS,
    Heartbeat,
    LinkReport,
    WaitingFor,
)
from pipeline.runtime.registry.entries import CheckDigests, Vitals
from pipeline.runtime.registry.settings_change import SettingsTaken
from pipeline.runtime.registry.waits import Stage
from protocol.ids import Incarnation

ERROR_COUNTERS: Final = ("failed", "refused_steps", "failed_checkpoints")
"""Counters of heartbeats that count failed pieces of work."""
_RETRIES_END: Final = ":retries"
"""Suffix of an endpoint's counter."""


class Answering(Protocol):
    """A connection that measures its server's response time."""

    @property
    def rtt_s(self) -> float:
        """Moving average of the response time, or the age of an older open call."""
        ...

    @property
    def num_repeats(self) -> int: ...


class LoopLag:
    """Measures how late a timer on the main loop fires. Both threads write it, under a lock."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._worst_s = 0.0
        self._due_s: float | None = None

    def expect(self, after_s: float) -> None:
        """Expect the loop's next turn in ``after_s`` seconds."""
        with self._lock:
            self._due_s = self._monotonic() + after_s

    def woke(self) -> None:
        with self._lock:
            if self._due_s is not None:
                self._worst_s = max(self._worst_s, self._monotonic() - self._due_s)
                self._due_s = None

    def take_worst_s(self) -> float:
        """Return the longest delay since the last call in seconds, including a current one."""
        with self._lock:
            worst_s, self._worst_s = self._worst_s, 0.0
            if self._due_s is not None:
                worst_s = max(worst_s, self._monotonic() - self._due_s)
            return worst_s


class VitalSigns:
    """A worker's vitals. The main loop updates them twice a second; the heartbeat thread collects them.

    Attributes:
        lag: The main loop's delay.
        host: Returns the latest figures of the host.
        ledger: The connection to the ledger's server; None before it exists.
        begun_s: When the oldest work held began, by the monotonic clock; None if none is held.
        input_depth, output_depth: As in ``Vitals``."""

    def __init__(self, clock: Clock, work: Meter, cpu_s: Callable[[], float] = time.process_time) -> None:
        """``work`` is the meter of the main loop's work. ``cpu_s`` returns the processor seconds used so far."""
        self._clock, self._work, self._cpu_s = clock, work, cpu_s
        self.lag = LoopLag(clock.monotonic)
        self.host: Callable[[], HostState] = HostState
        self.ledger: Answering | None = None
        self.begun_s: float | None = None
        self.input_depth: int | None = None
        self.output_depth: int | None = None
        self.refused = 0
        self._taken_s, self._spent_s = clock.monotonic(), cpu_s()

    def collect(self, counters: Mapping[str, float], *, held: int) -> Vitals:
        """Return the vitals since the last call. Called only from the heartbeat thread."""
        now_s, begun_s, host, ledger = self._clock.monotonic(), self.begun_s, self.host(), self.ledger
        share = host.disk_free_share
        return Vitals(
            loop_lag_ms=round(1e3 * self.lag.take_worst_s(), 1),
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
    return min((at_s for at_s in times_s if at_s is not None), default=None)


def _retries(counters: Mapping[str, float]) -> int:
    return int(sum(value for name, value in counters.items() if name.endswith(_RETRIES_END)))


def _rounded(sums: ServiceSums) -> ServiceSums:
    """Round the sums to milliseconds, to keep heartbeats short."""
    return ServiceSums(sums.pieces, round(sums.seconds, 3), int(sums.size))


_STATM = Path("/proc/self/statm")
LONGEST_PASSED_S = 5.0
"""Most that counts between two heartbeats: in a longer gap this process, or its host, was stopped."""
_TOLD_S = 10.0
"""How long heartbeats report a step that was not committed; the observer reads one a second."""


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """A wait of the loop. Compared by identity, so that a wait only ends itself."""

    kind: WaitingFor
    detail: str


class Standing:
    """How long the loop has been at each wait since work last progressed or began. Sampled by the heartbeat
    thread, which alone uses it."""

    def __init__(self, now_s: float) -> None:
        self._until_s = now_s
        self._at: tuple[WaitingFor, bool] = (WaitingFor.STARTING, False)
        self._moved: tuple[int, ...] = ()
        self._stood_s: dict[tuple[WaitingFor, bool], float] = {}

    def observe(self, now_s: float, at: tuple[WaitingFor, bool], moved: tuple[int, ...]) -> float:
        """Return the seconds at this wait, in all, since ``moved`` last changed. ``at``: the wait, and whether
        work is held."""
        if moved != self._moved:
            self._moved = moved
            self._stood_s.clear()
        else:
            passed_s = min(now_s - self._until_s, LONGEST_PASSED_S)
            self._stood_s[self._at] = self._stood_s.get(self._at, 0.0) + passed_s
        self._at, self._until_s = at, now_s
        return self._stood_s.get(at, 0.0)


class WorkerState:
    """The state behind a worker's heartbeats."""

    def __init__(self, who: Incarnation, clock: Clock) -> None:
        self.who = who
        self.policy_version = -1
        self.counters: dict[str, float] = {}
        self._links: tuple[tuple[LinkReport, ...], float] = ((), clock.monotonic())
        self._held = 0
        self.unreached = ""
        self.refused = ""
        self.settings = SettingsTaken()
        self.check = CheckDigests()
        self.on_news: Callable[[], None] = lambda: None
        """Called on the loop when the policy version or the settings change, for which others wait."""
        self._clock = clock
        self._started_s = clock.time()
        self._progress = 0
        self._progressed_s = clock.monotonic()
        self._turns = 0
        self._turned_s = clock.monotonic()
        self._wait = _Wait(WaitingFor.STARTING, "")
        self._entered_s = clock.monotonic()
        """When the loop's current series of waits of one kind began."""
        self._trouble = ""
        self.work, self.storing = Meter(clock.monotonic), Meter(clock.monotonic)
        self.signs = VitalSigns(clock, self.work)
        self._begun = 0
        self._still = Standing(clock.monotonic())
        self._not_committed = "", 0.0
        """The text, and until when heartbeats report it."""
        self._moved_s = clock.monotonic()
        self._host = socket.gethostname()

    def progress(self, n: int = 1) -> None:
        self._progress += n
        self._progressed_s = self._moved_s = self._clock.monotonic()
        self._turn()

    def waiting_for(self, kind: WaitingFor, detail: str = "") -> None:
        """Report what the loop now waits for; an idle loop repeats this at every turn."""
        self._enter(_Wait(kind, detail))

    @contextmanager
    def waiting(self, kind: WaitingFor, detail: str = "") -> Generator[None]:
        """Report a wait for the duration of the block; then the previous wait again, unless it has changed."""
        previous, mine = self._wait, _Wait(kind, detail)
        self._enter(mine)
        try:
            yield
        finally:
            if self._wait is mine:
                self._enter(previous)
            else:
                self._turn()

    @property
    def held(self) -> int:
        """Pieces of work taken but not finished."""
        return self._held

    @held.setter
    def held(self, number: int) -> None:
        was_waiting, self._held = self._is_waiting, number
        self._note_begin(was_waiting)

    def ledger_trouble(self, words: str) -> None:
        """Report why ledger calls are being repeated, or "" when that ends. Such time counts as progress."""
        if self._trouble and not words:
            self._progressed_s = self._moved_s = self._clock.monotonic()
        self._trouble = words
        self._turn()

    @property
    def moved_s(self) -> float:
        """When work last progressed or began, by the monotonic clock. While the loop is at work, its waits
        since then are left out."""
        moved_s = max(self._moved_s, self.work.moved_s)
        return max(moved_s, self.storing.moved_s) if self._wait.kind.counts_writes else moved_s

    @property
    def num_progress(self) -> int:
        return self._progress

    def report_not_committed(self, words: str) -> None:
        """Report for some seconds an optimiser step that was refused twice."""
        self._not_committed = words[:MAX_DETAIL_CHARS], self._clock.monotonic() + _TOLD_S
        self.on_news()

    def set_links(self, links: tuple[LinkReport, ...]) -> None:
        """Set the links' reports; their ages keep growing until the next call."""
        self._links = links, self._clock.monotonic()

    @property
    def links(self) -> tuple[LinkReport, ...]:
        """The links' reports, with their current ages."""
        links, at_s = self._links
        since_s = self._clock.monotonic() - at_s
        return tuple(
            msgspec.structs.replace(link, oldest_age_s=round(link.oldest_age_s + since_s, 2)) if link.open else link
            for link in links
        )

    @property
    def kind(self) -> WaitingFor:
        return self._wait.kind

    @property
    def detail(self) -> str:
        """Describes the current wait, for people."""
        return self._wait.detail

    def heartbeat(self) -> Heartbeat:
        """Return the current state. Called from the heartbeat thread."""
        wait = _Wait(WaitingFor.LEDGER, self._trouble) if self._trouble else self._wait
        # JSON has no representation of non-finite numbers, so readers would refuse the heartbeat
        counters = {name: value for name, value in self.counters.copy().items() if math.isfinite(value)}
        held, now_s, at_s = self.held, self._clock.monotonic(), self._clock.time()
        work, storing = self.work.report(), self.storing.report()
        moved = (self._progress, work.steps, storing.steps if wait.kind.counts_writes else 0, self._begun)

        def on_wall(then_s: float) -> float:
            """Return a moment of the monotonic clock, so that only durations count when the wall clock jumps."""
            return at_s - max(0.0, now_s - then_s)

        return Heartbeat(
            who=self.who,
            pid=worker_pid(),
            host=self._host,
            at_s=at_s,
            started_s=self._started_s,
            progress=self._progress,
            progress_at_s=on_wall(self._progressed_s),
            waiting_for=wait.kind,
            detail=wait.detail[:MAX_DETAIL_CHARS],
            policy_version=self.policy_version,
            rss_bytes=resident_bytes(),
            counters=counters,
            links=self.links,
            turns=self._turns,
            turned_at_s=on_wall(self._turned_s),
            held=held,
            begun=self._begun,
            moved_at_s=on_wall(self.moved_s),
            still_s=self._still.observe(now_s, (wait.kind, held > 0), moved),
            work=work,
            storing=storing,
            unreached=self.unreached[:MAX_DETAIL_CHARS],
            refused=self.refused[:MAX_DETAIL_CHARS],
            vitals=self.signs.collect(counters, held=held),
            settings=self.settings,
            check=self.check,
            not_committed=self._not_committed[0] if self._clock.monotonic() < self._not_committed[1] else "",
        )

    @property
    def _is_waiting(self) -> bool:
        """Whether it may stay in this wait forever: it has no work, or others end the wait."""
        kind = self._wait.kind
        return kind.stage is not Stage.COMPUTING and (not self._held or kind.may_hold)

    def _enter(self, wait: _Wait) -> None:
        was_waiting, before, now_s = self._is_waiting, self._wait.kind, self._clock.monotonic()
        self._wait = wait
        if wait.kind is not before:
            if before.stage is not Stage.COMPUTING:
                # after the wait, the work counts as idle for as long as before it
                self._moved_s = min(now_s, self.moved_s + now_s - max(self._entered_s, self.moved_s))
            self._entered_s = now_s
        self._note_begin(was_waiting)
        self._turn()

    def _note_begin(self, was_waiting: bool) -> None:
        if was_waiting and not self._is_waiting:
            self._begun += 1
            self._moved_s = self._clock.monotonic()

    def _turn(self) -> None:
        self._turns += 1
        self._turned_s = self._clock.monotonic()


def resident_bytes() -> int:
    """Return this process's resident memory in bytes; its peak if the current size is unknown."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
