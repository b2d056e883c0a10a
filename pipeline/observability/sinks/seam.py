"""The seam of a sink: a place where metrics are written besides the history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipeline.observability.sinks.points import Axis, Point


class SinkFailed(Exception):
    """A sink takes nothing now. Its message is a sentence with the reason, without a secret."""


class Sink(Protocol):
    """An open sink. Used by one thread."""

    id: str
    """The run's name at the sink, for the next opening; empty where it needs none."""
    takes_back: bool
    """Whether written points can be voided. Otherwise those of updates that were given up stay, and
    the updates that are made in their place are left out."""

    def write(self, points: Sequence[Point]) -> None:
        """Write points. Raises SinkFailed."""
        ...

    def restart(self, axis: Axis, step: int) -> None:
        """Void what was written at ``step`` of an axis and after it. Only of a sink that takes
        back. Raises SinkFailed."""
        ...

    def close(self, *, has_failed: bool) -> None:
        """Hand over all that is written; ``has_failed``: so has the run. May take as long as a
        network does. Raises SinkFailed."""
        ...
