"""How long to wait before asking the ledger again.

*Consumes* answers. *Produces* pauses in seconds. *Waits for* nothing; pure state machines. Asking costs the asker a tenth of a
millisecond and the server half of that, which a fleet that waits pays many times; an answer that is heard late costs the pause.
"""

from __future__ import annotations


class Backoff:
    """After each refusal a pause of twice the one before; whoever hears news begins anew."""

    def __init__(self, *, least_s: float, most_s: float) -> None:
        self._least_s, self._most_s = least_s, most_s
        self._pause_s = least_s
        self._next_s = 0.0

    def refused(self, now_s: float) -> float:
        """Take note of a refusal; return how long not to ask."""
        pause_s = self._pause_s
        self._next_s = now_s + pause_s
        self._pause_s = min(2.0 * pause_s, self._most_s)
        return pause_s

    def news(self) -> None:
        """Something has changed: ask at once."""
        self._pause_s, self._next_s = self._least_s, 0.0

    def may_ask(self, now_s: float) -> bool:
        """Whether the pause is over."""
        return now_s >= self._next_s


class Forecast:
    """Waits half of the time that the missing units will take at the rate so far: few questions, and the last one in time.

    While nothing has come, or it is not their number that is waited for, a tenth of the time that was waited.
    """

    def __init__(self, *, least_s: float, most_s: float) -> None:
        self._least_s, self._most_s = least_s, most_s
        self._first: tuple[float, int] | None = None

    def pause_s(self, now_s: float, *, num_ready: int, num_needed: int) -> float:
        """Return how long to wait before asking again."""
        if self._first is None or num_ready < self._first[1]:  # the first look, or some were dropped
            self._first = now_s, num_ready
        begin_s, begin = self._first
        missing, come, waited_s = num_needed - num_ready, num_ready - begin, now_s - begin_s
        pause_s = 0.5 * missing * waited_s / come if come and missing > 0 else 0.1 * waited_s
        return min(max(pause_s, self._least_s), self._most_s)
