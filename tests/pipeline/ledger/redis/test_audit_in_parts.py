"""Claims about the audit on a server: parts that other calls run between, one exact answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis.asyncio

from pipeline.ledger.redis import keys
from pipeline.ledger.redis.audit import FinishedLane, Walk
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.types import Audit, Claim, DropReason, FinishedClaim, LatePolicy, Unit
from protocol.errors import LedgerError
from protocol.ids import ChunkId, Incarnation, Role
from protocol.trajectory import Field
from tests.pipeline.ledger.builders import (
    GENERATOR,
    LEARNER,
    OTHER_GENERATOR,
    SCORER,
    make_chunk,
    make_spec,
    reward,
    value,
)

VALUE = Incarnation(Role.VALUE, "value-0", 1)
MOST = 25
"""Chunks and trajectories of a part: several parts a walk, and more than moves between two."""


@dataclass
class Parts:
    """The ledger's server, with what happens before each part; keeps how many rows each had."""

    ledger: RedisLedger
    between: Callable[[], Awaitable[None]] | None = None
    sizes: list[int] = field(default_factory=list)

    async def ask(self, script: str, **arguments: object) -> Any:
        if self.between is not None:
            await self.between()
        reply = await self.ledger.ask(script, **arguments)
        self.sizes.append(len(reply[3]) if reply else 0)
        return reply


class MovingFleet:
    """A fleet whose moves are drawn by dice: every way by which work comes, goes and changes hands."""

    def __init__(self, client: redis.asyncio.Redis, unit: Unit, *, critic: bool) -> None:
        self.ledger = RedisLedger(client, "test")
        self.spec = make_spec(unit, eta=20, late=LatePolicy.DROP, units_per_update=8)
        if critic:
            fields = frozenset({Field.REWARD, Field.VALUE})
            self.spec = make_spec(
                unit, eta=20, units_per_update=8, late=LatePolicy.DROP, fields=fields, value_training=True
            )
        self.critic = critic
        self.dice = random.Random(0)
        self.unscored: list[tuple[ChunkId, int]] = []
        self.num_updates = 0

    def lane(self, between: Callable[[], Awaitable[None]] | None = None) -> FinishedLane:
        async def ask(command: Any) -> Any:
            if between is not None:
                await between()
            return await self.ledger.connection.ask(*command)

        return FinishedLane(
            ask,
            keys.finished_order("test"),
            keys.finished_claims("test"),
            lambda claim: keys.finished_claim("test", claim),
        )

    async def walk(self, between: Callable[[], Awaitable[None]] | None = None, *, most: int = MOST) -> Audit | None:
        """Audit once; ``between``: what happens before each part."""

        return await Walk(self.lane(between), most=most).run(Parts(self.ledger, between))

    async def move(self) -> None:
        moves = [*[self._generate] * 5, *[self._score] * 3, self._learn]
        await self.dice.choice([*moves, *[self._train_critic] * 6] if self.critic else moves)()

    async def _generate(self) -> None:
        who = self.dice.choice((GENERATOR, OTHER_GENERATOR))
        for lease in (await self.ledger.lease(who, max_trajectories=3)).leases:
            index = lease.next_index
            length = lease.last_chunk.response_length if lease.last_chunk else 0
            for _ in range(self.dice.randint(0, 3)):
                tokens, final = self.dice.randint(1, 5), self.dice.random() < 0.5
                chunk = make_chunk(lease.trajectory, index, tokens=tokens, final=final, context=length)
                answer = await self.ledger.write_chunk(who, chunk)
                self.unscored.append((chunk.id, tokens))
                index, length = index + 1, length + tokens
                if not answer.keeps_lease:
                    break
        await self.ledger.give_back(who)

    async def _score(self) -> None:
        self.dice.shuffle(self.unscored)
        for _ in range(min(6, len(self.unscored))):
            chunk, tokens = self.unscored.pop()
            if self.dice.random() < 0.1:
                for _ in range(2):
                    await self.ledger.fail_score(SCORER, chunk, Field.REWARD, "broken")
                continue
            await self.ledger.write_score(SCORER, chunk, reward(self.dice.choice((0.0, 1.0))))
            if self.critic:
                await self.ledger.write_score(VALUE, chunk, value(tokens))

    async def _learn(self) -> None:
        if self.dice.random() < 0.05:
            await self.ledger.cancel_in_flight(LEARNER)
        claim = await self.ledger.claim(LEARNER, policy_version=self.num_updates)
        if not isinstance(claim, Claim):
            return
        await self.ledger.drop(LEARNER, claim, claim.units[0], DropReason.NON_FINITE)
        if self.dice.random() < 0.3:
            await self.ledger.return_claim(LEARNER, claim.claim_id)
            return
        self.num_updates += 1
        await self.ledger.settle(LEARNER, (claim.claim_id,), num_updates=self.num_updates)
        await self.ledger.advance(LEARNER, self.num_updates)

    async def _train_critic(self) -> None:
        luck = self.dice.random()
        if luck < 0.4:
            await self.ledger.recover_finished(VALUE, ())
            return
        claim = await self.ledger.claim_finished(VALUE, num_trajectories=3)
        if luck < 0.6 and isinstance(claim, FinishedClaim):
            await self.ledger.settle_finished(VALUE, (claim.claim_id,))


@pytest.fixture(params=[*Unit, "critic"])
async def moving(request: pytest.FixtureRequest, redis_client: redis.asyncio.Redis) -> AsyncIterator[MovingFleet]:
    is_critic = request.param == "critic"
    fleet = MovingFleet(redis_client, Unit.TRAJECTORY if is_critic else request.param, critic=is_critic)
    await fleet.ledger.open(fleet.spec)
    for _ in range(40):
        await fleet.move()
    while sum((await fleet.ledger.audit()).trajectories.in_flight.values()) < 2 * MOST:
        await fleet._generate()
    yield fleet


async def test_an_audit_balances_whatever_moves_between_its_parts(moving: MovingFleet) -> None:
    states: set[str] = set()
    for _ in range(8):
        audit = await moving.walk(moving.move)
        assert audit is not None
        assert audit.balances, audit
        states |= set(audit.trajectories.in_flight) | set(audit.finished.in_flight)
    assert {"open", "finished", "ready"} <= states
    if moving.critic:
        assert {"waiting", "claimed"} <= states


async def test_an_audit_beside_workers_that_never_wait_for_it_balances(moving: MovingFleet) -> None:
    is_over = asyncio.Event()

    async def work() -> None:
        while not is_over.is_set():
            await moving.move()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work())
        for _ in range(8):
            audit = await moving.walk()
            assert audit is not None
            assert audit.balances, audit
        is_over.set()


async def test_in_parts_or_at_once_the_answer_is_the_same_when_nothing_moves(moving: MovingFleet) -> None:
    assert await moving.walk(most=1) == await moving.walk(most=1_000_000) == await moving.ledger.audit()


@pytest.mark.parametrize("lost", ["a chunk", "a trajectory", "a group", "a count"])
async def test_a_loss_is_found_while_all_else_moves(
    moving: MovingFleet, redis_client: redis.asyncio.Redis, lost: str
) -> None:
    run = moving.ledger

    async def some(pattern: str) -> Any:
        return sorted(await redis_client.keys(f"{{test}}:{pattern}"))[0]

    # whose group cannot end, and what else is not finished is held: no generator meets what is gone
    grant = await run.lease(Incarnation(Role.GENERATOR, "generator-2", 1), max_trajectories=1)
    await run.close_admission(LEARNER)
    await run.lease(Incarnation(Role.GENERATOR, "generator-3", 1), max_trajectories=1000)
    moving.unscored.clear()
    if lost == "a chunk":
        await redis_client.delete(await some("chunk:*"))
    elif lost == "a trajectory":
        await redis_client.delete(await some("trajectory:t.*"))
    elif lost == "a group":
        await redis_client.zrem("{test}:groups", str(grant.leases[0].trajectory.group))
    else:
        await redis_client.hincrby("{test}:counters", "tokens:dropped:stale", 1)
    for between in (None, moving.move):
        audit = await moving.walk(between)
        assert audit is not None
        assert not audit.balances
    assert not (await run.audit()).balances


async def test_no_part_reads_more_than_it_may(moving: MovingFleet) -> None:
    parts = Parts(moving.ledger)
    assert await Walk(moving.lane(), most=7).run(parts) is not None
    assert max(parts.sizes) <= 7
    assert len(parts.sizes) > 3


async def test_an_audit_that_lost_track_is_made_anew_and_says_so_if_it_always_does(
    moving: MovingFleet, redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [0]

    async def forget() -> None:
        if left[0]:
            left[0] -= 1
            await redis_client.hincrby("{test}:counters", "moved", 1_000_000)

    monkeypatch.setattr(moving.ledger, "_call", _forgetful(moving.ledger, forget))
    left[0] = 2
    assert (await moving.ledger.audit()).balances
    left[0] = 1000
    with pytest.raises(LedgerError, match="lost track of the ledger 3 times"):
        await moving.ledger.audit()


def _forgetful(ledger: RedisLedger, forget: Callable[[], Awaitable[None]]) -> Any:
    real = ledger._call

    async def call(*given: Any, **asked: Any) -> Any:
        answer = await real(*given, **asked)
        await forget()
        return answer

    return call


async def test_the_list_of_what_moved_is_bounded(moving: MovingFleet, redis_client: redis.asyncio.Redis) -> None:
    await redis_client.lpush("{test}:moved", *(["t.0.0"] * 65_536))
    for _ in range(20):
        await moving.move()
    assert await redis_client.llen("{test}:moved") < 65_536


@pytest.mark.parametrize("change", ["a batch is settled", "a batch waits again"])
async def test_what_the_value_worker_has_is_counted_though_only_its_own_lane_moves(
    redis_client: redis.asyncio.Redis, change: str
) -> None:
    fleet = MovingFleet(redis_client, Unit.TRAJECTORY, critic=True)
    ledger = fleet.ledger
    await ledger.open(fleet.spec)
    for lease in (await ledger.lease(GENERATOR, max_trajectories=8)).leases:
        chunk = make_chunk(lease.trajectory)
        await ledger.write_chunk(GENERATOR, chunk)
        await ledger.write_score(SCORER, chunk.id, reward())
        await ledger.write_score(VALUE, chunk.id, value())
    trained = await ledger.claim(LEARNER, policy_version=0)
    assert isinstance(trained, Claim)
    await ledger.settle(LEARNER, (trained.claim_id,))
    claim = await ledger.claim_finished(VALUE, num_trajectories=7)
    assert isinstance(claim, FinishedClaim)
    num_steps = 0

    async def move() -> None:
        nonlocal num_steps
        num_steps += 1
        # the lane was looked at for what waits, and is about to be for what is claimed
        if change == "a batch waits again" and num_steps == 4:
            await ledger.recover_finished(VALUE, ())
        # some of the batch were read
        if change == "a batch is settled" and num_steps == 11:
            await ledger.settle_finished(VALUE, (claim.claim_id,))

    audit = await fleet.walk(move, most=2)
    assert audit is not None
    if change == "a batch is settled":
        assert num_steps > 11
    assert audit.balances, audit
    assert audit.finished.in_flight == {"waiting": 1 if change == "a batch is settled" else 8}
