"""Rows that the observer keeps name the same causes afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.flow.offline import causes_in_run
from pipeline.watch.frame import Frame
from pipeline.watch.segments import SegmentWriter
from tests.workers.observer.live_fleet import BREAKS_S, UNTIL_S, LiveFleet
from tests.workers.observer.test_suspicions import still
from workers.observer.suspicions import FleetSuspicions

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
        _, found = finder.look(now_s, now_s + AHEAD_S, list(fleet.at(second)), fleet.published(second))
        live |= {cause.component for one in found for cause in one.causes[:1]}
        segments.add(now_s + AHEAD_S, NO_FRAME, finder.tables)
        if second % PIECE_S == PIECE_S - 1:
            segments.take()()
    segments.take()()
    seen = causes_in_run(tmp_path)
    assert seen.notes == []
    assert {one.causes[0].component for one in seen.incidents} == live == ({component} if component else set())
    assert all(AHEAD_S + BREAKS_S < one.named_s < AHEAD_S + BREAKS_S + 30 for one in seen.incidents)
