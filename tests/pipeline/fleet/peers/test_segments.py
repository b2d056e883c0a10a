"""A run's metrics as Parquet files: whole, in order, bounded, and read by any reader."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.fleet.flow.offline import recorded
from pipeline.fleet.flow.rows import LinkRow, StateRow
from pipeline.fleet.peers import segments
from pipeline.fleet.peers.frame import Frame
from pipeline.fleet.peers.segments import SegmentWriter


def frame(second: int, *, workers: tuple[str, ...] = ("generator-0", "reward-0")) -> Frame:
    values = np.full((len(workers), 2), float(second), np.float32)
    values[0, 1] = np.nan
    values[-1, 0] = np.inf
    return Frame(float(second), workers, tuple(name.rpartition("-")[0] for name in workers), ("cpu", "errors"), values)


def written(folder: Path, kind: str) -> list[dict[str, Any]]:
    files = sorted((folder / "observed").glob(f"{kind}-*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def test_every_sample_an_infinite_one_too_is_a_row_of_the_offline_table(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, keep_bytes=1 << 20)
    writer.add(1000.0, frame(1), {})
    writer.add(1001.0, frame(2, workers=("learner-0", "value-0", "x-0")), {})
    writer.take()()
    rows = written(tmp_path, "metrics")
    assert rows[0] == {
        "time_s": 1000.0, "worker": "generator-0", "role": "generator", "phase": "", "metric": "cpu", "value": 1.0,
    }  # fmt: skip
    assert [(row["worker"], row["metric"], row["value"]) for row in rows] == [
        ("generator-0", "cpu", 1.0), ("reward-0", "cpu", inf), ("reward-0", "errors", 1.0), ("learner-0", "cpu", 2.0),
        ("value-0", "cpu", 2.0), ("value-0", "errors", 2.0), ("x-0", "cpu", inf), ("x-0", "errors", 2.0),
    ]  # fmt: skip
    assert not list((tmp_path / "observed").glob("*.partial"))


def test_further_tables_have_a_file_each_with_their_columns(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, keep_bytes=1 << 20)
    for second in (1, 2):
        writer.add(1000.0 + second, frame(second), {"links": [{"time_s": float(second), "sender": "a", "sent": None}]})
    writer.take()()
    assert written(tmp_path, "links") == [
        {"time_s": 1.0, "sender": "a", "sent": None}, {"time_s": 2.0, "sender": "a", "sent": None},
    ]  # fmt: skip


def test_a_file_is_due_once_its_time_is_full_and_the_next_begins_empty(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, keep_bytes=1 << 20, segment_s=3.0)
    due = []
    for second in range(5):
        writer.add(1000.0 + second, frame(second), {})
        due.append(writer.is_due())
        if due[-1]:
            writer.take()()
    assert due == [False, False, False, True, False]
    writer.take()()
    writer.take()()
    assert sorted({row["time_s"] for row in written(tmp_path, "metrics")}) == [1000.0 + n for n in range(5)]


def test_above_the_limit_the_oldest_files_are_deleted_and_the_newest_is_kept(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, keep_bytes=6000)
    for number in range(12):
        writer.add(1000.0 + number, frame(number), {"links": [{"time_s": float(number), "sender": "a"}]})
        writer.take()()
    size = sum(file.stat().st_size for file in (tmp_path / "observed").iterdir())
    times = [row["time_s"] for row in written(tmp_path, "metrics")]
    assert size <= 6000
    assert 1 < len(set(times)) < 12
    assert max(times) == 1011.0
    small = SegmentWriter(tmp_path, keep_bytes=1)
    small.add(2000.0, frame(1), {})
    small.take()()
    assert {row["time_s"] for row in written(tmp_path, "metrics")} == {2000.0}


def test_a_disk_that_refuses_costs_those_minutes_alone(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path / "absent", keep_bytes=1 << 20)
    for second in range(700):
        writer.add(1000.0 + second, frame(second), {})
    assert writer.num_left_out == 100
    with pytest.raises(OSError, match="absent"):
        writer.take()()
    (tmp_path / "absent").mkdir()
    writer.add(2000.0, frame(1), {})
    writer.take()()
    assert {row["time_s"] for row in written(tmp_path / "absent", "metrics")} == {2000.0}


def test_a_metric_every_second_takes_few_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = tuple(f"generator-{number}" for number in range(50))
    metrics = tuple(f"metric_{number}" for number in range(20))
    writer = SegmentWriter(tmp_path, keep_bytes=1 << 30)
    for second in range(120):
        values = rng.normal(size=(50, 20)).astype(np.float32)
        writer.add(1000.0 + second, Frame(float(second), names, ("generator",) * 50, metrics, values), {})
    writer.take()()
    size = sum(file.stat().st_size for file in (tmp_path / "observed").iterdir())
    assert size / (120 * 50 * 20) < 8.0, "bytes a sample of pure noise"


def test_rows_of_a_structured_array_keep_whole_numbers_and_words(tmp_path: Path) -> None:
    kind = np.dtype([("time_s", "f8"), ("worker", "O"), ("key", "u8"), ("service_s", "f4")])
    writer = SegmentWriter(tmp_path, keep_bytes=1 << 20)
    for second in (1, 2):
        rows = np.array([(1.0 * second, "reward-0", 2**64 - second, 0.5), (1.0, "reward-1", second, 0.0)], kind)
        writer.add(1000.0 + second, frame(second), {"messages": rows})
    writer.add(1003.0, frame(3), {"messages": np.array([], kind)})
    writer.take()()
    assert [tuple(row.values()) for row in written(tmp_path, "messages")] == [
        (1.0, "reward-0", 2**64 - 1, 0.5), (1.0, "reward-1", 1, 0.0),
        (2.0, "reward-0", 2**64 - 2, 0.5), (1.0, "reward-1", 2, 0.0),
    ]  # fmt: skip


def test_minutes_of_a_large_fleet_that_wait_for_a_disk_take_bounded_memory(tmp_path: Path) -> None:
    names = tuple(f"generator-{number}" for number in range(200))
    values = np.random.default_rng(0).normal(size=(200, 24)).astype(np.float32)
    links = [LinkRow(0.0, name, f"reward-{number}", *range(6)) for name in names for number in range(8)]
    tables = recorded(
        [StateRow(0.0, name, "generator", "compute", *range(9)) for name in names], links, ahead_s=0.0, given_s=0.0
    )
    metrics = tuple(f"metric_{number}" for number in range(24))
    writer, held = SegmentWriter(tmp_path / "absent", keep_bytes=1 << 30), dict[int, int]()
    for second in range(400):
        writer.add(float(second), Frame(float(second), names, names, metrics, values.copy()), tables)
        if second in (300, 399):
            held[second] = writer.num_held_bytes
    assert writer.num_left_out > 0
    assert held[399] == held[300] < 100_000_000


def test_many_rows_make_a_file_before_its_time_and_unwritten_ones_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_DUE_ROWS", 250)
    monkeypatch.setattr(segments, "_MAX_ROWS", 1000)
    rows = np.zeros(100, np.dtype([("time_s", "f8")]))
    writer = SegmentWriter(tmp_path, keep_bytes=1 << 20)
    due = []
    for second in range(15):
        writer.add(1000.0 + second, frame(second), {"messages": rows})
        due.append(writer.is_due())
    assert due == [False, False, *[True] * 13]
    assert writer.num_left_out == 5
    writer.take()()
    assert len(written(tmp_path, "messages")) == 1000
    assert not writer.is_due()
