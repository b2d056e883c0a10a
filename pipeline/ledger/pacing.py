"""When a generator asks for leases and the learner for a batch: often enough that nobody waits for the question, and
seldom enough that a waiting fleet does not keep the ledger busy. Pure; the caller has the clock."""

from __future__ import annotations

from collections import deque
from typing import Final

_LEAST_PAUSE_S = 0.02
MOST_PAUSE_S: Final = 0.1
"""Between two requests of a generator with free slots."""
_AHEAD_S = 0.2
"""Leased ahead are as many as slots come free in this time."""
_NUM_ENDS = 16
"""Ends from which the rate is taken; with fewer nothing is leased ahead."""


class Backoff:
    """The pause before the next request to the ledger. It doubles after each refusal, because a
    waiting fleet would otherwise ask too often, and a notification resets it."""

    def __init__(self, *, least_s: float, most_s: float) -> None:
        self._least_s, self._most_s = least_s, most_s
        self._pause_s = least_s
        self._next_s = 0.0

    def refused(self, now_s: float) -> float:
        """Record a refusal; return the seconds until the next request."""
        pause_s = self._pause_s
        self._next_s = now_s + pause_s
        self._pause_s = min(2.0 * pause_s, self._most_s)
        return pause_s

    def reset(self) -> None:
        self._pause_s, self._next_s = self._least_s, 0.0

    def may_ask(self, now_s: float) -> bool:
        return now_s >= self._next_s


class LeasePacing:
    """How many trajectories a generator asks for, and when."""

    def __init__(self) -> None:
        self._credit = Backoff(least_s=_LEAST_PAUSE_S, most_s=MOST_PAUSE_S)
        self._surplus = Backoff(least_s=MOST_PAUSE_S, most_s=_AHEAD_S)
        self._ends_s: deque[float] = deque(maxlen=_NUM_ENDS)

    def slot_came_free(self, now_s: float) -> None:
        self._ends_s.append(now_s)

    def credit_came(self) -> None:
        """Ask again at once: a published version frees credit."""
        self._credit.reset()

    def wanted(self, num_free_slots: int, now_s: float) -> int:
        """Return how many to ask for now, for the free slots and ahead; 0 if that was refused just now.

        ``num_free_slots`` is negative for those that are leased ahead already."""
        backoff = self._credit if num_free_slots > 0 else self._surplus
        return max(0, num_free_slots + self._num_ahead(now_s)) if backoff.may_ask(now_s) else 0

    def answered(self, num_granted: int, *, num_needed: int, is_refused: bool, now_s: float) -> None:
        """Record an answer to a request of which ``num_needed`` were for free slots."""
        if num_granted >= num_needed:
            self._credit.reset()
        else:
            self._credit.refused(now_s)
        if is_refused:
            self._surplus.refused(now_s)
        else:
            self._surplus.reset()

    def _num_ahead(self, now_s: float) -> int:
        if len(self._ends_s) < _NUM_ENDS:
            return 0
        return int(_NUM_ENDS * _AHEAD_S / max(now_s - self._ends_s[0], _AHEAD_S))


CLAIM_LEAST_S: Final = 0.02
CLAIM_MOST_S: Final = 0.1


class Forecast:
    """Chooses the pause between two requests for a batch.

    The pause is half of the time that the missing units will take at the rate so far, or a tenth of
    the time already waited when none arrived or none is missing."""

    def __init__(self, *, least_s: float = CLAIM_LEAST_S, most_s: float = CLAIM_MOST_S) -> None:
        self._least_s, self._most_s = least_s, most_s
        self._first: tuple[float, int] | None = None

    def pause_s(self, now_s: float, *, num_ready: int, num_needed: int) -> float:
        # the first call, or units were dropped since
        if self._first is None or num_ready < self._first[1]:
            self._first = now_s, num_ready
        begin_s, begin = self._first
        missing, come, waited_s = num_needed - num_ready, num_ready - begin, now_s - begin_s
        pause_s = 0.5 * missing * waited_s / come if come and missing > 0 else 0.1 * waited_s
        return min(max(pause_s, self._least_s), self._most_s)


_IDLE_S: Final = 5.0
_IDLE_COST: Final = 10.0
"""An idle learner writes a checkpoint after this many durations of the last one, and at least
_IDLE_S."""


def is_idle_due(idle_s: float, *, last_s: float) -> bool:
    """Whether a learner that waits takes a checkpoint early, to free the memory of what it has trained. The last one took
    ``last_s``."""
    return idle_s >= max(_IDLE_S, _IDLE_COST * last_s)
