"""The files of a run's update log: one segment for the updates between two checkpoints.

    <run_dir>/updates/000012.epoch-3.log     the twelfth segment, written by learner#3; its first record is a Start

Only the learner writes. It appends without waiting for the disk, and seals a segment (End, fsync)
with each checkpoint, so every update in a checkpoint is in a complete segment. The last segment of
a learner that died has no End, and may stop in the middle of a record."""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Final, cast

import msgspec
from xxhash import xxh3_64_intdigest, xxh32_intdigest

from pipeline.ledger.types import ClaimedUnit
from pipeline.training.update_log.records import (
    FORMAT,
    KINDS,
    Batch,
    End,
    Origin,
    Record,
    Start,
    Units,
    UpdateOutcome,
    unpack_units,
)
from protocol.errors import DataError

_HEAD = struct.Struct("<4sB3xIIQ")
_SEAL = struct.Struct("<I")
_MARKER: Final = b"\xf5HUL"
_HEADER_BYTES: Final = _HEAD.size + _SEAL.size
_SEARCH_BYTES: Final = 1 << 20
_LEVEL: Final = 1
"""zlib level: floats hardly compress, and higher levels gain little."""
MAX_RECORD_BYTES: Final = (1 << 32) - 1

_encode = msgspec.msgpack.Encoder().encode
_DECODERS = [msgspec.msgpack.Decoder(kind) for kind in KINDS]


@dataclass(frozen=True, slots=True)
class RecordFrame:
    """Where a record is in a file."""

    kind: type[Record]
    offset: int
    stored_bytes: int
    record_bytes: int
    checksum: int

    @property
    def end(self) -> int:
        """Offset of the next frame."""
        return self.offset + _HEADER_BYTES + self.stored_bytes


@dataclass(frozen=True, slots=True)
class Scan:
    """The complete frames of a file, in order."""

    frames: tuple[RecordFrame, ...]
    num_torn_bytes: int
    """Bytes of an incomplete record at the end."""


def encode_frame(record: Record) -> bytes:
    """Encode a record. Raises ValueError when it is too large."""
    body = _encode(record)
    if len(body) > MAX_RECORD_BYTES:
        raise ValueError(f"a {type(record).__name__} of {len(body)} bytes; a record holds at most {MAX_RECORD_BYTES}")
    stored = zlib.compress(body, _LEVEL)
    kind = KINDS.index(type(record)) + 1
    head = _HEAD.pack(_MARKER, kind, len(stored), len(body), xxh3_64_intdigest(stored))
    return head + _SEAL.pack(xxh32_intdigest(head)) + stored


def scan(path: Path) -> Scan:
    """Check every frame of a file. Raises DataError where it is damaged, OSError on read errors."""
    frames: list[RecordFrame] = []
    with path.open("rb") as file:
        # ignore what a live learner appends from now on
        num_bytes = file.seek(0, 2)
        offset = 0
        while offset < num_bytes:
            frame = _frame_at(file, offset, num_bytes)
            if frame is None:
                _refuse_damage(file, path, offset, num_bytes)
                return Scan(tuple(frames), num_bytes - offset)
            frames.append(frame)
            offset = frame.end
    return Scan(tuple(frames), 0)


def read_record(path: Path, frame: RecordFrame) -> Record:
    """Read the record of a frame that ``scan`` returned. Raises DataError if it has changed since."""
    with path.open("rb") as file:
        file.seek(frame.offset + _HEADER_BYTES)
        stored = file.read(frame.stored_bytes)
    if xxh3_64_intdigest(stored) != frame.checksum:
        raise DataError(f"{path} has changed at byte {frame.offset} since it was checked; replay it again")
    unpacker = zlib.decompressobj()
    try:
        body = unpacker.decompress(stored, frame.record_bytes)
        if len(body) != frame.record_bytes or not unpacker.eof:
            raise DataError(
                f"{path}: the record at byte {frame.offset} does not have the {frame.record_bytes} bytes of its header; "
                "the file was not written by Headrace: take another run"
            )
        return _DECODERS[KINDS.index(frame.kind)].decode(body)
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(
            f"{path}: the {frame.kind.__name__} record at byte {frame.offset} cannot be read: {error}; replay it with the "
            "release that wrote it"
        ) from error


def _frame_at(file: BinaryIO, offset: int, num_bytes: int) -> RecordFrame | None:
    """Return the frame at ``offset`` of a file of ``num_bytes``, or None if it is incomplete."""
    file.seek(offset)
    header = file.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES:
        return None
    marker, kind, stored_bytes, record_bytes, checksum = _HEAD.unpack_from(header)
    (seal,) = _SEAL.unpack_from(header, _HEAD.size)
    if marker != _MARKER or not 1 <= kind <= len(KINDS) or xxh32_intdigest(header[: _HEAD.size]) != seal:
        return None
    if offset + _HEADER_BYTES + stored_bytes > num_bytes or xxh3_64_intdigest(file.read(stored_bytes)) != checksum:
        return None
    return RecordFrame(KINDS[kind - 1], offset, stored_bytes, record_bytes, checksum)


def _refuse_damage(file: BinaryIO, path: Path, bad: int, num_bytes: int) -> None:
    """Raise DataError if a complete frame follows the bad one: the file was changed, not cut off."""
    for offset in _markers_after(file, bad + 1):
        if _frame_at(file, offset, num_bytes) is not None:
            raise DataError(
                f"{path} is damaged at byte {bad}: whole records follow from byte {offset}; restore the file from a copy, or "
                "replay from a checkpoint after it"
            )


def _markers_after(file: BinaryIO, offset: int) -> Iterator[int]:
    """Yield every position from ``offset`` on where a frame may start."""
    while True:
        file.seek(offset)
        block = file.read(_SEARCH_BYTES)
        place = block.find(_MARKER)
        while place >= 0:
            yield offset + place
            place = block.find(_MARKER, place + 1)
        if len(block) < _SEARCH_BYTES:
            return
        # a marker may span two blocks
        offset += _SEARCH_BYTES - len(_MARKER) + 1


UPDATES_FOLDER = "updates"
_NAME = re.compile(r"(?P<sequence>\d{6,})\.epoch-(?P<epoch>\d+)\.log")


class LogWriter:
    """Appends records. Any method may raise OSError; earlier records are then intact."""

    def __init__(self, folder: Path, *, epoch: int) -> None:
        """Write as incarnation ``epoch`` of the learner, after all existing segments."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._epoch = epoch
        self._file: BinaryIO | None = None
        self._num_records = 0
        self.next_segment = max((sequence for (sequence, _), _ in _segments(folder)), default=0) + 1

    @property
    def is_open(self) -> bool:
        """Whether a segment has begun and is not sealed."""
        return self._file is not None

    def begin(self, start: Start) -> None:
        path = self._folder / f"{self.next_segment:06d}.epoch-{self._epoch}.log"
        self.next_segment += 1
        self._file = cast("BinaryIO", path.open("xb", buffering=0))
        self._num_records = 0
        self.append(start)

    def append(self, record: Record) -> None:
        """Hand a record to the operating system: it survives this process, but not the host."""
        if self._file is None:
            raise ValueError("no segment is open; begin one")
        view = memoryview(encode_frame(record))
        while view:
            view = view[self._file.write(view) :]
        self._num_records += 1

    def seal(self) -> None:
        """End the open segment, if any, and wait until it is on disk."""
        if self._file is None:
            return
        self.append(End(num_records=self._num_records))
        os.fsync(self._file.fileno())
        self.close()
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close the segment without an End."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for _, path in _segments(self._folder))

    def trim(self, first_needed: int) -> int:
        """Remove the segments before number ``first_needed``; return how many."""
        old = [path for (sequence, _), path in _segments(self._folder) if sequence < first_needed]
        for path in old:
            path.unlink()
        return len(old)


@dataclass(frozen=True, slots=True)
class LoggedUpdate:
    """A logged update. Its units are read on request."""

    batch: Batch
    outcome: UpdateOutcome | None
    """None if the learner died before finishing the update."""
    path: Path
    frames: tuple[RecordFrame, ...]
    """Frames of its units."""

    @property
    def num_updates(self) -> int:
        """Updates in the resulting weights. An update without an applied step does not count."""
        is_made = self.outcome is None or self.outcome.policy_version > self.batch.policy_version
        return self.batch.update if is_made else self.batch.update - 1

    def units(self) -> list[ClaimedUnit]:
        """Read the units in order. Raises DataError if some were never written."""
        found = [unit for frame in self.frames for unit in unpack_units(cast("Units", read_record(self.path, frame)))]
        if tuple(unit.name for unit in found) != self.batch.units:
            raise DataError(
                f"{self.path}: update {self.batch.update} has {len(found)} of its {len(self.batch.units)} units, because the "
                "learner died while writing them: replay up to the version before"
            )
        return found


@dataclass(frozen=True, slots=True)
class LogSegment:
    path: Path
    epoch: int
    start: Start
    updates: tuple[LoggedUpdate, ...]
    is_whole: bool
    num_torn_bytes: int


def read_log(folder: Path) -> list[LogSegment]:
    """Check every byte of a run's update log; return its segments, oldest first.

    Skips a segment without its first record. Raises DataError, naming the place, if there is no log
    or a segment is damaged."""
    found = _segments(folder)
    if not found:
        raise DataError(
            f"{folder} holds no update log; it is written from the first update on if replay.record is on. A run made "
            "without it cannot be replayed"
        )
    try:
        segments = [_read_segment(path) for _, path in found]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}; make it readable") from error
    for before, after in pairwise(segments):
        if before and after and after.start.origin is Origin.CONTINUED and not before.is_whole:
            raise DataError(
                f"{before.path} is missing its end, which was on disk before {after.path.name} was started; restore "
                f"the file from a copy, or replay from a later checkpoint"
            )
    return [segment for segment in segments if segment is not None]


def _read_segment(path: Path) -> LogSegment | None:
    scanned = scan(path)
    if not scanned.frames:
        return None
    start = read_record(path, scanned.frames[0])
    if not isinstance(start, Start):
        raise DataError(f"{path} begins with a record of kind {type(start).__name__}, expected Start; restore the file")
    if start.format != FORMAT:
        raise DataError(
            f"{path} has format {start.format}, this release reads {FORMAT}; replay with the release that wrote it"
        )
    updates: list[LoggedUpdate] = []
    units: list[RecordFrame] = []
    batch: Batch | None = None
    for frame in scanned.frames[1:]:
        if frame.kind is Units:
            units.append(frame)
            continue
        record = read_record(path, frame)
        if isinstance(record, UpdateOutcome):
            if batch is None:
                raise DataError(f"{path}: an outcome without its batch at byte {frame.offset}; restore the file")
            updates.append(LoggedUpdate(batch, record, path, tuple(units)))
            batch, units = None, []
        elif isinstance(record, Batch):
            if batch is not None:
                updates.append(LoggedUpdate(batch, None, path, tuple(units)))
            batch, units = record, []
    if batch is not None:
        updates.append(LoggedUpdate(batch, None, path, tuple(units)))
    match = _NAME.fullmatch(path.name)
    assert match is not None, "only files of this name are read"
    is_whole = scanned.frames[-1].kind is End
    return LogSegment(path, int(match["epoch"]), start, tuple(updates), is_whole, scanned.num_torn_bytes)


def segments_before(folder: Path, number: int) -> list[Path]:
    """Return the segments before ``number``, oldest first. Those before a checkpoint's segment are sealed."""
    return [path for (sequence, _), path in _segments(folder) if sequence < number]


def _segments(folder: Path) -> list[tuple[tuple[int, int], Path]]:
    """Return the segments with their (number, epoch), in order."""
    if not folder.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(((int(match["sequence"]), int(match["epoch"])), path) for match, path in matches if match)
