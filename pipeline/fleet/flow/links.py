"""The rule table: how to read the counters of one link.

P produced, S sent, R received, D done, A acknowledged; always P >= S >= R >= D >= A. How long a
message has been between two counters follows from their history: the oldest undelivered message was
sent when S first exceeded the current R. The ages in rows are not needed.
| state, longer than usual | reading |
|---|---|
| P = S = A = 0, the sender waits for it | never started, or no credit was ever granted |
| P > S, the receiver has no room | the receiver is full: its state explains it |
| P > S, S = D, the receiver has room | the sender's own loop is blocked |
| S > R, the receiver has room, R stands | the link |
| S > R, the receiver has room, R moves | a slow link |
| R > D | the receiver's state explains it |
| D > A | the path of acknowledgements |
| P = S = D > 0 | nothing is in flight: the sender's state explains it |
| S > P, R > S, D > R or A > D, and it grows | the counters contradict one another |

After a restart, an end may have counted a few messages twice or not at all. That is not a fault of the
link: such a difference stays constant. Counters contradict one another when the difference grows."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from math import isnan
from operator import attrgetter

import numpy as np

from pipeline.fleet.flow.limits import UsualLimit
from pipeline.fleet.flow.rows import LinkRow

_NEW_ROWS, _OLD_ROWS = 128, 36
"""How many of the newest rows are kept at most, and of how many older ones every eighth."""
_THINNED, _THINNING = 16, 8
_COUNTERS = ("produced", "sent", "received", "done", "acknowledged")
_counters = attrgetter(*_COUNTERS)
_SPACINGS = 15
"""Number of row spacings whose median is the usual interval."""
_CONTRADICTION_S = 10.0
"""The two ends' counters are read at different moments. They contradict when, for this long, their
difference exceeds the largest seen during an earlier period of the same length."""


class LinkSign(StrEnum):
    """What a link's counters say."""

    MOVES = "moves"
    QUIET = "quiet"
    """Nothing is in flight."""
    NEVER_STARTED = "never_started"
    FULL = "full"
    SENDER_BLOCKED = "sender_blocked"
    UNDELIVERED = "undelivered"
    SLOW = "slow"
    HELD = "held"
    """The receiver has messages but finishes none."""
    UNACKNOWLEDGED = "unacknowledged"
    CONTRADICTS = "contradicts"


@dataclass(slots=True)
class PairTrack:
    """Usual delays of all links between the same two roles."""

    unsent: UsualLimit = field(default_factory=UsualLimit)
    undelivered: UsualLimit = field(default_factory=UsualLimit)
    unacknowledged: UsualLimit = field(default_factory=UsualLimit)
    has_started: bool = False


class CounterPast:
    """A link's past counters: the newest rows, and of older ones every eighth, about 400 rows back. One
    small array, because a large fleet has thousands of links."""

    __slots__ = ("_num", "_num_old", "_rows")

    def __init__(self, row: LinkRow) -> None:
        self._rows = np.empty((_OLD_ROWS + _NEW_ROWS, 1 + len(_COUNTERS)))
        """Time and counters, oldest row first."""
        self._num = self._num_old = 0
        self.append(row)

    def append(self, row: LinkRow) -> None:
        old = self._num_old
        if self._num == old + _NEW_ROWS:
            dropped = [old + at for at in range(_THINNED) if at % _THINNING]
            if old == _OLD_ROWS:
                dropped = [0, 1, *dropped]
            else:
                self._num_old += _THINNED // _THINNING
            kept = np.delete(self._rows[: self._num], dropped, axis=0)
            self._num = len(kept)
            self._rows[: self._num] = kept
        self._rows[self._num] = (row.time_s, *_counters(row))
        self._num += 1

    def clear(self) -> None:
        self._num = self._num_old = 0

    def since(self, counter: str, level: float) -> float | None:
        """Return the time of the oldest row since which a counter has stayed above a level; None if it
        is not above it now."""
        counts = self._rows[: self._num, 1 + _COUNTERS.index(counter)]
        if not self._num or not counts[-1] > level:
            return None
        below = np.flatnonzero(~(counts > level))
        return float(self._rows[below[-1] + 1 if len(below) else 0, 0])

    def rate(self, counter: str, from_s: float, until_s: float) -> float:
        """Return a counter's growth per second between two times; 0 with fewer than two rows."""
        times, counts = self._rows[: self._num, 0], self._rows[: self._num, 1 + _COUNTERS.index(counter)]
        first, last = np.searchsorted(times, from_s), np.searchsorted(times, until_s, side="right") - 1
        return float((counts[last] - counts[first]) / (times[last] - times[first])) if last > first else 0.0


class LinkTrack:
    """History and state of one link. All times but ``arrived_s`` are those of its rows."""

    def __init__(self, row: LinkRow, pair: PairTrack, now_s: float) -> None:
        self.pair = pair
        self._raw = row
        self._base: LinkRow | None = None
        self.row = row
        self.first_s = row.time_s
        self.arrived_s = now_s
        self.received_s = row.time_s
        """When R last grew."""
        self.done_s = row.time_s
        self.moved_s = row.time_s
        """When any counter last grew."""
        self.contradicts_since_s: float | None = None
        self._usual_excess = 0.0
        """Largest contradiction of the counters in the reference period."""
        self._grows_since_s: float | None = None
        self._past = CounterPast(row)
        self._spacings = array("f")
        self._interval_s = 1.0

    @property
    def name(self) -> str:
        return f"{self.row.sender}>{self.row.receiver}"

    @property
    def interval_s(self) -> float:
        return self._interval_s

    def read(self, row: LinkRow, now_s: float) -> None:
        """Add a newer row; older ones are ignored."""
        before = self.row
        passed_s = row.time_s - before.time_s
        if passed_s <= 0:
            return
        is_restarted, self._raw = _is_restarted(self._raw, row), row
        if is_restarted:
            # One end restarted its counters and the other did not: from now on both count from this row.
            self._base = row
        if self._base is not None:
            row = _since_base(row, self._base)
        self.arrived_s = now_s
        self._spacings.append(passed_s)
        del self._spacings[:-_SPACINGS]
        if abs(passed_s - self._interval_s) > 0.1 * self._interval_s:
            self._interval_s = sorted(self._spacings)[len(self._spacings) // 2]
        if is_restarted:
            self._past.clear()
            self.contradicts_since_s = self._grows_since_s = None
            self.received_s = self.done_s = self.moved_s = row.time_s
        else:
            self._record_delays(row)
        self.pair.has_started |= row.produced > before.produced or row.sent > before.sent
        if row.received > before.received:
            self.received_s = row.time_s
        if row.done > before.done:
            self.done_s = row.time_s
        if any(getattr(row, name) > getattr(before, name) for name in _COUNTERS[:4]):
            self.moved_s = row.time_s
        self.row = row
        self._past.append(row)
        self._follow_excess(row)

    def _follow_excess(self, row: LinkRow) -> None:
        """Track by how much the counters contradict one another, and whether that grows."""
        excess = _excess(row)
        if excess <= 0.0:
            self.contradicts_since_s, self._usual_excess, self._grows_since_s = None, 0.0, None
            return
        if self.contradicts_since_s is None:
            self.contradicts_since_s = row.time_s
        if row.time_s - self.contradicts_since_s <= self._contradiction_s:
            self._usual_excess = max(self._usual_excess, excess)
        elif excess <= self._usual_excess:
            self._grows_since_s = None
        elif self._grows_since_s is None:
            self._grows_since_s = row.time_s

    @property
    def _contradiction_s(self) -> float:
        return _CONTRADICTION_S + 2 * self._interval_s

    def _record_delays(self, row: LinkRow) -> None:
        """Record how long messages took whose counter has just grown. Delays are capped at the limit
        so that a slow link does not become the norm."""
        pair, before = self.pair, self.row
        for usual, grown, counter, level in (
            (pair.unsent, row.sent > before.sent, "produced", before.sent),
            (pair.undelivered, row.received > before.received, "sent", before.received),
            (pair.unacknowledged, row.acknowledged > before.acknowledged, "done", before.acknowledged),
        ):
            if grown:
                usual.add_capped(row.time_s - self._since(counter, level))

    def _since(self, counter: str, level: float) -> float:
        """Return when a counter first exceeded a level, as far back as history goes, else the time of
        the newest row."""
        since_s = self._past.since(counter, level)
        return self.row.time_s if since_s is None else since_s

    def _behind_s(self, first: str, then: str) -> float:
        """Return how long ago the oldest message was counted first but not then; 0 if none."""
        return self.row.time_s - self._since(first, getattr(self.row, then))

    def unsent_s(self) -> float:
        """Return how long ago the oldest unsent message was produced; 0 if none."""
        return self._behind_s("produced", "sent")

    def undelivered_s(self) -> float:
        """Return how long ago the oldest undelivered message was sent; 0 if none."""
        return self._behind_s("sent", "received")

    def held_s(self) -> float:
        """Return how long the receiver has held this link's oldest message; 0 if none."""
        return self._behind_s("received", "done")

    def unacknowledged_s(self) -> float:
        """Return how long ago the oldest unacknowledged message was done; 0 if none."""
        return self._behind_s("done", "acknowledged")

    def rate(self, counter: str, until_s: float, *, seconds: float = 60.0) -> float:
        """Return a counter's growth per second over the last ``seconds`` before ``until_s``."""
        return self._past.rate(counter, until_s - seconds, until_s)

    def state(self, *, has_room: bool, is_awaited: bool) -> LinkSign:
        """Read the counters by the rule table.

        Args:
            has_room: the receiver lives, and takes messages or is idle.
            is_awaited: the sender waits for this receiver."""
        row, pair, interval = self.row, self.pair, self._interval_s
        if self._grows_since_s is not None and row.time_s - self._grows_since_s > self._contradiction_s:
            return LinkSign.CONTRADICTS
        if not (row.produced > 0 or row.sent > 0 or row.received > 0):
            return LinkSign.NEVER_STARTED if is_awaited and pair.has_started else LinkSign.QUIET
        if (undelivered_s := self.undelivered_s()) > pair.undelivered.limit_s(interval) and has_room:
            stands = row.time_s - self.received_s > pair.undelivered.limit_s(interval)
            return LinkSign.UNDELIVERED if stands or undelivered_s > 60 else LinkSign.SLOW
        if row.produced > row.sent:
            if not has_room:
                return LinkSign.FULL
            if row.sent <= row.done and self.unsent_s() > pair.unsent.limit_s(interval):
                return LinkSign.SENDER_BLOCKED
        if not isnan(row.acknowledged) and self.unacknowledged_s() > pair.unacknowledged.limit_s(interval):
            return LinkSign.UNACKNOWLEDGED
        if row.received > row.done:
            return LinkSign.HELD if row.time_s - self.done_s > 3 + interval else LinkSign.MOVES
        return LinkSign.MOVES if row.sent > row.received or row.produced > row.sent else LinkSign.QUIET


def _excess(row: LinkRow) -> float:
    """Return by how much the counters contradict one another; not positive if they do not."""
    if row.produced >= row.sent >= row.received >= row.done and not row.acknowledged > row.done:
        return 0.0
    order = [row.produced, row.sent, row.received, row.done, row.acknowledged]
    known = [count for count in order if not isnan(count)]
    return max((later - earlier for earlier, later in pairwise(known)), default=0.0)


def _since_base(row: LinkRow, base: LinkRow) -> LinkRow:
    return replace(row, **{name: getattr(row, name) - getattr(base, name) for name in _COUNTERS})


def _is_restarted(before: LinkRow, row: LinkRow) -> bool:
    return any(getattr(row, name) < getattr(before, name) for name in _COUNTERS[:4])
