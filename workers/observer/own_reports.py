"""Faults that workers report of themselves. Pure; time is an argument.

They are a disk that refuses, weights that are not as they were published, and an engine without
tokens. An optimiser step that was refused twice is one, too.

All are facts and need no comparison. Damaged weights of most generators are the learner's. An
engine may stand for 8 s, and longer than it has stood before by half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pipeline.incidents.book import Suspicion
from pipeline.runtime.registry.contract import Heartbeat, WaitingFor
from pipeline.runtime.registry.entries import LONGEST_STANDSTILL, STANDSTILL
from protocol.ids import Role

QUARANTINED_S: Final = 2.0
"""A version that was read while it was replaced is refused for a moment alone."""
STANDSTILL_S: Final = 8.0
"""Turns of a generator's engine without a token that are never a fault."""
_LONGER: Final = 1.5
"""By which a standstill exceeds the longest one that ended by itself."""
_MOST: Final = 0.5
"""Share of generators above which damaged weights are the learner's."""


class OwnReports:
    """Remembers how long each worker reports. The workers of the last moment bound its memory."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def look(self, now_s: float, at_s: float, beats: Sequence[Heartbeat]) -> list[Suspicion]:
        """Return what workers report at this moment.

        Args:
            now_s: monotonic seconds.
            at_s: the same moment by the wall clock.
            beats: the last heartbeat of each worker."""
        refusing = [beat for beat in beats if beat.waiting_for is WaitingFor.QUARANTINE]
        self._since_s = {beat.who.worker: self._since_s.get(beat.who.worker, now_s) for beat in refusing}
        lasting = [beat for beat in refusing if now_s - self._since_s[beat.who.worker] >= QUARANTINED_S]
        found = [
            _reported(beat, "disk", at_s, f"its disk refuses it: {beat.refused}") for beat in beats if beat.refused
        ]
        found += [_reported(beat, "numeric", at_s, beat.not_committed) for beat in beats if beat.not_committed]
        found += [_without_tokens(beat, at_s) for beat in beats if beat.counters.get(STANDSTILL, 0.0) > _limit_s(beat)]
        num = sum(beat.who.role is Role.GENERATOR for beat in beats)
        if len(lasting) > 1 and len(lasting) > _MOST * num:
            return [*found, _published_damaged(lasting, at_s)]
        for beat in lasting:
            since_s = at_s - (now_s - self._since_s[beat.who.worker])
            found.append(_reported(beat, "quarantine", since_s, f"it refuses the weights that came: {beat.detail}"))
        return found


def _reported(beat: Heartbeat, kind: str, since_s: float, sentence: str) -> Suspicion:
    return Suspicion(beat.who.worker, kind, since_s, sentence, role=str(beat.who.role), score=1.0)


def _limit_s(beat: Heartbeat) -> float:
    return max(STANDSTILL_S, _LONGER * beat.counters.get(LONGEST_STANDSTILL, 0.0))


def _without_tokens(beat: Heartbeat, at_s: float) -> Suspicion:
    stood_s = beat.counters[STANDSTILL]
    sentence = (
        f"its engine has returned no token for {stood_s:.0f} s, and no error; the limit is {_limit_s(beat):.0f} s"
    )
    return _reported(beat, "hung", at_s - beat.silent_s - stood_s, sentence)


def _published_damaged(beats: Sequence[Heartbeat], at_s: float) -> Suspicion:
    names = ", ".join(beat.who.worker for beat in beats)
    sentence = f"{len(beats)} generators refuse the weights that it published: {names}"
    evidence = (f"{beats[0].who.worker}: {beats[0].detail}",)
    return Suspicion(
        str(Role.LEARNER), "quarantine", at_s, sentence, role=str(Role.LEARNER), score=1.0, evidence=evidence
    )
