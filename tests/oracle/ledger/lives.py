"""The lives of trajectories in the in-memory ledger, packed as ``parts/lives.lua`` does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from pipeline.ledger.life import EITHER_END, MAX_LEASES, MAX_LIVES
from pipeline.ledger.rules import UnitRecord
from pipeline.ledger.types import DropReason
from protocol.trajectory import Field
from tests.oracle.ledger.records import ChunkRecord, GroupRecord, TrajectoryRecord

_BREAK: Final = re.compile(r"[\t\n]")


class KeptLives:
    """The lives of the newest trajectories that have left, by name, oldest first."""

    def __init__(self) -> None:
        self.by_name: dict[str, str] = {}

    def keep(self, name: str, packed: str) -> None:
        """Keep a life; forget the oldest above ``MAX_LIVES``."""
        self.by_name[name] = packed
        while len(self.by_name) > MAX_LIVES:
            del self.by_name[next(iter(self.by_name))]


def event(who: object, now: float, *values: float) -> str:
    """Return what one did, when, with which values."""
    return " ".join((plain(str(who)), f"{now:.17g}", *map(repr, values)))


def plain(text: str) -> str:
    """Return a text with spaces for tabs and ends of lines, which separate the places."""
    return _BREAK.sub(" ", text)


def is_shown(index: int, num_chunks: int) -> bool:
    """Return whether a chunk is kept of a trajectory with so many."""
    return index < EITHER_END or index >= num_chunks - EITHER_END


def chunk_row(index: int, record: ChunkRecord, end: str = "") -> str:
    """Return a chunk's row; ``end``: of its unit, if it is one."""
    events = [record.events.get(field, "") for field in (Field.REWARD, Field.REFERENCE, Field.VALUE)]
    times = (record.written_s, record.ready_s or None, record.claimed_s or None)
    written, ready, claimed = map(_text, times)
    later = [record.events.get(field, "") for field in (Field.GUIDANCE, Field.TURN)]
    while later and not later[-1]:
        later.pop()
    places = (str(index), str(record.num_tokens), written, record.by, *events, ready, claimed, end, *later)
    return "\t".join(places)


def ended(now: float, reason: DropReason | None, made: int, oldest: int | None) -> str:
    """Return how a unit ended."""
    return f"{now!r} {made} {_text(oldest)} {reason or ''}"


def pack_life(
    name: str,
    state: str,
    t: TrajectoryRecord,
    group: GroupRecord | None,
    rows: Sequence[str],
    unit: UnitRecord,
    end: str = "",
) -> str:
    """Return a packed life. ``unit``: the record that has ``ready_s`` and ``claimed_s``."""
    admitted, prompt = (None, None) if group is None else (group.admitted_s, group.prompt)
    numbers = (admitted, prompt, t.num_tokens, unit.ready_s or None, unit.claimed_s or None, t.num_leases, t.next)
    places = (name, state, *map(_text, numbers), end, *t.leases[-MAX_LEASES:])
    return "\n".join(("\t".join(places), *rows))


def _text(number: float | None) -> str:
    return "" if number is None else repr(number)
