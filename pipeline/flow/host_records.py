"""The flow records of one host's workers, as rows for the run's folder.

A ring holds the newest records of a worker (``pipeline.runtime.flow_ring``); the observer reads all
rings once a second, so that none is lost. A message's end at one end of its link becomes a row of
*messages*. The states of a worker's main loop become *waits*: one row for each stretch in which the
wait was the same. Times become wall-clock seconds, by the reader's clocks.

Rings of joined hosts stay there: no process reads another host's files, and heartbeats bring what
finds a fault, of all hosts alike. Messages serve pictures and tables, which name the workers whose
messages they lack."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipeline.runtime.flow_ring import SUFFIX, FlowRingReader, LinkSide, MessageOutcome, RingSlice, SlotForm
from pipeline.runtime.registry.contract import WaitingFor

MESSAGES: Final = np.dtype(
    [
        ("time_s", "f8"), ("worker", "O"), ("link", "O"), ("outcome", "O"), ("key", "u8"), ("size", "f4"),
        ("waited_s", "f4"), ("service_s", "f4"), ("storing_s", "f4"), ("policy_version", "i4"),
    ]
)  # fmt: skip
"""``Completion`` as columns. ``time_s``: its end. ``key``: the same for all records of a chunk."""
WAITS: Final = np.dtype([("begin_s", "f8"), ("end_s", "f8"), ("worker", "O"), ("wait", "O")])
"""``wait``: a value of ``WaitingFor``."""
MAX_ROWS: Final = 50_000
"""Rows of one reading; further ones are left out, and counted."""
_HOLDS_S: Final = 0.35
"""A state holds for so long: three of its intervals."""
_LONGEST_S: Final = 30.0
"""A longer wait becomes several rows, so that a reader need not look far back."""
_KINDS: Final = tuple(WaitingFor)
_MOST_NAMED: Final = 8
_OUTCOMES: Final = np.array(["", *(outcome.name.lower() for outcome in MessageOutcome)], object)
"""By number."""
_SLOTS: Final = np.dtype(
    {
        "names": ["kind", "what", "link", "size", "time_s", "key", "waited_s", "service_s", "storing_s",
                  "policy_version", "wait"],
        "formats": ["u1", "u1", "u2", "u4", "f8", "u8", "f4", "f4", "f4", "i4", "u8"],
        "offsets": [8, 9, 10, 12, 16, 24, 32, 36, 40, 44, 40],
        "itemsize": 64,
    }
)  # fmt: skip
"""The slots of ``pipeline.runtime.flow_ring``: completions; and of states kind, ``what``, time, and
``wait``, the last count."""
_LINKS: Final = 1 << 16


@dataclass(slots=True)
class _Stretch:
    wait: str
    begin_s: float
    last_s: float


class HostRecordReader:
    """Follows all rings of a folder. One thread at a time uses it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rings: dict[str, FlowRingReader] = {}
        self._stretches: dict[str, _Stretch] = {}
        self._num_left_out = 0

    @property
    def num_lost(self) -> int:
        """Records that were overwritten or damaged before they were read, or are left out."""
        return self._num_left_out + sum(ring.num_overwritten + ring.num_damaged for ring in self._rings.values())

    def read(self, now_s: float, at_s: float) -> dict[str, NDArray[np.void]]:
        """Return the new rows by table: ``MESSAGES`` and ``WAITS``.

        ``now_s`` and ``at_s``: this moment by the monotonic clock and by the wall clock."""
        self._discover()
        ahead_s = at_s - now_s
        found = [(worker, slots) for worker, ring in self._rings.items() for slots in ring.take()]
        slots = np.frombuffer(b"".join(one.data for _, one in found), _SLOTS)
        of = np.repeat(np.arange(len(found)), [len(one.data) // _SLOTS.itemsize for _, one in found])
        is_message = slots["kind"] == SlotForm.COMPLETION
        messages = _messages(slots[is_message], of[is_message], found, ahead_s)
        waits = self._waits(slots[~is_message], of[~is_message], found, ahead_s)
        for worker in self._rings:
            waits += self._over(worker, now_s, ahead_s)
        self._num_left_out += max(0, len(messages) - MAX_ROWS) + max(0, len(waits) - MAX_ROWS)
        tables = {"messages": messages[-MAX_ROWS:], "waits": np.array(waits[-MAX_ROWS:], dtype=WAITS)}
        return {name: rows for name, rows in tables.items() if len(rows)}

    def _waits(
        self, states: NDArray[np.void], of: NDArray[np.intp], found: Sequence[tuple[str, RingSlice]], ahead_s: float
    ) -> list[tuple[object, ...]]:
        own = states["what"] == LinkSide.WORKER
        rows = list[tuple[object, ...]]()
        for at_s, index, place in zip(
            states["time_s"][own].tolist(), states["wait"][own].tolist(), of[own].tolist(), strict=True
        ):
            wait = str(_KINDS[index]) if index < len(_KINDS) else ""
            rows += self._take(found[place][0], wait, at_s, ahead_s)
        return rows

    def close(self) -> None:
        """Close all rings. Repeated calls do nothing."""
        for ring in self._rings.values():
            ring.close()

    def _discover(self) -> None:
        try:
            # Another account could have made a folder of this name first.
            if self._folder.lstat().st_uid != os.getuid():
                return
            names = [entry.name for entry in os.scandir(self._folder) if entry.name.endswith(SUFFIX)]
        except OSError:
            return
        for name in sorted(names):
            worker = name.removesuffix(SUFFIX)
            if worker not in self._rings:
                self._rings[worker] = FlowRingReader(self._folder / name)

    def _take(self, worker: str, wait: str, at_s: float, ahead_s: float) -> Iterator[tuple[object, ...]]:
        before = self._stretches.get(worker)
        if before is not None and before.wait == wait and 0.0 <= at_s - before.last_s <= _HOLDS_S:
            before.last_s = at_s
            if at_s - before.begin_s >= _LONGEST_S:
                yield _waited(worker, before, at_s, ahead_s)
                before.begin_s = at_s
            return
        if before is not None:
            yield _waited(worker, before, min(max(at_s, before.last_s), before.last_s + _HOLDS_S), ahead_s)
        self._stretches[worker] = _Stretch(wait, at_s, at_s)

    def _over(self, worker: str, now_s: float, ahead_s: float) -> Iterator[tuple[object, ...]]:
        """Yield the stretch of a worker that has had nothing open since."""
        before = self._stretches.get(worker)
        if before is not None and now_s - before.last_s > 2.0 * _HOLDS_S:
            yield _waited(worker, before, before.last_s, ahead_s)
            del self._stretches[worker]


def unrecorded_words(workers: Collection[str]) -> str:
    """Return a sentence on workers whose metrics are recorded and whose messages are not; empty
    without any."""
    if not workers:
        return ""
    named = sorted(workers)
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return (
        f"no messages are recorded of {', '.join(named[:_MOST_NAMED])}{more}: those of joined hosts stay there, and "
        "supervisor.flow_records = false leaves all out; metrics, states and links have these workers too"
    )


def _messages(
    ends: NDArray[np.void], of: NDArray[np.intp], found: Sequence[tuple[str, RingSlice]], ahead_s: float
) -> NDArray[np.void]:
    """Return completions as rows. ``of``: the place of each one's ring in ``found``."""
    rows = np.empty(len(ends), MESSAGES)
    for name in ("key", "size", "waited_s", "service_s", "storing_s", "policy_version"):
        rows[name] = ends[name]
    rows["time_s"] = ends["time_s"] + ahead_s
    rows["outcome"] = _OUTCOMES[ends["what"]]
    if len(ends):
        rows["worker"] = np.array([worker for worker, _ in found], object)[of]
        links, place = np.unique(of * _LINKS + ends["link"], return_inverse=True)
        names = [found[link // _LINKS][1].names.get(link % _LINKS, "") for link in links.tolist()]
        rows["link"] = np.array(names, object)[place]
    return rows


def _waited(worker: str, stretch: _Stretch, end_s: float, ahead_s: float) -> tuple[object, ...]:
    return (stretch.begin_s + ahead_s, end_s + ahead_s, worker, stretch.wait)
