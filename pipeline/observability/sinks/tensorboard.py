"""TensorBoard: event files in ``<run_dir>/tensorboard``, for ``tensorboard --logdir runs``.

Updates and evaluations are in the folder itself; the critic's steps and the fleet's seconds are in the
folders ``value`` and ``fleet``, because their steps count something else.

The packages that write event files import torch (tensorboardX: 1.3 s, 220 MB) or bring a web server with
gRPC (tensorboard). The format is small and frozen: one framed record per event, and seven protocol buffer
messages. The tests read these files with TensorBoard itself.

Source: tensorflow/core/lib/io/record_writer.h; for the field numbers tensorflow/core/util/event.proto,
framework/summary.proto and framework/tensor.proto."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pipeline.observability.sinks.points import Axis, Point
from pipeline.observability.sinks.seam import SinkFailed, SinkSpec

NAME: Final = "tensorboard"
_FOLDERS: Final = {Axis.UPDATE: ".", Axis.VALUE: "value", Axis.FLEET: "fleet"}


class TensorBoardSink:
    id = ""

    def __init__(self, spec: SinkSpec) -> None:
        self._spec = spec
        self._files: dict[Axis, EventFile] = {}

    def write(self, points: Sequence[Point]) -> None:
        """Write points; they have reached the operating system on return. Raises SinkFailed."""
        try:
            for point in points:
                self._file(point.axis).scalars(point.at_s, point.step, point.values)
            for file in self._files.values():
                file.flush()
        except OSError as error:
            raise SinkFailed(f"{self._spec.run_dir / NAME} cannot be written: {error.strerror}") from error

    def restart(self, axis: Axis, step: int) -> None:
        try:
            self._file(axis).restart(time.time(), step)
        except OSError as error:
            raise SinkFailed(f"{self._spec.run_dir / NAME} cannot be written: {error.strerror}") from error

    def close(self, *, has_failed: bool) -> None:
        files, self._files = self._files, {}
        failed = [error for file in files.values() if (error := file.close()) is not None]
        if failed:
            raise SinkFailed(f"{self._spec.run_dir / NAME} cannot be written: {failed[0].strerror}")

    def _file(self, axis: Axis) -> EventFile:
        if axis not in self._files:
            self._files[axis] = file = EventFile(self._spec.run_dir / NAME / _FOLDERS[axis])
            if axis is Axis.UPDATE:
                file.text(time.time(), "config", f"```toml\n{self._spec.settings_text}\n```")
        return self._files[axis]


_VERSION: Final = b"brain.Event:2"
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5
"""Wire types."""
_START: Final = 1
"""SessionLog.START: voids what earlier events have from this step on."""
_STRING: Final = 7
"""DataType.DT_STRING"""
_MAX_FLOAT32: Final = 3.4028234663852886e38
"""The largest 32-bit float."""
_POLYNOMIAL: Final = 0x82F63B78
"""Reflected polynomial of CRC-32C."""


def _table() -> tuple[int, ...]:
    values: list[int] = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        values.append(value)
    return tuple(values)


_TABLE: Final = _table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C checksum (RFC 3720, B.4)."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


class EventFile:
    """A new event file in a folder, read after the folder's older files.

    All methods may raise OSError."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        times = (path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*"))
        # TensorBoard reads files in the order of their names.
        newest = max((int(time_) for time_ in times if time_.isdigit()), default=0)
        self.path = folder / f"events.out.tfevents.{max(int(time.time()), newest + 1):010d}.headrace"
        self._file = self.path.open("xb")
        self._write(time.time(), 0, _field(3, _BYTES, _VERSION))

    def scalars(self, at_s: float, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of one step, by tag."""
        of = (_sized(1, _sized(1, tag.encode()) + _field(2, _FLOAT, value)) for tag, value in values.items())
        self._write(at_s, step, _sized(5, b"".join(of)))

    def text(self, at_s: float, tag: str, text: str) -> None:
        """Write a text, which TensorBoard shows as Markdown."""
        plugin = _sized(9, _sized(1, _sized(1, b"text")))
        shape = _sized(2, _sized(2, _field(1, _VARINT, 1)))
        tensor = _sized(8, _field(1, _VARINT, _STRING) + shape + _sized(8, text.encode()))
        self._write(at_s, 0, _sized(5, _sized(1, _sized(1, tag.encode()) + tensor + plugin)))

    def restart(self, at_s: float, step: int) -> None:
        """Void what was written from ``step`` on."""
        self._write(at_s, step, _sized(7, _field(1, _VARINT, _START)))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> OSError | None:
        """Close the file; return the error if its last events could not be written."""
        try:
            self._file.close()
        except OSError as error:
            return error
        return None

    def _write(self, at_s: float, step: int, what: bytes) -> None:
        event = _field(1, _DOUBLE, at_s) + _field(2, _VARINT, step) + what
        length = struct.pack("<Q", len(event))
        self._file.write(b"".join((length, _checksum(length), event, _checksum(event))))


def _checksum(data: bytes) -> bytes:
    value = crc32c(data)
    # Masked, because a checksum of data that contains checksums would be weak.
    return struct.pack("<I", (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _field(number: int, kind: int, value: float | bytes) -> bytes:
    key = _varint(number << 3 | kind)
    if isinstance(value, bytes):
        return key + _varint(len(value)) + value
    if kind == _VARINT:
        return key + _varint(int(value))
    if kind == _DOUBLE:
        return key + struct.pack("<d", value)
    # Values beyond a float's range become infinite.
    return key + struct.pack(
        "<f", value if abs(value) <= _MAX_FLOAT32 or value != value else math.copysign(math.inf, value)
    )


def _sized(number: int, value: bytes) -> bytes:
    return _field(number, _BYTES, value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
