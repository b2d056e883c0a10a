"""The lines of a run's logs, of all workers in the order of time, and those that come.

They are in ``<run_dir>/logs/*.jsonl``, as ``pipeline.runtime.log`` writes them; those of joined
hosts come home there. A file is read from its end, so that a long log costs no more than a short
one."""

from __future__ import annotations

import json
import os
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from protocol.printable import printable, printable_line

LEVELS: Final = ("info", "warning", "error")
_TAIL_BYTES: Final = 1 << 20
"""Most bytes of a file that are read at once."""
_LEFT_OUT: Final = frozenset({"at", "worker", "role", "run", "level", "event", "exception", "epoch", "policy_version"})


@dataclass(frozen=True, slots=True, order=True)
class LogLine:
    """One line of a worker's log."""

    at: str
    """ISO 8601 in UTC, so that texts sort as times."""
    worker: str
    level: str
    event: str
    text: str
    """The line as it stands in the file."""

    def shown(self) -> str:
        """Return the line for a terminal, with a traceback below it."""
        fields: dict[str, Any] = json.loads(self.text)
        values = " ".join(f"{name}={value}" for name, value in fields.items() if name not in _LEFT_OUT)
        head = f"{self.at[11:19]} {self.worker:<12} {self.level:<7} {self.event}  {values}"
        trace = str(fields.get("exception", ""))
        below = "".join(f"\n    {line}" for line in printable(trace).split("\n")) if trace else ""
        return printable_line(head).rstrip() + below


def parse(text: str) -> LogLine | None:
    """Return a line of a log; None for one that is torn or no log line."""
    try:
        fields = json.loads(text)
        return LogLine(
            str(fields["at"]), str(fields["worker"]), str(fields["level"]), str(fields["event"]), text.rstrip("\n")
        )
    except (ValueError, KeyError, TypeError):
        return None


class LogReader:
    """Reads a run's logs as they grow."""

    def __init__(self, run_dir: Path, *, workers: Container[str] | None = None, level: str = "info") -> None:
        """``workers``: None for all. ``level``: the least one."""
        self._folder = run_dir / "logs"
        self._workers = workers
        self._levels = frozenset(LEVELS[LEVELS.index(level) :]) | {"critical"}
        self._read: dict[Path, tuple[int, int]] = {}
        """Inode and offset of what was read."""

    def new(self) -> list[LogLine]:
        """Return the lines since the last call, in the order of time; at first at most a megabyte
        of each file."""
        lines = [
            line
            for path in sorted(self._folder.glob("*.jsonl"))
            if self._workers is None or path.stem in self._workers
            for line in self._of(path)
        ]
        return sorted(lines)

    def known(self) -> list[str]:
        """Return the names of the workers that have logs."""
        return sorted(path.stem for path in self._folder.glob("*.jsonl"))

    def _of(self, path: Path) -> list[LogLine]:
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                inode, offset = self._read.get(path, (status.st_ino, 0))
                # A file that was renamed at its limit has another in its place.
                begin = offset if inode == status.st_ino and offset <= status.st_size else 0
                cut = max(begin, status.st_size - _TAIL_BYTES)
                file.seek(cut)
                found = file.read(status.st_size - cut)
        except OSError:
            return []
        if cut > begin:
            found = found.partition(b"\n")[2]
        whole, newline, torn = found.rpartition(b"\n")
        self._read[path] = (status.st_ino, status.st_size - len(torn))
        texts = (whole + newline).decode(errors="replace").splitlines()
        return [line for line in map(parse, texts) if line is not None and line.level in self._levels]
