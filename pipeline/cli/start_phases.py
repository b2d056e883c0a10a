"""How long a start takes from its checks to the first sampled tokens, by phase. The last start of the same
kind (settings, model, versions, host) is the estimate of the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from pipeline.fleet.status import RunSnapshot
from pipeline.preflight.passed import PassedCheck
from protocol.ids import Role

PHASES: Final = ("checks", "imports", "engine and weights")


class StartPhases:
    """*Consumes* snapshots. Nothing is said of a run whose generators are at work already, as after a takeover."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: list[float] = [clock()]
        self._kept: PassedCheck | None = None

    def checked(self, kept: PassedCheck) -> str:
        """End the checks; return the estimate from the notes ``kept``, or an empty text."""
        self._kept = kept
        self._ends.append(self._clock())
        try:
            before = msgspec.json.decode(kept.notes() or "", type=dict[str, float])
        except msgspec.DecodeError:
            return ""
        return f"the last start of this kind took {in_words(before)}"

    def observe(self, snapshot: RunSnapshot) -> str:
        """Return the phases when the first tokens are there, once; otherwise an empty text."""
        if self._kept is None:
            return ""
        beats = [beat for beat in snapshot.workers if beat.who.role is Role.GENERATOR]
        has_tokens = any(beat.counters.get("sampled_tokens", 0) for beat in beats)
        if beats and len(self._ends) == PHASES.index("imports") + 1:
            self._ends.append(self._clock())
            if has_tokens:
                self._kept = None
                return ""
        if not has_tokens:
            return ""
        self._ends.append(self._clock())
        took = {name: self._ends[n + 1] - self._ends[n] for n, name in enumerate(PHASES)}
        self._kept, kept = None, self._kept
        kept.remember(msgspec.json.encode(took).decode())
        return f"this start took {in_words(took)}"


def in_words(took: Mapping[str, float]) -> str:
    parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in took.items())
    return f"{sum(took.values()):.0f} s to the first tokens ({parts})"
