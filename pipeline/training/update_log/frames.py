"""Records as bytes in an append-only file, where a cut end differs from damage.

    header   marker (4), kind (1), 3 x 0, stored bytes (4), bytes before compression (4), xxh3-64 of the stored bytes (8),
             xxh32 of the header so far (4); little-endian
    body     the record in MessagePack, compressed with zlib

A crash leaves at most an unfinished end without a readable frame after it: that is tolerated. A bad
frame with a good one after it is damage, and refused."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
from xxhash import xxh3_64_intdigest, xxh32_intdigest

from pipeline.training.update_log.records import KINDS, Record
from protocol.errors import DataError

_HEAD = struct.Struct("<4sB3xIIQ")
_SEAL = struct.Struct("<I")
_MARKER: Final = b"\xf5HUL"
_HEADER_BYTES: Final = _HEAD.size + _SEAL.size
_SEARCH_BYTES: Final = 1 << 20
_LEVEL: Final = 1
"""Of zlib: floats hardly compress, and higher levels win little more."""
MAX_RECORD_BYTES: Final = (1 << 32) - 1

_encode = msgspec.msgpack.Encoder().encode
_DECODERS = [msgspec.msgpack.Decoder(kind) for kind in KINDS]


@dataclass(frozen=True, slots=True)
class RecordFrame:
    """The place of a record in a file."""

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
    """The frames of a file."""

    frames: tuple[RecordFrame, ...]
    """All whole frames, in order."""
    num_torn_bytes: int
    """Bytes of an unfinished record at the end."""


def encode_frame(record: Record) -> bytes:
    """Return a record's bytes. Raises ValueError when it is too large."""
    body = _encode(record)
    if len(body) > MAX_RECORD_BYTES:
        raise ValueError(f"a {type(record).__name__} of {len(body)} bytes; a record holds at most {MAX_RECORD_BYTES}")
    stored = zlib.compress(body, _LEVEL)
    kind = KINDS.index(type(record)) + 1
    head = _HEAD.pack(_MARKER, kind, len(stored), len(body), xxh3_64_intdigest(stored))
    return head + _SEAL.pack(xxh32_intdigest(head)) + stored


def scan(path: Path) -> Scan:
    """Check every frame of a file. Raises DataError that names damage, OSError for read errors."""
    frames: list[RecordFrame] = []
    with path.open("rb") as file:
        # a live learner's later records are ignored
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
    """Return the record of a frame from ``scan``. Raises DataError when it has changed since."""
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
                f"{path}: the record at byte {frame.offset} is not the {frame.record_bytes} bytes of its header; "
                "the file was not written by Headrace: take another run"
            )
        return _DECODERS[KINDS.index(frame.kind)].decode(body)
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(
            f"{path}: the {frame.kind.__name__} record at byte {frame.offset} cannot be read: {error}; replay it with the "
            "release that wrote it"
        ) from error


def _frame_at(file: BinaryIO, offset: int, num_bytes: int) -> RecordFrame | None:
    """Return the frame at ``offset`` of a file of ``num_bytes``; None if it is not whole."""
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
    """Raise DataError when a whole frame follows the bad one: the file was changed, not cut off."""
    for offset in _markers_after(file, bad + 1):
        if _frame_at(file, offset, num_bytes) is not None:
            raise DataError(
                f"{path} is damaged at byte {bad}: whole records follow from byte {offset}; restore the file from a copy, or "
                "replay from a checkpoint after it"
            )


def _markers_after(file: BinaryIO, offset: int) -> Iterator[int]:
    """Yield every place from ``offset`` on where a frame may begin."""
    while True:
        file.seek(offset)
        block = file.read(_SEARCH_BYTES)
        place = block.find(_MARKER)
        while place >= 0:
            yield offset + place
            place = block.find(_MARKER, place + 1)
        if len(block) < _SEARCH_BYTES:
            return
        # a marker may lie across the border
        offset += _SEARCH_BYTES - len(_MARKER) + 1
