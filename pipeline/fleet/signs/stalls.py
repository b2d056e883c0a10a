"""Work and event loops that stall while the worker's heartbeats continue. Pure; time is an
argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pipeline.fleet.incidents.book import Suspicion
from pipeline.fleet.state import Worker
from pipeline.process.work import standing_limit_s
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.registry.waits import LimitKind

KNOWN: Final = 5
"""Pieces of progress after which a worker's usual standstills are known."""
_OFTEN, _LONGER_THAN_FOUND = 3, 1.5
"""This many findings that ended by themselves count as usual; a hang is longer than the third of them by this factor."""
_NO_ANSWER_MS: Final = 1000.0
"""A ledger call this slow, finished or not, explains a standstill."""
_PAUSE_S: Final = 0.05
"""Times of the last piece that differ by less are the same: the clock is read at two moments."""


@dataclass(slots=True)
class _Computation:
    """One worker's computations. All times are on the worker's clock."""

    epoch: int
    at_s: float
    moved_s: float
    begun_progress: int
    still_s: float = 0.0
    """How long it has stood still; 0 while it moves or waits."""
    num_still: int = 0
    longest_s: float = 0.0
    work_s: float = 0.0
    """The longest time of one task, including the current one so far."""
    found_s: list[float] = field(default_factory=list[float])
    """The longest standstills that were findings, longest first."""

    def read(self, beat: Worker) -> None:
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
        # a single heartbeat comes from a process that was stopped
        if self.num_still > 1:
            if self.still_s > self.limit_s:
                self.found_s = sorted([*self.found_s, self.still_s], reverse=True)[:_OFTEN]
            else:
                self.longest_s = max(self.longest_s, self.still_s)
        self.still_s, self.num_still = 0.0, 0

    @property
    def limit_s(self) -> float:
        often_s = self.found_s[-1] if len(self.found_s) == _OFTEN else 0.0
        return max(standing_limit_s(self.longest_s, self.work_s), _LONGER_THAN_FOUND * often_s)


class StandingWork:
    """Work that stalls on a worker without peers while its heartbeats continue.

    A heartbeat has the time of the last finished piece of work, such as the layer of a pass. The
    learner has no peers to be compared with, so its own past sets the limit: 6 s, twice its longest
    pause that was not a finding, 1.5 times the third longest that was one, and a tenth of its
    longest task, since a restart costs all of that task.

    Five pieces of progress must come first, to see what is usual. First computations, which may
    compile, do not count, nor does time in which the ledger does not answer."""

    def __init__(self) -> None:
        self._of: dict[str, _Computation] = {}

    def observe(self, at_s: float, beats: Sequence[Worker]) -> list[Suspicion]:
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


def _standing(beat: Worker, at_s: float, of: _Computation) -> Suspicion:
    return Suspicion(
        component=beat.who.worker,
        kind="hung",
        since_s=at_s - beat.silent_s - of.still_s,
        sentence=(
            f"its computation has made no progress for {of.still_s:.0f} s, while its heartbeats continue; the limit is "
            f"{of.limit_s:.0f} s, from its own past"
        ),
        role=str(beat.who.role),
        score=of.still_s / of.limit_s,
    )


LOOP_S: Final = 5.0
"""A main loop blocked for this long hangs, unless that is usual for its worker."""
_LONGER: Final = 1.5
"""A hang is longer than a process's usual long standstills by this factor."""
_MOST: Final = 0.3
"""If more than this share of the fleet's loops is blocked, the host is the cause."""


@dataclass(slots=True)
class _MainLoop:
    epoch: int
    at_s: float
    num_still: int = 0
    still_s: float = 0.0
    """How long it has been blocked; 0 while it turns."""
    longest_s: list[float] = field(default_factory=list[float])

    def read(self, beat: Worker) -> None:
        if beat.who.epoch != self.epoch:
            self.epoch, self.num_still, self.still_s = beat.who.epoch, 0, 0.0
            self.longest_s.clear()
        elif beat.at_s == self.at_s:
            return
        self.at_s = beat.at_s
        lag_s = beat.vitals.loop_lag_ms / 1e3 if beat.vitals is not None else 0.0
        turned_s = beat.at_s - beat.turned_at_s if beat.turned_at_s else lag_s
        still_s = min(lag_s, turned_s) if beat.waiting_for.limit is not LimitKind.START else 0.0
        if still_s < LOOP_S:
            if self.num_still > 1:
                # a single heartbeat comes from a process that was stopped
                self.longest_s = sorted([*self.longest_s, self.still_s], reverse=True)[:_OFTEN]
            self.num_still, self.still_s = 0, 0.0
        else:
            self.num_still, self.still_s = self.num_still + 1, still_s

    @property
    def is_hung(self) -> bool:
        usual_s = self.longest_s[-1] if len(self.longest_s) == _OFTEN else 0.0
        return self.num_still > 1 and self.still_s > _LONGER * usual_s


class MainLoops:
    """Workers whose main loop is blocked while their heartbeats continue.

    The heartbeat thread measures how late the loop's timer is, and reports the time of its last
    turn. Both must be old, since a loop that turns again reports its late timer once more. If many
    loops are blocked at once the host is the cause, and no worker is blamed."""

    def __init__(self) -> None:
        self._loops: dict[str, _MainLoop] = {}

    def observe(self, at_s: float, beats: Sequence[Worker]) -> list[Suspicion]:
        known = self._loops
        self._loops = {
            beat.who.worker: known.get(beat.who.worker) or _MainLoop(beat.who.epoch, beat.at_s) for beat in beats
        }
        for beat in beats:
            self._loops[beat.who.worker].read(beat)
        hung = [beat for beat in beats if self._loops[beat.who.worker].is_hung]
        if len(hung) > max(1.0, _MOST * len(beats)):
            return []
        return [_hung_loop(beat, at_s, self._loops[beat.who.worker].still_s) for beat in hung]


def _hung_loop(beat: Worker, at_s: float, still_s: float) -> Suspicion:
    return Suspicion(
        component=beat.who.worker,
        kind="hung",
        since_s=at_s - beat.silent_s - still_s,
        sentence=(
            f"its main loop has been blocked for {still_s:.0f} s, while its heartbeats continue; the limit is {LOOP_S:g} s"
        ),
        role=str(beat.who.role),
        score=still_s / LOOP_S,
    )
