"""Finds the causes of stalls after the fact: in tables of any fleet (CSV or Parquet), or in what a run
has recorded.

A table with columns sender and receiver describes links; one with worker and any state column
describes states. Only ``time_s`` and the names are required: missing or empty cells are unknown. Rows
may come in any order and more than once. A replay advances by one second per tick, or by the rows' own
interval if that is longer, up to five seconds.

A row takes effect at its ``time_s``, or at ``given_s`` if the table has that column: the observer
repeats a silent worker's last row, and this is how silence is recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from heapq import merge
from math import inf, isfinite, isinf, nan
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipeline.files.columns import Cell, Column, Columns, column_names, read_columns, table_files
from pipeline.fleet.flow.rows import FlowIncident, LinkRow, StateRow
from pipeline.fleet.flow.watcher import LEAST_SLOW_LIVE, FlowWatch
from pipeline.fleet.peers.segments import begin_s, observed_files
from protocol.errors import DataError

_STATE_TEXTS = frozenset({"role", "waiting_for"})
_NAMES = {StateRow: ("worker",), LinkRow: ("sender", "receiver")}
_LONGEST_TICK_S = 5.0
_EMPTY_S = 60.0
"""Stretches without rows that are longer than this are skipped."""
_AT_ONCE = 4096
"""Rows that are made at once."""


def _columns(row: type[StateRow | LinkRow]) -> tuple[Column, ...]:
    needed = [Column("time_s", Cell.SECONDS), *(Column(name, Cell.TEXT) for name in _NAMES[row])]
    names = [one.name for one in fields(row) if one.name not in ("time_s", *_NAMES[row])]
    return (*needed, *(Column(n, Cell.TEXT, "") if n in _STATE_TEXTS else Column(n, Cell.NUMBER, nan) for n in names))


_GIVEN = Column("given_s", Cell.NUMBER, nan)
STATE_COLUMNS = (*_columns(StateRow), _GIVEN)
LINK_COLUMNS = (*_columns(LinkRow), _GIVEN)


@dataclass(slots=True)
class FlowTables:
    states: list[Columns] = field(default_factory=list[Columns])
    links: list[Columns] = field(default_factory=list[Columns])
    notes: list[str] = field(default_factory=list[str])
    """Sentences about files and columns that were not read or are missing."""


def read_flow_tables(paths: Sequence[Path]) -> FlowTables:
    """Read files and folders, skipping damaged files in folders.

    Raises DataError: no file is a table of states or links, or a given file has an unreadable cell."""
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
        f"{_files(names)} {columns}, so not a table of states or links; skipped" for columns, names in others.items()
    ]
    return found


def _files(names: Sequence[str]) -> str:
    return f"{names[0]} has" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more have"


def add_table(found: FlowTables, path: Path) -> str:
    """Read one file into ``found``. Returns its column names if it is another kind of table, else "".
    Raises DataError."""
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
        found.notes.append(f"{table.path.name}: columns not read: {', '.join(table.unknown[:20])}")
    absent = [name for name in matters.split() if name in table.absent]
    if absent:
        found.notes.append(f"{table.path.name}: no column {', '.join(absent)}, so what it would show is unknown")


Given = tuple[float, StateRow | LinkRow]
"""When a row takes effect, and the row."""


def given_rows(tables: FlowTables) -> Iterator[Given]:
    """Yield the rows of tables in the order in which they take effect."""
    of_states = [_given(table, StateRow) for table in tables.states]
    return merge(*of_states, *(_given(table, LinkRow) for table in tables.links), key=itemgetter(0))


def _given(table: Columns, kind: type[StateRow | LinkRow]) -> Iterator[Given]:
    given_s, time_s = table.numbers["given_s"], table.numbers["time_s"]
    given_s = np.where(np.isfinite(given_s), given_s, time_s)
    order = np.lexsort((time_s, given_s))
    columns = [
        table.texts[one.name].array() if one.name in table.texts else table.numbers[one.name] for one in fields(kind)
    ]
    for begin in range(0, len(order), _AT_ONCE):
        places = order[begin : begin + _AT_ONCE]
        cells = [column[places].tolist() for column in (given_s, *columns)]
        for at_s, *row in zip(*cells, strict=True):
            yield at_s, kind(*map(_finite, row))


def _finite(cell: Any) -> Any:
    return nan if isinstance(cell, float) and not isfinite(cell) else cell


def spacing_s(tables: FlowTables) -> float:
    """Return the median time between two rows of the same worker or link, in seconds."""
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


def replay(given: Iterable[Given], watch: FlowWatch, step_s: float = 1.0) -> list[FlowIncident]:
    """Return the incidents that a live observer of these rows would have reported, in order."""
    found, batch = list[FlowIncident](), list[StateRow | LinkRow]()
    now_s = last_s = inf

    def tick() -> None:
        nonlocal now_s
        states = [row for row in batch if isinstance(row, StateRow)]
        found.extend(watch.tick(now_s, states, [row for row in batch if isinstance(row, LinkRow)]))
        batch.clear()
        now_s += step_s

    for last_s, row in given:
        now_s = last_s if isinf(now_s) else now_s
        while last_s > now_s:
            tick()
            now_s = last_s if last_s - now_s > _EMPTY_S else now_s
        batch.append(row)
    while now_s <= last_s + step_s < inf:
        tick()
    return found


@dataclass(slots=True)
class OfflineFlow:
    incidents: list[FlowIncident] = field(default_factory=list[FlowIncident])
    notes: list[str] = field(default_factory=list[str])
    """Sentences about files and columns that were not read, and about unknown words."""


def causes_in_tables(paths: Sequence[Path]) -> OfflineFlow:
    """Find the causes in tables of states and links. Raises DataError."""
    tables, watch = read_flow_tables(paths), FlowWatch()
    incidents = replay(given_rows(tables), watch, min(max(1.0, spacing_s(tables)), _LONGEST_TICK_S))
    return OfflineFlow(incidents, [*tables.notes, *_unknown_words(watch)])


def causes_in_run(run_dir: Path) -> OfflineFlow:
    """Find the causes in what a run's observer recorded, replayed two minutes at a time.

    Raises DataError: no states are recorded."""
    files = [file for kind in (STATES, LINKS) for file in observed_files(run_dir, kind)]
    if not files:
        raise DataError(
            f"{run_dir} has no recorded states of workers: the observer writes them every two minutes and at the "
            f"end of the run; `headrace why` reads the current state"
        )
    watch, num_damaged = FlowWatch(least_slow=LEAST_SLOW_LIVE), 0

    def recorded_rows() -> Iterator[Given]:
        nonlocal num_damaged
        for at_s in sorted(set(map(begin_s, files))):
            tables = FlowTables()
            for file in files:
                if begin_s(file) == at_s:
                    try:
                        add_table(tables, file)
                    except DataError:
                        num_damaged += 1
            yield from given_rows(tables)

    found = OfflineFlow(replay(recorded_rows(), watch))
    if num_damaged:
        found.notes.append(f"{num_damaged} of {len(files)} recorded files are damaged and were skipped")
    found.notes += _unknown_words(watch)
    return found


def _unknown_words(watch: FlowWatch) -> list[str]:
    words = ", ".join(map(repr, watch.fleet.unknown_words))
    return [f"unknown words in waiting_for are taken for work: {words}"] if words else []


STATES: Final = "states"
LINKS: Final = "links"
_TEXT_NAMES: Final = frozenset({"worker", "role", "waiting_for", "sender", "receiver"})


def recorded(
    states: Sequence[StateRow], links: Sequence[LinkRow], *, ahead_s: float, given_s: float
) -> dict[str, NDArray[np.void]]:
    """Return the rows of this tick by table, with wall-clock times.

    Args:
        states: One row for each worker.
        links: One row for each link.
        ahead_s: Wall clock minus the clock of the rows.
        given_s: The current wall-clock time; a silent worker's row is older."""
    rows: Mapping[str, tuple[type[StateRow | LinkRow], Sequence[Any]]] = {
        STATES: (StateRow, states),
        LINKS: (LinkRow, links),
    }
    return {name: _array(kind, found, ahead_s, given_s) for name, (kind, found) in rows.items() if found}


def _array(kind: type[StateRow | LinkRow], rows: Sequence[Any], ahead_s: float, given_s: float) -> NDArray[np.void]:
    names = [one.name for one in fields(kind)]
    form = np.dtype([*((name, "O" if name in _TEXT_NAMES else "f8") for name in names), ("given_s", "f8")])
    cells = attrgetter(*names)
    made = np.array([(*cells(row), given_s) for row in rows], form)
    made["time_s"] += ahead_s
    return made
