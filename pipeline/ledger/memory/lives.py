"""The lives of trajectories in the in-memory ledger, packed as ``parts/lives.lua`` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.ledger.life import EITHER_END, MAX_LEASES, MAX_LIVES
from pipeline.ledger.memory.records import ChunkRecord, GroupRecord, TrajectoryRecord, UnitRecord
from pipeline.ledger.types import DropReason
from protocol.trajectory import Field


class KeptLives:
    """The lives of the newest trajectories that have left, by name, oldest first."""

    def __init__(self) -> None:
        self.by_name: dict[str, Sequence[Any]] = {}

    def keep(self, name: str, packed: Sequence[Any]) -> None:
        """Keep a life; forget the oldest above ``MAX_LIVES``."""
        self.by_name[name] = packed
        while len(self.by_name) > MAX_LIVES:
            del self.by_name[next(iter(self.by_name))]


def event(who: object, now: float, *values: float) -> str:
    """Return what one did, when, with which values."""
    return " ".join((str(who), f"{now:.17g}", *map(repr, values)))


def is_shown(index: int, num_chunks: int) -> bool:
    """Return whether a chunk is kept of a trajectory with so many."""
    return index < EITHER_END or index >= num_chunks - EITHER_END


def chunk_row(index: int, record: ChunkRecord, end: Sequence[Any] | str = "") -> list[Any]:
    """Return a chunk's row; ``end``: of its unit, if it is one."""
    events = [record.events.get(field, "") for field in Field]
    times = (record.ready_s or "", record.claimed_s or "")
    return [index, record.num_tokens, record.written_s, record.by, events, *times, end]


def ended(now: float, reason: DropReason | None, made: int, oldest: int | None) -> list[Any]:
    """Return how a unit ended."""
    return [now, "" if reason is None else reason.value, made, "" if oldest is None else oldest]


def pack_life(
    name: str,
    state: str,
    t: TrajectoryRecord,
    group: GroupRecord | None,
    rows: Sequence[Any],
    unit: UnitRecord,
    end: Sequence[Any] | str = "",
) -> list[Any]:
    """Return a packed life. ``unit``: the record that has ``ready_s`` and ``claimed_s``."""
    admitted, prompt = ("", "") if group is None else (group.admitted_s, group.prompt)
    times = (unit.ready_s or "", unit.claimed_s or "")
    leases = t.leases[-MAX_LEASES:]
    return [name, state, admitted, prompt, t.num_tokens, *times, t.num_leases, leases, t.next, rows, end]
