"""Claims about phases in records and tables: workers are compared inside them, as live."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.fleet.peers.frame import Frame
from pipeline.fleet.peers.heartbeats import FrameMaker
from pipeline.fleet.peers.offline import recorded_frames, watch_run, watch_table
from pipeline.fleet.peers.segments import SegmentWriter, observed_files
from pipeline.fleet.peers.tables import TableForm
from pipeline.fleet.state import Worker
from pipeline.observability.exported_tables import export_tables
from pipeline.runtime.registry.contract import WaitingFor
from protocol.ids import Incarnation, Role
from tests.pipeline.fleet.peers.fleets import findings, fleet
from tests.pipeline.fleet.peers.test_similarity import scale
from tests.pipeline.fleet.peers.test_tables import table

BEGIN_S = 1.7e9
STARTS_S = 150.0


def with_starts() -> Iterator[Frame]:
    """Yield frames of twelve workers, of which three start anew, with little use of a processor."""
    for frame in fleet(12, seconds=400, change=scale("cpu", 0.3, 0, 1, 2, begin_s=STARTS_S)):
        phases = tuple("starting" if at < 3 and frame.time_s >= STARTS_S else "" for at in range(12))
        yield replace(frame, phases=phases)


def record(run_dir: Path, frames: Iterator[Frame]) -> Path:
    """Write frames as an observer does, in pieces of 100 moments."""
    writer = SegmentWriter(run_dir, keep_bytes=1 << 30)
    for number, frame in enumerate(frames):
        writer.add(BEGIN_S + frame.time_s, frame, {})
        if number % 100 == 99:
            writer.take()()
    writer.take()()
    return run_dir


def test_workers_that_start_are_not_compared_with_those_that_work_in_a_record(tmp_path: Path) -> None:
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    assert findings(with_starts()) == []
    assert watch_run(record(tmp_path / "with", with_starts())).findings == []
    blind = record(tmp_path / "without", (replace(frame, phases=None) for frame in with_starts()))
    assert {one.worker for one in watch_run(blind).findings} == {"generator-0", "generator-1", "generator-2"}


def test_a_record_has_each_workers_phase_at_each_moment(tmp_path: Path) -> None:
    given = list(with_starts())
    (file, *_) = observed_files(record(tmp_path, iter(given[100:200])), "metrics")
    assert [frame.phases for frame in recorded_frames(file)] == [frame.phases for frame in given[100:200]]


def test_a_heartbeat_of_a_worker_that_starts_or_compiles_is_in_that_phase() -> None:
    waits = (WaitingFor.STARTING, WaitingFor.COMPILE, WaitingFor.COMPUTE, WaitingFor.INPUT)
    beats = [
        Worker(
            who=Incarnation(role=Role.GENERATOR, worker=f"generator-{at}", epoch=1),
            pid=1,
            host="h",
            at_s=9.0,
            started_s=0.0,
            progress=0,
            progress_at_s=0.0,
            waiting_for=wait,
        )
        for at, wait in enumerate(waits)
    ]
    assert FrameMaker().frame(1.0, beats, -1).phases == ("starting", "starting", "", "")


def test_exported_tables_keep_the_phases_and_the_table_is_watched_by_them(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    record(run_dir, with_starts())
    export_tables(run_dir, tmp_path / "tables")
    assert watch_table([tmp_path / "tables" / "metrics.parquet"], TableForm.METRICS).findings == []


def metric_lines(phase: str = "") -> list[str]:
    """Return rows of the workers; ``phase`` is a format of their second, or "" for their phase."""
    return [
        f"{frame.time_s},{worker},{phase.format(int(frame.time_s)) or own or 'training'},{metric},{value:.6g}"
        for frame in with_starts()
        for worker, own, values in zip(frame.workers, frame.phases or (), frame.values.tolist(), strict=True)
        for metric, value in zip(frame.metrics, values, strict=True)
    ]


@pytest.mark.parametrize(("phase", "is_ignored"), [("", False), ("step {}", True)])
def test_a_strangers_phases_count_and_a_column_of_too_many_is_ignored_and_named(
    tmp_path: Path, phase: str, is_ignored: bool
) -> None:
    path = table(tmp_path / "t.csv", metric_lines(phase), "time_s,worker,phase,metric,value")
    result = CliRunner().invoke(headrace, ["fleet", "watch", "--from", str(path)])
    assert ("the column phase has more than 32 words, and is ignored" in result.stderr) is is_ignored
    assert ("generator-1" in result.stdout) is is_ignored
