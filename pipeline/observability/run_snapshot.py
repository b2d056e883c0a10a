"""A run at one moment, as the supervisor shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.ledger.types import Totals
from pipeline.runtime.registry.contract import Heartbeat, RunStatus


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """The supervisor's view of its run."""

    status: RunStatus
    heartbeats: Sequence[Heartbeat]
    totals: Totals
    absent: tuple[str, ...] = ()
    """Wanted workers that are being started again."""
