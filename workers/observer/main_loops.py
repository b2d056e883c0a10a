"""Workers whose main loop stands still while their heartbeats go on. Pure; time is an argument.

A heartbeat's thread measures the loop's timer, and names the time of the loop's last turn. Both
must be old: a loop that turns again reports its late timer once more. That is a fact, and needs no
comparison. Loops of many workers that stand at once are the host's, and no worker is blamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pipeline.incidents.book import Suspicion
from pipeline.runtime.registry.contract import Heartbeat, WaitingFor

LOOP_S: Final = 5.0
"""A main loop that stands for so long hangs, unless its worker's loop often stands as long."""
_LONGER: Final = 1.5
"""By which a hang exceeds a process's usual long standstills."""
_OFTEN: Final = 3
"""Standstills that ended by themselves, from which on they are usual."""
_MOST: Final = 0.3
"""Share of the fleet above which standing loops are the host's."""
_STARTING: Final = frozenset({WaitingFor.STARTING, WaitingFor.COMPILE})


@dataclass(slots=True)
class _MainLoop:
    """One worker's main loop."""

    epoch: int
    at_s: float
    """Of the newest heartbeat, by the worker's clock."""
    num_still: int = 0
    """Heartbeats in a row that show it standing."""
    still_s: float = 0.0
    """For how long it stands; 0 while it turns."""
    longest_s: list[float] = field(default_factory=list[float])
    """The longest standstills that ended by themselves, the longest first."""

    def read(self, beat: Heartbeat) -> None:
        """Take a heartbeat in; a repeated one changes nothing."""
        if beat.who.epoch != self.epoch:
            self.epoch, self.num_still, self.still_s = beat.who.epoch, 0, 0.0
            self.longest_s.clear()
        elif beat.at_s == self.at_s:
            return
        self.at_s = beat.at_s
        lag_s = beat.vitals.loop_lag_ms / 1e3 if beat.vitals is not None else 0.0
        turned_s = beat.at_s - beat.turned_at_s if beat.turned_at_s else lag_s
        still_s = min(lag_s, turned_s) if beat.waiting_for not in _STARTING else 0.0
        if still_s < LOOP_S:
            if self.num_still > 1:
                # a single heartbeat is that of a process which was stopped
                self.longest_s = sorted([*self.longest_s, self.still_s], reverse=True)[:_OFTEN]
            self.num_still, self.still_s = 0, 0.0
        else:
            self.num_still, self.still_s = self.num_still + 1, still_s

    @property
    def is_hung(self) -> bool:
        """Whether it stands, in two heartbeats at least."""
        usual_s = self.longest_s[-1] if len(self.longest_s) == _OFTEN else 0.0
        return self.num_still > 1 and self.still_s > _LONGER * usual_s


class MainLoops:
    """Remembers each worker's main loop. The workers of the last moment bound its memory."""

    def __init__(self) -> None:
        self._loops: dict[str, _MainLoop] = {}

    def look(self, at_s: float, beats: Sequence[Heartbeat]) -> list[Suspicion]:
        """Return the workers whose main loop stands at this moment.

        Args:
            at_s: the moment by the wall clock.
            beats: the last heartbeat of each worker."""
        known = self._loops
        self._loops = {
            beat.who.worker: known.get(beat.who.worker) or _MainLoop(beat.who.epoch, beat.at_s) for beat in beats
        }
        for beat in beats:
            self._loops[beat.who.worker].read(beat)
        hung = [beat for beat in beats if self._loops[beat.who.worker].is_hung]
        if len(hung) > max(1.0, _MOST * len(beats)):
            return []
        return [_standing(beat, at_s, self._loops[beat.who.worker].still_s) for beat in hung]


def _standing(beat: Heartbeat, at_s: float, still_s: float) -> Suspicion:
    return Suspicion(
        component=beat.who.worker,
        kind="hung",
        since_s=at_s - beat.silent_s - still_s,
        sentence=(
            f"its main loop has not turned for {still_s:.0f} s, while its heartbeats go on; the limit is {LOOP_S:g} s"
        ),
        role=str(beat.who.role),
        score=still_s / LOOP_S,
    )
