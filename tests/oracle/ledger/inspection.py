"""Looks into the in-memory ledger, as ``groups.lua``, ``staleness.lua`` and ``drops.lua`` do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pipeline.ledger.admin import Place
from pipeline.ledger.inspection import (
    MAX_CLAIMED,
    MAX_LOOKS,
    MAX_STALENESS,
    DropsView,
    GroupsView,
    OpenGroup,
    StalenessView,
    drops_from,
    staleness_of,
)
from pipeline.ledger.life import TrajectoryLife, UnknownTrajectory, life_from
from pipeline.ledger.rules import UnitName, UnitRecord
from pipeline.ledger.types import Unit
from protocol.ids import ChunkId, TrajectoryId
from tests.oracle.ledger.lacking import waited_trajectory
from tests.oracle.ledger.ledger import MemoryLedger
from tests.oracle.ledger.lives import chunk_row, is_shown, pack_life
from tests.oracle.ledger.state import LedgerState


class MemoryInspection:
    """``pipeline.ledger.inspection.LedgerInspection`` in this process."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger

    async def groups(self, *, max_groups: int = 20) -> GroupsView:
        """Return the oldest open groups."""
        s, now = self._ledger.state, self._ledger.clock()
        numbers = sorted({_group_of(name) for name in s.running} | {name.group for name in s.parked})
        found: list[OpenGroup] = []
        num_looks = 0
        for number in numbers:
            if len(found) >= max_groups or num_looks >= MAX_LOOKS:
                break
            there = [name for name in s.members(number) if name in s.trajectories]
            num_looks += sum(s.trajectories[name].next for name in there)
            found.append(_group(s, number, there, now))
        return GroupsView(s.spec.unit, s.spec.group_size, len(s.groups), len(s.running), tuple(found))

    async def versions(self) -> StalenessView:
        """Return the staleness of what is ready, running, claimed, trained and dropped."""
        s = self._ledger.state
        published = s.version_history.updates(s.version)
        claimed = [(s.version_history.updates(c.policy_version), name) for c in s.claims.values() for name in c.units]
        looked = [(made, s.record(name).oldest) for made, name in claimed[:MAX_CLAIMED]]
        trained, dropped = staleness_of(s.tallies)
        return StalenessView(
            unit=s.spec.unit,
            policy_version=s.version,
            eta=s.spec.eta,
            ready=_staleness((published, s.record(name).oldest) for name in s.ready),
            running=_staleness((published, age) for age in s.running_age.values()),
            num_unbegun=len(s.running) - len(s.running_age),
            claimed=_staleness(looked),
            num_claimed=len(claimed),
            trained=trained,
            dropped=dropped,
        )

    async def drops(self) -> DropsView:
        """Return what was dropped, by reason, against what was trained."""
        s = self._ledger.state
        return drops_from(s.trained, s.dropped, s.tallies, group_size=s.spec.group_size)

    async def life(self, trajectory: TrajectoryId) -> TrajectoryLife | UnknownTrajectory:
        """Return what happened to a trajectory."""
        s, name = self._ledger.state, str(trajectory)
        kept = s.lives.by_name.get(name)
        if kept is not None:
            return life_from(kept)
        if trajectory in s.trajectories:
            return life_from(_life(s, trajectory))
        groups, lives = sorted(s.groups), list(s.lives.by_name)
        return UnknownTrajectory(
            name,
            s.spec.group_size,
            s.admitted["groups"],
            (groups[0], groups[-1]) if groups else None,
            (lives[0], lives[-1]) if lives else None,
        )


def _life(s: LedgerState, name: TrajectoryId) -> str:
    """Return the packed life of a trajectory in the ledger."""
    t = s.trajectories[name]
    group = None if name.is_evaluation else s.groups[name.group]
    unit: UnitRecord = group if group is not None and s.spec.unit is Unit.GROUP else t
    state = (unit.state if s.spec.unit is not Unit.CHUNK else "") or (
        Place.FINISHED
        if t.final
        else Place.LEASED
        if t.holder is not None
        else Place.WAITING
        if t.waits
        else Place.PARKED
        if name in s.parked
        else Place.OPEN
    )
    rows: list[str] = []
    for index in filter(lambda index: is_shown(index, t.next), range(t.next)):
        chunk = s.chunks.get(ChunkId(name, index))
        if chunk is not None:
            rows.append(chunk_row(index, chunk))
        elif index in t.past:
            rows.append(t.past[index])
    return pack_life(str(name), str(state), t, group, rows, unit)


def _group_of(name: UnitName) -> int:
    if isinstance(name, int):
        return name
    return name.trajectory.group if isinstance(name, ChunkId) else name.group


def _group(s: LedgerState, number: int, there: list[TrajectoryId], now: float) -> OpenGroup:
    record = s.groups[number]
    waited = tuple(row for name in there if (row := waited_trajectory(s, name, None, now)) is not None)
    num_done, num_left = len(there) - len(waited), s.spec.group_size - len(there)
    age_s = now - record.admitted_s
    return OpenGroup(number, record.prompt, age_s, num_done, num_left, record.judged_by, waited)


def _staleness(pairs: Iterable[tuple[int, int | None]]) -> dict[int, int]:
    found = Counter(min(max(made - oldest, 0), MAX_STALENESS) for made, oldest in pairs if oldest is not None)
    return dict(sorted(found.items()))
