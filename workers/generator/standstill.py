"""An engine that answers and samples nothing: a dead one that reports success. Pure; times are
arguments.

A turn without a token is no progress. An engine that decodes by itself may have such turns, and a
long prefill has them. After many in a row, and a time that no piece of its work takes, the engine
has died."""

from __future__ import annotations

from typing import Final

from protocol.errors import EngineDied
from workers.engines.generation.seam import EngineStats

MAX_EMPTY_TURNS: Final = 100
"""Turns without a token that are never an error, however long they took."""


class Standstill:
    """Watches an engine's counters from turn to turn."""

    def __init__(self) -> None:
        self._num_empty = 0
        self._since_s = 0.0
        self.stood_s = 0.0
        """Time of the newest turns without a token, in seconds; 0 after one with tokens."""
        self.longest_s = 0.0
        """The longest such time that tokens have ended."""

    @property
    def is_on(self) -> bool:
        """Whether the last turn gave nothing."""
        return self._num_empty > 0

    def look(
        self,
        before: EngineStats,
        after: EngineStats,
        *,
        num_windows: int,
        began_s: float,
        now_s: float,
        limit_s: float,
    ) -> bool:
        """Return whether a turn gave tokens, of a prompt or a response, or windows.

        Args:
            before: counters at the turn's begin; some trajectory was live.
            after: counters at its end.
            num_windows: that it returned.
            began_s: monotonic time of its begin, in seconds.
            now_s: the same of its end.
            limit_s: longest time without tokens.

        Raises:
            EngineDied: too many turns, over more than ``limit_s``, gave none."""
        if num_windows or _counts(before) != _counts(after):
            self.longest_s = max(self.longest_s, self.stood_s)
            self.rest()
            return True
        if not self._num_empty:
            self._since_s = began_s
        self._num_empty += 1
        self.stood_s = now_s - self._since_s
        if self._num_empty > MAX_EMPTY_TURNS and self.stood_s > limit_s:
            raise EngineDied(
                f"the engine returned no token in {self._num_empty} turns over {self.stood_s:.0f} s, and no error, with "
                f"{after.num_live} trajectories in it; expected tokens within {limit_s:.0f} s: it is dead or hangs, and a new "
                "engine takes its place"
            )
        return False

    def rest(self) -> None:
        """Nothing is live: no tokens are expected."""
        self._num_empty = 0
        self.stood_s = 0.0


def _counts(stats: EngineStats) -> tuple[int, int, int]:
    return stats.num_decode_steps, stats.num_sampled_tokens, stats.num_prefill_tokens
