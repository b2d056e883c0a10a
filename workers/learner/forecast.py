"""How long the learner waits between two requests for a batch. Time is an argument."""

from __future__ import annotations


class Forecast:
    """Waits half of the time that the missing units will take at the rate so far: the last poll is
    in time. While nothing comes, or none is missing, it waits a tenth of the time waited."""

    def __init__(self, *, least_s: float, most_s: float) -> None:
        self._least_s, self._most_s = least_s, most_s
        self._first: tuple[float, int] | None = None

    def pause_s(self, now_s: float, *, num_ready: int, num_needed: int) -> float:
        """Return the seconds to wait before the next request."""
        # the first look, or some were dropped
        if self._first is None or num_ready < self._first[1]:
            self._first = now_s, num_ready
        begin_s, begin = self._first
        missing, come, waited_s = num_needed - num_ready, num_ready - begin, now_s - begin_s
        pause_s = 0.5 * missing * waited_s / come if come and missing > 0 else 0.1 * waited_s
        return min(max(pause_s, self._least_s), self._most_s)
