"""Looks into the ledger in Redis, one script a method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.ledger.inspection import MAX_CLAIMED, MAX_LOOKS, DropsView, GroupsView, OpenGroup, StalenessView
from pipeline.ledger.life import TrajectoryLife, UnknownTrajectory, life_from
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.redis.views import audit_from, waited_from
from pipeline.ledger.tallies import drops_from, staleness_of
from pipeline.ledger.types import Unit
from protocol.ids import TrajectoryId


class RedisInspection:
    """``pipeline.ledger.inspection.LedgerInspection`` on a server."""

    def __init__(self, ledger: RedisLedger) -> None:
        self._ledger = ledger

    async def groups(self, *, max_groups: int = 20) -> GroupsView:
        """Return the oldest open groups."""
        groups: list[OpenGroup] = []
        num_looked, following = 0, 0
        while True:
            asked = {
                "most": max_groups - len(groups),
                "looks": min(self._ledger.most, MAX_LOOKS - num_looked),
                "start": following,
            }
            reply = await self._ledger.ask("groups", **asked)
            unit, group_size, num_groups, running, rows, looked, following = reply
            groups += map(_group, rows)
            num_looked += looked
            if following == b"" or len(groups) >= max_groups or num_looked >= MAX_LOOKS:
                return GroupsView(Unit(unit.decode()), group_size, num_groups, running, tuple(groups))

    async def versions(self) -> StalenessView:
        """Return the staleness of what is ready, running, claimed, trained and dropped."""
        unit, version, eta, *counts, flat = await self._ledger.ask("staleness", most=MAX_CLAIMED)
        ready, running, unbegun, claimed, num_claimed = counts
        trained, dropped = staleness_of(_tallies(flat))
        return StalenessView(
            unit=Unit(unit.decode()),
            policy_version=version,
            eta=eta,
            ready=_staleness(ready),
            running=_staleness(running),
            num_unbegun=unbegun,
            claimed=_staleness(claimed),
            num_claimed=num_claimed,
            trained=trained,
            dropped=dropped,
        )

    async def drops(self) -> DropsView:
        """Return what was dropped, by reason, against what was trained."""
        group_size, counters, tallies = await self._ledger.ask("drops")
        audit = audit_from([counters])
        balances = {"groups": audit.groups, "trajectories": audit.trajectories, "tokens": audit.tokens}
        trained = {currency: balance.trained for currency, balance in balances.items()}
        dropped = {currency: balance.dropped for currency, balance in balances.items()}
        return drops_from(trained, dropped, _tallies(tallies), group_size=group_size)

    async def life(self, trajectory: TrajectoryId) -> TrajectoryLife | UnknownTrajectory:
        """Return what happened to a trajectory."""
        packed, *there = await self._ledger.ask("life", trajectory=str(trajectory))
        if packed:
            return life_from(packed.decode(errors="replace"))
        group_size, num_groups, first, last, oldest, newest = there
        return UnknownTrajectory(
            str(trajectory),
            group_size,
            num_groups,
            (int(first), int(last)) if first else None,
            (oldest.decode(), newest.decode()) if oldest else None,
        )


def _group(row: Sequence[Any]) -> OpenGroup:
    number, prompt, age, done, left, judge, waited = row
    age_s = float(age) if age else None
    return OpenGroup(number, prompt, age_s, done, left, judge.decode(), tuple(map(waited_from, waited)))


def _staleness(flat: Sequence[int]) -> dict[int, int]:
    return dict(sorted(zip(flat[::2], flat[1::2], strict=True)))


def _tallies(flat: Sequence[bytes]) -> dict[str, int]:
    return {name.decode(): int(number) for name, number in zip(flat[::2], flat[1::2], strict=True)}
