"""Looks into a ledger over several servers: one look at each, summed up.

The moments of the looks differ by milliseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pipeline.ledger.inspection import DropsView, EndedRow, GroupsView, LedgerInspection, StalenessView
from pipeline.ledger.life import TrajectoryLife, UnknownTrajectory
from pipeline.ledger.sharded.calls import together
from pipeline.ledger.types import DropReason
from protocol.ids import TrajectoryId


class ShardedInspection:
    """``pipeline.ledger.inspection.LedgerInspection`` over the shards' own, in their order."""

    def __init__(self, shards: Sequence[LedgerInspection]) -> None:
        self._shards = tuple(shards)

    async def groups(self, *, max_groups: int = 20) -> GroupsView:
        """Return the oldest open groups of all shards."""
        every = await together(shard.groups(max_groups=max_groups) for shard in self._shards)
        groups = sorted((group for one in every for group in one.groups), key=lambda group: group.number)
        return replace(
            every[0],
            num_groups=sum(one.num_groups for one in every),
            num_running=sum(one.num_running for one in every),
            groups=tuple(groups[:max_groups]),
        )

    async def versions(self) -> StalenessView:
        """Return the staleness of all shards' units. The version is the first shard's, which is
        never behind."""
        every = await together(shard.versions() for shard in self._shards)
        dropped = {reason.value: _sum(one.dropped.get(reason.value, {}) for one in every) for reason in DropReason}
        return replace(
            every[0],
            ready=_sum(one.ready for one in every),
            running=_sum(one.running for one in every),
            num_unbegun=sum(one.num_unbegun for one in every),
            claimed=_sum(one.claimed for one in every),
            num_claimed=sum(one.num_claimed for one in every),
            trained=_sum(one.trained for one in every),
            dropped={reason: counts for reason, counts in dropped.items() if counts},
        )

    async def drops(self) -> DropsView:
        """Return what was dropped in all shards against what was trained there."""
        every = await together(shard.drops() for shard in self._shards)
        rows = [row for one in every for row in one.dropped]
        by_reason = {reason.value: [row for row in rows if row.reason == reason.value] for reason in DropReason}
        dropped = tuple(_ended(some) for some in by_reason.values() if some)
        return DropsView(_ended([one.trained for one in every]), dropped, every[0].group_size)

    async def life(self, trajectory: TrajectoryId) -> TrajectoryLife | UnknownTrajectory:
        """Return what happened to a trajectory, from its group's shard."""
        return await self._shards[trajectory.group % len(self._shards)].life(trajectory)


def _ended(rows: Sequence[EndedRow]) -> EndedRow:
    responses = rows[0].responses
    for row in rows[1:]:
        responses += row.responses
    return EndedRow(
        rows[0].reason,
        sum(row.num_groups for row in rows),
        sum(row.num_trajectories for row in rows),
        sum(row.num_tokens for row in rows),
        responses,
    )


def _sum(counts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items()))
