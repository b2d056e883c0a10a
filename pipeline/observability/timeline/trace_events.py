"""Writes a file of trace events that Perfetto and chrome://tracing can open.

The format is Chrome's Trace Event Format as a JSON object: complete events (``X``), flows (``s``, ``f``)
and metadata (``M``). Times are whole microseconds since 1970. Slices on one track must nest; the caller
ensures that. A flow binds to the slice around its moment, so slices are at least ``LEAST_US`` long and
flows begin and end inside one.

Reference: "Trace Event Format", linked from catapult/docs of the Chromium project."""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self, TextIO

LEAST_US: Final = 4
_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Moment:
    pid: int
    tid: int
    at_us: int


@dataclass(frozen=True, slots=True)
class Slice:
    pid: int
    tid: int
    begin_us: int
    end_us: int

    @property
    def first(self) -> Moment:
        """A moment inside the slice, at its beginning."""
        return Moment(self.pid, self.tid, self.begin_us + 1)

    @property
    def last(self) -> Moment:
        """A moment inside the slice, at its end."""
        return Moment(self.pid, self.tid, self.end_us - 1)


def microseconds(at_s: float) -> int:
    return round(at_s * 1e6)


class TraceEventWriter:
    """Writes events one by one; memory only holds the names of processes and tracks."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._pids: dict[str, int] = {}
        self._tracks: set[tuple[int, int]] = set()
        self._flows = itertools.count(1)
        self.num_events = 0
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')

    @classmethod
    @contextmanager
    def at(cls, path: Path) -> Iterator[Self]:
        """Write the file ``path``, which appears only once complete. Raises OSError."""
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        try:
            with partial.open("x", encoding="utf-8") as file:
                writer = cls(file)
                yield writer
                file.write("\n]}\n")
            partial.replace(path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                partial.unlink()

    def process(self, name: str, *, order: int = 0) -> int:
        """Return the number of a group of tracks, creating it if new. Lower ``order`` is shown first."""
        pid = self._pids.get(name)
        if pid is None:
            pid = self._pids[name] = len(self._pids) + 1
            self._write({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})
            order_event = {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0}
            self._write(order_event | {"args": {"sort_index": order}})
        return pid

    def track(self, pid: int, tid: int, name: str) -> None:
        """Name a track. A process's tracks are shown in the order of their numbers."""
        if (pid, tid) not in self._tracks:
            self._tracks.add((pid, tid))
            self._write({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
            order_event = {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid}
            self._write(order_event | {"args": {"sort_index": tid}})

    def slice(
        self, pid: int, tid: int, name: str, kind: str, begin_us: int, end_us: int, told: Mapping[str, Any] = _NONE
    ) -> Slice:
        """Write an interval. ``kind`` is its category; ``told`` is shown when it is selected."""
        end_us = max(end_us, begin_us + LEAST_US)
        event = {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid, "ts": begin_us}
        # JSON has no NaN, but a loss may be NaN
        whole = {key: None if isinstance(cell, float) and not isfinite(cell) else cell for key, cell in told.items()}
        self._write(event | {"dur": end_us - begin_us, "args": whole})
        return Slice(pid, tid, begin_us, end_us)

    def flow(self, name: str, kind: str, begin: Moment, end: Moment) -> None:
        """Write an arrow from one slice to another, unless it would go back in time."""
        if end.at_us < begin.at_us:
            return
        event = {"name": name, "cat": kind, "id": next(self._flows)}
        self._write(event | {"ph": "s", "pid": begin.pid, "tid": begin.tid, "ts": begin.at_us})
        self._write(event | {"ph": "f", "bp": "e", "pid": end.pid, "tid": end.tid, "ts": end.at_us})

    def _write(self, event: Mapping[str, Any]) -> None:
        self._file.write(",\n" if self.num_events else "\n")
        self._file.write(json.dumps(event, separators=(",", ":"), allow_nan=False))
        self.num_events += 1
