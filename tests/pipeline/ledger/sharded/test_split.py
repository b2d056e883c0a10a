"""How a run is split: specifications, names, claims."""

from __future__ import annotations

import pytest

from pipeline.ledger.memory.ledger import MemoryLedger
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.sharded.ledger import ShardedLedger
from pipeline.ledger.sharded.split import admission_order, join_claims, own_shard, shard_spec, split_claims
from pipeline.ledger.types import EvaluationRequest, Refusal, Unit
from protocol.errors import ConfigError, LedgerMismatch
from protocol.ids import ChunkId
from protocol.trajectory import Field
from tests.pipeline.ledger.builders import GENERATOR, LEARNER, SCORER, make_chunk, make_spec, reward


@pytest.fixture(params=["memory", "redis"])
def make_ledger(request, redis_client):
    def make():
        if request.param == "memory":
            return MemoryLedger(lambda _: 1, lambda: 1000.0)
        return RedisLedger(redis_client, "test", now=lambda: 1000.0)

    return make


def test_an_updates_units_are_divided_and_what_does_not_divide_is_refused():
    spec = make_spec(Unit.GROUP, units_per_update=12, group_size=2, max_bytes=1000)
    part = shard_spec(spec, 1, 3)
    assert (part.units_per_update, part.shard, part.num_shards, part.max_bytes) == (4, 1, 3, 1000)
    with pytest.raises(ConfigError, match="6 groups do not divide by the run's 4 ledger servers"):
        shard_spec(spec, 0, 4)
    assert shard_spec(make_spec(Unit.CHUNK, units_per_update=12), 0, 4).units_per_update == 3


def test_a_roles_workers_are_spread_evenly_by_the_number_in_their_names():
    assert [own_shard(f"generator-{number}", 3) for number in range(6)] == [0, 1, 2, 0, 1, 2]
    assert own_shard("no-number", 3) == own_shard("no-number", 3) < 3


def test_the_order_of_admission_is_that_of_numbers_and_not_of_texts():
    assert sorted(["10", "9"], key=admission_order) == ["9", "10"]
    assert sorted(["t.10.0.0", "t.9.1.3"], key=admission_order) == ["t.9.1.3", "t.10.0.0"]


def test_a_claims_id_names_every_shards_claim_and_an_unknown_id_none():
    claim = join_claims([(1, "learner-0#1/7"), (0, "learner-0#1/6")])
    assert split_claims((claim,), 2) == {0: ("learner-0#1/6",), 1: ("learner-0#1/7",)}
    assert split_claims((claim, "learner-0#1/8"), 1) == {0: ()}


async def test_a_shard_has_every_so_many_th_group_and_prompt_and_no_more_than_there_are(make_ledger):
    ledger = make_ledger()
    await ledger.open(make_spec(eta=3, num_prompts=6, shard=1, num_shards=3))
    grant = await ledger.lease(GENERATOR, max_trajectories=10)
    assert [(str(one.trajectory), one.prompt) for one in grant.leases] == [
        ("t.1.0", 1),
        ("t.1.1", 1),
        ("t.4.0", 4),
        ("t.4.1", 4),
    ]
    assert grant.refusal is Refusal.EXHAUSTED
    assert (await ledger.totals()).is_exhausted


async def test_a_shard_evaluates_every_so_many_th_prompt(make_ledger):
    ledger = make_ledger()
    await ledger.open(make_spec(shard=1, num_shards=2))
    request = EvaluationRequest(0, 0, num_prompts=4, samples_per_prompt=1, temperature=0.0)
    await ledger.request_evaluation(LEARNER, request)
    grant = await ledger.lease(GENERATOR, max_trajectories=2)
    assert [str(one.trajectory) for one in grant.leases] == ["e0.1.0", "e0.3.0"]


async def test_a_prompt_that_is_admitted_again_leaves_the_others_their_places(make_ledger):
    ledger = make_ledger()
    await ledger.open(make_spec(shard=1, num_shards=2, group_size=1, units_per_update=1, max_attempts=1))
    [lease] = (await ledger.lease(GENERATOR, max_trajectories=1)).leases
    await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory))
    assert await ledger.fail_score(SCORER, ChunkId(lease.trajectory, 0), Field.REWARD, "boom")
    if isinstance(ledger, MemoryLedger):
        ledger.state.again.add(1)
    else:
        await ledger.ask("retry", chunks=())
    grant = await ledger.lease(GENERATOR, max_trajectories=2)
    assert [(str(one.trajectory), one.prompt) for one in grant.leases] == [("t.3.0", 1), ("t.5.0", 3)]


async def test_a_ledger_of_one_server_is_stored_as_before_there_were_several(redis_client):
    await RedisLedger(redis_client, "test").open(make_spec())
    stored = await redis_client.hgetall("{test}:spec")
    assert not {b"shard", b"num_shards"} & stored.keys()
    assert b"shard" not in await redis_client.get("{test}:settings")


async def test_other_servers_or_another_order_of_them_are_refused_in_a_sentence(make_ledger):
    ledger, spec = make_ledger(), make_spec(units_per_update=12)
    await ledger.open(shard_spec(spec, 0, 2))
    with pytest.raises(LedgerMismatch, match="is share 0 of 2, expected share 0 of 3: name the same servers"):
        await ShardedLedger([ledger] * 3).open(spec)
    with pytest.raises(LedgerMismatch, match="is share 0 of 2, expected share 1 of 2"):
        await ledger.open(shard_spec(spec, 1, 2))
    with pytest.raises(LedgerMismatch, match="is share 0 of 2, expected the whole"):
        await ledger.open(spec)


async def test_a_claim_that_is_returned_may_be_claimed_again_and_returns_once(make_ledger):
    ledger = make_ledger()
    await ledger.open(make_spec())
    for lease in (await ledger.lease(GENERATOR, max_trajectories=4)).leases:
        await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory))
        await ledger.write_score(SCORER, ChunkId(lease.trajectory, 0), reward())
    first = await ledger.claim(LEARNER, policy_version=0)
    assert [await ledger.return_claim(LEARNER, first.claim_id) for _ in range(2)] == [2, 0]
    again = await ledger.claim(LEARNER, policy_version=0)
    assert (again.units, again.claim_id == first.claim_id) == (first.units, False)
    assert await ledger.settle(LEARNER, (first.claim_id,)) == 0
    assert (await ledger.audit()).balances
