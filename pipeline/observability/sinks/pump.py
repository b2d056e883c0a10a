"""Brings a run's points to one sink, each exactly once, even across restarts of the run.

A pump follows the histories of updates, critic and fleet, writes to a sink, and keeps the sink's record. A
write may take as long as the network does, so each pump has its own thread or process. A sink that fails
is reopened after growing pauses; meanwhile, rows wait in the histories."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from pipeline.files import write_private
from pipeline.observability.fleet_history import fleet_history
from pipeline.observability.history import HISTORY_NAME, VALUE_HISTORY_NAME, run_history
from pipeline.observability.sinks.points import MAIN, Axis, Point, RowNames, fleet_point
from pipeline.observability.sinks.seam import Sink, SinkFailed, VoidingSink

FOLDER: Final = "sinks"


class Mark(msgspec.Struct, frozen=True):
    """The newest point of a series that was written."""

    step: int
    at_s: float


class SinkRecord(msgspec.Struct, frozen=True):
    """What is remembered about a run's sink."""

    id: str = ""
    """The run's id at the sink, needed to continue it; empty before the first write."""
    origin_s: float = 0.0
    """Time of the fleet's first row, from which its steps are counted; 0 before it."""
    marks: dict[str, Mark] = {}
    """Newest point by series."""
    trouble: str = ""
    """Why the sink accepts nothing now, as a sentence; empty while it does."""

    def is_new(self, point: Point) -> bool:
        """Whether a point was never written. A learner that resumed from an older checkpoint repeats
        updates: their steps are old, but their times are new."""
        mark = self.marks.get(point.series)
        return mark is None or point.at_s > mark.at_s or point.step > mark.step

    def is_again(self, point: Point) -> bool:
        """Whether the point's step was already written, for an update that was taken back since."""
        mark = self.marks.get(point.series)
        return mark is not None and point.step <= mark.step

    def written(self, point: Point) -> SinkRecord:
        """Return the record after a point was written."""
        return msgspec.structs.replace(self, marks=self.marks | {point.series: Mark(point.step, point.at_s)})

    def passed(self, point: Point) -> SinkRecord:
        """Return the record after a point was skipped because its step was already written."""
        mark = self.marks[point.series]
        return msgspec.structs.replace(self, marks=self.marks | {point.series: Mark(mark.step, point.at_s)})


def record_path(run_dir: Path, sink: str) -> Path:
    return run_dir / FOLDER / f"{sink}.json"


def read_record(run_dir: Path, sink: str) -> SinkRecord:
    """Return a sink's record; an empty one if it is missing or unreadable."""
    try:
        return msgspec.json.decode(record_path(run_dir, sink).read_bytes(), type=SinkRecord)
    except (OSError, msgspec.MsgspecError):
        return SinkRecord()


def write_record(run_dir: Path, sink: str, record: SinkRecord) -> None:
    path = record_path(run_dir, sink)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(path, msgspec.json.encode(record))


def forget_trouble(run_dir: Path, sink: str) -> None:
    """Clear the trouble in a sink's record, before the sink is opened."""
    record = read_record(run_dir, sink)
    if record.trouble:
        with suppress(OSError):
            write_record(run_dir, sink, msgspec.structs.replace(record, trouble=""))


_FIRST_PAUSE_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 300.0
_MAX_READ: Final = 500
_MAX_REASON: Final = 500


class HistoryPoints:
    """The points of a run's histories that have not been read yet."""

    def __init__(self, run_dir: Path, origin_s: float) -> None:
        """``origin_s``: time of the fleet's first row; 0 if unknown yet."""
        self.origin_s = origin_s
        self._histories = [
            (names, run_history(run_dir / name).tail(names.clear))
            for name, names in ((HISTORY_NAME, RowNames()), (VALUE_HISTORY_NAME, RowNames()))
        ]
        self._fleet = fleet_history(run_dir).tail()

    def read(self) -> list[Point]:
        """Return the next points of each file, at most some hundreds. A history that was replaced is read
        from its start. Raises OSError."""
        points = [names.point(row) for names, rows in self._histories for row in islice(rows, _MAX_READ)]
        for row in islice(self._fleet, _MAX_READ):
            self.origin_s = self.origin_s or row.at_s
            points.append(fleet_point(row, self.origin_s))
        return points


class Pump:
    """Writes one run to one sink. Used by one thread."""

    def __init__(self, sink: str, run_dir: Path, open_sink: Callable[[str], Sink]) -> None:
        """``open_sink`` takes the run's id at the sink ("" for a new run) and raises SinkFailed."""
        self._name, self._run_dir, self._open = sink, run_dir, open_sink
        self._record = read_record(run_dir, sink)
        self._history = HistoryPoints(run_dir, self._record.origin_s)
        self._pending: list[Point] = []
        self._sink: Sink | None = None
        self._begun: set[Axis] = set()
        """Axes of which the open sink has points."""
        self._num_failed = 0
        self._next_s = 0.0

    @property
    def record(self) -> SinkRecord:
        return self._record

    def turn(self, now: float, *, at_once: bool = False) -> bool:
        """Write what is new; return whether that was everything. ``now`` is monotonic; ``at_once`` skips
        the pause after a failure."""
        if now < self._next_s and not at_once:
            return False
        try:
            while self._pending or self._read_new():
                self._write()
        except SinkFailed as error:
            self._fail(now, str(error))
            return False
        if self._record.trouble:
            self._save(msgspec.structs.replace(self._record, trouble=""))
        self._num_failed = 0
        return True

    def close(self, *, has_failed: bool = False) -> None:
        """Close the sink, which may wait for the network."""
        sink, self._sink = self._sink, None
        if sink is not None:
            try:
                sink.close(has_failed=has_failed)
            except SinkFailed as error:
                self._save(msgspec.structs.replace(self._record, trouble=str(error)[:_MAX_REASON]))

    def _read_new(self) -> bool:
        """Read what is new; return whether there was anything. Raises SinkFailed."""
        try:
            read = self._history.read()
        except OSError as error:
            raise SinkFailed(f"the history cannot be read: {error}") from error
        self._record = msgspec.structs.replace(self._record, origin_s=self._history.origin_s)
        self._pending += filter(self._record.is_new, read)
        return bool(read)

    def _write(self) -> None:
        """Write what is pending, and then the record."""
        if not self._pending:
            return
        sink = self._sink or self._opened()
        voiding = sink if isinstance(sink, VoidingSink) else None
        record, points = self._record, list[Point]()
        for point in self._pending:
            if voiding is None and record.is_again(point):
                record = record.passed(point)
                continue
            if voiding is not None and (step := self._void_from(point, record)) is not None:
                sink.write(points)
                points = []
                voiding.restart(point.axis, step)
            self._begun.add(point.axis)
            points.append(point)
            record = record.written(point)
        sink.write(points)
        self._pending.clear()
        self._save(record)

    def _void_from(self, point: Point, record: SinkRecord) -> int | None:
        """Return the step from which a point's axis must be voided before writing it, or None."""
        if record.is_again(point) and point.series == MAIN[point.axis]:
            return point.step
        mark = record.marks.get(MAIN[point.axis])
        # A process that was killed may have written more than its record says.
        return mark.step + 1 if mark is not None and point.axis not in self._begun else None

    def _opened(self) -> Sink:
        self._begun.clear()
        self._sink = sink = self._open(self._record.id)
        self._save(msgspec.structs.replace(self._record, id=sink.id))
        return sink

    def _fail(self, now: float, reason: str) -> None:
        self._next_s = now + min(_FIRST_PAUSE_S * 2.0**self._num_failed, _LONGEST_PAUSE_S)
        self._num_failed += 1
        sink, self._sink = self._sink, None
        if sink is not None:
            with suppress(SinkFailed):
                sink.close(has_failed=True)
        if self._record.trouble != reason[:_MAX_REASON]:
            self._save(msgspec.structs.replace(self._record, trouble=reason[:_MAX_REASON]))

    def _save(self, record: SinkRecord) -> None:
        self._record = record
        # A full disk also stops the run's workers, which report it.
        with suppress(OSError):
            write_record(self._run_dir, self._name, record)
