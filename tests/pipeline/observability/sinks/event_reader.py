"""Reads event files for tests, by the published format alone: frames, checksums, wire types.

``make test-sinks`` reads the same files with TensorBoard itself."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.observability.sinks.tensorboard import crc32c


@dataclass
class ReadEvent:
    """One event."""

    at_s: float = 0.0
    step: int = 0
    version: str = ""
    scalars: dict[str, float] = field(default_factory=dict[str, float])
    texts: dict[str, str] = field(default_factory=dict[str, str])
    is_restart: bool = False


def read_events(folder: Path) -> list[ReadEvent]:
    """Return the events of a folder's files, in the order of the files' names."""
    return [event for path in sorted(folder.glob("events.out.tfevents.*")) for event in _file(path.read_bytes())]


def standing(folder: Path) -> dict[str, dict[int, float]]:
    """Return the numbers by tag and step, as a reader keeps them. A restart voids steps; no step
    may be there twice."""
    found: dict[str, dict[int, float]] = {}
    for event in read_events(folder):
        if event.is_restart:
            found = {tag: {s: v for s, v in of.items() if s < event.step} for tag, of in found.items()}
        for tag, value in event.scalars.items():
            steps = found.setdefault(tag, {})
            assert event.step not in steps, f"{tag} is there twice at {event.step}"
            steps[event.step] = value
    return {tag: steps for tag, steps in found.items() if steps}


def _file(data: bytes) -> Iterator[ReadEvent]:
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        body = data[12 : 12 + length]
        assert struct.unpack("<I", data[8:12])[0] == _masked(data[:8])
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == _masked(body)
        yield _event(body)
        data = data[16 + length :]


def _masked(data: bytes) -> int:
    value = crc32c(data)
    return (((value >> 15) | (value << 17)) + 0xA282EAD8) % 2**32


def _event(body: bytes) -> ReadEvent:
    event = ReadEvent()
    for number, value in _fields(body):
        if number == 1:
            event.at_s = struct.unpack("<d", value)[0]
        elif number == 2:
            event.step = value
        elif number == 3:
            event.version = value.decode()
        elif number == 7:
            event.is_restart = dict(_fields(value)) == {1: 1}
        elif number == 5:
            for _, held in _fields(value):
                of = dict(_fields(held))
                if 2 in of:
                    event.scalars[of[1].decode()] = struct.unpack("<f", of[2])[0]
                else:
                    event.texts[of[1].decode()] = dict(_fields(of[8]))[8].decode()
    return event


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        yield key >> 3, data[at : at + size]
        at += size
