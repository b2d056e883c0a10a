"""The state that heartbeats report.

The main loop's thread alone writes it, and the heartbeat thread alone reads it. Every read is of
one reference or one dict copy, which the interpreter makes whole. If the loop is dead, ``progress``
stands still in every heartbeat."""

from __future__ import annotations

import math
import os
import resource
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipeline.process.records import worker_pid
from pipeline.process.work import Meter
from pipeline.runtime.clock import Clock
from pipeline.runtime.registry.contract import (
    MAX_DETAIL_CHARS,
    MAY_HOLD,
    Heartbeat,
    LinkReport,
    WaitingFor,
)
from pipeline.runtime.registry.settings_change import SettingsTaken
from pipeline.runtime.registry.vitals import CheckDigests
from pipeline.runtime.vital_signs import VitalSigns
from protocol.ids import Incarnation

_STATM = Path("/proc/self/statm")
_AT_WORK = frozenset({WaitingFor.COMPUTE, WaitingFor.COMPILE})
_TOLD_S = 10.0
"""How long heartbeats report a step that was not committed; the observer reads one a second."""


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """A wait of the loop. Compared by identity, so that a wait ends only itself."""

    kind: WaitingFor
    detail: str


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
        """Called on the loop when the policy version or the settings change: others wait for it."""
        self._clock = clock
        self._started_s = clock.time()
        self._progress = 0
        self._progress_at_s = self._started_s
        self._turns = 0
        self._turned_at_s = self._started_s
        self._wait = _Wait(WaitingFor.STARTING, "")
        self._entered_s = clock.monotonic()
        """Since when the loop has been at waits of the present kind."""
        self._trouble = ""
        self.work, self.storing = Meter(clock.monotonic), Meter(clock.monotonic)
        self.signs = VitalSigns(clock, self.work)
        self._begun = 0
        self._not_committed = "", 0.0
        """With the time until which heartbeats have it."""
        self._moved_s = clock.monotonic()
        self._host = socket.gethostname()

    def progress(self, n: int = 1) -> None:
        """Count ``n`` productive turns of the main loop."""
        self._progress += n
        self._progress_at_s = self._clock.time()
        self._moved_s = self._clock.monotonic()
        self._turn()

    def waiting_for(self, kind: WaitingFor, detail: str = "") -> None:
        """Report the loop's wait from now on; an idle loop repeats it at every turn."""
        self._enter(_Wait(kind, detail))

    @contextmanager
    def waiting(self, kind: WaitingFor, detail: str = "") -> Generator[None]:
        """Report a wait for the length of the block; then the earlier one, unless it
        has changed."""
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
        """Pieces of work taken and not finished."""
        return self._held

    @held.setter
    def held(self, number: int) -> None:
        was_waiting, self._held = self._is_waiting, number
        self._note_begin(was_waiting)

    def ledger_trouble(self, words: str) -> None:
        """Report why ledger calls are repeated, or "" at the end; that time counts as progress."""
        if self._trouble and not words:
            self._progress_at_s, self._moved_s = self._clock.time(), self._clock.monotonic()
        self._trouble = words
        self._turn()

    @property
    def moved_s(self) -> float:
        """Time of the last progress or begin of work, by the monotonic clock. While the loop is at
        work, its waits since then are left out."""
        return max(self._moved_s, self.work.moved_s, self.storing.moved_s)

    @property
    def num_progress(self) -> int:
        """Productive turns so far."""
        return self._progress

    def report_not_committed(self, words: str) -> None:
        """Report an optimiser step that was refused twice, in words, for some seconds."""
        self._not_committed = words[:MAX_DETAIL_CHARS], self._clock.monotonic() + _TOLD_S
        self.on_news()

    def set_links(self, links: tuple[LinkReport, ...]) -> None:
        """Set the links' reports; their ages grow until the next ones."""
        self._links = links, self._clock.monotonic()

    @property
    def links(self) -> tuple[LinkReport, ...]:
        """The links' reports, with the ages of now."""
        links, at_s = self._links
        since_s = self._clock.monotonic() - at_s
        return tuple(
            msgspec.structs.replace(link, oldest_age_s=round(link.oldest_age_s + since_s, 2)) if link.open else link
            for link in links
        )

    @property
    def kind(self) -> WaitingFor:
        """The present wait."""
        return self._wait.kind

    @property
    def detail(self) -> str:
        """The present wait in words."""
        return self._wait.detail

    def heartbeat(self) -> Heartbeat:
        """Return the present state; called from the heartbeat thread."""
        wait = _Wait(WaitingFor.LEDGER, self._trouble) if self._trouble else self._wait
        # JSON has no word for a number that is not finite: a reader would refuse the heartbeat
        counters = {name: value for name, value in self.counters.copy().items() if math.isfinite(value)}
        held = self.held
        return Heartbeat(
            who=self.who,
            pid=worker_pid(),
            host=self._host,
            at_s=self._clock.time(),
            started_s=self._started_s,
            progress=self._progress,
            progress_at_s=self._progress_at_s,
            waiting_for=wait.kind,
            detail=wait.detail[:MAX_DETAIL_CHARS],
            policy_version=self.policy_version,
            rss_bytes=resident_bytes(),
            counters=counters,
            links=self.links,
            turns=self._turns,
            turned_at_s=self._turned_at_s,
            held=held,
            begun=self._begun,
            moved_at_s=self._clock.time() - max(0.0, self._clock.monotonic() - self.moved_s),
            work=self.work.report(),
            storing=self.storing.report(),
            unreached=self.unreached[:MAX_DETAIL_CHARS],
            refused=self.refused[:MAX_DETAIL_CHARS],
            vitals=self.signs.take(counters, held=held),
            settings=self.settings,
            check=self.check,
            not_committed=self._not_committed[0] if self._clock.monotonic() < self._not_committed[1] else "",
        )

    @property
    def _is_waiting(self) -> bool:
        """Whether it may stay where it is for ever: it has no work, or others end the wait."""
        return self._wait.kind not in _AT_WORK and (not self._held or self._wait.kind in MAY_HOLD)

    def _enter(self, wait: _Wait) -> None:
        was_waiting, before, now_s = self._is_waiting, self._wait.kind, self._clock.monotonic()
        self._wait = wait
        if wait.kind is not before:
            if before not in _AT_WORK:
                # the work stood before the wait for as long as it has stood now
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
        self._turned_at_s = self._clock.time()


def resident_bytes() -> int:
    """Return this process's resident memory in bytes; its peak where that is unknown."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
