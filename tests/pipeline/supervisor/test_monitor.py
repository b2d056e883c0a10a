"""Claims about the supervisor's view of a run, and its times."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from pipeline.fleet.state import overdue_ages
from pipeline.fleet.status import RunSnapshot
from pipeline.ledger.inspection import queue_stat
from pipeline.ledger.server.embedded import EmbeddedServer
from pipeline.ledger.types import Totals
from pipeline.observability.effective_time import EffectiveTime
from pipeline.observability.start_record import StartRow, start_records
from pipeline.runtime.registry.contract import RunState, RunStatus
from pipeline.supervisor.fleet_plan import FleetPlan
from pipeline.supervisor.monitor import FleetRecorder, Monitor
from protocol.errors import LedgerUnavailable
from protocol.ids import Role
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.observability.rows import update_row
from tests.pipeline.observability.test_device_time import write_history
from tests.pipeline.observability.test_live_view import TOTALS


class Shown:
    """Metrics that keep what they are given."""

    def __init__(self) -> None:
        self.effective: list[EffectiveTime | None] = []
        self.num_unreadable = -1

    def update(self, *told: Any) -> None:
        *_, effective, self.num_unreadable = told
        self.effective.append(effective)


class Counted:
    """A ledger that has counters."""

    async def totals(self) -> Totals:
        return TOTALS


def test_work_of_reference_workers_is_overdue_by_both_of_their_queues() -> None:
    def of(**ages: float | None) -> dict[Role, float]:
        return overdue_ages([queue_stat(name, 1, None, age) for name, age in ages.items()], 30.0)

    assert of(reward=50.0, reference=31.0, guidance=40.0) == {Role.REWARD: 20.0, Role.REFERENCE: 10.0}
    assert of(reference=None, guidance=40.0) == {Role.REFERENCE: 10.0}
    assert of(guidance=None, ready=90.0) == {Role.REFERENCE: -30.0}


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


async def test_the_metrics_have_the_effective_time_of_the_runs_folder_every_half_minute(tmp_path: Path) -> None:
    write_history(tmp_path, *[replace(update_row(n), at_s=10.0 * n) for n in range(1, 11)])
    start_records(tmp_path).append(StartRow(at_s=0.0))
    metrics = Shown()
    around = Monitor(
        MemoryRegistry(), cast("Any", Counted()), None, cast("Any", metrics), None, 1.0, 1.0, server_patience_s=1.0,
        recorder=FleetRecorder(tmp_path, 5.0, clock=lambda: 100.0),
    )  # fmt: skip
    plan = cast("FleetPlan", type("Plan", (), {"absent": (), "wanted": {}})())
    for now in (5.0, 20.0, 34.5, 35.0):
        await around.show(RunStatus(RunState.RUNNING), [], plan, now)
    first, *between, last = metrics.effective
    assert between == [None, None] and first == last
    assert first is not None and first.by_steps == 1.0
    assert metrics.num_unreadable == 0


def watching(server: object) -> Monitor:
    return Monitor(cast("Any", None), cast("Any", Counted()), cast("Any", server), None, None, 1.0, 1.0, 30.0)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


async def test_a_killed_server_is_started_again_while_the_loop_waits_for_it(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, max_memory_mb=64)
    server.start()
    around = watching(server)
    try:
        around.keep_server()
        killed = server.pid()
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        # The loop waits for an answer: it does not come back to keep_server.
        wait_for(lambda: server.pid() not in (None, killed))
    finally:
        await around.close()
    assert not server.is_there()


async def test_a_server_that_cannot_be_started_again_ends_the_loop_with_the_reason(tmp_path: Path) -> None:
    class Hopeless:
        folder = tmp_path

        def supervise(self, *_: object) -> None:
            raise LedgerUnavailable("its program is gone")

        def stop(self) -> None: ...

    around = watching(Hopeless())
    with pytest.raises(LedgerUnavailable, match="its program is gone"):
        wait_for(lambda: around.keep_server() is not None)
    await around.close()
