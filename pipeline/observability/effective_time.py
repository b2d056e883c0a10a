"""How much of a run's time turned into updates: the effective training time ratio. Does no I/O.

A run with n updates has been effective for n times the usual time between updates; the ratio is this
over the time the run was up. Updates that a resumed learner repeats count once, but the time they took
counts twice. The usual time is the median gap between updates, so faults, evaluations and checkpoints
do not change it. Time after a crash of the supervisor counts as up; time after a requested end does not.

Source: ByteRobust (arXiv 2509.16293), sections on ETTR. Theirs counts time; this counts updates."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from pipeline.fleet.repair.records import parts_in_words

_NO_REPAIRS: Mapping[str, float] = {}
WINDOW_S = 3600.0
"""Length of the sliding window."""
_FEWEST = 3
"""Minimum number of updates for a usual time."""


@dataclass(frozen=True, slots=True)
class UpSpan:
    """A period during which the run was up, in seconds since 1970."""

    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class EffectiveTime:
    """Ratios of a run's time. They may slightly exceed 1, because updates differ in length."""

    by_steps: float
    """Updates times the usual time, over the time up."""
    lowest_hour: float | None
    """Lowest ratio over a sliding hour; None for a shorter run."""
    last_hour: float | None
    usual_s: float
    """Usual time from one update to the next."""
    up_s: float
    by_device: float | None = None
    """Productive time of all workers over their total time; None if unknown."""
    lost_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds that workers of this host were under repair, by part (``repairs.PARTS``); empty if none.
    Others may have worked meanwhile."""

    def in_words(self) -> str:
        """Return ``effective time: 97.1 % by steps (last hour 96.0 %), 41.0 % by device``."""
        hour = "" if self.last_hour is None else f" (last hour {100 * self.last_hour:.1f} %)"
        device = "" if self.by_device is None else f", {100 * self.by_device:.1f} % by device"
        lost = (
            f"; workers under repair {sum(self.lost_s.values()):.0f} s: {parts_in_words(self.lost_s)}"
            if self.lost_s
            else ""
        )
        return f"effective time: {100 * self.by_steps:.1f} % by steps{hour}{device}{lost}"


def effective_time(
    updates_at_s: Sequence[float],
    spans: Sequence[UpSpan],
    by_device: float | None = None,
    lost_s: Mapping[str, float] = _NO_REPAIRS,
) -> EffectiveTime | None:
    """Return the ratios; None before three updates in one span.

    Args:
        updates_at_s: When updates ended, in order.
        spans: When the run was up, in order and without overlap. The time between them is ignored.
        by_device: The share of the workers' time, if known.
        lost_s: Seconds under repair, by part."""
    up_s = sum(span.end_s - span.begin_s for span in spans)
    distances = [
        after - before
        for before, after in pairwise(updates_at_s)
        if any(span.begin_s <= before and after <= span.end_s for span in spans)
    ]
    if len(distances) < _FEWEST - 1 or up_s <= 0.0:
        return None
    usual_s = median(distances)
    whole = len(updates_at_s) * usual_s / up_s
    # on a clock that is stopped while the run is down
    at_s = [_up_before(when, spans) for when in updates_at_s]
    hours = [
        (bisect_right(at_s, end) - bisect_right(at_s, end - WINDOW_S)) * usual_s / WINDOW_S
        for end in _window_ends(at_s, up_s)
    ]
    lowest, last = (min(hours), hours[-1]) if up_s >= WINDOW_S else (None, None)
    return EffectiveTime(whole, lowest, last, usual_s, up_s, by_device, lost_s)


def _up_before(when_s: float, spans: Sequence[UpSpan]) -> float:
    return sum(max(0.0, min(span.end_s, when_s) - span.begin_s) for span in spans)


def _window_ends(at_s: Sequence[float], up_s: float) -> list[float]:
    """Return where windows end: just before and at each update, and at the last moment."""
    first = bisect_left(at_s, WINDOW_S)
    ends = [end for when in at_s[first:] for end in (max(WINDOW_S, when - 1e-6), when)]
    return [*ends, up_s]
