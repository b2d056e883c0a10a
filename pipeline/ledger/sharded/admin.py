"""An operator's side of a ledger over several servers.

Each shard's part of a request is one transition. A name that one shard does not know keeps that
shard as it was, and no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.ledger.admin import Holder, LedgerAdmin, Requeued, Retried, StoredChunk, WaitedUnit, Waits, Wish
from pipeline.ledger.sharded.calls import together
from pipeline.ledger.sharded.split import admission_order
from pipeline.ledger.types import LatePolicy, Pause
from pipeline.ledger.validation import parse_chunk


class ShardedAdmin:
    """``pipeline.ledger.admin.LedgerAdmin`` over the shards' own, in their order."""

    def __init__(self, shards: Sequence[LedgerAdmin]) -> None:
        self._shards = tuple(shards)

    async def waits(self, *, max_units: int = 64) -> Waits:
        """Return what the next update waits for, in all shards."""
        every = await together(shard.waits(max_units=max_units) for shard in self._shards)
        home = every[0]
        needed, ready = sum(one.num_needed for one in every), sum(one.num_ready for one in every)
        units = [unit for one in every for unit in one.units]
        is_late = ready >= needed and home.late is LatePolicy.WAIT
        units.sort(key=_age if is_late else lambda unit: (0, *admission_order(unit.name)))
        return replace(
            home,
            num_needed=needed,
            num_ready=ready,
            num_running=sum(one.num_running for one in every),
            num_parked=sum(one.num_parked for one in every),
            num_claimed=sum(one.num_claimed for one in every),
            units=tuple(units[:max_units]),
            holders=_holders([holder for one in every for holder in one.holders]),
            num_evaluation_open=sum(one.num_evaluation_open for one in every),
            num_evaluation_unscored=sum(one.num_evaluation_unscored for one in every),
        )

    async def stored(self, *, max_trajectories: int = 20) -> tuple[StoredChunk, ...]:
        """Return the newest chunks of trajectories."""
        every = await together(shard.stored(max_trajectories=max_trajectories) for shard in self._shards)
        chunks = [chunk for some in every for chunk in some]
        # a group's members in their order, the newest group first
        chunks.sort(key=lambda one: (-admission_order(one.chunk)[0], *admission_order(one.chunk)[1:]))
        return tuple(chunks[:max_trajectories])

    async def requeue(self, wish: Wish) -> Requeued:
        """Put work back."""
        if not wish.trajectories:
            every = await together(shard.requeue(wish) for shard in self._shards)
            # a worker is known where it has worked
            unknown = every[0].unknown if all(one.unknown for one in every) else ()
            return Requeued(sum(one.num_opened for one in every), sum(one.num_due for one in every), unknown)
        by_shard = [
            tuple(name for name in wish.trajectories if name.group % len(self._shards) == index)
            for index in range(len(self._shards))
        ]
        pairs = [(shard, names) for shard, names in zip(self._shards, by_shard, strict=True) if names]
        every = await together(shard.requeue(Wish(trajectories=names)) for shard, names in pairs)
        unknown = tuple(name for one in every for name in one.unknown)
        return Requeued(sum(one.num_opened for one in every), sum(one.num_due for one in every), unknown)

    async def retry(self, chunks: tuple[str, ...] | None) -> Retried:
        """Admit the prompts of dead letters again."""
        if chunks is None:
            return _retried(await together(shard.retry(None) for shard in self._shards))
        named = [(chunk, parse_chunk(chunk)) for chunk in chunks]
        if unknown := tuple(chunk for chunk, name in named if name is None):
            return Retried(unknown=unknown)
        by_shard = [
            tuple(chunk for chunk, name in named if name and name.trajectory.group % len(self._shards) == index)
            for index in range(len(self._shards))
        ]
        pairs = [(shard, names) for shard, names in zip(self._shards, by_shard, strict=True) if names]
        return _retried(await together(shard.retry(names) for shard, names in pairs))

    async def pause(self, *, by: str, reason: str = "") -> Pause:
        """Admit no new group from now on, in any shard. The home's pause is the run's."""
        paused = await self._shards[0].pause(by=by, reason=reason)
        await together(shard.pause(by=by, reason=reason) for shard in self._shards[1:])
        return paused

    async def resume(self) -> Pause | None:
        """Admit groups again. The home is the last, so that a repeat knows the pause after a
        failure."""
        ended = await together(shard.resume() for shard in self._shards[1:])
        ended.insert(0, await self._shards[0].resume())
        return next(filter(None, ended), None)


def _retried(every: Sequence[Retried]) -> Retried:
    return Retried(
        prompts=tuple(prompt for one in every for prompt in one.prompts),
        num_letters=sum(one.num_letters for one in every),
        unknown=tuple(name for one in every for name in one.unknown),
        is_closed=any(one.is_closed for one in every),
    )


def _age(unit: WaitedUnit) -> tuple[int, ...]:
    oldest = 1 << 60 if unit.oldest_version is None else unit.oldest_version
    return (oldest, *admission_order(unit.name))


def _holders(found: Sequence[Holder]) -> tuple[Holder, ...]:
    """Return one holder for each incarnation: what it holds in all shards, by the end of its first
    lease."""
    by_name: dict[str, Holder] = {}
    for one in found:
        known = by_name.get(one.who)
        by_name[one.who] = (
            one
            if known is None
            else Holder(
                one.who,
                one.num_trajectories + known.num_trajectories,
                one.num_evaluation + known.num_evaluation,
                min(one.lease_left_s, known.lease_left_s),
            )
        )
    return tuple(sorted(by_name.values(), key=lambda one: (one.lease_left_s, one.who)))
