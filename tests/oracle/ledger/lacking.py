"""Lists what a trajectory of the in-memory ledger lacks, as ``parts/lacking.lua`` does."""

from __future__ import annotations

from pipeline.ledger.admin import Lack, Place, WaitedTrajectory
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import Field
from tests.oracle.ledger.state import LedgerState


def waited_trajectory(s: LedgerState, name: TrajectoryId, only: int | None, now: float) -> WaitedTrajectory | None:
    """Return an incomplete trajectory of a unit, None when complete; ``only``: its chunk if that is
    the unit."""
    t = s.trajectories[name]
    is_sampled = t.final or (only is not None and only < t.next)
    lacks = _lacks(s, [ChunkId(name, index) for index in (range(t.next) if only is None else (only,))], now)
    if is_sampled and not lacks:
        return None
    place = Place.FINISHED if is_sampled else Place.LEASED if t.holder is not None else Place.OPEN
    if place is Place.OPEN and (t.waits or name in s.parked):
        place = Place.WAITING if t.waits else Place.PARKED
    return WaitedTrajectory(str(name), place, t.holder or "", t.next, t.num_tokens, now - t.since_s, lacks)


def _lacks(s: LedgerState, chunks: list[ChunkId], now: float) -> tuple[Lack, ...]:
    rows: list[Lack] = []
    for field in Field:
        due = s.due[field]
        lacking = [chunk for chunk in chunks if chunk in due]
        if lacking:
            first = lacking[0]
            record = s.chunks[first]
            age_s, overdue_s = now - record.lacking_since(field), now - due[first]
            rows.append(Lack(field, len(lacking), str(first), age_s, overdue_s, record.attempts[field]))
    return tuple(rows)
