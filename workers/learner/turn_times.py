"""Where the time of the learner's loop goes, from one row of the history to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.runtime.clock import Clock
from workers.learner.policy_update import Stepped


class TurnTimes:
    """The parts add up to the whole time: ``other_s`` is what no part has.

    Example::

        with times.part("prepare_s"):
            units = await ledger.fetch(claim)
        row = replace(row, **times.cut())"""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._parts: dict[str, float] = {}
        self._begun_s = clock.monotonic()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began_s = self._clock.monotonic()
        try:
            yield
        finally:
            self.add(name, self._clock.monotonic() - began_s)

    def add(self, name: str, seconds: float) -> None:
        self._parts[name] = self._parts.get(name, 0.0) + seconds

    def add_steps(self, stepped: Stepped, **waited_s: float) -> None:
        """Add an update's steps; what they waited for, because it read the weights, counts for that part."""
        self.add("logprob_s", stepped.logprob_s)
        self.add("step_s", stepped.step_s - sum(waited_s.values()))
        for name, seconds in waited_s.items():
            self.add(name, seconds)

    def cut(self) -> dict[str, float]:
        """Return the parts of a row's time since the last one, and its end, as fields of ``UpdateRow``."""
        now_s = self._clock.monotonic()
        parts, self._parts = self._parts, {}
        parts["other_s"] = max(0.0, now_s - self._begun_s - sum(parts.values()))
        self._begun_s = now_s
        return {**parts, "at_s": self._clock.time()}
