"""How long the generator waits before its next request to the ledger. Time is an argument.

A request costs the generator a tenth of a millisecond and the server half of that, and a waiting
fleet pays it many times. The pause delays the answer.
"""

from __future__ import annotations


class Backoff:
    """Doubles the pause after each refusal. A notification resets it."""

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
        """The ledger has changed: allow a request at once."""
        self._pause_s, self._next_s = self._least_s, 0.0

    def may_ask(self, now_s: float) -> bool:
        """Whether the pause is over."""
        return now_s >= self._next_s
