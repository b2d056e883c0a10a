"""Tables of worker states and of links, in CSV or Parquet files, and their replay.

A table with the columns sender and receiver is one of links; one with worker and any column of a
state is one of states. Only ``time_s`` and the names are needed: what is absent or empty is
unknown. Rows may come in any order and twice. A replay goes in ticks of a second, or of the rows'
own interval where that is longer, up to five seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.files.columns import Cell, Column, Columns, column_names, read_columns, table_files
from pipeline.flow.rows import FlowIncident, LinkRow, StateRow
from pipeline.flow.watcher import FlowWatch
from protocol.errors import DataError

_TEXTS = frozenset({"role", "waiting_for"})
_NAMES = {StateRow: ("worker",), LinkRow: ("sender", "receiver")}
_LONGEST_TICK_S = 5.0
_EMPTY_S = 60.0
"""A stretch without rows that is longer is passed over."""


def _columns(row: type[StateRow | LinkRow]) -> tuple[Column, ...]:
    needed = [Column("time_s", Cell.SECONDS), *(Column(name, Cell.TEXT) for name in _NAMES[row])]
    names = [one.name for one in fields(row) if one.name not in ("time_s", *_NAMES[row])]
    return (*needed, *(Column(n, Cell.TEXT, "") if n in _TEXTS else Column(n, Cell.NUMBER, nan) for n in names))


STATE_COLUMNS = _columns(StateRow)
LINK_COLUMNS = _columns(LinkRow)


@dataclass(slots=True)
class FlowTables:
    """Everything that was read."""

    states: list[Columns] = field(default_factory=list[Columns])
    links: list[Columns] = field(default_factory=list[Columns])
    notes: list[str] = field(default_factory=list[str])
    """Sentences about files and columns that were not read, and columns that are absent."""


def read_flow_tables(paths: Sequence[Path]) -> FlowTables:
    """Read files and folders. Raises DataError: none of them is a table of states or links, or a
    cell cannot be read."""
    found = FlowTables()
    others = list[str]()
    for path in (file for given in paths for file in table_files(given)):
        names = column_names(path)
        if {"sender", "receiver"} <= set(names):
            _add(found, found.links, read_columns(path, LINK_COLUMNS), "produced sent received done")
        elif "worker" in names and set(names) & {column.name for column in STATE_COLUMNS[3:]} - {"role"}:
            _add(
                found, found.states, read_columns(path, STATE_COLUMNS), "waiting_for done in_flight input_depth errors"
            )
        else:
            others.append(f"{path.name} has {', '.join(names[:12]) or 'no column'}")
    if not found.states and not found.links:
        state, link = (", ".join(column.name for column in columns) for columns in (STATE_COLUMNS, LINK_COLUMNS))
        raise DataError(f"no table of states or links: {'; '.join(others)}; expected {state}; or {link}")
    found.notes += [f"{words}: it is no table of states or links, and was not read" for words in others]
    return found


def _add(found: FlowTables, tables: list[Columns], table: Columns, matters: str) -> None:
    tables.append(table)
    if table.unknown:
        found.notes.append(f"{table.path.name}: columns that were not read: {', '.join(table.unknown[:20])}")
    absent = [name for name in matters.split() if name in table.absent]
    if absent:
        found.notes.append(f"{table.path.name}: no column {', '.join(absent)}: what it would show is not known")


def replay(tables: FlowTables, watch: FlowWatch) -> Iterator[FlowIncident]:
    """Yield the incidents that an observer of these rows would have named, in their order."""
    states = [(table, np.argsort(table.numbers["time_s"], kind="stable")) for table in tables.states]
    links = [(table, np.argsort(table.numbers["time_s"], kind="stable")) for table in tables.links]
    every = [table.numbers["time_s"] for table, _ in (*states, *links) if table.num_rows]
    if not every:
        return
    times = np.unique(np.concatenate(every))
    step_s = min(max(1.0, _spacing_s(tables)), _LONGEST_TICK_S)
    readers = [_RowReader(table, order, StateRow) for table, order in states]
    link_readers = [_RowReader(table, order, LinkRow) for table, order in links]
    now_s = float(times[0])
    while now_s <= times[-1] + step_s:
        yield from watch.tick(
            now_s,
            [row for reader in readers for row in reader.until(now_s) if isinstance(row, StateRow)],
            [row for reader in link_readers for row in reader.until(now_s) if isinstance(row, LinkRow)],
        )
        at = int(np.searchsorted(times, now_s, side="right"))
        now_s += step_s
        if at < len(times) and times[at] - now_s > _EMPTY_S:
            now_s = float(times[at])


def _spacing_s(tables: FlowTables) -> float:
    """Return the usual time between two rows of one worker or link, in seconds."""
    spacings = list[NDArray[np.float64]]()
    for table in (*tables.states, *tables.links):
        names = [table.texts[name].codes for name in ("worker", "sender", "receiver") if name in table.texts]
        order = np.lexsort((table.numbers["time_s"], *names))
        same = np.ones(max(0, table.num_rows - 1), dtype=bool)
        for codes in names:
            same &= np.diff(codes[order]) == 0
        gaps = np.diff(table.numbers["time_s"][order])[same]
        spacings.append(gaps[gaps > 0])
    gaps = np.concatenate(spacings) if spacings else np.zeros(0)
    return float(np.median(gaps)) if len(gaps) else 1.0


class _RowReader:
    """Makes rows of one table, in the order of their times."""

    def __init__(self, table: Columns, order: NDArray[np.intp], row: type[StateRow | LinkRow]) -> None:
        self._times = table.numbers["time_s"][order]
        names = [one.name for one in fields(row)]
        texts = {name: column.array()[order] for name, column in table.texts.items()}
        numbers = {name: column[order] for name, column in table.numbers.items()}
        self._columns = [texts[name] if name in texts else numbers[name] for name in names]
        self._row = row
        self._next = 0

    def until(self, now_s: float) -> list[StateRow | LinkRow]:
        """Return the rows up to a time that were not yet returned."""
        end = int(np.searchsorted(self._times, now_s, side="right"))
        cells = [column[self._next : end].tolist() for column in self._columns]
        self._next = end
        return [self._row(*map(_finite, row)) for row in zip(*cells, strict=True)]


def _finite(cell: Any) -> Any:
    return nan if isinstance(cell, float) and not isfinite(cell) else cell
