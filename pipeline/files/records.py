"""Files of records: one JSON object per line, one writer, any number of readers.

A schema is a frozen msgspec struct, or a union of structs that the field ``kind`` tells apart::

    class Started(msgspec.Struct, frozen=True, tag_field="kind", tag="started"):
        at_s: float

    file = RecordFile(path, Schema[Started | Ended](Started | Ended))
    file.append(Started(1.0))
    records, num_skipped = file.read()

Unknown fields are ignored. Lines that are damaged, or of a kind that only a newer release knows, are
skipped and counted; only ``resume`` and ``read_strictly`` refuse damage, because their callers must not
lose records. A last line without its end is still being written, or a crash cut it short: it is no record.

JSON cannot express numbers that are not finite; the strings ``NaN``, ``Infinity`` and ``-Infinity``
stand for them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from pipeline.files import write_private
from protocol.errors import DataError

T = TypeVar("T")
_BUFFER_BYTES = 1 << 18


class UnknownKind(ValueError):
    """A record of a kind that this release does not know."""


class Schema(Generic[T]):
    """How the records of a file are written as lines."""

    def __init__(self, types: Any, *, untagged: str = "") -> None:
        """``types``: a struct or a union of tagged structs; ``untagged``: the kind of lines without one."""
        self._types = types
        self._untagged = untagged
        members: tuple[Any, ...] = getattr(types, "__args__", (types,))
        tags = [member.__struct_config__.tag for member in members]
        self._kinds = [tag for tag in tags if tag is not None]
        # not strict, so that strings are read as the numbers that they stand for
        self._decoder = msgspec.json.Decoder(types, strict=False)

    def encode(self, record: T) -> bytes:
        """Return the record's line, in ASCII."""
        # ``float`` converts the numbers of NumPy
        values = _plain(msgspec.to_builtins(record, enc_hook=float))
        return json.dumps(values, allow_nan=False).encode("ascii") + b"\n"

    def decode(self, line: bytes) -> T:
        """Raises UnknownKind for a record of a newer release, another ValueError for a damaged line."""
        try:
            return self._decoder.decode(line)
        except (ValueError, RecursionError):
            return self._decode_slowly(line)

    def _decode_slowly(self, line: bytes) -> T:
        """Decode what msgspec refuses and earlier releases wrote: bare ``NaN``, half a surrogate pair."""
        try:
            values = json.loads(line)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if self._kinds and isinstance(values, dict):
            kind: Any = values.setdefault("kind", self._untagged)  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
            if isinstance(kind, str) and kind and kind not in self._kinds:
                raise UnknownKind(f"its kind is {kind!r}; expected {', '.join(self._kinds)}")
        return msgspec.convert(values, self._types, strict=False)


class RecordFile(Generic[T]):
    """A file of records. Only its writer may change it. Holds nothing open; blocks.

    The file is its owner's alone (mode 0600). If ``max_bytes`` is given, a longer file is replaced by
    what ``compact`` returns of its records, which should be about half."""

    def __init__(
        self,
        path: Path,
        schema: Schema[T],
        *,
        max_bytes: int | None = None,
        compact: Callable[[list[T]], Iterable[T]] | None = None,
    ) -> None:
        self.path = path
        self._schema = schema
        self._max_bytes = max_bytes
        self._compact = compact

    def append(self, *records: T) -> None:
        """Append records as whole lines; all or none. Raises OSError."""
        if not records:
            return
        size = _append(self.path, b"".join(map(self._schema.encode, records)))
        if self._compact is not None and self._max_bytes is not None and size > self._max_bytes:
            self.rewrite(self._compact(self.read()[0]))

    def rewrite(self, records: Iterable[T]) -> None:
        """Replace the whole file by these records, atomically. Raises OSError."""
        write_private(self.path, b"".join(map(self._schema.encode, records)), sync=True)

    def resume(self, keeps: Callable[[T], bool]) -> None:
        """Drop an unfinished last line and the records that ``keeps`` refuses, atomically. Other lines stay
        as they are; a missing file is created. Raises DataError for a damaged line before the last, OSError."""
        if not self.path.exists():
            _append(self.path, b"")
        kept = b"".join(line for line, record in self._lines() if record is None or keeps(record))
        if len(kept) != self.path.stat().st_size:
            write_private(self.path, kept, sync=True)

    def sync(self) -> None:
        """Sync what was appended to disk. Raises OSError."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            os.fsync(file.fileno())

    def read(self) -> tuple[list[T], int]:
        """Return the records, oldest first, and the number of skipped lines. Raises OSError."""
        tail = self.tail()
        return list(tail), tail.num_skipped

    def read_strictly(self) -> Iterator[T]:
        """Yield the records of known kinds, oldest first. Raises DataError, which names the line, for a
        damaged one before the last."""
        if self.path.exists():
            yield from (record for _, record in self._lines() if record is not None)

    def tail(self, restart: Callable[[], object] = lambda: None) -> RecordTail[T]:
        """Return a reader of the file as it grows; it calls ``restart`` before it reads a new file."""
        return RecordTail(self.path, self._schema, restart)

    def _lines(self) -> Iterator[tuple[bytes, T | None]]:
        """Yield each line with its record, or with None if its kind is unknown."""
        damaged: DataError | None = None
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if damaged is not None:
                    raise damaged
                if line == b"\n":
                    continue
                record: T | None = None
                try:
                    if not line.endswith(b"\n"):
                        raise ValueError("the line is cut short")
                    record = self._schema.decode(line)
                except UnknownKind:
                    pass
                except ValueError as error:
                    damaged = DataError(
                        f"{self.path}:{number}: not a record of this file: {error}; remove the line, or restore the "
                        "file from a copy"
                    )
                    continue
                yield line, record


class RecordTail(Generic[T]):
    """Iterates over the records that others have appended since the last time, each once. An iteration that
    stops early continues there. Starts over if the file was replaced or cut. Raises OSError."""

    def __init__(self, path: Path, schema: Schema[T], restart: Callable[[], object]) -> None:
        self._path, self._schema, self._restart = path, schema, restart
        self._inode = self._offset = 0
        self.num_skipped = 0
        """Lines of the present file so far that are damaged or of an unknown kind."""

    def __iter__(self) -> Iterator[T]:
        try:
            file = self._path.open("rb", buffering=_BUFFER_BYTES)
        except FileNotFoundError:
            self._begin(0)
            return
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._offset:
                self._begin(found.st_ino)
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if line == b"\n":
                    continue
                try:
                    record = self._schema.decode(line)
                except ValueError:
                    self.num_skipped += 1
                else:
                    yield record

    def _begin(self, inode: int) -> None:
        if self._inode:
            self._restart()
        self._inode, self._offset, self.num_skipped = inode, 0, 0


def skipped_words(num_skipped: int, name: str) -> str:
    """Return a sentence about skipped lines of a file; empty if there are none."""
    if not num_skipped:
        return ""
    lines = "line" if num_skipped == 1 else "lines"
    return f"{num_skipped} {lines} of {name} skipped, damaged or of a newer release; the figures lack them"


def _append(path: Path, lines: bytes) -> int:
    """Append whole lines after ending a line that a crash left unfinished; return the new size."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            lines = b"\n" + lines
        written = 0
        try:
            while written < len(lines):
                written += os.write(descriptor, lines[written:])
        except OSError:
            # a full disk, so leave no part of a record
            os.ftruncate(descriptor, size)
            raise
        return size + written
    finally:
        os.close(descriptor)


def _plain(value: Any) -> Any:
    """Replace numbers that are not finite by strings."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
