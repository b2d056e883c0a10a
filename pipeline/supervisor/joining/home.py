"""Sends logs, terminal output and tallies of a joined host's workers to the run's host.

The files stay in the joined folder. At most once a second, an entry of bounded size with what is
new goes to the run's host, which writes it into the run's folder under the same names.

If a log grows faster than that, its newest part is sent, and the receiver inserts a line about the
gap. The receiver checks names: an entry can touch no other file, and no file of the run's own
workers."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import structlog

from pipeline.files import cut, write_private
from pipeline.observability.regenerated_tokens import FOLDER as TALLIES
from pipeline.process.records import FOLDER as PROCESSES
from protocol.ids import Role, is_worker_name

MAX_ENTRY_BYTES: Final = 64 << 10
"""Bytes of logs per entry."""
_MAX_BEHIND_BYTES: Final = 1 << 20
"""If a log is further behind than this, its older part is skipped."""
_MAX_TALLY_BYTES: Final = 64
_MAX_TALLIES: Final = 256
_MAX_ENDED: Final = 256
_MAX_FILE_BYTES: Final = 32 << 20
_MAX_NAME_BYTES: Final = 200
"""Of a file name; file systems allow 255."""
_MAX_FILES: Final = 4096
"""Maximum logs of joined hosts in a run's folder, and of tallies."""
_LOG = re.compile(r"(?P<worker>.+)\.(?:jsonl|out)")
_OFFSETS: Final = "home.json"
_ALONE: Final = frozenset({str(Role.SUPERVISOR), str(Role.LEARNER), str(Role.VALUE), str(Role.OBSERVER), "starter"})
"""Names that only the run's host gives to workers."""

_log = structlog.get_logger(__name__)


class HomePiece(msgspec.Struct, frozen=True):
    name: str
    """File name, such as ``generator-hostb-x3f9a1-0.jsonl``."""
    file: int
    """Inode; it changes when the log was replaced."""
    offset: int
    data: bytes

    @property
    def worker(self) -> str:
        """Name of the log's worker; empty if this is not the name of a log."""
        found = _LOG.fullmatch(self.name)
        return "" if found is None else found["worker"]


class HomeEntry(msgspec.Struct, frozen=True):
    """What one joined host sends at once."""

    pieces: tuple[HomePiece, ...] = ()
    tallies: dict[str, bytes] = {}
    """Complete files by name."""
    ended: tuple[str, ...] = ()
    """In a join's last entry: the workers of which nothing more will come."""


class HomeReader:
    """Reads new data of a joined folder. A later join continues where an earlier one ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets = _read_offsets(folder / _OFFSETS)
        self._tallies: dict[str, bytes] = {}
        self._last = ""
        """Name of the last log in the previous entry."""

    def next_entry(self) -> bytes:
        """Return the next entry, encoded; empty if nothing is new. If it is not delivered, its data
        is skipped, and marked as a gap at home."""
        pieces: list[HomePiece] = []
        room = MAX_ENTRY_BYTES
        # round robin, so that a log that fills every entry does not starve the others
        paths = sorted((self._folder / "logs").glob("*"), key=lambda path: (path.name <= self._last, path.name))
        for path in paths:
            if room > 0 and _LOG.fullmatch(path.name) and (piece := self._piece(path, room)) is not None:
                pieces.append(piece)
                room -= len(piece.data)
                self._last = path.name
        tallies = self._changed_tallies()
        return msgspec.msgpack.encode(HomeEntry(tuple(pieces), tallies)) if pieces or tallies else b""

    def last_entry(self) -> bytes:
        """Return the final entry, which names the workers whose logs are here."""
        found = (_LOG.fullmatch(path.name) for path in (self._folder / "logs").glob("*"))
        names = {one["worker"] for one in found if one is not None and one["worker"] not in _ALONE}
        return msgspec.msgpack.encode(HomeEntry(ended=tuple(sorted(names))[:_MAX_ENDED]))

    def save(self) -> None:
        """Record how far each log was sent. If that fails, a later join sends it again."""
        with contextlib.suppress(OSError):
            write_private(self._folder / _OFFSETS, msgspec.json.encode(self._offsets))

    def _piece(self, path: Path, room: int) -> HomePiece | None:
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                known, offset = self._offsets.get(path.name, (0, 0))
                if found.st_ino != known or found.st_size < offset:
                    # it was replaced or truncated
                    offset = 0
                size = found.st_size
                if size - offset > _MAX_BEHIND_BYTES:
                    offset = size - MAX_ENTRY_BYTES
                data = os.pread(file.fileno(), room, offset)
        except OSError:
            return None
        self._offsets[path.name] = found.st_ino, offset + len(data)
        return HomePiece(path.name, found.st_ino, offset, data) if data else None

    def _changed_tallies(self) -> dict[str, bytes]:
        changed: dict[str, bytes] = {}
        for path in sorted((self._folder / TALLIES).glob("*"))[-_MAX_TALLIES:]:
            try:
                content = path.read_bytes()
            except OSError:
                continue
            if content and self._tallies.get(path.name) != content:
                changed[path.name] = self._tallies[path.name] = content
        return changed


class HomeWriter:
    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._offsets = _read_offsets(run_dir / _OFFSETS)

    def write(self, encoded: bytes) -> HomeEntry:
        """Write one entry; return the part that was written. Refuses undecodable entries, and names
        that are not a joined worker's. Raises OSError."""
        try:
            entry = msgspec.msgpack.decode(encoded, type=HomeEntry)
        except (ValueError, RecursionError) as error:
            _log.warning("home_entry_refused", reason=str(error)[:200])
            return HomeEntry()
        written = list[HomePiece]()
        for piece in entry.pieces:
            if self._is_wanted(piece):
                self._append(piece)
                written.append(piece)
            else:
                _log.warning("home_entry_refused", name=piece.name[:80])
        self._put_tallies(entry.tallies)
        return HomeEntry(tuple(written), ended=entry.ended[:_MAX_ENDED])

    def save(self) -> None:
        """Record how far each log has come, so that a repeated entry writes nothing twice. Raises
        OSError."""
        write_private(self._run_dir / _OFFSETS, msgspec.json.encode(self._offsets))

    def _is_wanted(self, piece: HomePiece) -> bool:
        if len(piece.name.encode()) > _MAX_NAME_BYTES or not is_joined(self._run_dir, piece.worker):
            return False
        has_room = piece.name in self._offsets or len(self._offsets) < _MAX_FILES
        return has_room and piece.offset >= 0 and len(piece.data) <= MAX_ENTRY_BYTES

    def _append(self, piece: HomePiece) -> None:
        path, (known, expected) = self._run_dir / "logs" / piece.name, self._offsets.get(piece.name, (0, 0))
        data, end = piece.data, piece.offset + len(piece.data)
        expected = expected if piece.file == known else 0
        if piece.offset < expected <= end:
            data = data[expected - piece.offset :]
        elif piece.offset > expected:
            data = f"[{piece.offset - expected} bytes did not arrive; the joined host has them]\n".encode() + data
        self._offsets[piece.name] = piece.file, end
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write(data)
        cut(path, max_bytes=_MAX_FILE_BYTES)

    def _put_tallies(self, tallies: Mapping[str, bytes]) -> None:
        folder = self._run_dir / TALLIES
        folder.mkdir(mode=0o700, exist_ok=True)
        there = {path.name for path in folder.iterdir()} if tallies else set[str]()
        for name, content in tallies.items():
            worker, _, epoch = name.rpartition(".")
            fits = len(name.encode()) <= _MAX_NAME_BYTES and len(content) <= _MAX_TALLY_BYTES
            has_room = name in there or len(there) < _MAX_FILES
            if fits and has_room and epoch.isdecimal() and is_joined(self._run_dir, worker):
                write_private(folder / name, content)
                there.add(name)


def is_joined(run_dir: Path, worker: str) -> bool:
    """Return whether this can be a joined host's worker: the run's host has no process of that
    name."""
    if not is_worker_name(worker) or worker in _ALONE:
        return False
    return not (run_dir / PROCESSES / f"{worker}.json").exists()


def _read_offsets(path: Path) -> dict[str, tuple[int, int]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, tuple[int, int]])
    except (OSError, msgspec.DecodeError):
        return {}
