"""Streams the rows of prompt and response files.

A path ends in ``.jsonl``, ``.ndjson``, ``.json`` (one object per line) or ``.parquet``. Each line
gives a Row, or a BadRow that says why it cannot be read. At most one line, or one batch of Parquet
rows, is in memory at a time.

A null counts as absent. Parquet gives all tables of a column the same fields and fills missing ones
with nulls, so the two cannot be told apart; JSONL follows the same rule, so that equal rows read
equal. Nulls in a list are kept, because positions matter there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from protocol.errors import DataError

MAX_LINE_BYTES = 16 << 20
_JSON_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
_PARQUET_BATCH_ROWS = 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RowProblem(StrEnum):
    """Why a line cannot be read at all."""

    INVALID_UTF8 = "invalid UTF-8"
    NOT_JSON = "not JSON"
    NOT_AN_OBJECT = "not an object"
    TOO_LARGE = "line too large"


@dataclass(frozen=True, slots=True)
class Row:
    line: int
    """Starts at 1; the row number in a Parquet file."""
    columns: Mapping[str, Any]
    """Plain values: text, numbers, booleans, lists and dicts. None occurs only as a column's value
    or in a list; nested tables have no null values."""


@dataclass(frozen=True, slots=True)
class BadRow:
    line: int
    problem: RowProblem
    detail: str


def read_rows(path: Path) -> Iterator[Row | BadRow]:
    """Yield the rows of a file in order, without blank lines. Raises DataError if the file is
    missing, has another ending, or its content does not match the ending."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; give a JSONL or Parquet file")
    suffix = path.suffix.lower()
    if suffix in _JSON_SUFFIXES:
        return _read_jsonl(path)
    if suffix == ".parquet":
        return _read_parquet(path)
    raise DataError(f"{path}: the file name ends in {suffix or 'nothing'!r}; expected .jsonl or .parquet")


def count_rows(path: Path) -> int:
    """Return about how many rows ``read_rows`` yields. Raises DataError like it."""
    # for its errors only
    read_rows(path)
    if path.suffix.lower() == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.read_metadata(path).num_rows
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
    try:
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _read_jsonl(path: Path) -> Iterator[Row | BadRow]:
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
                    size = len(raw) + _skip_line(file)
                    detail = f"{size} bytes; at most {MAX_LINE_BYTES} are read"
                    yield BadRow(number, RowProblem.TOO_LARGE, detail)
                    continue
                if number == 1:
                    raw = raw.removeprefix(_BYTE_ORDER_MARK)
                if raw.strip():
                    yield _parse_json(number, raw)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _pruned(value: Any, *, keep: bool = False) -> Any:
    """Remove nulls from nested tables; ``keep`` those of the outermost."""
    if isinstance(value, dict):
        return {key: _pruned(inner) for key, inner in value.items() if keep or inner is not None}
    return [_pruned(item) for item in value] if isinstance(value, list) else value


def _skip_line(file: BinaryIO) -> int:
    size = 0
    while part := file.readline(MAX_LINE_BYTES):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _parse_json(number: int, raw: bytes) -> Row | BadRow:
    try:
        columns = _pruned(msgspec.json.decode(raw.decode("utf-8")), keep=True)
    except UnicodeDecodeError as error:
        return BadRow(number, RowProblem.INVALID_UTF8, f"byte {error.start} of the line: {error.reason}")
    except (msgspec.DecodeError, RecursionError) as error:
        return BadRow(number, RowProblem.NOT_JSON, str(error))
    if not isinstance(columns, dict):
        return BadRow(number, RowProblem.NOT_AN_OBJECT, f"a {type(columns).__name__}; expected {{...}} on one line")
    return Row(number, columns)


def _read_parquet(path: Path) -> Iterator[Row | BadRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
                for columns in _records(batch):
                    number += 1
                    if isinstance(columns, UnicodeDecodeError):
                        detail = f"byte {columns.start} of a text: {columns.reason}"
                        yield BadRow(number, RowProblem.INVALID_UTF8, detail)
                    else:
                        # dates become ISO text, bytes base64, decimals text
                        yield Row(number, _pruned(msgspec.to_builtins(columns, str_keys=True), keep=True))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet after row {number}: {error}") from error


def _records(batch: Any) -> list[dict[str, Any] | UnicodeDecodeError]:
    """Return the rows of a record batch; converts them one by one if one has invalid text."""
    try:
        with warnings.catch_warnings():
            # the last value of a repeated key counts, as in JSON
            warnings.simplefilter("ignore")
            return batch.to_pylist(maps_as_pydicts="lossy")
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [error]
        return [record for index in range(batch.num_rows) for record in _records(batch.slice(index, 1))]
