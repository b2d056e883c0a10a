"""An operator's side of the ledger in Redis, one script a method."""

from __future__ import annotations

from typing import Any

from pipeline.ledger.admin import (
    Holder,
    Requeued,
    Retried,
    StoredChunk,
    WaitedUnit,
    Waits,
    Wish,
)
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.redis.views import pause_from, waited_from
from pipeline.ledger.types import LatePolicy, Pause, Unit
from protocol.trajectory import Field


class RedisAdmin:
    """``pipeline.ledger.admin.LedgerAdmin`` on a server."""

    def __init__(self, ledger: RedisLedger) -> None:
        self._ledger = ledger

    async def waits(self, *, max_units: int = 64) -> Waits:
        """Return what the next update waits for."""
        head, units, holders = await self._ledger.ask("waits", most=max_units)
        unit, group_size, eta, late, version, needed, ready, running, parked, claimed, opened, value = head
        unscored = await self._ledger.num_evaluation_unscored()
        policy = Unit(unit.decode()), group_size, eta, LatePolicy(late.decode())
        held = tuple(Holder(who.decode(), num, evaluation, float(left)) for who, num, evaluation, left in holders)
        work = needed, ready, running, parked, claimed, tuple(map(_unit, units)), held
        return Waits(*policy, version, *work, opened, unscored, bool(value))

    async def stored(self, *, max_trajectories: int = 20) -> tuple[StoredChunk, ...]:
        """Return the newest chunks of trajectories."""
        found = await self._ledger.ask("stored", most=max_trajectories)
        return tuple(
            StoredChunk(name.decode(), tokens, float(age), bool(final), tuple(Field(one.decode()) for one in fields))
            for name, tokens, age, final, *fields in found
        )

    async def requeue(self, wish: Wish) -> Requeued:
        """Put work back."""
        if wish.worker:
            what, names = "worker", [wish.worker]
        elif wish.field is not None:
            return await self._requeue_field(wish.field)
        else:
            what, names = "trajectories", [*map(str, wish.trajectories)]
        opened, due, *unknown = await self._ledger.ask("requeue", what=what, most=self._ledger.most, names=names)
        return Requeued(opened, due, tuple(name.decode() for name in unknown))

    async def _requeue_field(self, field: Field) -> Requeued:
        """Make chunks due, a part a call; each part stands if the next is never made."""
        while True:
            _, moved, due = await self._ledger.ask("requeue", what="field", most=self._ledger.most, names=[field.value])
            if moved < self._ledger.most:
                return Requeued(0, due)

    async def retry(self, chunks: tuple[str, ...] | None) -> Retried:
        """Admit the prompts of dead letters again."""
        if chunks == ():
            return Retried()
        closed, letters, prompts, unknown = await self._ledger.ask("retry", chunks=chunks or ())
        return Retried(tuple(prompts), letters, tuple(name.decode() for name in unknown), bool(closed))

    async def pause(self, *, by: str, reason: str = "") -> Pause:
        """Admit no new group from now on."""
        paused = pause_from(await self._ledger.ask("pause", by=by, reason=reason))
        assert paused is not None
        return paused

    async def resume(self) -> Pause | None:
        """Admit groups again."""
        return pause_from(await self._ledger.ask("resume"))


def _unit(row: Any) -> WaitedUnit:
    name, oldest, complete, trajectories = row
    begun = int(float(oldest)) if oldest else None
    return WaitedUnit(name.decode(), begun, complete, tuple(map(waited_from, trajectories)))
