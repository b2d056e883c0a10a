"""Claims about the history of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.observability.history import (
    History,
    HistoryTail,
    Row,
    UpdateRow,
    columns,
    compute_share,
    read_for_view,
    read_history,
    skipped_words,
)
from protocol.errors import DataError
from tests.pipeline.observability.rows import evaluation_row, update_row


def _written(path: Path, *rows: Row) -> Path:
    history = History(path)
    for row in rows:
        history.append(row)
    history.sync()
    history.close()
    return path


def _updates(rows: Iterable[Row]) -> list[UpdateRow]:
    """Return rows that are all of updates, as such."""
    updates: list[UpdateRow] = []
    for row in rows:
        assert isinstance(row, UpdateRow)
        updates.append(row)
    return updates


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [evaluation_row(0, 0, 0.2), update_row(1), update_row(2, accuracy=0.75)]
    assert list(read_history(_written(tmp_path / "h.jsonl", *rows))) == rows


def test_no_file_is_an_empty_history(tmp_path: Path) -> None:
    assert list(read_history(tmp_path / "none.jsonl")) == []


def test_resuming_drops_the_rows_after_the_checkpoint(tmp_path: Path) -> None:
    path = _written(tmp_path / "h.jsonl", *(update_row(n) for n in range(1, 6)), evaluation_row(1, 5, 0.5))
    history = History.resume(path, last_version=3)
    history.append(update_row(4, accuracy=0.9))
    history.close()
    rows = _updates(read_history(path))
    assert [(row.update, row.accuracy) for row in rows] == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.9)]


@pytest.mark.parametrize("cut", [1, 40, -2])
def test_a_line_cut_short_by_a_crash_is_skipped_and_resuming_removes_it(tmp_path: Path, cut: int) -> None:
    path = _written(tmp_path / "h.jsonl", update_row(1))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:cut])
    assert list(read_history(path)) == [update_row(1)]
    history = History.resume(path, last_version=9)
    history.append(update_row(2))
    history.close()
    assert list(read_history(path)) == [update_row(1), update_row(2)]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = _written(tmp_path / "h.jsonl", update_row(1))
    whole = path.read_bytes()
    path.write_bytes(whole + b"\x00\x00 not a row\n" + whole)
    with pytest.raises(DataError, match=r"h\.jsonl:2: not a row"):
        list(read_history(path))


@pytest.mark.parametrize("damage", [b"\x00\x00 not a row\n", b'{"kind": "update", "update": 2}\n', b"\n", b"[1, 2]\n"])
def test_a_view_skips_a_damaged_line_and_counts_it(tmp_path: Path, damage: bytes) -> None:
    path = _written(tmp_path / "h.jsonl", update_row(1))
    path.write_bytes(path.read_bytes() + damage)
    _written(path, update_row(3))
    read = read_for_view(path)
    assert [row.update for row in _updates(read.rows)] == [1, 3]
    assert read.num_skipped == 1
    assert "1 damaged line of h.jsonl skipped" in skipped_words(read.num_skipped, path.name)


def test_a_view_counts_a_damaged_line_once_however_often_it_reads(tmp_path: Path) -> None:
    path = _written(tmp_path / "h.jsonl", update_row(1))
    tail = HistoryTail(path)
    with path.open("ab") as file:
        file.write(b"\x0c half \x0b a line\n")
    tail.read()
    _written(path, update_row(2))
    assert len(tail.read()) == 2
    assert tail.num_skipped == 1


def test_a_whole_history_has_nothing_skipped(tmp_path: Path) -> None:
    path = _written(tmp_path / "h.jsonl", update_row(1))
    with path.open("a") as file:
        # being written
        file.write('{"kind": "upd')
    assert read_for_view(path).num_skipped == 0
    assert skipped_words(0, path.name) == ""


def test_rows_and_fields_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    path = _written(tmp_path / "h.jsonl", update_row(1))
    later = json.loads(path.read_text()) | {"flux": 3.0, "update": 2}
    path.write_text(path.read_text() + json.dumps(later) + "\n" + json.dumps({"kind": "tide"}) + "\n")
    assert [row.update for row in _updates(read_history(path))] == [1, 2]


def test_a_view_reads_only_what_is_new_and_begins_anew_when_the_file_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    tail = HistoryTail(path)
    assert tail.read() == []
    _written(path, update_row(1))
    assert tail.read() == [update_row(1)]
    with path.open("a") as file:
        # being written
        file.write('{"kind": "upd')
    assert tail.read() == [update_row(1)]
    History.resume(path, last_version=0).close()
    _written(path, update_row(1, accuracy=0.9))
    assert [row.accuracy for row in _updates(tail.read())] == [0.9]


def test_numbers_that_are_not_finite_are_words_that_every_json_reader_takes(tmp_path: Path) -> None:
    bad = replace(update_row(1), loss=math.nan, grad_norm=math.inf, metrics={"entropy": -math.inf, "kl": 0.5})
    path = _written(tmp_path / "history.jsonl", bad, update_row(2))

    def refused(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    first = json.loads(path.read_text().splitlines()[0], parse_constant=refused)
    assert (first["loss"], first["grad_norm"], first["metrics"]) == (
        "NaN",
        "Infinity",
        {"entropy": "-Infinity", "kl": 0.5},
    )
    row, other = _updates(read_history(path))
    assert math.isnan(row.loss) and row.grad_norm == math.inf and row.metrics["entropy"] == -math.inf
    assert other == update_row(2)
    assert repr(HistoryTail(path).read()) == repr([row, other])


def test_bare_words_of_earlier_releases_are_read_too(tmp_path: Path) -> None:
    path = _written(tmp_path / "history.jsonl", update_row(1))
    path.write_text(path.read_text().replace('"loss": 0.1', '"loss": NaN'))
    [row] = _updates(read_history(path))
    assert math.isnan(row.loss)


def test_a_row_from_before_all_seconds_had_names_is_its_four_parts_long(tmp_path: Path) -> None:
    path = _written(tmp_path / "h.jsonl", replace(update_row(1), wait_s=2.0))
    line = json.loads(path.read_text())
    new = ("prepare_s", "record_s", "save_s", "other_s")
    path.write_text(json.dumps({name: value for name, value in line.items() if name not in new}) + "\n")
    (row,) = _updates(read_history(path))
    assert (row.seconds, row.compute_s, compute_share([row])) == (2.75, 0.5, pytest.approx(0.5 / 2.75))
    assert columns([row], "update")["seconds"] == [2.75]
    assert compute_share([]) is None
