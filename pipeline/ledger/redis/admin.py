"""The Redis ledger's operator interface and read-only views, one script per method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.ledger.admin import (
    Holder,
    Requeued,
    RequeueRequest,
    Retried,
    StoredChunk,
    WaitedUnit,
    Waits,
)
from pipeline.ledger.inspection import (
    MAX_CLAIMED,
    MAX_LOOKS,
    DropsView,
    GroupsView,
    OpenGroup,
    StalenessView,
    drops_from,
    staleness_of,
)
from pipeline.ledger.life import TrajectoryLife, UnknownTrajectory, life_from
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.redis.views import audit_from, pause_from, waited_from
from pipeline.ledger.types import LatePolicy, Pause, Unit
from protocol.ids import TrajectoryId
from protocol.trajectory import Field


class RedisAdmin:
    """``pipeline.ledger.admin.LedgerAdmin`` in Redis."""

    def __init__(self, ledger: RedisLedger) -> None:
        self._ledger = ledger

    async def waits(self, *, max_units: int = 64) -> Waits:
        head, units, holders = await self._ledger.ask("waits", most=max_units)
        unit, group_size, eta, late, version, needed, ready, running, parked, claimed, opened, value = head
        unscored = await self._ledger.num_evaluation_lacking(Field.REWARD)
        waiting = await self._ledger.num_evaluation_lacking(Field.TURN)
        policy = Unit(unit.decode()), group_size, eta, LatePolicy(late.decode())
        held = tuple(Holder(who.decode(), num, evaluation, float(left)) for who, num, evaluation, left in holders)
        work = needed, ready, running, parked, claimed, tuple(map(_unit, units)), held
        return Waits(*policy, version, *work, opened, unscored, waiting, bool(value))

    async def stored(self, *, max_trajectories: int = 20) -> tuple[StoredChunk, ...]:
        found = await self._ledger.ask("stored", most=max_trajectories)
        return tuple(
            StoredChunk(name.decode(), tokens, float(age), bool(final), tuple(Field(one.decode()) for one in fields))
            for name, tokens, age, final, *fields in found
        )

    async def requeue(self, request: RequeueRequest) -> Requeued:
        if request.worker:
            what, names = "worker", [request.worker]
        elif request.field is not None:
            return await self._requeue_field(request.field)
        else:
            what, names = "trajectories", [*map(str, request.trajectories)]
        opened, due, *unknown = await self._ledger.ask("requeue", what=what, most=self._ledger.most, names=names)
        return Requeued(opened, due, tuple(name.decode() for name in unknown))

    async def _requeue_field(self, field: Field) -> Requeued:
        """Make chunks due in batches; what was done stays done if a later call fails."""
        while True:
            _, moved, due = await self._ledger.ask("requeue", what="field", most=self._ledger.most, names=[field.value])
            if moved < self._ledger.most:
                return Requeued(0, due)

    async def retry(self, chunks: tuple[str, ...] | None) -> Retried:
        if chunks == ():
            return Retried()
        closed, letters, prompts, unknown = await self._ledger.ask("retry", chunks=chunks or ())
        return Retried(tuple(prompts), letters, tuple(name.decode() for name in unknown), bool(closed))

    async def pause(self, *, by: str, reason: str = "") -> Pause:
        paused = pause_from(await self._ledger.ask("pause", by=by, reason=reason))
        assert paused is not None
        return paused

    async def resume(self) -> Pause | None:
        return pause_from(await self._ledger.ask("resume"))


def _unit(row: Any) -> WaitedUnit:
    name, oldest, complete, trajectories = row
    begun = int(float(oldest)) if oldest else None
    return WaitedUnit(name.decode(), begun, complete, tuple(map(waited_from, trajectories)))


class RedisInspection:
    """``pipeline.ledger.inspection.LedgerInspection`` in Redis."""

    def __init__(self, ledger: RedisLedger) -> None:
        self._ledger = ledger

    async def groups(self, *, max_groups: int = 20) -> GroupsView:
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
        group_size, counters, tallies = await self._ledger.ask("drops")
        audit = audit_from([counters])
        balances = {"groups": audit.groups, "trajectories": audit.trajectories, "tokens": audit.tokens}
        trained = {currency: balance.trained for currency, balance in balances.items()}
        dropped = {currency: balance.dropped for currency, balance in balances.items()}
        return drops_from(trained, dropped, _tallies(tallies), group_size=group_size)

    async def life(self, trajectory: TrajectoryId) -> TrajectoryLife | UnknownTrajectory:
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
