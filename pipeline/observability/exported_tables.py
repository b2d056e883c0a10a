"""Exports a run's records as the tables ``metrics``, ``states``, ``links`` and ``work``.

``headrace fleet watch --from`` and ``headrace run trace --from`` read them. Times are seconds since
1970. ``work`` has the scored messages of the run's host, each with its service time only, and the
learner's updates. Files of ``observed`` are read one after another, so memory holds two minutes.
Unreadable files are skipped and counted."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from pipeline.files.columns import arrow
from pipeline.fleet.flow.rows import LinkRow, StateRow
from pipeline.fleet.peers.segments import observed_files
from pipeline.observability.history import HISTORY_NAME, HistoryTail, UpdateRow
from pipeline.runtime.message_record import MessageOutcome
from protocol.errors import ConfigError, DataError
from protocol.ids import Role

_TEXTS: Final = frozenset({"worker", "role", "phase", "metric", "waiting_for", "sender", "receiver", "kind"})
WORK_COLUMNS: Final = ("worker", "kind", "start_s", "duration_s", "size", "ok")
COLUMNS: Final = {
    "metrics": ("time_s", "worker", "role", "phase", "metric", "value"),
    "states": (*(one.name for one in fields(StateRow)), "given_s"),
    "links": (*(one.name for one in fields(LinkRow)), "given_s"),
    "work": WORK_COLUMNS,
}
_SOURCES: Final = {"metrics": "metrics", "states": "states", "links": "links", "work": "messages"}


@dataclass(slots=True)
class ExportReport:
    rows: dict[str, int] = field(default_factory=dict[str, int])
    """Number of rows by table; a table without rows has no file."""
    num_skipped: int = 0
    """Damaged files of ``observed``, and damaged lines of the history."""
    without_messages: list[str] = field(default_factory=list[str])
    """Workers with states but no messages; their work is missing from ``work``."""


def export_tables(
    run_dir: Path, out: Path, *, as_csv: bool = False, progress: Callable[[int, int], None] = lambda *_: None
) -> ExportReport:
    """Write a run's tables to the new folder ``out``, which appears only once complete.

    ``progress`` receives the number of files read and their total. Raises ConfigError: ``out`` exists.
    Raises DataError: nothing is recorded. Raises OSError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--tables {out} exists; give a new or an empty folder")
    files = {name: observed_files(run_dir, source) for name, source in _SOURCES.items()}
    report, num_files, num_read = ExportReport(), sum(map(len, files.values())), 0
    seen: dict[str, set[str]] = {name: set[str]() for name in files}
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir(parents=True)
    try:
        for name, sources in files.items():
            with contextlib.closing(_Table(partial, name, as_csv=as_csv)) as table:
                for file in sources:
                    try:
                        rows = _read(file)
                        if "worker" in rows.column_names:
                            seen[name].update(map(str, arrow(".compute").unique(rows.column("worker")).to_pylist()))
                        table.add(_work_of(rows) if name == "work" else rows)
                    except DataError:
                        report.num_skipped += 1
                    num_read += 1
                    progress(num_read, num_files)
                if name == "work":
                    for rows in _updates(run_dir, report):
                        table.add(rows)
            if table.num_rows:
                report.rows[name] = table.num_rows
        report.without_messages = sorted(seen["states"] - seen["work"])
        if not report.rows:
            raise DataError(
                f"{run_dir} has recorded nothing that can be read: the observer writes files every two minutes, and at "
                "the run's end"
            )
        # ``out`` is absent or an empty folder.
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return report


class _Table:
    """One table's file, created with its first rows."""

    def __init__(self, folder: Path, name: str, *, as_csv: bool) -> None:
        pa = arrow()
        kinds = {"ok": pa.bool_()}
        self._schema: Any = pa.schema(
            [(column, pa.string() if column in _TEXTS else kinds.get(column, pa.float64())) for column in COLUMNS[name]]
        )
        self._path = folder / f"{name}.{'csv' if as_csv else 'parquet'}"
        self._as_csv = as_csv
        self._writer: Any = None
        self.num_rows = 0

    def add(self, rows: Any) -> None:
        """Write rows; columns they lack are left empty. Raises DataError."""
        pa = arrow()
        try:
            columns = [
                _cast(rows.column(column.name), column.type)
                if column.name in rows.column_names
                else pa.nulls(rows.num_rows, column.type)
                for column in self._schema
            ]
        except (pa.ArrowException, ValueError) as error:
            raise DataError(f"{self._path.name}: {error}") from error
        if not rows.num_rows:
            return
        if self._writer is None:
            self._writer = (
                arrow(".csv").CSVWriter(str(self._path), self._schema)
                if self._as_csv
                else arrow(".parquet").ParquetWriter(str(self._path), self._schema, compression="zstd")
            )
        self._writer.write_table(pa.table(columns, schema=self._schema))
        self.num_rows += rows.num_rows

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _cast(column: Any, kind: Any) -> Any:
    """Cast a column; numbers may lose precision."""
    return arrow(".compute").cast(column, kind, safe=False)


def _read(file: Path) -> Any:
    pa = arrow()
    try:
        return arrow(".parquet").read_table(file)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as Parquet: {error}") from error


def _work_of(messages: Any) -> Any:
    """Return the pieces of work whose result is in the ledger. Failed ones cannot be told from work
    that was no longer wanted, and are counted in the metrics."""
    pa, pc = arrow(), arrow(".compute")
    try:
        stored = pc.equal(messages.column("outcome"), MessageOutcome.STORED.name.lower())
        worker = _cast(messages.column("worker"), pa.string())
        kind = pc.replace_substring_regex(worker, r"-\d+$", "")
        table = pa.table(
            {
                "worker": worker,
                "kind": kind,
                "start_s": pc.subtract(
                    messages.column("time_s"), pc.add(messages.column("service_s"), messages.column("storing_s"))
                ),
                "duration_s": messages.column("service_s"),
                "size": messages.column("size"),
                "ok": stored,
            }
        )
        return table.filter(pc.and_(stored, pc.not_equal(kind, str(Role.LEARNER))))
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise DataError(f"not a table of messages: {error}") from error


def _updates(run_dir: Path, report: ExportReport) -> Iterator[Any]:
    tail = HistoryTail(run_dir / HISTORY_NAME)
    rows = [row for row in tail.read() if isinstance(row, UpdateRow)]
    report.num_skipped += tail.num_skipped
    if rows:
        cells = [
            (
                str(Role.LEARNER), "update", row.at_s - row.publish_s - row.record_s - row.compute_s,
                row.compute_s, float(row.num_response_tokens), True,
            )
            for row in rows
        ]  # fmt: skip
        yield arrow().table(dict(zip(WORK_COLUMNS, map(list, zip(*cells, strict=True)), strict=True)))
