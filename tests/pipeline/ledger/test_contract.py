"""Every ledger's promises on a run as a whole. ``test_contract_*`` have the others."""

import pytest

from pipeline.ledger.types import Refusal, Restart, Unit
from protocol.errors import ConfigError, LedgerMismatch
from protocol.ids import Incarnation, Role
from tests.pipeline.ledger.builders import (
    GENERATOR,
    LEARNER,
    SCORER,
    finish,
    make_chunk,
    make_spec,
)


async def test_all_workers_together_spend_up_to_the_limit_and_a_higher_one_gives_more(bench):
    ledger = await bench.open(make_spec())
    other = Incarnation(Role.REWARD, "reward-1", 1)

    async def spent(limit: int) -> list[bool]:
        return [await ledger.spend(who, "endpoint/quality", limit=limit) for who in (SCORER, other, SCORER, other)]

    assert await spent(3) == [True, True, True, False]
    assert await ledger.spend(SCORER, "endpoint/another", limit=1)
    assert await spent(5) == [True, True, False, False]


async def test_cancelling_drops_all_that_is_not_trained_and_balances(bench):
    ledger = await bench.open(make_spec(Unit.CHUNK))
    leases = (await ledger.lease(GENERATOR, max_trajectories=4)).leases
    for lease in leases:
        await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory, final=False))
    claim = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (claim.claim_id,))
    await ledger.write_chunk(GENERATOR, make_chunk(leases[0].trajectory, 1, final=False, context=3))
    assert await ledger.cancel_in_flight(LEARNER) == 2
    audit, totals = await ledger.audit(), await ledger.totals()
    assert audit.balances
    assert (audit.trajectories.trained, audit.groups.in_flight) == (4, {})
    assert (totals.credit_used, totals.num_running) == (4, 0)
    assert audit.tokens.dropped == {"cancelled": 3}


@pytest.mark.parametrize("unit", Unit)
async def test_what_an_end_cancels_before_any_of_it_was_trained_is_admitted_again_when_the_run_goes_on(bench, unit):
    ledger = await bench.open(make_spec(unit, num_prompts=4, units_per_update=4 if unit is Unit.GROUP else 2, eta=5))
    leases = (await ledger.lease(GENERATOR, max_trajectories=8)).leases
    assert sorted({lease.prompt for lease in leases}) == [0, 1, 2, 3]
    trained = leases[:4] if unit is Unit.GROUP else (leases[0], leases[2])
    for lease in trained:
        if unit is Unit.CHUNK:
            await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory, final=False))
        else:
            await finish(ledger, lease)
    claim = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (claim.claim_id,))
    await ledger.advance(LEARNER, 1)
    await ledger.close_admission(LEARNER)
    await ledger.cancel_in_flight(LEARNER)
    left = sorted({0, 1, 2, 3} - {lease.prompt for lease in trained})
    assert {stat.name: stat.depth for stat in await ledger.queues()}["again"] == len(left)
    assert (await ledger.lease(GENERATOR, max_trajectories=8)).refusal is Refusal.CLOSED

    await ledger.resume_from(LEARNER, Restart(policy_version=1, num_updates=1))
    again = (await ledger.lease(GENERATOR, max_trajectories=8)).leases
    assert sorted({lease.prompt for lease in again}) == left
    assert len({str(lease.trajectory) for lease in (*leases, *again)}) == len(leases) + len(again), "new groups"
    assert (await ledger.audit()).balances


async def test_reopening_with_other_settings_names_them(bench):
    spec = make_spec()
    ledger = await bench.open(spec)
    await ledger.open(spec)
    with pytest.raises(LedgerMismatch, match="eta is '1' there, '2' here"):
        await ledger.open(make_spec(eta=2))


async def test_a_specification_that_could_never_fill_an_update_is_refused(bench):
    with pytest.raises(ConfigError, match="not a multiple"):
        await bench.open(make_spec(units_per_update=3))
    with pytest.raises(ConfigError, match="Raise eta or oversampling"):
        await bench.open(make_spec(Unit.TRAJECTORY, eta=0))


async def test_peek_and_queues_show_what_is_stored(bench):
    ledger = await bench.open(make_spec())
    [lease, _] = (await ledger.lease(GENERATOR, max_trajectories=2)).leases
    await finish(ledger, lease)
    bench.now += 4.0
    assert len(await ledger.peek(f"{lease.trajectory}.0")) == 2
    assert await ledger.peek("nothing") == []
    queues = {stat.name: stat for stat in await ledger.queues()}
    assert (queues["leased"].depth, queues["credit"].depth, queues["credit"].limit) == (1, 2, 8)
    assert queues["reward"].waiting_for == "reward"
