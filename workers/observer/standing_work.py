"""A worker without peers whose computation stands while its heartbeats go on. Pure; time is an
argument.

A worker counts the pieces inside its work, such as the layers of a pass, and its heartbeat has the
time of the last one. The learner has no peers with whom it could be compared, so its own past sets
the limit: 6 s, twice its longest standstill that was no finding, and 1.5 times the third of those
that were. A tenth of its longest work is one, too: to repair it costs all of that work.

Five pieces of progress come first, in which whatever is usual is seen: a piece may take long in
every update. A first computation has a wait of its own, and does not count. Neither does the time
in which the ledger gives the worker no answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pipeline.incidents.book import Suspicion
from pipeline.process.work import standing_limit_s
from pipeline.runtime.registry.contract import Heartbeat, WaitingFor

KNOWN: Final = 5
"""Pieces of progress after which a worker's usual standstills are known."""
_OFTEN, _LONGER_THAN_FOUND = 3, 1.5
"""So many findings that ended by themselves are usual. A hang is so much longer than the third."""
_NO_ANSWER_MS: Final = 1000.0
"""A call of the ledger, at its usual pace or without an answer yet, that explains a standstill."""
_PAUSE_S: Final = 0.05
"""Two times of the last piece that differ by less are one: the clock is read at two moments."""


@dataclass(slots=True)
class _Computation:
    """One worker's computations."""

    epoch: int
    at_s: float
    """Of the newest heartbeat, by the worker's clock, as all times here."""
    moved_s: float
    begun_progress: int
    """At the first heartbeat."""
    still_s: float = 0.0
    """For how long it stands; 0 while it moves or waits."""
    num_still: int = 0
    """Heartbeats that show the present standstill."""
    longest_s: float = 0.0
    work_s: float = 0.0
    """The longest time of one work, the present one's so far included."""
    found_s: list[float] = field(default_factory=list[float])
    """The longest standstills that were findings, the longest first."""

    def read(self, beat: Heartbeat) -> None:
        """Take a heartbeat in; a repeated one changes nothing."""
        if beat.at_s == self.at_s:
            return
        self.at_s = beat.at_s
        answer_ms = beat.vitals.ledger_rtt_ms if beat.vitals is not None else 0.0
        is_computing = (
            beat.waiting_for is WaitingFor.COMPUTE
            and beat.held > 0
            and beat.moved_at_s > 0.0
            and answer_ms < _NO_ANSWER_MS
        )
        if not is_computing or beat.moved_at_s > self.moved_s + _PAUSE_S:
            self._end()
        self.moved_s = beat.moved_at_s
        self.work_s = max(self.work_s, beat.work.elapsed_s if beat.work is not None else 0.0)
        if is_computing:
            self.still_s, self.num_still = beat.at_s - beat.moved_at_s, self.num_still + 1

    def _end(self) -> None:
        # a single heartbeat is that of a process which was stopped
        if self.num_still > 1:
            if self.still_s > self.limit_s:
                self.found_s = sorted([*self.found_s, self.still_s], reverse=True)[:_OFTEN]
            else:
                self.longest_s = max(self.longest_s, self.still_s)
        self.still_s, self.num_still = 0.0, 0

    @property
    def limit_s(self) -> float:
        """The longest standstill that is no finding."""
        often_s = self.found_s[-1] if len(self.found_s) == _OFTEN else 0.0
        return max(standing_limit_s(self.longest_s, self.work_s), _LONGER_THAN_FOUND * often_s)


class StandingWork:
    """Remembers the computations of workers without peers. The last moment bounds its memory."""

    def __init__(self) -> None:
        self._of: dict[str, _Computation] = {}

    def look(self, at_s: float, beats: Sequence[Heartbeat]) -> list[Suspicion]:
        """Return the workers whose computation stands at this moment.

        Args:
            at_s: the moment by the wall clock.
            beats: the last heartbeat of each worker."""
        members = Counter(beat.who.role for beat in beats)
        alone = [beat for beat in beats if members[beat.who.role] == 1]
        known, self._of = self._of, {}
        found = list[Suspicion]()
        for beat in alone:
            of = known.get(beat.who.worker)
            if of is None or of.epoch != beat.who.epoch:
                of = _Computation(beat.who.epoch, beat.at_s, beat.moved_at_s, beat.progress)
            self._of[beat.who.worker] = of
            of.read(beat)
            is_known = beat.progress - of.begun_progress >= KNOWN
            if is_known and of.num_still > 1 and of.still_s > of.limit_s:
                found.append(_standing(beat, at_s, of))
        return found


def _standing(beat: Heartbeat, at_s: float, of: _Computation) -> Suspicion:
    return Suspicion(
        component=beat.who.worker,
        kind="hung",
        since_s=at_s - beat.silent_s - of.still_s,
        sentence=(
            f"its computation has not moved for {of.still_s:.0f} s, while its heartbeats go on; the limit is "
            f"{of.limit_s:.0f} s, by its own past"
        ),
        role=str(beat.who.role),
        score=of.still_s / of.limit_s,
    )
