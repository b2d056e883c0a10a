"""Claims about the supervisor's view of a run, and its times."""

from __future__ import annotations

from typing import Any, cast

from pipeline.ledger.types import Totals
from pipeline.observability.status import RunSnapshot
from pipeline.runtime.registry.contract import RunState, RunStatus
from pipeline.supervisor.fleet_plan import FleetPlan
from pipeline.supervisor.monitor import Monitor
from tests.pipeline.observability.test_live_view import TOTALS


class Counted:
    """A ledger that has counters."""

    async def totals(self) -> Totals:
        return TOTALS


async def test_a_new_state_is_shown_at_once_and_else_one_picture_an_interval() -> None:
    """A run that ends within a second of its last picture would stay drawn as running."""
    shown: list[RunSnapshot] = []
    around = Monitor(
        cast("Any", None), cast("Any", Counted()), None, None, shown.append, 1.0, 1.0, server_patience_s=1.0
    )
    plan = cast("FleetPlan", type("Plan", (), {"absent": ()})())
    running, finished = RunStatus(RunState.RUNNING), RunStatus(RunState.FINISHED, "10 updates done")
    for status, now in ((running, 5.0), (running, 5.5), (finished, 5.75), (finished, 6.0), (finished, 6.75)):
        await around.show(status, [], plan, now)
    assert [picture.status for picture in shown] == [running, finished, finished]
