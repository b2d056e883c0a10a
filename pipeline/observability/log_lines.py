"""Reads the logs of a run's workers, merged in order of time, and follows them.

They are in ``<run_dir>/logs/*.jsonl``, as ``pipeline.runtime.log`` writes them; joined hosts send theirs
there. Files are read from the end, so a long log costs no more than a short one."""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from pipeline.runtime.log import NUM_OLD_FILES
from protocol.printable import json_safe, printable, printable_line

LEVELS: Final = ("info", "warning", "error")
_TAIL_BYTES: Final = 1 << 20
"""Maximum bytes read from a file at first (from its end), or for one line."""
_PIECE_BYTES: Final = 1 << 16
"""Maximum bytes read at once later, unless a line is longer."""
_LEFT_OUT: Final = frozenset({"at", "worker", "role", "run", "level", "event", "exception", "epoch", "policy_version"})


@dataclass(frozen=True, slots=True, order=True)
class LogLine:
    at: str
    """ISO 8601 in UTC, so that text sorts by time."""
    worker: str
    level: str
    event: str
    text: str
    """The line as it is in the file."""

    def as_json(self) -> str:
        """Return the original line with control characters escaped."""
        return json_safe(self.text)

    def shown(self) -> str:
        """Format the line for a terminal, followed by its traceback if any."""
        fields: dict[str, Any] = json.loads(self.text)
        values = " ".join(f"{name}={value}" for name, value in fields.items() if name not in _LEFT_OUT)
        head = f"{self.at[11:19]} {self.worker:<12} {self.level:<7} {self.event}  {values}"
        trace = str(fields.get("exception", ""))
        below = "".join(f"\n    {line}" for line in printable(trace).split("\n")) if trace else ""
        return printable_line(head).rstrip() + below


def parse(text: str) -> LogLine | None:
    """Parse a line; None if it is torn or not a log line."""
    try:
        fields = json.loads(text)
        return LogLine(
            str(fields["at"]), str(fields["worker"]), str(fields["level"]), str(fields["event"]), text.rstrip("\n")
        )
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


class _Position(NamedTuple):
    """How far a file has been read."""

    inode: int
    offset: int
    last: int
    """Hash of the last complete line, to find the place again in a truncated file."""


class LogReader:
    """Follows a run's logs in bounded memory."""

    def __init__(
        self,
        run_dir: Path,
        *,
        workers: Container[str] | None = None,
        level: str = "info",
        tail_bytes: int = _TAIL_BYTES,
    ) -> None:
        """``workers``: None for all. ``level``: the minimum. ``tail_bytes``: how much of a file's end is
        read at first, at most a megabyte."""
        self._tail_bytes = min(tail_bytes, _TAIL_BYTES)
        self._folder = run_dir / "logs"
        self._workers = workers
        self._levels = frozenset(LEVELS[LEVELS.index(level) :]) | {"critical"}
        self._read: dict[Path, _Position] = {}
        self.is_behind = False
        """Whether a file had more new lines than one call returns; call again for the rest."""

    def new(self, last: int | None = None) -> list[LogLine]:
        """Return the lines since the last call, in order of time.

        The first call returns the last lines of each file, reading up to ``tail_bytes`` of it; ``last``
        limits their number. Later calls read 64 KiB per file, or one longer line."""
        self.is_behind = False
        lines = (
            line
            for path in sorted(self._folder.glob("*.jsonl"))
            if self._workers is None or path.stem in self._workers
            for line in self._new_lines(path)
        )
        return sorted(lines) if last is None else sorted(heapq.nlargest(last, lines))

    def known(self) -> list[str]:
        """Return the names of the workers that have logs."""
        return sorted(path.stem for path in self._folder.glob("*.jsonl"))

    def newest(self, most: int) -> list[str]:
        """Return up to ``most`` workers whose logs were written last."""
        found = list[tuple[float, str]]()
        for path in self._folder.glob("*.jsonl"):
            with suppress(OSError):
                found.append((path.stat().st_mtime, path.stem))
        return [name for _, name in heapq.nlargest(most, found)]

    def _new_lines(self, path: Path) -> Iterator[LogLine]:
        known = self._read.get(path)
        for place in (path,) if known is None else self._files(path, known.inode):
            try:
                with place.open("rb") as file:
                    found, has_more = self._lines(path, file)
            except OSError:
                continue
            for line in map(parse, found):
                if line is not None and line.level in self._levels:
                    yield line
            if has_more:
                self.is_behind = True
                return

    def _files(self, path: Path, inode: int) -> list[Path]:
        """Return the files that may have new lines, oldest first: a full file is renamed and replaced by
        a new one."""
        places = [path]
        for number in range(1, NUM_OLD_FILES + 1):
            if _inode(places[-1]) == inode:
                return places[::-1]
            places.append(path.with_name(f"{path.name}.{number}"))
        # The known file is gone, or is the oldest one kept.
        return places[::-1] if _inode(places[-1]) == inode else [path]

    def _lines(self, path: Path, file: BinaryIO) -> tuple[list[str], bool]:
        """Return the next lines of a file and whether there are more; record how far it was read."""
        status, known = os.fstat(file.fileno()), self._read.get(path)
        begin, is_cut = 0, False
        if known is None:
            begin = max(0, status.st_size - self._tail_bytes)
        elif known.inode == status.st_ino:
            is_cut = known.offset > status.st_size
            begin = 0 if is_cut else known.offset
        found = _read_at(file, begin, _TAIL_BYTES if known is None or is_cut else _PIECE_BYTES)
        if b"\n" not in found:
            found = _read_at(file, begin, _TAIL_BYTES)
        whole, newline, torn = found.rpartition(b"\n")
        if not newline and len(torn) >= _TAIL_BYTES:
            # No log has such a line; skip it, and what follows of it.
            torn = b""
        end = begin + len(found) - len(torn)
        # When a long file is first read, the first line is torn.
        lines = whole.split(b"\n")[1 if known is None and begin > 0 else 0 :] if whole else []
        if is_cut and known is not None:
            hashes = list(map(hash, lines))
            lines = lines[len(hashes) - hashes[::-1].index(known.last) :] if known.last in hashes else lines
        last = hash(lines[-1]) if lines else (known.last if known is not None else 0)
        self._read[path] = _Position(status.st_ino, end, last)
        return [line.decode(errors="replace") for line in lines], status.st_size > begin + len(found)


def _read_at(file: BinaryIO, offset: int, most: int) -> bytes:
    file.seek(offset)
    return file.read(most)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1
