"""A sink's record of its writes: ``<run_dir>/sinks/<sink>.json``, replaced as a whole."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from pipeline.files import write_private
from pipeline.observability.sinks.points import Point

FOLDER: Final = "sinks"


class Mark(msgspec.Struct, frozen=True):
    """The newest point of a series that was written."""

    step: int
    at_s: float


class SinkRecord(msgspec.Struct, frozen=True):
    """A sink of a run."""

    id: str = ""
    """The run's name at the sink, as the sink needs it to go on; empty before the first write."""
    origin_s: float = 0.0
    """Time of the fleet's first row, from which its steps count; 0 before it."""
    marks: dict[str, Mark] = {}
    """By series."""
    trouble: str = ""
    """Why it takes nothing now, in a sentence; empty while it does."""

    def is_new(self, point: Point) -> bool:
        """Whether a point was never written. A learner that went back to a checkpoint makes updates
        again: their steps are old, their times are new."""
        mark = self.marks.get(point.series)
        return mark is None or point.at_s > mark.at_s or point.step > mark.step

    def is_again(self, point: Point) -> bool:
        """Whether a point's step was written before, for an update that was since given up."""
        mark = self.marks.get(point.series)
        return mark is not None and point.step <= mark.step

    def written(self, point: Point) -> SinkRecord:
        """A point was written."""
        return msgspec.structs.replace(self, marks=self.marks | {point.series: Mark(point.step, point.at_s)})

    def passed(self, point: Point) -> SinkRecord:
        """A point was left out: its step was written before."""
        mark = self.marks[point.series]
        return msgspec.structs.replace(self, marks=self.marks | {point.series: Mark(mark.step, point.at_s)})


def record_path(run_dir: Path, sink: str) -> Path:
    """Return the file of a sink's record."""
    return run_dir / FOLDER / f"{sink}.json"


def read_record(run_dir: Path, sink: str) -> SinkRecord:
    """Return a sink's record; an empty one if it is missing or cannot be read."""
    try:
        return msgspec.json.decode(record_path(run_dir, sink).read_bytes(), type=SinkRecord)
    except (OSError, msgspec.MsgspecError):
        return SinkRecord()


def write_record(run_dir: Path, sink: str, record: SinkRecord) -> None:
    """Write a sink's record. Raises OSError."""
    path = record_path(run_dir, sink)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(path, msgspec.json.encode(record))


def forget_trouble(run_dir: Path, sink: str) -> None:
    """Remove the trouble from a sink's record, before the sink is opened."""
    record = read_record(run_dir, sink)
    if record.trouble:
        with suppress(OSError):
            write_record(run_dir, sink, msgspec.structs.replace(record, trouble=""))
