"""Claims about calls that may walk over much of a ledger on a server: a part a call, and whoever dies
between two parts leaves what a successor ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio

from pipeline.ledger.admin import Requeued, RequeueRequest
from pipeline.ledger.redis.admin import RedisAdmin, RedisInspection
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.types import Claim, ClaimRefused, EvaluationRequest, LatePolicy, Restart, Unit
from protocol.ids import Incarnation, Role
from protocol.trajectory import Field
from tests.pipeline.ledger.builders import GENERATOR, LEARNER, SCORER, finish, make_chunk, make_spec, reward

SUCCESSOR = Incarnation(Role.LEARNER, "learner-0", 2)
BATCH = 8
"""Trajectories of an update, with a chunk each."""


class Died(Exception):
    """The caller died between two parts."""


class InParts(RedisLedger):
    """Ends three chunks a call; ``dies_after`` so many further calls of ``dies_in``, if that is set."""

    dies_in = ""
    dies_after = 0

    def __init__(self, client: redis.asyncio.Redis) -> None:
        super().__init__(client, "test", most=12)
        self.calls: list[str] = []

    async def _call(self, name: str, who: Incarnation | None, **arguments: object) -> Any:
        if name == self.dies_in:
            if self.dies_after == 0:
                self.dies_in = ""
                raise Died
            self.dies_after -= 1
        self.calls.append(name)
        return await super()._call(name, who, **arguments)

    def die(self, name: str, after: int) -> None:
        self.dies_in, self.dies_after = name, after

    async def update(self, version: int = 0) -> Claim:
        while isinstance(claim := await self.claim(LEARNER, policy_version=version), ClaimRefused):
            for lease in (await self.lease(GENERATOR, max_trajectories=BATCH)).leases:
                await finish(self, lease, accuracy=float(lease.trajectory.member % 2))
        return claim

    async def books(self) -> tuple[int, dict[str, int], dict[str, int]]:
        audit = await self.audit()
        assert audit.balances, audit
        return audit.trajectories.trained, audit.trajectories.dropped, audit.trajectories.in_flight


@pytest.fixture(params=[*Unit])
async def ledger(request: pytest.FixtureRequest, redis_client: redis.asyncio.Redis) -> AsyncIterator[InParts]:
    ledger = InParts(redis_client)
    await ledger.open(make_spec(request.param, units_per_update=BATCH, eta=4, late=LatePolicy.DROP))
    yield ledger


async def test_settling_recovering_and_cancelling_take_several_calls_with_one_answer(ledger: InParts) -> None:
    claims = (await ledger.update()).claim_id, (await ledger.update()).claim_id
    assert await ledger.settle(LEARNER, claims, num_updates=2) == 2
    assert ledger.calls.count("settle") > 2
    num_units = len((await ledger.update()).units)
    assert await ledger.recover(SUCCESSOR, ()) == num_units
    assert ledger.calls.count("recover") > 1
    assert await ledger.cancel_in_flight(SUCCESSOR) > 0
    assert ledger.calls.count("cancel") > 1
    trained, dropped, in_flight = await ledger.books()
    assert (trained, dropped, in_flight) == (2 * BATCH, {"cancelled": BATCH}, {})


@pytest.mark.parametrize("after", [1, 3])
async def test_a_learner_that_dies_while_it_settles_is_succeeded_and_each_unit_counts_once(
    ledger: InParts, after: int
) -> None:
    claims = (await ledger.update()).claim_id, (await ledger.update()).claim_id
    ledger.die("settle", after)
    with pytest.raises(Died):
        await ledger.settle(LEARNER, claims, num_updates=2)
    trained, _, in_flight = await ledger.books()
    assert 0 < trained < 2 * BATCH, "it died half-way"
    assert trained + in_flight["claimed"] == 2 * BATCH
    assert await ledger.recover(SUCCESSOR, claims) == 0
    assert await ledger.resume_from(SUCCESSOR, Restart(2, 2)) == 0
    assert await ledger.books() == (2 * BATCH, {}, {})
    assert await ledger.settle(SUCCESSOR, claims, num_updates=2) == 0


async def test_a_half_settled_update_is_given_up_by_a_learner_that_goes_back_before_it(ledger: InParts) -> None:
    await ledger.settle(LEARNER, ((await ledger.update()).claim_id,), num_updates=1)
    lost = await ledger.update()
    ledger.die("settle", 1)
    with pytest.raises(Died):
        await ledger.settle(LEARNER, (lost.claim_id,), num_updates=2)
    half = (await ledger.books())[0] - BATCH
    assert half > 0
    returned = await ledger.recover(SUCCESSOR, ())
    given_up = await ledger.resume_from(SUCCESSOR, Restart(3, 1))
    assert given_up == half, "what the later weights had learned is not in these"
    assert await ledger.books() == (BATCH, {"rolled_back": half}, {"ready": BATCH - half})
    assert returned > 0


async def test_a_learner_that_dies_while_it_recovers_is_succeeded(ledger: InParts) -> None:
    applied, other = await ledger.update(), await ledger.update()
    ledger.die("recover", 1)
    with pytest.raises(Died):
        await ledger.recover(LEARNER, (applied.claim_id,))
    await ledger.books()
    await ledger.recover(SUCCESSOR, (applied.claim_id,))
    assert await ledger.books() == (BATCH, {}, {"ready": BATCH})
    again = await ledger.claim(SUCCESSOR, policy_version=0)
    assert isinstance(again, Claim)
    assert again.units == other.units, "in their order"


async def test_a_claim_comes_back_in_parts_and_its_rest_with_the_successor(ledger: InParts) -> None:
    claim = await ledger.update()
    assert await ledger.return_claim(LEARNER, claim.claim_id) == len(claim.units)
    assert ledger.calls.count("return_claim") > 1
    assert await ledger.return_claim(LEARNER, claim.claim_id) == 0
    again = await ledger.update()
    assert again.units == claim.units
    ledger.die("return_claim", 1)
    with pytest.raises(Died):
        await ledger.return_claim(LEARNER, again.claim_id)
    assert 0 < (await ledger.totals()).num_ready_units < len(claim.units)
    assert 0 < await ledger.recover(SUCCESSOR, ()) < len(claim.units)
    last = await ledger.claim(SUCCESSOR, policy_version=0)
    assert isinstance(last, Claim)
    assert last.units == claim.units, "in their order"


async def test_a_cancel_that_is_cut_short_leaves_no_claim_of_what_is_gone(ledger: InParts) -> None:
    await ledger.update()
    for lease in (await ledger.lease(GENERATOR, max_trajectories=BATCH)).leases:
        chunk = make_chunk(lease.trajectory)
        await ledger.write_chunk(GENERATOR, chunk)
        await ledger.write_score(SCORER, chunk.id, reward())
    await ledger.close_admission(LEARNER)
    ledger.die("cancel", 1)
    with pytest.raises(Died):
        await ledger.cancel_in_flight(LEARNER)
    _, dropped, in_flight = await ledger.books()
    assert dropped["cancelled"] > 0
    assert in_flight["claimed"] > 0
    assert await ledger.recover(SUCCESSOR, ()) > 0
    await ledger.books()
    await ledger.cancel_in_flight(SUCCESSOR)
    _, dropped, in_flight = await ledger.books()
    assert in_flight == {}
    assert (await ledger.totals()).num_ready_units == 0
    assert (await ledger.totals()).credit_used == 0


async def test_looks_and_requeues_take_several_calls_with_the_answer_of_one(
    ledger: InParts, redis_client: redis.asyncio.Redis
) -> None:
    ledger.most = 3
    for lease in (await ledger.lease(GENERATOR, max_trajectories=2 * BATCH)).leases:
        await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory))
    at_once = RedisLedger(redis_client, "test", most=1000)
    groups = await RedisInspection(ledger).groups(max_groups=7)
    assert ledger.calls.count("groups") > 2
    assert [group.number for group in groups.groups] == [*range(7)]
    assert replace(groups, groups=()) == replace(await RedisInspection(at_once).groups(max_groups=7), groups=())
    found = await RedisAdmin(ledger).requeue(RequeueRequest(field=Field.REWARD))
    assert found == await RedisAdmin(at_once).requeue(RequeueRequest(field=Field.REWARD)) == Requeued(0, 2 * BATCH)
    assert ledger.calls.count("requeue") > 2
    assert len(await ledger.overdue(SCORER, Field.REWARD, max_chunks=100)) == 2 * BATCH, "all are due"


async def test_unscored_evaluation_responses_are_counted_among_many_chunks(
    ledger: InParts, redis_client: redis.asyncio.Redis
) -> None:
    asked = EvaluationRequest(number=0, policy_version=0, num_prompts=5, samples_per_prompt=1, temperature=1.0)
    await ledger.request_evaluation(LEARNER, asked)
    for lease in (await ledger.lease(GENERATOR, max_trajectories=5 + 2 * BATCH)).leases:
        await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory))
    # the server answers for a small set at once
    await redis_client.zadd("{test}:due:reward", {f"t.{group}.0.0": group for group in range(100, 400)})
    assert (await RedisAdmin(ledger).waits()).num_evaluation_unscored == 5
