"""Rows that the observer keeps name the same causes afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipeline.fleet.flow.offline import causes_in_run
from pipeline.fleet.peers.frame import Frame
from pipeline.fleet.peers.offline import watch_run, watch_table
from pipeline.fleet.peers.segments import SegmentWriter
from pipeline.fleet.peers.tables import TableForm
from pipeline.fleet.state import Worker
from pipeline.fleet.suspicions import FleetSuspicions
from pipeline.observability.exported_tables import export_tables
from tests.pipeline.fleet.live_fleet import BREAKS_S, UNTIL_S, LiveFleet
from tests.pipeline.fleet.test_suspicions import still

AHEAD_S = 1.7e9
"""The wall clock less the monotonic one."""
PIECE_S = 25
NO_FRAME = Frame(0.0, (), (), (), np.zeros((0, 0), np.float32))


def frozen(fleet: LiveFleet) -> str:
    fleet.silent["generator-1"] = (BREAKS_S, 1000)
    return "generator-1"


def hung(fleet: LiveFleet) -> str:
    fleet.change("reward-0", lambda since, beat: still(beat, since))
    return "reward-0"


def healthy(_: LiveFleet) -> str:
    return ""


@pytest.mark.parametrize("fault", [frozen, hung, healthy])
def test_recorded_rows_name_the_cause_that_the_live_ones_named(
    tmp_path: Path, fault: Callable[[LiveFleet], str]
) -> None:
    fleet, finder = LiveFleet(), FleetSuspicions()
    component = fault(fleet)
    segments = SegmentWriter(tmp_path, keep_bytes=1 << 30)
    live = set[str]()
    for second in range(UNTIL_S):
        now_s = second + 0.3
        _, found = finder.observe(now_s, now_s + AHEAD_S, list(fleet.at(second)), fleet.published(second))
        live |= {cause.component for one in found for cause in one.causes[:1]}
        segments.add(now_s + AHEAD_S, NO_FRAME, finder.tables)
        if second % PIECE_S == PIECE_S - 1:
            segments.take()()
    segments.take()()
    seen = causes_in_run(tmp_path)
    assert seen.notes == []
    assert {one.causes[0].component for one in seen.incidents} == live == ({component} if component else set())
    assert all(AHEAD_S + BREAKS_S < one.named_s < AHEAD_S + BREAKS_S + 30 for one in seen.incidents)


@pytest.mark.parametrize("num_refused", [1, 0])
def test_a_refused_step_is_found_in_a_finished_run_and_in_its_exported_tables(tmp_path: Path, num_refused: int) -> None:
    def refusing(since: int, beat: Worker) -> Worker:
        counters = {"loss": 0.3, "refused_steps": float(num_refused if since >= 5 else 0)}
        return msgspec.structs.replace(beat, counters=counters)

    fleet, finder = LiveFleet(), FleetSuspicions()
    fleet.change("learner", refusing)
    segments = SegmentWriter(tmp_path, keep_bytes=1 << 30)
    for second in range(BREAKS_S + 10):
        now_s = second + 0.3
        frame, _ = finder.observe(now_s, now_s + AHEAD_S, list(fleet.at(second)), fleet.published(second))
        segments.add(now_s + AHEAD_S, frame, {})
    segments.take()()
    export_tables(tmp_path, tmp_path / "tables", as_csv=True)
    found = [
        *watch_run(tmp_path).findings,
        *watch_table([tmp_path / "tables" / "metrics.csv"], TableForm.METRICS).findings,
    ]
    assert [(one.worker, one.kind) for one in found] == [("learner", "numeric")] * 2 * num_refused
    assert all(one.alarm_s == pytest.approx(AHEAD_S + BREAKS_S + 5.3, abs=1.1) for one in found)
