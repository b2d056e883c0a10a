"""A ring buffer of flow records in a file: one worker writes, any process on its host reads.

The writer never waits and makes no system calls: it overwrites the oldest slot. A reader follows at its own
pace, counts what was overwritten before it got there, and never returns half a record.

Format, little endian, version 1::

    header    128 bytes: magic, version, slot and name sizes, counts, epoch, pid, times, worker
              (offset 96: links named so far, u32; offset 104: records written so far, u64)
    names     64 entries of 80 bytes: length u8, text, crc32 u32 of both
    slots     64 bytes: sequence u64, body of 48 bytes, crc32 u32 of sequence and body, 4 unused

A slot's sequence is its record's number, from 1, and is written last. Processors may reorder writes, so the
checksum decides whether a slot is whole. The number of records is written after that, so the slot being filled
is that of the record before the oldest.

A restarted worker creates a new file, which takes over the name. A reader finishes the old file first. It
uses ``pread``, so that a truncated file cannot kill it."""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np

from pipeline.runtime.message_record import MessageOutcome, MessageRecord, key_of
from protocol.endpoints import run_tag
from protocol.ids import Incarnation
from protocol.private import ensure_private_folder

NUM_SLOTS: Final = 4096
"""A quarter of a megabyte per worker; 40 seconds at 100 records a second."""
MAX_NAMES: Final = 64
"""Number of links with a name; later ones are ``NO_LINK``."""
NO_LINK: Final = 0xFFFF
"""Takes the place of a link, for the worker itself or work without a link."""
SUFFIX: Final = ".ring"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- memory-backed storage; the folder made in it is private (0700)
_MAGIC: Final = b"HRFLOW\r\n"
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sHHHHIIqdd32s")
"""magic, version, slot bytes, name bytes, maximum names, slots, pid, epoch, monotonic and wall time at the
start, worker"""
_NUM_NAMES_AT: Final = 96
_WRITTEN_AT: Final = 104
_HEAD_BYTES: Final = 128
_NAME_BYTES: Final = 80
_SLOTS_AT: Final = _HEAD_BYTES + MAX_NAMES * _NAME_BYTES
_SLOT_BYTES: Final = 64
_SLOT: Final = struct.Struct("<QBBH44xI4x")
"""sequence; the body's kind, outcome or side, and link; checksum"""
_SEQUENCE: Final = struct.Struct("<Q")
_NUMBER: Final = struct.Struct("<I")
_COMPLETION: Final = struct.Struct("<BBHIdQfffi8x")
_STATE: Final = struct.Struct("<BBHIdQQQfi")
SLOTS: Final = np.dtype(
    {
        "names": ["kind", "what", "link", "size", "time_s", "key", "waited_s", "service_s", "storing_s",
                  "policy_version", "counts", "oldest_age_s", "state_version"],
        "formats": ["u1", "u1", "u2", "u4", "f8", "u8", "f4", "f4", "f4", "i4", ("u8", 3), "f4", "i4"],
        "offsets": [8, 9, 10, 12, 16, 24, 32, 36, 40, 44, 24, 48, 52],
        "itemsize": _SLOT_BYTES,
    }
)  # fmt: skip
"""Slots as columns, for readers. ``what`` is a message's outcome or a state's side; a state's ``size`` is its
number of open messages, and its last three columns replace a message's from ``key`` on."""
_BODY_END: Final = 56
_COUNT_LIMIT: Final = 2**32 - 1
_FILE_BYTES: Final = _SLOTS_AT + NUM_SLOTS * _SLOT_BYTES
_READ_SLOTS: Final = 256
"""Slots per read: the writer overwrites few of them meanwhile."""


class SlotForm(IntEnum):
    COMPLETION = 1
    STATE = 2


class LinkSide(IntEnum):
    """What a state describes."""

    SENDER = 1
    """counts: produced, sent, given up"""
    RECEIVER = 2
    """counts: received, done, stored"""
    WORKER = 3
    """counts: progress, held, index of the wait in ``WaitingFor``"""


class LinkState(NamedTuple):
    """The state of one end of a link, or of a whole worker, while messages are open."""

    at_s: float
    link: str
    """Name of the link; empty for the worker itself."""
    end: LinkSide
    counts: tuple[int, int, int]
    """Three counts, whose meaning is in ``LinkSide``."""
    num_open: int
    """Messages that this end has and has not passed on."""
    oldest_age_s: float
    policy_version: int


_KNOWN: Final = frozenset(
    {(int(SlotForm.COMPLETION), int(outcome)) for outcome in MessageOutcome}
    | {(int(SlotForm.STATE), int(side)) for side in LinkSide}
)
"""Kind, and outcome or side, of the records that this version can read."""


@dataclass(frozen=True, slots=True)
class RingSlice:
    """Complete slots of one incarnation, in order."""

    data: bytes
    """Slots of 64 bytes each."""
    names: Mapping[int, str]


def flow_folder(run_dir: Path) -> Path:
    """Return the folder of a run's rings on this host, memory-backed if possible."""
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK):
        folder = _SHARED_MEMORY / run_tag(run_dir)
        return folder.with_name(f"{folder.name}-flow")
    return run_dir / "flow"


class FlowRingWriter:
    """Writes one worker's records. Used by one thread."""

    def __init__(self, folder: Path, who: Incarnation) -> None:
        """Create this incarnation's ring in ``folder``, replacing an older one.

        Raises OSError without room, and ConfigError when the folder belongs to another user."""
        ensure_private_folder(folder)
        self.path = folder / f"{who.worker}{SUFFIX}"
        partial = folder / f"{who.worker}.{secrets.token_hex(4)}.partial"
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # fail here without room, since writing to a page without storage would kill the process
            os.posix_fallocate(fd, 0, _FILE_BYTES)
            self._map = mmap.mmap(fd, _FILE_BYTES)
            head = _HEAD.pack(
                *(_MAGIC, _VERSION, _SLOT_BYTES, _NAME_BYTES, MAX_NAMES, NUM_SLOTS, os.getpid() & _COUNT_LIMIT),
                *(who.epoch, time.monotonic(), time.time(), who.worker.encode()[:32]),
            )
            self._map[: len(head)] = head
            partial.rename(self.path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        self._written = 0
        self._names: dict[str, int] = {}

    def message(self, record: MessageRecord) -> None:
        """Write a record that has ended."""
        link, size = self._index_of(record.link or ""), min(record.size, _COUNT_LIMIT)
        self._write(
            _COMPLETION.pack(
                *(SlotForm.COMPLETION, record.outcome, link, size, record.ended_s, key_of(record.chunk)),
                *(*record.times_s(), record.policy_version),
            )
        )

    def state(self, state: LinkState) -> None:
        link, num_open = self._index_of(state.link), min(state.num_open, _COUNT_LIMIT)
        self._write(
            _STATE.pack(
                *(SlotForm.STATE, state.end, link, num_open, state.at_s),
                *(*state.counts, state.oldest_age_s, state.policy_version),
            )
        )

    def close(self) -> None:
        """Stop writing; the file stays for its readers. Repeated calls do nothing."""
        self._map.close()

    def _write(self, body: bytes) -> None:
        at = _SLOTS_AT + self._written % NUM_SLOTS * _SLOT_BYTES
        sequence = _SEQUENCE.pack(self._written + 1)
        ring = self._map
        ring[at + 8 : at + 60] = body + _NUMBER.pack(crc32(body, crc32(sequence)))
        ring[at : at + 8] = sequence
        self._written += 1
        ring[_WRITTEN_AT : _WRITTEN_AT + 8] = sequence

    def _index_of(self, link: str) -> int:
        index = self._names.get(link)
        if index is None:
            if not link or len(self._names) >= MAX_NAMES:
                return NO_LINK
            index = self._names[link] = len(self._names)
            text = link.encode()[: _NAME_BYTES - 5]
            entry = bytes([len(text)]) + text
            at = _HEAD_BYTES + index * _NAME_BYTES
            self._map[at : at + len(entry) + 4] = entry + _NUMBER.pack(crc32(entry))
            self._map[_NUM_NAMES_AT : _NUM_NAMES_AT + 4] = _NUMBER.pack(len(self._names))
        return index


class FlowRingReader:
    """Follows one worker's ring across its incarnations.

    Attributes:
        num_read: Records returned.
        num_overwritten: Records that were overwritten before they were read.
        num_damaged: Incomplete slots, and files that are not rings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_read = self.num_overwritten = self.num_damaged = 0
        self._fd: int | None = None
        self._file = (0, 0)
        self._refused = (0, 0)
        self._next = 0
        self._names: dict[int, str] = {}

    def read(self) -> list[RingSlice]:
        """Return the complete slots since the last call, in order."""
        found = list(self._rest())
        if self._is_replaced() and self._open():
            found += self._rest()
        self.num_read += sum(len(slots.data) for slots in found) // _SLOT_BYTES
        return found

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _is_replaced(self) -> bool:
        try:
            found = self.path.stat()
        except OSError:
            # removed at the end of the run, or not created yet
            return False
        return (found.st_dev, found.st_ino) not in ((self._file if self._fd is not None else None), self._refused)

    def _open(self) -> bool:
        """Open the file that now has this name; return whether it is a ring."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        found = os.fstat(fd)
        if not _is_ring(fd, found.st_size):
            os.close(fd)
            self._refused = (found.st_dev, found.st_ino)
            self.num_damaged += 1
            return False
        self.close()
        self._fd, self._file = fd, (found.st_dev, found.st_ino)
        self._next, self._names = 0, {}
        return True

    def _rest(self) -> Iterator[RingSlice]:
        if self._fd is None:
            return
        written = self._written(self._fd)
        lost = max(0, written - NUM_SLOTS - self._next)
        self.num_overwritten += lost
        self._next += lost
        while self._next < written:
            first = self._next
            # up to the end of the file, after which the first slot follows
            num_slots = min(written - first, NUM_SLOTS - first % NUM_SLOTS, _READ_SLOTS)
            slots = _bytes_at(self._fd, num_slots * _SLOT_BYTES, _SLOTS_AT + first % NUM_SLOTS * _SLOT_BYTES)
            links, whole = _whole(slots, first)
            for link in links - self._names.keys():
                self._learn(self._fd, link)
            self._next = first + num_slots
            if len(whole) < num_slots:
                self._miss(self._fd, set(range(first, self._next)) - set(whole))
                slots = b"".join(slots[at : at + _SLOT_BYTES] for at in ((n - first) * _SLOT_BYTES for n in whole))
            if slots:
                yield RingSlice(slots, self._names)

    def _miss(self, fd: int, numbers: AbstractSet[int]) -> None:
        # the writer has reached these slots again, or is filling one right now
        written = self._written(fd)
        overwritten = sum(written >= number + NUM_SLOTS for number in numbers)
        self.num_overwritten += overwritten
        self.num_damaged += len(numbers) - overwritten

    def _learn(self, fd: int, index: int) -> None:
        if index >= MAX_NAMES:
            return
        found = _bytes_at(fd, _NAME_BYTES, _HEAD_BYTES + index * _NAME_BYTES)
        end = 1 + found[0] if found else 0
        if end <= _NAME_BYTES - 4 and found[end : end + 4] == _NUMBER.pack(crc32(found[:end])):
            self._names[index] = found[1:end].decode(errors="replace")

    def _written(self, fd: int) -> int:
        found = _bytes_at(fd, 8, _WRITTEN_AT)
        return _SEQUENCE.unpack(found)[0] if len(found) == 8 else 0


def _whole(slots: bytes, first: int) -> tuple[set[int], list[int]]:
    """Return the links and numbers of the complete records. ``first`` is the number expected in the first
    slot."""
    num_slots = len(slots) // _SLOT_BYTES
    links, whole = set[int](), list[int]()
    view = memoryview(slots)[: num_slots * _SLOT_BYTES]
    number, at = first, 0
    for sequence, kind, what, link, told in _SLOT.iter_unpack(view):
        # the checksum covers sequence and body
        if sequence == number + 1 and told == crc32(view[at : at + _BODY_END]) and (kind, what) in _KNOWN:
            whole.append(number)
            links.add(link)
        number += 1
        at += _SLOT_BYTES
    return links, whole


def _is_ring(fd: int, num_bytes: int) -> bool:
    found = _bytes_at(fd, _HEAD_BYTES, 0)
    if len(found) < _HEAD_BYTES or num_bytes < _FILE_BYTES:
        return False
    magic, *layout = _HEAD.unpack_from(found)
    return magic == _MAGIC and layout[:5] == [_VERSION, _SLOT_BYTES, _NAME_BYTES, MAX_NAMES, NUM_SLOTS]


def _bytes_at(fd: int, num_bytes: int, at: int) -> bytes:
    try:
        return os.pread(fd, num_bytes, at)
    except OSError:
        return b""
