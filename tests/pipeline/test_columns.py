"""Claims about tables of named columns: any file is read, or refused with the row to look at."""

from __future__ import annotations

import gzip
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.files.columns import Cell, Column, column_names, read_columns, table_files
from protocol.errors import DataError

TIME = Column("time_s", Cell.SECONDS)
WORKER = Column("worker", Cell.TEXT)
ROLE = Column("role", Cell.TEXT, "unknown")
DEPTH = Column("depth", Cell.NUMBER, float("nan"))
OK = Column("ok", Cell.FLAG, float("nan"))
WANTED = (TIME, WORKER, ROLE, DEPTH, OK)


def csv_file(folder: Path, text: str | bytes, name: str = "table.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as error:
        read_columns(path, WANTED)
    return str(error.value)


def test_a_csv_table_has_numbers_words_defaults_and_names_of_what_was_not_read(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "Time_s, worker,Depth,colour\n1,a,2.5,red\n3e1, b ,,blue\n\n4,a,NaN,red\n")
    table = read_columns(path, WANTED)
    assert table.num_rows == 3
    assert table.numbers["time_s"].tolist() == [1, 30, 4]
    assert table.texts["worker"].array().tolist() == ["a", "b", "a"]
    assert table.texts["worker"].words == ("a", "b")
    assert table.texts["role"].array().tolist() == ["unknown"] * 3
    np.testing.assert_equal(table.numbers["depth"], [2.5, np.nan, np.nan])
    assert (table.unknown, table.absent) == (("colour",), ("role", "ok"))
    assert column_names(path) == ("time_s", "worker", "depth", "colour")


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_other_separators_line_ends_and_a_byte_order_mark_are_read(tmp_path: Path, separator: str) -> None:
    text = "\ufeff" + "\r\n".join(separator.join(row) for row in (["time_s", "worker"], ["1", "a"])) + "\r\n"
    table = read_columns(csv_file(tmp_path, text), WANTED)
    assert (table.numbers["time_s"].tolist(), table.texts["worker"][0]) == ([1], "a")


def test_a_packed_table_is_read(tmp_path: Path) -> None:
    path = csv_file(tmp_path, gzip.compress(b"time_s,worker\n1,a\n"), "table.csv.gz")
    assert read_columns(path, WANTED).num_rows == 1
    damaged = csv_file(tmp_path, gzip.compress(b"time_s,worker\n1,a\n")[:-12], "damaged.csv.gz")
    assert "damaged.csv.gz" in refusal(damaged)


def test_parquet_and_csv_give_the_same_table(tmp_path: Path) -> None:
    columns = {"time_s": [1, 2], "worker": [7, 8], "depth": [0.5, None], "ok": [True, False], "colour": ["red", "blue"]}
    path = tmp_path / "table.anything"
    pq.write_table(pa.table(columns), path)
    table = read_columns(path, WANTED)
    other = read_columns(csv_file(tmp_path, "time_s,worker,depth,ok,colour\n1,7,.5,yes,red\n2,8,,0,blue\n"), WANTED)
    for name in ("time_s", "depth", "ok"):
        np.testing.assert_equal(table.numbers[name], other.numbers[name])
    assert table.texts["worker"].array().tolist() == other.texts["worker"].array().tolist() == ["7", "8"]
    assert table.unknown == other.unknown == ("colour",)


def test_dates_are_seconds_since_1970_in_both_formats(tmp_path: Path) -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 500_000, UTC)
    for words in ("2026-01-02 03:04:05.5", "2026-01-02T03:04:05.5Z"):
        table = read_columns(csv_file(tmp_path, f"time_s,worker\n{words},a\n"), WANTED)
        assert table.numbers["time_s"].tolist() == [moment.timestamp()]
    path = tmp_path / "dates.parquet"
    pq.write_table(pa.table({"time_s": [moment], "worker": ["a"]}), path)
    assert read_columns(path, WANTED).numbers["time_s"].tolist() == [moment.timestamp()]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("1,a\nsoon,b\n", "row 3, column time_s: 'soon'; expected seconds (or milli-, micro- or nanoseconds"),
        ("1,a\n\n\n,b\n", "row 5, column time_s: an empty cell"),
        ("inf,a\n", "row 2, column time_s: 'inf'"),
        ('1,"two\nlines"\n2,\n', "row 4, column worker: an empty cell; expected text"),
        ("1,a\n2,b,c\n", "row 3: 3 cells; expected 2, as in the header"),
    ],
)
def test_a_bad_cell_is_named_by_the_row_that_an_editor_shows(tmp_path: Path, rows: str, words: str) -> None:
    assert words in refusal(csv_file(tmp_path, "time_s,worker\n" + rows))


def test_a_bad_cell_of_an_optional_column_is_refused_too(tmp_path: Path) -> None:
    assert "row 2, column depth: 'deep'; expected a number" in refusal(
        csv_file(tmp_path, "time_s,worker,depth\n1,a,deep\n")
    )
    assert "row 3, column ok: 'maybe'; expected true or false" in refusal(
        csv_file(tmp_path, "time_s,worker,ok\n1,a,yes\n1,a,maybe\n")
    )


def test_rows_of_parquet_count_from_1_and_nested_cells_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"time_s": [1.0, None], "worker": ["a", "b"]}), path)
    assert "row 2, column time_s: an empty cell" in refusal(path)
    pq.write_table(pa.table({"time_s": [[1.0]], "worker": ["a"]}), path)
    assert "column time_s: its cells are list" in refusal(path)


def test_what_is_no_table_is_refused_in_a_sentence(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "absent.csv")
    assert "an empty file" in refusal(csv_file(tmp_path, ""))
    assert "no column worker; it has 'time_s'" in refusal(csv_file(tmp_path, "time_s\n1\n"))
    assert "2 columns are named 'time_s'" in refusal(csv_file(tmp_path, "time_s,TIME_S,worker\n1,2,a\n"))
    assert "row 2, column worker" in refusal(csv_file(tmp_path, b"time_s,worker\n1,\xff\xfe\n"))
    assert "cannot be read as Parquet" in refusal(csv_file(tmp_path, b"PAR1 and no more"))


def test_a_folder_gives_its_tables_by_name(tmp_path: Path) -> None:
    for name in ("b.parquet", "a.csv", "notes.md"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in table_files(tmp_path)] == ["a.csv", "b.parquet"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no table in this folder"):
        table_files(tmp_path / "empty")


def test_a_table_without_rows_is_a_table(tmp_path: Path) -> None:
    table = read_columns(csv_file(tmp_path, "time_s,worker\n"), WANTED)
    assert table.num_rows == 0
    assert table.texts["role"].array().tolist() == []


@pytest.mark.parametrize("ticks", [1, 10**3, 10**6, 10**9])
def test_ticks_since_1970_are_read_as_seconds(tmp_path: Path, ticks: int) -> None:
    begin = 1_795_000_000
    path = csv_file(tmp_path, "time_s,worker\n" + "".join(f"{(begin + n) * ticks},a\n" for n in range(3)))
    np.testing.assert_allclose(read_columns(path, WANTED).numbers["time_s"], [begin, begin + 1, begin + 2], atol=1e-5)


@pytest.mark.parametrize("absurd", ["1e300", "-1e300", "inf", "9e25", "1e12"])
def test_an_absurd_time_among_others_is_refused_by_its_row(tmp_path: Path, absurd: str) -> None:
    said = refusal(csv_file(tmp_path, f"time_s,worker\n1,a\n{absurd},a\n"))
    assert "row 3" in said and "column time_s" in said and "year 5000" in said
