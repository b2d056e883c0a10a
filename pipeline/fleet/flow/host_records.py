"""Flow records of one host's workers, as rows for the run folder.

A ring holds a worker's newest records (``pipeline.runtime.flow_ring``); the observer reads all rings
once a second so that none is lost. A message that ends at one side of its link becomes a row of
*messages*. Consecutive states of a main loop with the same wait become one row of *waits*. Times are
converted to wall-clock seconds.

Rings of joined hosts are not read, since no process reads another host's files. Fault detection does
not need them: it uses heartbeats, which come from every host. Messages only serve charts and tables,
which name the workers whose messages are missing."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipeline.runtime.flow_ring import SLOTS, SUFFIX, FlowRingReader, LinkSide, RingSlice, SlotForm
from pipeline.runtime.message_record import MessageOutcome
from pipeline.runtime.registry.contract import WaitingFor

MESSAGES: Final = np.dtype(
    [
        ("time_s", "f8"), ("worker", "O"), ("link", "O"), ("outcome", "O"), ("key", "u8"), ("size", "f4"),
        ("waited_s", "f4"), ("service_s", "f4"), ("storing_s", "f4"), ("policy_version", "i4"),
    ]
)  # fmt: skip
"""Messages as columns. ``time_s`` is when it ended; ``key`` is shared by all records of a chunk."""
WAITS: Final = np.dtype([("begin_s", "f8"), ("end_s", "f8"), ("worker", "O"), ("wait", "O")])
"""``wait`` is a ``WaitingFor`` value."""
MAX_ROWS: Final = 50_000
"""Maximum rows of one read; the rest is dropped and counted."""
_STATE_HOLDS_S: Final = 0.35
"""How long a recorded state is assumed to hold: three sampling intervals."""
_LONGEST_S: Final = 30.0
"""Longer waits are split into several rows, so that readers need not look far back."""
_KINDS: Final = tuple(WaitingFor)
_MOST_NAMED: Final = 8
_OUTCOMES: Final = np.array(["", *(outcome.name.lower() for outcome in MessageOutcome)], object)
"""By outcome number."""
_LINKS: Final = 1 << 16


@dataclass(slots=True)
class _Stretch:
    wait: str
    begin_s: float
    last_s: float


class HostRecordReader:
    """Follows all rings in a folder. Not safe for use by two threads at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rings: dict[str, FlowRingReader] = {}
        self._stretches: dict[str, _Stretch] = {}
        self._num_left_out = 0

    @property
    def num_lost(self) -> int:
        """Records overwritten, damaged or dropped before they could be read."""
        return self._num_left_out + sum(ring.num_overwritten + ring.num_damaged for ring in self._rings.values())

    def read(self, now_s: float, at_s: float) -> dict[str, NDArray[np.void]]:
        """Return the new rows by table: ``MESSAGES`` and ``WAITS``.

        ``now_s`` and ``at_s`` are the current time by the monotonic and the wall clock."""
        self._discover()
        ahead_s = at_s - now_s
        found = [(worker, slots) for worker, ring in self._rings.items() for slots in ring.read()]
        slots = np.frombuffer(b"".join(one.data for _, one in found), SLOTS)
        of = np.repeat(np.arange(len(found)), [len(one.data) // SLOTS.itemsize for _, one in found])
        is_message = slots["kind"] == SlotForm.COMPLETION
        messages = _messages(slots[is_message], of[is_message], found, ahead_s)
        waits = self._waits(slots[~is_message], of[~is_message], found, ahead_s)
        for worker in self._rings:
            waits += self._end_idle(worker, now_s, ahead_s)
        self._num_left_out += max(0, len(messages) - MAX_ROWS) + max(0, len(waits) - MAX_ROWS)
        tables = {"messages": messages[-MAX_ROWS:], "waits": np.array(waits[-MAX_ROWS:], dtype=WAITS)}
        return {name: rows for name, rows in tables.items() if len(rows)}

    def _waits(
        self, states: NDArray[np.void], of: NDArray[np.intp], found: Sequence[tuple[str, RingSlice]], ahead_s: float
    ) -> list[tuple[object, ...]]:
        own = states["what"] == LinkSide.WORKER
        rows = list[tuple[object, ...]]()
        times_s, kinds = states["time_s"][own].tolist(), states["counts"][own, 2].tolist()
        for at_s, index, place in zip(times_s, kinds, of[own].tolist(), strict=True):
            wait = str(_KINDS[index]) if index < len(_KINDS) else ""
            rows += self._extend(found[place][0], wait, at_s, ahead_s)
        return rows

    def close(self) -> None:
        for ring in self._rings.values():
            ring.close()

    def _discover(self) -> None:
        try:
            # Another account could have created a folder of this name first.
            if self._folder.lstat().st_uid != os.getuid():
                return
            names = [entry.name for entry in os.scandir(self._folder) if entry.name.endswith(SUFFIX)]
        except OSError:
            return
        for name in sorted(names):
            worker = name.removesuffix(SUFFIX)
            if worker not in self._rings:
                self._rings[worker] = FlowRingReader(self._folder / name)

    def _extend(self, worker: str, wait: str, at_s: float, ahead_s: float) -> Iterator[tuple[object, ...]]:
        before = self._stretches.get(worker)
        if before is not None and before.wait == wait and 0.0 <= at_s - before.last_s <= _STATE_HOLDS_S:
            before.last_s = at_s
            if at_s - before.begin_s >= _LONGEST_S:
                yield _wait_row(worker, before, at_s, ahead_s)
                before.begin_s = at_s
            return
        if before is not None:
            yield _wait_row(worker, before, min(max(at_s, before.last_s), before.last_s + _STATE_HOLDS_S), ahead_s)
        self._stretches[worker] = _Stretch(wait, at_s, at_s)

    def _end_idle(self, worker: str, now_s: float, ahead_s: float) -> Iterator[tuple[object, ...]]:
        """Yield the last stretch of a worker that has recorded no state for a while."""
        before = self._stretches.get(worker)
        if before is not None and now_s - before.last_s > 2.0 * _STATE_HOLDS_S:
            yield _wait_row(worker, before, before.last_s, ahead_s)
            del self._stretches[worker]


def unrecorded_words(workers: Collection[str]) -> str:
    """Return a sentence about workers with recorded metrics but no recorded messages ("" if none)."""
    if not workers:
        return ""
    named = sorted(workers)
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return (
        f"no messages are recorded for {', '.join(named[:_MOST_NAMED])}{more}: joined hosts keep theirs, and "
        "supervisor.flow_records = false records none; metrics, states and links include these workers"
    )


def _messages(
    ends: NDArray[np.void], of: NDArray[np.intp], found: Sequence[tuple[str, RingSlice]], ahead_s: float
) -> NDArray[np.void]:
    """Return completions as rows. ``of`` is the index in ``found`` of each one's ring."""
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


def _wait_row(worker: str, stretch: _Stretch, end_s: float, ahead_s: float) -> tuple[object, ...]:
    return (stretch.begin_s + ahead_s, end_s + ahead_s, worker, stretch.wait)
