"""Reward workers whose verifiers often give no verdict, since they are late or fail, or give the
same one for hundreds of responses. Pure; times are arguments.

A response without a verdict is tried again, and then left out of its group. A few are no fault; when
many tries fail, the verifier or what it asks is at fault, and training loses what it leaves out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from pipeline.incidents.book import Suspicion
from pipeline.runtime.registry.contract import Heartbeat
from protocol.ids import Incarnation, Role

MOST_SHARE: Final = 0.1
"""Of the newest tries, that may give no verdict."""
FEWEST: Final = 5.0
"""Failed tries below which nothing is named."""
_MEMORY_S: Final = 60.0
SAME_VERDICTS: Final = 512
"""Responses in a row that were all wrong, or that were all right since the worker's start."""


class MissingVerdicts:
    """The newest tries of each reward worker, fading within a minute. The last heartbeats bound it."""

    def __init__(self) -> None:
        self._counts: dict[Incarnation, tuple[float, float, float]] = {}
        self._recent: dict[Incarnation, tuple[float, float, float]] = {}
        self._since_s: dict[Incarnation, float] = {}
        self._now_s = math.nan

    def look(self, now_s: float, at_s: float, beats: Sequence[Heartbeat]) -> list[Suspicion]:
        """Return the reward workers too many of whose tries failed.

        Args:
            now_s: monotonic seconds.
            at_s: the same moment by the wall clock.
            beats: the last heartbeat of each worker."""
        fading = math.exp(-(now_s - self._now_s) / _MEMORY_S) if now_s > self._now_s else 1.0
        self._now_s = now_s
        counts = {beat.who: _counts(beat) for beat in beats if beat.who.role is Role.REWARD}
        recent = dict[Incarnation, tuple[float, float, float]]()
        for who, now in counts.items():
            before, old = self._counts.get(who, now), self._recent.get(who, (0.0, 0.0, 0.0))
            grown = [max(0.0, new - last) for new, last in zip(now, before, strict=True)]
            judged, failed, late = (fading * past + more for past, more in zip(old, grown, strict=True))
            recent[who] = judged, failed, late
        self._counts, self._recent = counts, recent
        bad = {who: one for who, one in recent.items() if one[1] >= FEWEST and one[1] > MOST_SHARE * (one[0] + one[1])}
        self._since_s = {who: self._since_s.get(who, at_s) for who in bad}
        return [_missing(who, *bad[who], self._since_s[who]) for who in bad]


class SameVerdicts:
    """Reward workers that find everything wrong, or everything right. A model that has learned its
    task is right all the time, but was not from the start."""

    def __init__(self) -> None:
        self._last_right: dict[Incarnation, tuple[float, float]] = {}
        """Sum of accuracies, and the responses judged when it last grew."""
        self._since_s: dict[Incarnation, float] = {}

    def look(self, at_s: float, beats: Sequence[Heartbeat]) -> list[Suspicion]:
        """Return the reward workers with ``SAME_VERDICTS`` equal verdicts; ``at_s`` by the wall
        clock."""
        found: dict[Incarnation, str] = {}
        last_right: dict[Incarnation, tuple[float, float]] = {}
        for beat in beats:
            if beat.who.role is not Role.REWARD:
                continue
            judged, accuracy = (beat.counters.get(name, 0.0) for name in ("judged", "judged_accuracy"))
            before = self._last_right.get(beat.who, (0.0, 0.0))
            last_right[beat.who] = before = before if accuracy == before[0] else (accuracy, judged)
            if judged - before[1] >= SAME_VERDICTS:
                found[beat.who] = f"each of the last {judged - before[1]:,.0f} responses was wrong"
            elif judged >= SAME_VERDICTS and accuracy == judged:
                found[beat.who] = f"each of {judged:,.0f} responses was right"
        self._last_right = last_right
        self._since_s = {who: self._since_s.get(who, at_s) for who in found}
        hint = "look at `headrace samples`, and mend data.verifier or take other prompts"
        return [
            Suspicion(who.worker, "verdicts", self._since_s[who], f"{words}: {hint}", role=str(Role.REWARD), score=1.0)
            for who, words in found.items()
        ]


def _counts(beat: Heartbeat) -> tuple[float, float, float]:
    judged, failed, late = (beat.counters.get(name, 0.0) for name in ("judged", "failed", "late"))
    return judged, failed, late


def _missing(who: Incarnation, judged: float, failed: float, late: float, since_s: float) -> Suspicion:
    share = failed / (judged + failed)
    sentence = (
        f"{share:.0%} of its newest tries gave no verdict, {late / failed:.0%} of these for want of time; the limit is "
        f"{MOST_SHARE:.0%}: such responses are left out of their groups"
    )
    return Suspicion(who.worker, "verdicts", since_s, sentence, role=str(Role.REWARD), score=share / MOST_SHARE)
