"""The two fleets behind one door."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ops.bench.watch.cases import Case, Truth
from ops.bench.watch.regimes import RegimeFleet
from ops.bench.watch.work_items import WorkItemFleet
from pipeline.watch.frame import Frame


class Fleet(Protocol):
    """A window: its truth, and frames that know nothing of it."""

    truth: Truth

    def frames(self) -> Iterator[Frame]:
        """Yield a frame a second."""
        ...


def open_fleet(case: Case) -> Fleet:
    """Return the fleet of a window."""
    return RegimeFleet(case) if case.fleet == "regimes" else WorkItemFleet(case)
