"""The causes of stalls after the fact: in tables of any fleet, and in what a run has recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.flow.recorded import LINKS, STATES
from pipeline.flow.rows import FlowIncident
from pipeline.flow.tables import FlowTables, add_table, read_flow_tables, replay, replay_piece
from pipeline.flow.watcher import LEAST_SLOW_LIVE, FlowWatch
from pipeline.watch.segments import begin_s, observed_files
from protocol.errors import DataError


@dataclass(slots=True)
class OfflineFlow:
    """Causes, and notes on their sources."""

    incidents: list[FlowIncident] = field(default_factory=list[FlowIncident])
    notes: list[str] = field(default_factory=list[str])
    """Sentences on files and columns that were not read, and on words that are not known."""


def causes_in_tables(paths: Sequence[Path]) -> OfflineFlow:
    """Name the causes in tables of states and links. Raises DataError."""
    tables, watch = read_flow_tables(paths), FlowWatch()
    incidents = replay(tables, watch)
    return OfflineFlow(incidents, [*tables.notes, *_unknown_words(watch)])


def causes_in_run(run_dir: Path) -> OfflineFlow:
    """Name the causes in what a run's observer has recorded, two minutes at a time.

    Raises DataError: it has recorded no states."""
    files = [file for kind in (STATES, LINKS) for file in observed_files(run_dir, kind)]
    if not files:
        raise DataError(
            f"{run_dir} has no recorded states of workers: the observer writes them every two minutes and at the "
            f"end of the run; `headrace why` reads the current state"
        )
    found, watch, from_s, num_damaged = OfflineFlow(), FlowWatch(least_slow=LEAST_SLOW_LIVE), float("-inf"), 0
    for at_s in sorted(set(map(begin_s, files))):
        tables = FlowTables()
        for file in files:
            if begin_s(file) == at_s:
                try:
                    add_table(tables, file)
                except DataError:
                    num_damaged += 1
        incidents, from_s = replay_piece(tables, watch, from_s)
        found.incidents += incidents
    if num_damaged:
        found.notes.append(f"{num_damaged} of {len(files)} recorded files are damaged, and were skipped")
    found.notes += _unknown_words(watch)
    return found


def _unknown_words(watch: FlowWatch) -> list[str]:
    words = ", ".join(map(repr, watch.fleet.unknown_words))
    return [f"waiting_for has words that are not known, and taken for work: {words}"] if words else []
