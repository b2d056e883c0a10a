"""The seam of a sink: a place where metrics are written besides the history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from pipeline.observability.sinks.points import Axis, Point


class SinkFailed(Exception):
    """A sink takes nothing now. Its message is a sentence with the reason, without a secret."""


class Sink(Protocol):
    """An open sink. Used by one thread. Points of updates that were given up stay in it, and the
    updates that are made in their place are left out."""

    id: str
    """The run's name at the sink, for the next opening; empty where it needs none."""

    def write(self, points: Sequence[Point]) -> None:
        """Write points. Raises SinkFailed."""
        ...

    def close(self, *, has_failed: bool) -> None:
        """Hand over all that is written; ``has_failed``: so has the run. May take as long as a
        network does. Raises SinkFailed."""
        ...


@runtime_checkable
class VoidingSink(Sink, Protocol):
    """A sink that can void written points: updates that are made again replace those that were
    given up."""

    def restart(self, axis: Axis, step: int) -> None:
        """Void what was written at ``step`` of an axis and after it. Raises SinkFailed."""
        ...
