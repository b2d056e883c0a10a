"""A run's incidents on the disk: ``<run_dir>/incidents.jsonl``.

One writer appends, whole lines, flushed. A file at its limit is renamed to ``incidents.1.jsonl``,
in place of an older one. The open incidents are then the first lines of the new file.
Readers skip damaged lines and count them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from pipeline.files import GrowingFile
from pipeline.incidents.records import Incident, IncidentRecord, decode, encode, fold

INCIDENTS_NAME: Final = "incidents.jsonl"
OLD_INCIDENTS_NAME: Final = "incidents.1.jsonl"
MAX_FILE_BYTES: Final = 8 << 20
_MAX_KNOWN: Final = 10_000
_READ_BYTES: Final = 1 << 20


class IncidentFile:
    """Appends records. Made by the one process that writes a run's incidents."""

    def __init__(self, run_dir: Path, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._path = run_dir / INCIDENTS_NAME
        self._max_bytes = max_bytes

    def append(self, records: Sequence[IncidentRecord], still_open: Iterable[Incident] = ()) -> None:
        """Write records; ``still_open`` begin the next file, should this one be full. Raises
        OSError."""
        if not records:
            return
        lines = b"".join(map(encode, records))
        if self._size() + len(lines) > self._max_bytes:
            kept = (record for incident in still_open for record in incident.records if record not in records)
            lines = b"".join(map(encode, kept)) + lines
            if self._path.exists():
                self._path.replace(self._path.with_name(OLD_INCIDENTS_NAME))
        with self._path.open("ab") as file:
            if _is_torn(self._path):
                file.write(b"\n")
            file.write(lines)

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0


def _is_torn(path: Path) -> bool:
    """Return whether a crash has left a line without its end."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class RunIncidents:
    """Reads a run's incidents as their file grows, in bounded memory."""

    def __init__(self, run_dir: Path) -> None:
        self._old = GrowingFile(run_dir / OLD_INCIDENTS_NAME)
        self._new = GrowingFile(run_dir / INCIDENTS_NAME)
        self._found: dict[int, Incident] = {}
        self.num_skipped = 0
        """Damaged lines."""

    def read(self) -> tuple[Incident, ...]:
        """Return all incidents that are known, the oldest first: the newest 10,000. Raises
        OSError."""
        for file in (self._old, self._new):
            while lines := file.read(_READ_BYTES):
                for line in lines:
                    self._take(line)
        while len(self._found) > _MAX_KNOWN:
            del self._found[next(iter(self._found))]
        return tuple(self._found.values())

    def _take(self, line: bytes) -> None:
        record = decode(line)
        if record is None:
            self.num_skipped += bool(line)
            return
        incident = self._found.get(record.number)
        # A renamed file is read again, and a new one begins with open incidents.
        if incident is None or (record not in incident.records and record.at_s >= incident.records[-1].at_s):
            self._found[record.number] = fold(incident, record)
