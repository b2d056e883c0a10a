"""A file of lines that another process appends to, or replaces."""

from __future__ import annotations

import os
from pathlib import Path


class GrowingFile:
    """Reads each whole line once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self.num_replaced = 0
        """Times that it was replaced, cut short or removed. Its next lines are of a new file."""

    def read(self, max_bytes: int | None = None) -> list[bytes]:
        """Return the whole lines that are new, without their ends; nothing without a file.
        ``max_bytes``: read about so much at once; None: all. Raises OSError."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self.num_replaced += self._inode != 0
                    self._inode, self._offset = found.st_ino, 0
                file.seek(self._offset)
                new = file.read() if max_bytes is None else file.read(max_bytes) + file.readline()
        except FileNotFoundError:
            self.num_replaced += self._inode != 0
            self._inode, self._offset = 0, 0
            return []
        lines = new.split(b"\n")
        self._offset += len(new) - len(lines.pop())
        return lines
