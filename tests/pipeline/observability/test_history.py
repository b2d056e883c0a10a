"""Claims about the history of a run; those of every file of records are in ``test_records``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec.structs import replace

from pipeline.observability.history import (
    HistoryTail,
    Row,
    UpdateRow,
    columns,
    compute_share,
    resume_history,
    run_history,
)
from tests.pipeline.observability.rows import evaluation_row, update_row, value_row


def _updates(rows: Iterable[Row]) -> list[UpdateRow]:
    """Return rows that are all of updates, as such."""
    updates: list[UpdateRow] = []
    for row in rows:
        assert isinstance(row, UpdateRow)
        updates.append(row)
    return updates


def test_resuming_drops_the_rows_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    run_history(path).append(*(update_row(n) for n in range(1, 6)), evaluation_row(1, 5, 0.5))
    resume_history(path, last_version=3).append(update_row(4, accuracy=0.9))
    rows = _updates(run_history(path).read()[0])
    assert [(row.update, row.accuracy) for row in rows] == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.9)]


def test_resuming_drops_the_value_steps_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    run_history(path).append(*map(value_row, range(1, 6)))
    assert resume_history(path, last_version=2).read() == ([value_row(1), value_row(2)], 0)


def test_a_view_keeps_all_rows_and_starts_over_when_a_learner_resumes(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    tail = HistoryTail(path)
    assert tail.read() == []
    run_history(path).append(update_row(1))
    with path.open("ab") as file:
        file.write(b"half a line\n")
    run_history(path).append(update_row(2))
    for _ in range(2):
        assert (tail.read(), tail.num_skipped) == ([update_row(1), update_row(2)], 1)
    path.write_bytes(path.read_bytes().replace(b"half a line\n", b""))
    resume_history(path, last_version=0).append(update_row(1, accuracy=0.9))
    assert [row.accuracy for row in _updates(tail.read())] == [0.9]
    assert tail.num_skipped == 0


def test_a_row_from_before_all_seconds_had_names_is_its_four_parts_long(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    run_history(path).append(replace(update_row(1), wait_s=2.0))
    line = json.loads(path.read_text())
    new = ("prepare_s", "record_s", "save_s", "other_s")
    path.write_text(json.dumps({name: value for name, value in line.items() if name not in new}) + "\n")
    (row,) = _updates(run_history(path).read()[0])
    assert (row.seconds, row.compute_s, compute_share([row])) == (2.75, 0.5, pytest.approx(0.5 / 2.75))
    assert columns([row], "update")["seconds"] == [2.75]
    assert compute_share([]) is None
