"""Draws a run's records as trace events.

Each worker is a process of the timeline. Its first track shows the waits of its main loop; the second
shows a learner's updates or the versions a generator serves; the others show messages at this end of
their link, until the link took them or the ledger has their result. Incidents form a separate process.
There are three kinds of arrows:

* *chunk*: from the sender's end of a link to the receiver's;
* *claim*: from a chunk's last scorer to the update that trained on it;
* *weights*: from the publishing of a version to each generator that serves it.

The files of ``observed`` are read one after another, so memory holds two minutes of a run. Unreadable
files are skipped and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, get_type_hints

import numpy as np

from pipeline.files.columns import Cell, Column, read_columns
from pipeline.fleet.incidents.records import RunIncidents
from pipeline.fleet.peers.segments import SEGMENT_S, begin_s, observed_files
from pipeline.observability.history import HISTORY_NAME, UpdateRow, run_history
from pipeline.observability.timeline.drawing import Drawing, MessageRow, StateLook, TimelineReport, WaitRow
from pipeline.observability.timeline.trace_events import TraceEventWriter, microseconds
from protocol.errors import DataError

_TABLES: Final[dict[str, tuple[Any, str, Callable[[Drawing, Any], None]]]] = {
    "waits": (WaitRow, "end_s", Drawing.wait),
    "states": (StateLook, "time_s", Drawing.look),
    "messages": (MessageRow, "time_s", Drawing.message),
}
"""Rows of each table, the column that orders them, and what draws one."""
_MOMENTS: Final = frozenset({"time_s", "begin_s", "end_s"})


def write_timeline(
    run_dir: Path, out: Path, *, last_s: float | None = None, progress: Callable[[int, int], None] = lambda *_: None
) -> TimelineReport:
    """Write the timeline of a run to ``out``.

    Args:
        run_dir: The run's folder; the run may still be running.
        out: A new file, or one to be replaced.
        last_s: Only the last seconds of the run; None for all of it.
        progress: Receives the number of files read and their total.

    Raises DataError: the run has recorded nothing. Raises OSError."""
    files = {kind: observed_files(run_dir, kind) for kind in _TABLES}
    begins = sorted({begin_s(file) for found in files.values() for file in found})
    rows, num_skipped = _updates(run_dir)
    if not begins and not rows:
        raise DataError(
            f"{run_dir} has recorded nothing yet: no update, and no file in its folder observed; the observer writes "
            "files every two minutes, and at the run's end"
        )
    end_s = max([*begins[-1:], *(row.at_s for row in rows[-1:]), *map(_last_s, files, files.values())])
    from_s = end_s - last_s if last_s is not None else 0.0
    with TraceEventWriter.at(out) as events:
        drawing = Drawing(events, from_us=microseconds(from_s))
        drawing.report.num_skipped = num_skipped
        for row in rows:
            drawing.update(row)
        for number, at_s in enumerate(begins, 1):
            if at_s >= from_s - 2 * SEGMENT_S:
                for kind, found in files.items():
                    _draw(drawing, kind, [file for file in found if begin_s(file) == at_s])
                drawing.settle(at_s)
            progress(number, len(begins))
        drawing.end(RunIncidents(run_dir).read(), end_s)
    return drawing.report


def _last_s(kind: str, files: Sequence[Path]) -> float:
    """Return the last time in the newest file of a table; 0 if none can be read."""
    _, order_by, _ = _TABLES[kind]
    for file in files[-1:]:
        with suppress(DataError):
            return float(read_columns(file, [Column(order_by, Cell.SECONDS)]).numbers[order_by].max(initial=0.0))
    return 0.0


def _updates(run_dir: Path) -> tuple[list[UpdateRow], int]:
    """Return the updates, oldest first, and the number of skipped lines."""
    history = run_history(run_dir / HISTORY_NAME).tail()
    found = list[UpdateRow]()
    for row in history:
        if isinstance(row, UpdateRow):
            # not drawn, so free the memory
            row.histograms.clear()
            row.metrics.clear()
            found.append(row)
    return found, history.num_skipped


def _draw(drawing: Drawing, kind: str, files: Sequence[Path]) -> None:
    row_type, order_by, draw = _TABLES[kind]
    for file in files:
        try:
            rows = _rows(file, row_type, order_by)
        except DataError:
            drawing.report.num_skipped += 1
            continue
        for row in rows:
            draw(drawing, row_type(*row))


def _rows(file: Path, row_type: Any, order_by: str) -> Iterable[tuple[Any, ...]]:
    """Return a file's rows sorted by one column. Raises DataError."""
    texts = {name for name, kind in get_type_hints(row_type).items() if kind is str}
    kinds = dict.fromkeys(row_type._fields, Cell.NUMBER) | dict.fromkeys(texts, Cell.TEXT)
    kinds |= dict.fromkeys(_MOMENTS & kinds.keys(), Cell.SECONDS)
    table = read_columns(file, [Column(*one, row_type._field_defaults.get(one[0])) for one in kinds.items()])
    order = np.argsort(table.numbers[order_by], kind="stable")
    cells = (table.texts[name].array() if name in texts else table.numbers[name] for name in kinds)
    return zip(*(cell[order].tolist() for cell in cells), strict=True)
