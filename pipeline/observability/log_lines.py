"""The lines of a run's logs, of all workers in the order of time, and those that come.

They are in ``<run_dir>/logs/*.jsonl``, as ``pipeline.runtime.log`` writes them; those of joined
hosts come home there. A file is read from its end, so that a long log costs no more than a short
one."""

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
"""Most bytes of a file that are read at once: its end at first, or one line."""
_PIECE_BYTES: Final = 1 << 16
"""Bytes of a file that are read at once later, unless one line is longer."""
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
    """The line as it is in the file."""

    def as_json(self) -> str:
        """Return the line as it is in the file, with control characters escaped."""
        return json_safe(self.text)

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
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


class _Position(NamedTuple):
    """How far a file was read."""

    inode: int
    offset: int
    last: int
    """Hash of the last whole line, to find the place again in a file that was cut."""


class LogReader:
    """Reads a run's logs as they grow, in bounded memory."""

    def __init__(
        self,
        run_dir: Path,
        *,
        workers: Container[str] | None = None,
        level: str = "info",
        tail_bytes: int = _TAIL_BYTES,
    ) -> None:
        """``workers``: None for all. ``level``: the least one. ``tail_bytes``: of a file's end that
        are read at first, a megabyte at most."""
        self._tail_bytes = min(tail_bytes, _TAIL_BYTES)
        self._folder = run_dir / "logs"
        self._workers = workers
        self._levels = frozenset(LEVELS[LEVELS.index(level) :]) | {"critical"}
        self._read: dict[Path, _Position] = {}
        self.is_behind = False
        """Whether a file had more new lines than one call returns; the next call goes on."""

    def new(self, last: int | None = None) -> list[LogLine]:
        """Return the lines since the last call, in the order of time.

        At first these are the last ones of each file, of ``tail_bytes`` at most; ``last`` is how
        many of them are returned. Later calls read 64 KiB a file, or one longer line."""
        self.is_behind = False
        lines = (
            line
            for path in sorted(self._folder.glob("*.jsonl"))
            if self._workers is None or path.stem in self._workers
            for line in self._of(path)
        )
        return sorted(lines) if last is None else sorted(heapq.nlargest(last, lines))

    def known(self) -> list[str]:
        """Return the names of the workers that have logs."""
        return sorted(path.stem for path in self._folder.glob("*.jsonl"))

    def newest(self, most: int) -> list[str]:
        """Return the names of the workers whose logs were written last, at most ``most``."""
        found = list[tuple[float, str]]()
        for path in self._folder.glob("*.jsonl"):
            with suppress(OSError):
                found.append((path.stat().st_mtime, path.stem))
        return [name for _, name in heapq.nlargest(most, found)]

    def _of(self, path: Path) -> Iterator[LogLine]:
        known = self._read.get(path)
        for place in (path,) if known is None else self._places(path, known.inode):
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

    def _places(self, path: Path, inode: int) -> list[Path]:
        """Return the files that may have new lines, the oldest first: a file at its limit is
        renamed, and another comes in its place."""
        places = [path]
        for number in range(1, NUM_OLD_FILES + 1):
            if _inode(places[-1]) == inode:
                return places[::-1]
            places.append(path.with_name(f"{path.name}.{number}"))
        # The known one is gone, or the last of those that are kept.
        return places[::-1] if _inode(places[-1]) == inode else [path]

    def _lines(self, path: Path, file: BinaryIO) -> tuple[list[str], bool]:
        """Return the next lines of a file, and whether it has more; note how far it was read."""
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
            # No log has such a line; what follows of it is passed over, too.
            torn = b""
        end = begin + len(found) - len(torn)
        # Of the first reading of a long file, the first line is torn.
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
