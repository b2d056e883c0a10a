"""Reads named columns from CSV or Parquet files as arrays of numbers and words.

A CSV file has a header; its cells are separated by commas, semicolons, tabs or bars; ``.gz`` is
unpacked. A file that begins with Parquet's magic bytes is Parquet, whatever its name. Column names
are compared in lower case and stripped of blanks. The whole table is held in memory: 8 bytes per
number, 4 per word.

A column without a default is required, and so is each of its cells. Any other column may be absent,
and its empty cells get the default. In number columns, nan, null, none, na and n/a count as empty.
Every error is a DataError that names file, row, column, what was read and what was expected. Rows
are numbered as an editor shows them: a CSV file's header is row 1."""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from protocol.errors import DataError

_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".pq")
_PARQUET_MAGIC = b"PAR1"
_SEPARATORS = ",;\t|"
_EMPTY_WORDS = ("", "nan", "null", "none", "na", "n/a", "-")
_TRUE_WORDS = ("true", "1", "1.0", "yes", "t", "y", "ok")
_FALSE_WORDS = ("false", "0", "0.0", "no", "f", "n")
_SHOWN_CHARS = 40
_MOST_S = 1e11
"""Seconds since 1970, in the year 5138. As milliseconds, any date since 1973 is above it."""


class Cell(StrEnum):
    TEXT = "text"
    NUMBER = "a number"
    SECONDS = "seconds (or milli-, micro- or nanoseconds since 1970) before the year 5000, or a date and time"
    FLAG = "true or false"


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    """In lower case."""
    kind: Cell = Cell.NUMBER
    default: float | str | None = None
    """Value of an absent column and of empty cells. None: the column and all its cells are
    required."""


@dataclass(frozen=True, slots=True)
class WordColumn:
    """A column of text that stores each distinct word once."""

    codes: NDArray[np.int32]
    """[rows]; index into ``words``."""
    words: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, row: int) -> str:
        return self.words[int(self.codes[row])]

    def array(self) -> NDArray[np.object_]:
        """Return the words [rows]; equal words are the same object."""
        words = np.array([*self.words, ""], dtype=object)
        return cast("NDArray[np.object_]", words[self.codes])


@dataclass(frozen=True, slots=True)
class Columns:
    path: Path
    num_rows: int
    numbers: dict[str, NDArray[np.float64]]
    """By column name: [rows]; a flag is 1 or 0; NaN if empty."""
    texts: dict[str, WordColumn]
    unknown: tuple[str, ...]
    """Columns of the file that were not asked for and not read."""
    absent: tuple[str, ...]
    """Requested columns that the file lacks; they hold their defaults."""


def joined(tables: Sequence[Columns]) -> Columns:
    """Concatenate the rows of tables that were read with the same columns; at least one table."""
    if len(tables) == 1:
        return tables[0]
    first = tables[0]
    texts: dict[str, WordColumn] = {}
    for name in first.texts:
        place: dict[str, int] = {}
        codes: list[NDArray[np.int32]] = []
        for table in tables:
            column = table.texts[name]
            now = np.array([place.setdefault(word, len(place)) for word in column.words] or [0], np.int32)
            codes.append(np.where(column.codes >= 0, now[column.codes], column.codes).astype(np.int32))
        texts[name] = WordColumn(np.concatenate(codes), tuple(place))
    return Columns(
        first.path,
        sum(table.num_rows for table in tables),
        {name: np.concatenate([table.numbers[name] for table in tables]) for name in first.numbers},
        texts,
        tuple(dict.fromkeys(name for table in tables for name in table.unknown)),
        tuple(dict.fromkeys(name for table in tables for name in table.absent)),
    )


def table_files(path: Path) -> list[Path]:
    """Return the file itself, or the CSV and Parquet files of a folder sorted by name. Raises
    DataError."""
    if not path.is_dir():
        return [path]
    try:
        found = sorted(file for file in path.iterdir() if file.name.lower().endswith(_SUFFIXES) and file.is_file())
    except OSError as error:
        raise DataError(f"{path}: cannot be listed: {error.strerror}") from error
    if not found:
        raise DataError(f"{path}: no table in this folder; expected files named {', '.join(_SUFFIXES)}")
    return found


def column_names(path: Path) -> tuple[str, ...]:
    """Return a table's column names, stripped and in lower case. Raises DataError."""
    return tuple(_comparable(name) for name in _open(path).names)


def read_columns(path: Path, columns: Sequence[Column]) -> Columns:
    source = _open(path)
    names = [_comparable(name) for name in source.names]
    for name in (column.name for column in columns):
        if names.count(name) > 1:
            raise DataError(f"{path}: {names.count(name)} columns are named {name!r}; expected one: rename the others")
    lacking = [column.name for column in columns if column.default is None and column.name not in names]
    if lacking:
        raise DataError(f"{path}: no column {', '.join(lacking)}; it has {_shown_names(source.names)}")
    present = [column for column in columns if column.name in names]
    arrays = source.read([names.index(column.name) for column in present])
    num_rows = len(arrays[0]) if arrays else 0
    numbers, texts = dict[str, NDArray[np.float64]](), dict[str, WordColumn]()
    for column, array in zip(present, arrays, strict=True):
        if column.kind is Cell.TEXT:
            texts[column.name] = _words(source, column, array)
        else:
            numbers[column.name] = _numbers(source, column, array)
    for column in columns:
        if column.name in names:
            continue
        if column.kind is Cell.TEXT:
            texts[column.name] = WordColumn(np.zeros(num_rows, np.int32), (str(column.default),))
        else:
            numbers[column.name] = np.full(num_rows, float(column.default or 0.0))
    wanted = {column.name for column in columns}
    unknown = tuple(name for name, own in zip(source.names, names, strict=True) if own not in wanted)
    absent = tuple(column.name for column in columns if column.name not in names)
    return Columns(path, num_rows, numbers, texts, unknown, absent)


def arrow(module: str = "") -> Any:
    """Import and return pyarrow or one of its modules, untyped and late: commands that read no
    table do not load it."""
    return importlib.import_module(f"pyarrow{module}")


def _comparable(name: str) -> str:
    return name.strip().lower()


def _shown_names(names: Sequence[str]) -> str:
    shown = ", ".join(_shown(name) for name in names[:20])
    return f"{shown} and {len(names) - 20} more" if len(names) > 20 else shown or "none"


def _shown(cell: object) -> str:
    words = repr(cell)
    return words if len(words) <= _SHOWN_CHARS else f"{words[:_SHOWN_CHARS]}..."


# -- files -----------------------------------------------------------------------------------------


class _CsvFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        with self._lines() as lines:
            first = lines.readline()
        self._separator = max(_SEPARATORS, key=lambda sign: (first.count(sign), sign == ","))
        try:
            self.names, self._header_lines = next(
                (row, last) for _, last, row in self._records() if any(cell.strip() for cell in row)
            )
        except StopIteration:
            raise DataError(f"{path}: an empty file; expected a header and rows") from None

    def _lines(self) -> Any:
        pa = arrow()

        raw = pa.input_stream(str(self.path), compression="gzip" if self.path.name.lower().endswith(".gz") else None)
        return io.TextIOWrapper(raw, encoding="utf-8-sig", errors="replace", newline="")

    def _records(self) -> Iterator[tuple[int, int, list[str]]]:
        """Yield the first line, last line and cells of each non-empty record."""
        csv.field_size_limit(1 << 24)
        try:
            with self._lines() as lines:
                reader = csv.reader(lines, delimiter=self._separator)
                last = 0
                for row in reader:
                    if row:
                        yield last + 1, reader.line_num, row
                    last = reader.line_num
        except (csv.Error, OSError, EOFError) as error:
            raise DataError(f"{self.path}: cannot be read as CSV: {error}") from error

    def _rows(self) -> Iterator[tuple[int, int, list[str]]]:
        return (record for record in self._records() if record[1] > self._header_lines)

    def read(self, indices: Sequence[int]) -> list[Any]:
        pa = arrow()
        arrow_csv = arrow(".csv")

        if not indices:
            return []
        keys = [str(index) for index in range(len(self.names))]
        try:
            table: Any = arrow_csv.read_csv(
                str(self.path),
                read_options=arrow_csv.ReadOptions(column_names=keys, skip_rows=self._header_lines),
                parse_options=arrow_csv.ParseOptions(delimiter=self._separator, newlines_in_values=True),
                convert_options=arrow_csv.ConvertOptions(
                    column_types=dict.fromkeys(keys, pa.string()),
                    include_columns=[keys[index] for index in indices],
                    strings_can_be_null=False,
                ),
            )
        except pa.ArrowException as error:
            raise self._unreadable(error) from error
        return [table.column(keys[index]) for index in indices]

    def _unreadable(self, error: Exception) -> DataError:
        for first, _, row in self._rows():
            if len(row) != len(self.names):
                had = f"{len(row)} cells; expected {len(self.names)}, as in the header"
                return DataError(f"{self.path}, row {first}: {had}")
            for name, cell in zip(self.names, row, strict=True):
                if "\ufffd" in cell:
                    where = f"{self.path}, row {first}, column {_comparable(name)}"
                    return DataError(f"{where}: {_shown(cell)} is not UTF-8; expected UTF-8 text")
        return DataError(f"{self.path}: cannot be read as CSV: {error}")

    def row_number(self, index: int) -> int:
        return next((first for at, (first, _, _) in enumerate(self._rows()) if at == index), index + 2)


class _ParquetFile:
    def __init__(self, path: Path) -> None:
        pa = arrow()
        pq = arrow(".parquet")

        self.path = path
        try:
            self.names = list[str](pq.read_schema(path).names)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as Parquet: {error}") from error

    def read(self, indices: Sequence[int]) -> list[Any]:
        pa = arrow()
        pq = arrow(".parquet")

        try:
            with pq.ParquetFile(self.path) as file:
                table: Any = file.read(columns=[self.names[index] for index in indices])
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.path}: cannot be read as Parquet: {error}") from error
        return [table.column(self.names[index]) for index in indices]

    def row_number(self, index: int) -> int:
        return index + 1


def _open(path: Path) -> _CsvFile | _ParquetFile:
    try:
        with path.open("rb") as file:
            is_parquet = file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC
        return _ParquetFile(path) if is_parquet else _CsvFile(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; give a CSV or Parquet table") from None
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


# -- cells -----------------------------------------------------------------------------------------


def _words(source: _CsvFile | _ParquetFile, column: Column, array: Any) -> WordColumn:
    pa = arrow()
    pc = arrow(".compute")

    text = pc.utf8_trim_whitespace(_as_text(source, column, array)).combine_chunks()
    text = pc.fill_null(text, "")
    encoded: Any = text.dictionary_encode()
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    words = list[str](encoded.dictionary.to_pylist())
    codes: NDArray[np.int32] = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int32)
    if "" in words:
        empty = words.index("")
        if column.default is None:
            raise _bad_cell(source, column, int(np.argmax(codes == empty)), "", "text")
        default = str(column.default)
        if default in words:
            codes[codes == empty] = words.index(default)
        else:
            words[empty] = default
    return WordColumn(codes, tuple(words))


def _as_text(source: _CsvFile | _ParquetFile, column: Column, array: Any) -> Any:
    pa = arrow()
    pc = arrow(".compute")

    kind: Any = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        expected = f"expected {column.kind}, one value per cell"
        raise DataError(f"{source.path}, column {column.name}: its cells are {kind}; {expected}")
    try:
        return pc.cast(array, pa.string())
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{source.path}, column {column.name}: cannot be read as {column.kind}: {error}") from error


def _numbers(source: _CsvFile | _ParquetFile, column: Column, array: Any) -> NDArray[np.float64]:
    pa = arrow()
    pc = arrow(".compute")

    kind: Any = array.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        array = pc.divide(pc.cast(pc.cast(array, pa.timestamp("us")), pa.int64()), 1e6)
        kind = pa.float64()
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        numeric: Any = pc.cast(array, pa.int8()) if pa.types.is_boolean(kind) else array
        values = np.array(pc.cast(numeric, pa.float64(), safe=False).to_numpy(), np.float64)
        text: Any = array
    else:
        text = pc.utf8_lower(pc.utf8_trim_whitespace(_as_text(source, column, array))).combine_chunks()
        values = _parsed(source, column, text)
    empty = np.isnan(values)
    wrong = np.zeros(len(values), bool)
    if column.kind is Cell.FLAG:
        wrong = ~empty & (values != 0) & (values != 1)
    elif column.kind is Cell.SECONDS:
        values = values / _per_second(values)
        wrong = ~(np.abs(values) <= _MOST_S) & ~empty
    if column.default is None:
        wrong |= empty
    if wrong.any():
        index = int(np.argmax(wrong))
        raise _bad_cell(source, column, index, text[index].as_py(), str(column.kind))
    if column.default is not None:
        values[empty] = float(column.default)
    return values


def _per_second(times: NDArray[np.float64]) -> float:
    """Guess a time column's ticks per second: values too large for seconds since 1970 are milli-,
    micro- or nanoseconds."""
    if not np.isfinite(times).any():
        return 1.0
    least = float(np.nanmin(np.abs(times)))
    return next((ticks for ticks in (1e9, 1e6, 1e3) if least > _MOST_S * ticks / 1e3), 1.0)


def _parsed(source: _CsvFile | _ParquetFile, column: Column, text: Any) -> NDArray[np.float64]:
    """Return numbers [rows] from lower-case cells; NaN for empty ones."""
    pa = arrow()
    pc = arrow(".compute")

    none: Any = pa.scalar(None, pa.string())
    text = pc.if_else(pc.is_in(text, value_set=pa.array(_EMPTY_WORDS)), none, text)
    if column.kind is Cell.FLAG:
        text = pc.if_else(pc.is_in(text, value_set=pa.array(_TRUE_WORDS)), "1", text)
        text = pc.if_else(pc.is_in(text, value_set=pa.array(_FALSE_WORDS)), "0", text)
    with suppress(pa.ArrowInvalid):
        return np.array(pc.cast(text, pa.float64()).to_numpy(zero_copy_only=False), np.float64)
    if column.kind is Cell.SECONDS and (dates := _dates(text)) is not None:
        return dates
    values = np.full(len(text), np.nan)
    for index, cell in enumerate(text.to_pylist()):
        if cell is None:
            continue
        try:
            values[index] = float(cell)
        except ValueError:
            raise _bad_cell(source, column, index, cell, str(column.kind)) from None
    return values


def _dates(text: Any) -> NDArray[np.float64] | None:
    """Parse ISO dates to seconds since 1970; None if any cell is something else."""
    pa = arrow()
    pc = arrow(".compute")

    upper = pc.utf8_upper(text)
    for kind in (pa.timestamp("us", tz="UTC"), pa.timestamp("us")):
        with suppress(pa.ArrowInvalid):
            micros = pc.cast(pc.cast(upper, kind), pa.int64())
            return np.array(pc.cast(micros, pa.float64()).to_numpy(zero_copy_only=False), np.float64) / 1e6
    return None


def _bad_cell(source: _CsvFile | _ParquetFile, column: Column, index: int, cell: object, expected: str) -> DataError:
    got = "an empty cell" if cell in ("", None) else _shown(cell)
    where = f"{source.path}, row {source.row_number(index)}, column {column.name}"
    return DataError(f"{where}: {got}; expected {expected}")
