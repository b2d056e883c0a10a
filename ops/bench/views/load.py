"""A ledger under load: many generators, and trajectories in every state.

*Consumes* an empty server. *Produces* groups that are trained, dropped, ready, claimed, unscored,
half-written, leased and open. *Waits for* the server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass

import msgspec

from ops.bench.ledger.payload import Payload
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.types import Claim, LatePolicy, LedgerSpec, Unit
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
from protocol.trajectory import FinishReason, RewardScore

RUN = "views"
GROUP_SIZE = 8
BATCH_GROUPS = 64
_NUM_TOGETHER = 48
LEARNER = Incarnation(Role.LEARNER, "learner", 1)
SCORER = Incarnation(Role.REWARD, "reward-0", 1)


@dataclass(frozen=True, slots=True)
class Load:
    """The size of a ledger's content."""

    num_workers: int
    num_trajectories: int
    """In the ledger at once."""
    num_trained: int
    """Groups that have left before."""
    num_tokens: int
    """Of a chunk."""


def spec_of(load: Load) -> LedgerSpec:
    """Return a specification that has credit for all of it at version 0."""
    batch = BATCH_GROUPS * GROUP_SIZE
    return LedgerSpec(
        run=RUN,
        unit=Unit.GROUP,
        group_size=GROUP_SIZE,
        units_per_update=batch,
        eta=2 + (load.num_trajectories + load.num_trained * GROUP_SIZE) // batch,
        late=LatePolicy.DROP,
        lease_s=86400.0,
        scoring_deadline_s=86400.0,
    )


def generator(number: int) -> Incarnation:
    """Return one of the generators."""
    return Incarnation(Role.GENERATOR, f"generator-{number}", 1)


class Filling:
    """Fills a ledger."""

    def __init__(self, ledger: RedisLedger, load: Load) -> None:
        self._ledger = ledger
        self._load = load
        self._payload = Payload(load.num_tokens)
        self._next_group = 0
        self._holder: dict[TrajectoryId, Incarnation] = {}

    async def fill(self) -> None:
        """Train ``num_trained`` groups, then put ``num_trajectories`` into all states: of 16 groups
        2 are ready, 1 unscored, 2 half-written, 10 leased, 1 open."""
        await self._ledger.open(spec_of(self._load))
        for _ in range(self._load.num_trained // BATCH_GROUPS):
            groups = await self._lease(BATCH_GROUPS)
            await self._finish(groups, is_scored=True)
            claim = await self._ledger.claim(LEARNER, policy_version=0)
            assert isinstance(claim, Claim)
            await self._ledger.settle(LEARNER, (claim.claim_id,))
        num_groups = self._load.num_trajectories // GROUP_SIZE
        groups = await self._lease(num_groups - num_groups // 16)
        kinds: dict[str, list[int]] = {"ready": [], "unscored": [], "half": [], "leased": []}
        for number in groups:
            place = number % 15
            kind = "ready" if place < 2 else "unscored" if place < 3 else "half" if place < 5 else "leased"
            kinds[kind].append(number)
        await self._finish(kinds["ready"], is_scored=True)
        await self._finish(kinds["unscored"], is_scored=False)
        await self._write(kinds["half"], is_final=False)
        await self._open(num_groups // 16)

    async def _lease(self, num_groups: int) -> list[int]:
        """Lease groups, spread over the generators; return their numbers."""
        first, wanted = self._next_group, num_groups * GROUP_SIZE
        self._next_group += num_groups
        share = -(-wanted // self._load.num_workers)
        for number in range(self._load.num_workers):
            count = min(share, wanted)
            wanted -= count
            if count:
                grant = await self._ledger.lease(generator(number), max_trajectories=count)
                assert len(grant.leases) == count, grant.refusal
                self._holder.update((lease.trajectory, generator(number)) for lease in grant.leases)
        return [*range(first, first + num_groups)]

    async def _open(self, num_groups: int) -> None:
        for number in await self._lease(num_groups):
            for trajectory in _members(number):
                await self._ledger.give_back(self._holder[trajectory], (trajectory,))

    async def _finish(self, groups: list[int], *, is_scored: bool) -> None:
        await self._write(groups, is_final=True)
        if is_scored:
            names = [trajectory for number in groups for trajectory in _members(number)]
            await _all(self._score(name) for name in names)

    async def _score(self, name: TrajectoryId) -> None:
        score = RewardScore(reward=1.0, accuracy=float(name.member % 2))
        await self._ledger.write_score(SCORER, ChunkId(name, 0), score)

    async def _write(self, groups: list[int], *, is_final: bool) -> None:
        names = [trajectory for number in groups for trajectory in _members(number)]
        await _all(self._write_one(name, is_final) for name in names)

    async def _write_one(self, name: TrajectoryId, is_final: bool) -> None:
        chunk = self._payload.chunk(name, 0)
        if not is_final:
            chunk = msgspec.structs.replace(chunk, finish_reason=FinishReason.WINDOW, response_text=None)
        await self._ledger.write_chunk(self._holder[name], chunk)


def _members(number: int) -> list[TrajectoryId]:
    return [TrajectoryId("t", number, member) for member in range(GROUP_SIZE)]


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Await calls, so many at a time."""
    waiting = iter(calls)

    async def worker() -> None:
        for call in waiting:
            await call

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_NUM_TOGETHER):
            tasks.create_task(worker())
