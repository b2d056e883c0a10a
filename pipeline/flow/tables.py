"""Tables of worker states and of links, in CSV or Parquet files, and their replay.

A table with the columns sender and receiver is one of links; one with worker and any column of a
state is one of states. Only ``time_s`` and the names are needed: what is absent or empty is
unknown. Rows may come in any order and twice. A replay goes in ticks of a second, or of the rows'
own interval where that is longer, up to five seconds.

A row counts from its ``time_s`` on, or from ``given_s`` where a table has that column. An observer
gives the old row of a silent worker again at each moment: that is how silence is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import inf, isfinite, nan
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


_GIVEN = Column("given_s", Cell.NUMBER, nan)
STATE_COLUMNS = (*_columns(StateRow), _GIVEN)
LINK_COLUMNS = (*_columns(LinkRow), _GIVEN)


@dataclass(slots=True)
class FlowTables:
    """Everything that was read."""

    states: list[Columns] = field(default_factory=list[Columns])
    links: list[Columns] = field(default_factory=list[Columns])
    notes: list[str] = field(default_factory=list[str])
    """Sentences about files and columns that were not read, and columns that are absent."""


def read_flow_tables(paths: Sequence[Path]) -> FlowTables:
    """Read files and folders; damaged files of a folder are left out. Raises DataError: none of
    them is a table of states or links, or a cell of a given file cannot be read."""
    found = FlowTables()
    others = dict[str, list[str]]()
    for given in paths:
        for path in table_files(given):
            try:
                columns = add_table(found, path)
            except DataError as error:
                if not given.is_dir():
                    raise
                found.notes.append(f"left out: {error}")
            else:
                if columns:
                    others.setdefault(columns, []).append(path.name)
    if not found.states and not found.links:
        state, link = (", ".join(column.name for column in columns[:-1]) for columns in (STATE_COLUMNS, LINK_COLUMNS))
        had = "; ".join([f"{_files(names)} {columns}" for columns, names in others.items()] + found.notes[:2])
        raise DataError(f"no table of states or links: {had}; expected {state}; or {link}")
    found.notes += [
        f"{_files(names)} {columns}: no table of states or links, and was not read" for columns, names in others.items()
    ]
    return found


def _files(names: Sequence[str]) -> str:
    return f"{names[0]} has" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more have"


def add_table(found: FlowTables, path: Path) -> str:
    """Read one file into ``found``; return its columns in words when it is of another kind, else
    "". Raises DataError."""
    names = column_names(path)
    if {"sender", "receiver"} <= set(names):
        _add(found, found.links, read_columns(path, LINK_COLUMNS), "produced sent received done")
    elif "worker" in names and set(names) & {column.name for column in STATE_COLUMNS[3:]} - {"role"}:
        _add(found, found.states, read_columns(path, STATE_COLUMNS), "waiting_for done in_flight input_depth errors")
    else:
        return ", ".join(names[:12]) or "no column"
    return ""


def _add(found: FlowTables, tables: list[Columns], table: Columns, matters: str) -> None:
    tables.append(table)
    if table.unknown:
        found.notes.append(f"{table.path.name}: columns that were not read: {', '.join(table.unknown[:20])}")
    absent = [name for name in matters.split() if name in table.absent]
    if absent:
        found.notes.append(f"{table.path.name}: no column {', '.join(absent)}: what it would show is not known")


def replay(tables: FlowTables, watch: FlowWatch) -> list[FlowIncident]:
    """Return the incidents that an observer of these rows would have named, in their order."""
    return replay_piece(tables, watch)[0]


def replay_piece(tables: FlowTables, watch: FlowWatch, from_s: float = -inf) -> tuple[list[FlowIncident], float]:
    """Replay the rows that follow those of an earlier piece; return the incidents, and the time at
    which the next piece may begin. ``from_s``: that time of the earlier piece."""
    states = [(table, _given_s(table)) for table in tables.states if table.num_rows]
    links = [(table, _given_s(table)) for table in tables.links if table.num_rows]
    if not states and not links:
        return [], from_s
    times = np.unique(np.concatenate([given_s for _, given_s in (*states, *links)]))
    step_s = min(max(1.0, _spacing_s(tables)), _LONGEST_TICK_S)
    readers = [_RowReader(table, given_s, StateRow) for table, given_s in states]
    link_readers = [_RowReader(table, given_s, LinkRow) for table, given_s in links]
    found = list[FlowIncident]()
    now_s = max(float(times[0]), from_s)
    while now_s <= times[-1] + step_s:
        found += watch.tick(
            now_s,
            [row for reader in readers for row in reader.until(now_s) if isinstance(row, StateRow)],
            [row for reader in link_readers for row in reader.until(now_s) if isinstance(row, LinkRow)],
        )
        at = int(np.searchsorted(times, now_s, side="right"))
        now_s += step_s
        if at < len(times) and times[at] - now_s > _EMPTY_S:
            now_s = float(times[at])
    return found, now_s


def _given_s(table: Columns) -> NDArray[np.float64]:
    """Return the time from which each row counts, [rows]."""
    given_s, time_s = table.numbers["given_s"], table.numbers["time_s"]
    return np.where(np.isfinite(given_s), given_s, time_s)


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

    def __init__(self, table: Columns, given_s: NDArray[np.float64], row: type[StateRow | LinkRow]) -> None:
        order = np.lexsort((table.numbers["time_s"], given_s))
        self._times = given_s[order]
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
