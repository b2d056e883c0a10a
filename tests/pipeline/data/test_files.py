from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.data import files
from pipeline.data.files import BadRow, Row, RowProblem, read_rows
from protocol.errors import DataError


def test_broken_lines_are_told_with_their_number_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": "\xff"}\n{"a": \n[1]\n{"a": NaN}\n{"a": "\\ud800"}\n'
        + b"[" * 100_000
        + b'\n\x00\x00\n{"a": 2}'
    )
    rows = list(read_rows(path))
    assert [row for row in rows if isinstance(row, Row)] == [Row(1, {"a": 1}), Row(11, {"a": 2})]
    assert [(row.line, row.problem) for row in rows if isinstance(row, BadRow)] == [
        (4, RowProblem.INVALID_UTF8),
        (5, RowProblem.NOT_JSON),
        (6, RowProblem.NOT_AN_OBJECT),
        (7, RowProblem.NOT_JSON),
        (8, RowProblem.NOT_JSON),
        (9, RowProblem.NOT_JSON),
        (10, RowProblem.NOT_JSON),
    ]


def test_a_line_without_end_is_not_taken_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 100)
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"a": "' + b"x" * 1000 + b'"}\n{"a": 1}\n' + b"y" * 250)
    first, second, third = read_rows(path)
    assert isinstance(first, BadRow)
    assert first.problem is RowProblem.TOO_LARGE
    assert "1010 bytes" in first.detail
    assert second == Row(2, {"a": 1})
    assert isinstance(third, BadRow)
    assert third.problem is RowProblem.TOO_LARGE


def test_a_parquet_file_is_read_as_plain_values(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    table = pa.table(
        {
            "prompt": ["a", "b"],
            "when": [datetime.date(2026, 1, 2), None],
            "price": [decimal.Decimal("1.50"), decimal.Decimal("2.25")],
            "nested": [{"x": [1, 2]}, {"x": []}],
        }
    )
    pq.write_table(table, path)
    assert list(read_rows(path)) == [
        Row(1, {"prompt": "a", "when": "2026-01-02", "price": "1.50", "nested": {"x": [1, 2]}}),
        Row(2, {"prompt": "b", "when": None, "price": "2.25", "nested": {"x": []}}),
    ]


WORDS = st.sampled_from(["a", "b", "\u00e9"])


@st.composite
def shapes(draw: st.DrawFn, depth: int = 3) -> Any:
    """A type that Arrow infers: of a leaf, a list or a table."""
    kind = draw(st.sampled_from(["text", "whole", "real", "flag", "list", "table"] if depth else ["text", "whole"]))
    if kind == "list":
        return [draw(shapes(depth - 1))]
    return draw(st.dictionaries(WORDS, shapes(depth - 1), min_size=1)) if kind == "table" else kind


def values(shape: Any) -> st.SearchStrategy[Any]:
    """Values of a type, with absent and null parts at every depth."""
    if isinstance(shape, list):
        return st.lists(st.none() | values(shape[0]), max_size=3)
    if isinstance(shape, dict):
        return st.fixed_dictionaries({}, optional={key: st.none() | values(inner) for key, inner in shape.items()})
    leaves: dict[str, st.SearchStrategy[Any]] = {
        "text": st.text(max_size=3, alphabet=st.characters(codec="utf-8")),
        "whole": st.integers(-(2**63), 2**63 - 1),
        "real": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
    }
    return leaves[shape]


def arrow_type(shape: Any) -> pa.DataType:
    if isinstance(shape, list):
        return pa.list_(arrow_type(shape[0]))
    if isinstance(shape, dict):
        return pa.struct([(key, arrow_type(inner)) for key, inner in shape.items()])
    return {"text": pa.string(), "whole": pa.int64(), "real": pa.float64(), "flag": pa.bool_()}[shape]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_same_rows_read_the_same_from_parquet_and_jsonl(tmp_path: Path, data: st.DataObject) -> None:
    columns = data.draw(st.dictionaries(WORDS, shapes(), min_size=1))
    rows: list[dict[str, Any]] = data.draw(st.lists(values(columns), min_size=1, max_size=4))
    table, lines = tmp_path / "rows.parquet", tmp_path / "rows.jsonl"
    schema = pa.schema([(name, arrow_type(shape)) for name, shape in columns.items()])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), table)
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    theirs, ours = ([seen(row) for row in read_rows(path)] for path in (table, lines))
    assert theirs == ours


def seen(row: Row | BadRow) -> dict[str, Any]:
    """A row's columns as prompts have them: a column that holds null counts as absent."""
    assert isinstance(row, Row)
    return {name: value for name, value in row.columns.items() if value is not None}


def test_a_null_in_a_table_counts_as_absent_and_one_in_a_list_keeps_its_place(tmp_path: Path) -> None:
    calls = [{"role": "user", "content": "2+2?"}, {"role": "user", "content": "w?", "calls": [{"id": "1"}, {}]}]
    rows = [{"messages": calls, "info": {"split": "x"}}, {"messages": calls[:1], "info": {"tests": [None, "a"]}}]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert [row.columns for row in read_rows(path) if isinstance(row, Row)] == rows
    written = tmp_path / "rows.jsonl"
    written.write_text('{"info": {"tests": [null, {"a": null}], "split": null}, "note": null}\n')
    assert list(read_rows(written)) == [Row(1, {"info": {"tests": [None, {}]}, "note": None})]


def test_a_map_of_arrow_is_a_table_whose_last_value_of_a_repeated_key_counts(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.map_(pa.int64(), pa.string()))
    maps = [[("k", [(1, "x"), (1, "y")]), ("gone", None)], None, []]
    path = tmp_path / "maps.parquet"
    pq.write_table(pa.table({"inner": pa.array([{"m": one} for one in maps], pa.struct([("m", kind)]))}), path)
    read = [row.columns["inner"] for row in read_rows(path) if isinstance(row, Row)]
    assert read == [{"m": {"k": {"1": "y"}}}, {}, {"m": {}}]


def test_a_parquet_row_with_invalid_text_is_told_alone(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    texts = pa.Array.from_buffers(
        pa.string(),
        3,
        [None, pa.array([0, 1, 3, 4], pa.int32()).buffers()[1], pa.py_buffer(b"a\xff\xfec")],
    )
    pq.write_table(pa.table({"prompt": texts}), path)
    first, second, third = read_rows(path)
    assert first == Row(1, {"prompt": "a"})
    assert isinstance(second, BadRow)
    assert (second.line, second.problem) == (2, RowProblem.INVALID_UTF8)
    assert third == Row(3, {"prompt": "c"})


@pytest.mark.parametrize("damage", ["text", "cut", "middle"])
def test_a_file_that_is_not_parquet_or_is_damaged_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": [str(n) for n in range(5000)]}), path, compression="gzip")
    whole = path.read_bytes()
    path.write_bytes(
        {"text": b'{"a": 1}\n', "cut": whole[: len(whole) // 2], "middle": whole[:100] + b"\x00" * 200 + whole[300:]}[
            damage
        ]
    )
    with pytest.raises(DataError, match=r"p\.parquet: cannot be read as Parquet"):
        list(read_rows(path))


@pytest.mark.parametrize(("name", "says"), [("none.jsonl", "no such file"), ("dir.jsonl", "no such file")])
def test_a_missing_file_is_refused_at_once(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "dir.jsonl").mkdir()
    with pytest.raises(DataError, match=says):
        read_rows(tmp_path / name)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"expected \.jsonl or \.parquet"):
        read_rows(tmp_path / "p.csv")
