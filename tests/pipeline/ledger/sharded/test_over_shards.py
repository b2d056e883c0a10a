"""Claims about a ledger over several shards: views, order, and a shard that fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pipeline.ledger.memory.admin import MemoryAdmin
from pipeline.ledger.memory.ledger import MemoryLedger
from pipeline.ledger.redis.admin import RedisAdmin
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.sharded.admin import ShardedAdmin
from pipeline.ledger.sharded.ledger import ShardedLedger
from pipeline.ledger.sharded.merge import merge_audits, merge_refusals
from pipeline.ledger.types import (
    Audit,
    Balance,
    Claim,
    ClaimRefused,
    ClaimWait,
    EvaluationRequest,
    FinishedClaim,
    Refusal,
    Restart,
    WriteStatus,
)
from protocol.errors import Fenced, LedgerError, LedgerUnavailable
from protocol.ids import Incarnation, Role, TrajectoryId
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
SPEC = make_spec(units_per_update=8)


@pytest.fixture(params=["memory", "redis"])
async def shards(request, redis_server, redis_client):
    """Two shards; the real ones are databases of one server."""
    if request.param == "memory":
        yield [MemoryLedger(lambda _: 1, lambda: 1000.0) for _ in range(2)]
        return
    ledgers = [RedisLedger(connect(f"{redis_server}?db={number}"), "test", now=lambda: 1000.0) for number in range(2)]
    yield ledgers
    for ledger in ledgers:
        await ledger.aclose()


class Away:
    """A shard that fails while ``is_away``."""

    def __init__(self, shard) -> None:
        self._shard, self.is_away = shard, False

    def __getattr__(self, name: str):
        async def call(*args, **kwargs):
            if self.is_away:
                raise LedgerUnavailable("no answer")
            return await getattr(self._shard, name)(*args, **kwargs)

        return call


async def sample(ledger, who=GENERATOR, most=100, version=0) -> list[str]:
    """Lease, write and score all that there is credit for; return the trajectories."""
    grant = await ledger.lease(who, max_trajectories=most)
    for lease in grant.leases:
        chunk = make_chunk(lease.trajectory, version=version)
        await ledger.write_chunk(who, chunk)
        await ledger.write_score(SCORER, chunk.id, reward(lease.trajectory.member % 2))
    return [str(lease.trajectory) for lease in grant.leases]


async def test_a_run_over_two_ledgers_trains_in_order_and_balances_in_each(shards):
    ledger = ShardedLedger(shards)
    await ledger.open(SPEC)
    own = await sample(ledger, GENERATOR, most=4)
    other = await sample(ledger, OTHER_GENERATOR, most=4)
    assert (own, other) == (["t.0.0", "t.0.1", "t.2.0", "t.2.1"], ["t.1.0", "t.1.1", "t.3.0", "t.3.1"])
    assert (await ledger.totals()).next_group == 4
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert isinstance(claim, Claim)
    assert claim.units == ("0", "1", "2", "3")
    assert [unit.name for unit in await ledger.fetch(claim)] == ["0", "1", "2", "3"]
    await ledger.advance(LEARNER, 1)
    assert await ledger.make_durable(LEARNER) in (True, False)
    assert await ledger.recover(LEARNER, (), kept=(claim.claim_id,)) == 0, "every shard keeps its part"
    assert await ledger.missing((claim.claim_id, "another")) == ("another",)
    assert [await ledger.settle(LEARNER, (claim.claim_id,), num_updates=1) for _ in range(2)] == [1, 0]
    assert await ledger.missing((claim.claim_id,)) == (claim.claim_id,)
    totals, audit = await ledger.totals(), await ledger.audit()
    assert (totals.credit_used, totals.policy_version, totals.credit_limit) == (8, 1, 24)
    assert audit.balances
    assert (audit.groups.trained, [shard.groups.trained for shard in audit.shards]) == (4, [2, 2])
    assert [shard.tokens.trained for shard in audit.shards] == [12, 12]
    assert await ledger.recover(LEARNER, (claim.claim_id,)) == 0
    assert await ledger.resume_from(LEARNER, Restart(2, 1)) == 0
    assert await ledger.restarts() == (Restart(2, 1),)
    await ledger.close_admission(LEARNER)
    assert (await ledger.lease(GENERATOR, max_trajectories=1)).refusal is Refusal.CLOSED


async def test_a_generator_takes_what_its_own_shard_lacks_from_the_others(shards):
    ledger = ShardedLedger(shards)
    await ledger.open(SPEC)
    grant = await ledger.lease(GENERATOR, max_trajectories=100)
    assert (len(grant.leases), grant.refusal) == (16, Refusal.NO_CREDIT)
    assert {lease.trajectory.group for lease in grant.leases} == set(range(8))
    assert await ledger.give_back(GENERATOR, (TrajectoryId("t", 3, 0), TrajectoryId("t", 4, 1))) == 2
    assert await ledger.give_back(GENERATOR) == 14


async def test_an_update_waits_for_the_share_of_every_shard_and_keeps_what_it_has(shards):
    ledger = ShardedLedger(shards)
    await ledger.open(SPEC)
    await sample(ledger, GENERATOR, most=8)
    waits = await ledger.claim(LEARNER, policy_version=0)
    assert isinstance(waits, ClaimRefused)
    assert (waits.wait, waits.num_ready, waits.num_needed) == (ClaimWait.NOT_ENOUGH, 2, 4)
    await sample(ledger, OTHER_GENERATOR, most=4)
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert isinstance(claim, Claim)
    assert claim.units == ("0", "1", "2", "3")


async def test_a_share_that_is_kept_is_not_used_at_another_version(shards):
    ledger = ShardedLedger(shards)
    await ledger.open(replace(SPEC, eta=0))
    await sample(ledger, GENERATOR, most=4)
    waits = await ledger.claim(LEARNER, policy_version=0)
    assert isinstance(waits, ClaimRefused)
    assert waits.num_ready == 2
    waits = await ledger.claim(LEARNER, policy_version=1)
    assert isinstance(waits, ClaimRefused)
    assert (waits.wait, waits.num_ready) == (ClaimWait.NOT_ENOUGH, 0)
    assert (await ledger.audit()).groups.dropped == {"stale": 2}


async def test_an_evaluation_is_shared_out_and_complete_when_every_shard_has_answered(shards):
    ledger = ShardedLedger(shards)
    await ledger.open(SPEC)
    await ledger.request_evaluation(LEARNER, EvaluationRequest(0, 0, 3, 1, 0.0))
    assert await sample(ledger, GENERATOR, most=2) == ["e0.0.0", "e0.2.0"]
    state = await ledger.evaluation(0)
    assert state is not None
    assert not state.is_complete
    assert await sample(ledger, OTHER_GENERATOR, most=1) == ["e0.1.0"]
    state = await ledger.evaluation(0)
    assert state is not None
    assert state.is_complete
    assert [sample.prompt for sample in state.samples] == [0, 1, 2]
    assert await ledger.evaluation(1) is None


async def test_overdue_chunks_come_from_every_shard_within_the_limit(shards):
    ledger = ShardedLedger(shards)
    await ledger.open(SPEC)
    for lease in (await ledger.lease(GENERATOR, max_trajectories=16)).leases:
        chunk = make_chunk(lease.trajectory)
        await ledger.write_chunk(GENERATOR, chunk)
        await ledger.fail_score(SCORER, chunk.id, Field.REWARD, "boom")
    some = await ledger.overdue(SCORER, Field.REWARD, max_chunks=10)
    assert len(some) == 10
    assert {late.chunk.trajectory.group % 2 for late in some} == {0, 1}


async def test_a_shard_that_was_emptied_is_named():
    shards = [MemoryLedger(lambda _: 1, lambda: 1000.0) for _ in range(2)]
    await ShardedLedger(shards).open(SPEC)
    await shards[0].resume_from(LEARNER, Restart(0, 0))
    with pytest.raises(LedgerError, match="server 1 of 2 has no record of this run"):
        await ShardedLedger(shards).restarts()


async def test_leases_survive_a_call_that_fails_at_another_shard():
    away = Away(MemoryLedger(lambda _: 1, lambda: 1000.0))
    ledger = ShardedLedger([MemoryLedger(lambda _: 1, lambda: 1000.0), away])  # pyright: ignore[reportArgumentType]
    await ledger.open(SPEC)
    away.is_away = True
    grant = await ledger.lease(GENERATOR, max_trajectories=100)
    assert (len(grant.leases), grant.refusal) == (8, None)
    with pytest.raises(LedgerUnavailable):
        await ledger.lease(GENERATOR, max_trajectories=1)
    away.is_away = False
    assert len((await ledger.lease(GENERATOR, max_trajectories=1)).leases) == 1


async def test_a_share_survives_a_claim_that_fails_at_another_shard():
    away = Away(MemoryLedger(lambda _: 1, lambda: 1000.0))
    ledger = ShardedLedger([MemoryLedger(lambda _: 1, lambda: 1000.0), away])  # pyright: ignore[reportArgumentType]
    await ledger.open(SPEC)
    await sample(ledger)
    away.is_away = True
    with pytest.raises(LedgerUnavailable):
        await ledger.claim(LEARNER, policy_version=0)
    away.is_away = False
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert isinstance(claim, Claim)
    assert claim.units == ("0", "1", "2", "3")


async def test_a_server_without_a_registry_fences_by_the_epochs_that_it_is_told(redis_server, redis_client):
    shards = [RedisLedger(connect(f"{redis_server}?db={number}"), "test") for number in range(2)]
    older, newer = (ShardedLedger(shards, raise_epoch=[shard.raise_epoch for shard in shards[1:]]) for _ in range(2))
    await older.open(SPEC)
    odd = Incarnation(Role.GENERATOR, "generator-1", 1)
    assert [str(one.trajectory) for one in (await older.lease(odd, max_trajectories=1)).leases] == ["t.1.0"]
    await newer.lease(Incarnation(Role.GENERATOR, "generator-1", 2), max_trajectories=1)
    with pytest.raises(Fenced, match="epoch 2"):
        await older.write_chunk(odd, make_chunk(TrajectoryId("t", 1, 0)))
    await shards[1].raise_epoch("generator-1", 1)
    with pytest.raises(Fenced, match="epoch 2"):
        await older.renew(odd)
    await older.aclose()


def test_one_shards_surplus_does_not_hide_anothers_loss():
    audit = merge_audits([_audit(admitted=3, trained=2), _audit(admitted=2, trained=3)])
    assert audit.groups.difference == 0
    assert not audit.balances


def test_a_refusal_is_the_one_that_may_pass_soonest():
    assert merge_refusals([Refusal.EXHAUSTED, Refusal.NO_CREDIT]) is Refusal.NO_CREDIT
    assert merge_refusals([Refusal.NO_CREDIT, Refusal.BEHIND]) is Refusal.BEHIND


def _audit(*, admitted: int, trained: int):
    empty = Balance(0, 0)
    return Audit(Balance(admitted, trained), empty, empty)


class Mute:
    """A shard that gives no answer until ``answers`` is set, and is known to be away meanwhile."""

    def __init__(self, shard) -> None:
        self._shard, self.answers = shard, asyncio.Event()
        self.answers.set()

    def __getattr__(self, name: str):
        async def call(*args, **kwargs):
            await self.answers.wait()
            return await getattr(self._shard, name)(*args, **kwargs)

        return call


async def test_while_one_shard_is_away_the_work_of_the_others_goes_on():
    now = [1000.0]
    shards = [Mute(MemoryLedger(lambda _: 1, lambda: now[0])) for _ in range(2)]
    ledger = ShardedLedger(shards, is_away=lambda index: not shards[index].answers.is_set())  # pyright: ignore[reportArgumentType]
    await ledger.open(SPEC)
    held = [str(one.trajectory) for one in (await ledger.lease(OTHER_GENERATOR, max_trajectories=1)).leases]
    shards[0].answers.clear()
    async with asyncio.timeout(5.0):
        for _ in range(3):
            now[0] += 6.0
            await ledger.renew(OTHER_GENERATOR)
        written = await ledger.write_chunk(OTHER_GENERATOR, make_chunk(TrajectoryId.parse(held[0])))
        assert written.status is WriteStatus.STORED, "a lease at a shard that answers was not renewed"
        assert len(await ledger.overdue(SCORER, Field.REWARD, max_chunks=9)) == 0
        there = await ledger.lease(GENERATOR, max_trajectories=100)
        assert {one.trajectory.group % 2 for one in there.leases} == {1}
        assert (await ledger.lease(GENERATOR, max_trajectories=5)).leases == ()
        shards[0].answers.set()
        late = await ledger.lease(GENERATOR, max_trajectories=100)
        assert {one.trajectory.group % 2 for one in late.leases} == {0}
        assert len({one.trajectory for one in (*there.leases, *late.leases)}) == 15
    await ledger.aclose()


async def test_a_value_batch_takes_even_parts_and_more_where_another_has_too_few(shards):
    ledger = ShardedLedger(shards)
    await ledger.open(replace(SPEC, fields=frozenset({Field.REWARD, Field.VALUE}), value_training=True))
    for who, most in ((GENERATOR, 4), (OTHER_GENERATOR, 2)):
        for lease in (await ledger.lease(who, max_trajectories=most)).leases:
            chunk = make_chunk(lease.trajectory)
            await ledger.write_chunk(who, chunk)
            for score in (reward(), value()):
                await ledger.write_score(SCORER, chunk.id, score)
    assert await ledger.claim_finished(VALUE, num_trajectories=7) == 6
    claim = await ledger.claim_finished(VALUE, num_trajectories=5)
    assert isinstance(claim, FinishedClaim)
    assert [str(one.chunk.trajectory) for one in claim.trajectories] == ["t.0.0", "t.0.1", "t.2.0", "t.1.0", "t.1.1"]
    assert [await ledger.settle_finished(VALUE, (claim.claim_id,)) for _ in range(2)] == [1, 0]
    assert await ledger.recover_finished(VALUE, ()) == 0
    assert (await ledger.audit()).finished.trained == 5


async def test_a_renewal_holds_what_its_worker_has_in_every_shard():
    now = [1000.0]
    ledger = ShardedLedger([MemoryLedger(lambda _: 1, lambda: now[0]) for _ in range(2)])
    await ledger.open(SPEC)
    assert len((await ledger.lease(GENERATOR, max_trajectories=100)).leases) == 16
    for _ in range(3):
        now[0] += 6.0
        await ledger.renew(GENERATOR)
    assert (await ledger.lease(OTHER_GENERATOR, max_trajectories=100)).leases == ()
    await ledger.aclose()


def admin_of(shard) -> MemoryAdmin | RedisAdmin:
    return MemoryAdmin(shard, lambda _: 1) if isinstance(shard, MemoryLedger) else RedisAdmin(shard)


async def test_a_pause_holds_in_every_shard_and_ends_in_every_shard(shards):
    ledger = ShardedLedger(shards)
    await ledger.open(SPEC)
    admin = ShardedAdmin([admin_of(shard) for shard in shards])
    paused = await admin.pause(by="operator@host", reason="a look")
    grant = await ledger.lease(GENERATOR, max_trajectories=100)
    assert (grant.leases, grant.refusal) == ((), Refusal.PAUSED)
    assert (await ledger.totals()).paused == paused
    assert await admin.resume() == paused
    assert (await ledger.totals()).paused is None
    assert {name.split(".")[1] for name in await sample(ledger)} >= {"0", "1"}, "both shards admit again"


async def test_a_run_is_paused_until_its_last_shard_is_not(shards):
    await ShardedLedger(shards).open(SPEC)
    away = Away(admin_of(shards[1]))
    admin = ShardedAdmin([admin_of(shards[0]), away])  # pyright: ignore[reportArgumentType]
    paused = await admin.pause(by="operator@host")
    away.is_away = True
    with pytest.raises(LedgerUnavailable):
        await admin.resume()
    away.is_away = False
    assert (await ShardedLedger(shards).totals()).paused == paused
    assert await admin.resume() == paused
