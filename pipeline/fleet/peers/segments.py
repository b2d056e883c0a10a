"""A live run's metrics on disk: Parquet files in ``<run_dir>/observed``, each of two minutes.

``headrace fleet watch --from`` and ``headrace run trace --from`` read such files, too, so the same
code examines a run afterwards. A file is either complete or absent. Above the folder's size limit
the oldest files are deleted. If the disk refuses a file, only those minutes are lost.

Moments that wait for the disk are bounded in number and in rows, whose numbers take 8 bytes
each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.fleet.peers.frame import Frame

if TYPE_CHECKING:
    import pyarrow as pa

OBSERVED: Final = "observed"
"""Name of the folder in the run's folder."""
SEGMENT_S: Final = 120.0
_MAX_UNWRITTEN: Final = 600
"""Most moments that wait for the disk. Beyond it the oldest are dropped, and counted."""
_MAX_ROWS: Final = 500_000
"""Most rows of further tables that wait for the disk."""
_DUE_ROWS: Final = 100_000
"""This many rows of further tables are written before their time."""
_TEXT: Final = frozenset(
    {"worker", "role", "phase", "metric", "sender", "receiver", "waiting_for", "link", "outcome", "wait"}
)
FurtherRows: TypeAlias = "Sequence[Mapping[str, Any]] | NDArray[np.void]"
"""Rows by column, or a structured array."""


@dataclass(frozen=True, slots=True)
class _Moment:
    at_s: float
    frame: Frame
    tables: Mapping[str, pa.Table]
    num_rows: int
    """Rows of all ``tables``."""


class SegmentWriter:
    """Collects moments and writes them as files. ``add`` is quick. What ``take`` returns is slow
    and belongs on a thread, one call at a time."""

    def __init__(self, run_dir: Path, *, keep_bytes: int, segment_s: float = SEGMENT_S) -> None:
        self.folder = run_dir / OBSERVED
        self._keep_bytes = keep_bytes
        self._segment_s = segment_s
        self._moments: deque[_Moment] = deque()
        self._num_rows = 0
        self.num_left_out = 0
        """Moments that were never written."""

    def add(self, at_s: float, frame: Frame, tables: Mapping[str, FurtherRows]) -> None:
        """Add one moment. ``at_s``: wall-clock seconds. ``tables``: rows by the name of a further
        table."""
        made = {name: _table(rows) for name, rows in tables.items() if len(rows)}
        moment = _Moment(at_s, frame, made, sum(table.num_rows for table in made.values()))
        self._moments.append(moment)
        self._num_rows += moment.num_rows
        while len(self._moments) > _MAX_UNWRITTEN or (self._num_rows > _MAX_ROWS and len(self._moments) > 1):
            self._num_rows -= self._moments.popleft().num_rows
            self.num_left_out += 1

    @property
    def num_held_bytes(self) -> int:
        """Size of the values that wait for the disk."""
        return sum(
            moment.frame.values.nbytes + sum(table.nbytes for table in moment.tables.values())
            for moment in self._moments
        )

    def is_due(self) -> bool:
        """Return whether it is time for a file, or there are enough rows."""
        if not self._moments:
            return False
        return self._moments[-1].at_s - self._moments[0].at_s >= self._segment_s or self._num_rows >= _DUE_ROWS

    def take(self) -> Callable[[], None]:
        """Return a function that writes what has been collected, and raises OSError."""
        moments, self._moments = list(self._moments), deque()
        self._num_rows = 0
        return lambda: self._write(moments)

    def _write(self, moments: Sequence[_Moment]) -> None:
        if not moments:
            return
        import pyarrow as pa

        self.folder.mkdir(mode=0o700, exist_ok=True)
        begin_ms = round(1000 * moments[0].at_s)
        self._store(f"metrics-{begin_ms}", _metrics(moments))
        for name in dict.fromkeys(name for moment in moments for name in moment.tables):
            tables = [moment.tables[name] for moment in moments if name in moment.tables]
            self._store(f"{name}-{begin_ms}", pa.concat_tables(tables).unify_dictionaries())
        self._thin()

    def _store(self, name: str, table: pa.Table) -> None:
        import pyarrow.parquet as pq

        partial = self.folder / f"{name}.partial"
        options: dict[str, Any] = {"use_dictionary": [name for name in table.column_names if name in _TEXT]}
        pq.write_table(table, partial, compression="zstd", **options)
        partial.replace(self.folder / f"{name}.parquet")

    def _thin(self) -> None:
        files = sorted(self.folder.glob("*.parquet"), key=_begin_ms, reverse=True)
        size = 0
        for file in files:
            size += file.stat().st_size
            # The newest is kept, however small the limit.
            if size > self._keep_bytes and _begin_ms(file) != _begin_ms(files[0]):
                file.unlink(missing_ok=True)


def observed_files(run_dir: Path, kind: str) -> list[Path]:
    """Return a run's files of one table, oldest first. ``kind`` is ``metrics`` or a further table's
    name."""
    return sorted((run_dir / OBSERVED).glob(f"{kind}-*.parquet"), key=_begin_ms)


def begin_s(file: Path) -> float:
    """Return the time of a file's first moment, in seconds since 1970."""
    return _begin_ms(file) / 1000.0


def _begin_ms(file: Path) -> int:
    number = file.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _metrics(moments: Sequence[_Moment]) -> pa.Table:
    """Return the rows ``time_s, worker, role, phase, metric, value`` of all samples."""
    import pyarrow as pa

    parts: list[pa.Table] = []
    for moment in moments:
        frame = moment.frame
        # an infinite loss is a sample; NaN is none
        at, column = np.nonzero(~np.isnan(frame.values))
        parts.append(
            pa.table(
                {
                    "time_s": pa.array(np.full(len(at), moment.at_s)),
                    "worker": _coded(at, frame.workers),
                    "role": _coded(at, frame.roles),
                    "phase": _coded(at, frame.phases or ("",) * len(frame.workers)),
                    "metric": _coded(column, frame.metrics),
                    "value": pa.array(frame.values[at, column]),
                }
            )
        )
    return pa.concat_tables(parts).unify_dictionaries()


def _coded(indices: Any, names: Sequence[str]) -> Any:
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(pa.array(indices.astype(np.int32)), pa.array(list(names), pa.string()))


def _table(rows: FurtherRows) -> pa.Table:
    import pyarrow as pa

    if isinstance(rows, np.ndarray):
        columns: dict[str, Any] = {name: rows[name] for name in rows.dtype.names or ()}
    else:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
    return pa.table({name: _column(name, cells) for name, cells in columns.items()})


def _column(name: str, cells: Any) -> Any:
    import pyarrow as pa

    if name in _TEXT:
        return pa.array(cells, pa.string()).dictionary_encode()
    return pa.array(cells) if isinstance(cells, np.ndarray) else pa.array(cells, pa.float64())
