"""Promises of both ledgers for the unit chunk, where windows end one by one."""

from pipeline.ledger.types import ClaimRefused, ClaimWait, DropReason, LatePolicy, Refusal, Unit, WriteStatus
from protocol.ids import ChunkId, Incarnation, Role
from protocol.trajectory import Field
from tests.pipeline.ledger.builders import GENERATOR, LEARNER, OTHER_GENERATOR, SCORER, make_chunk, make_spec, reward


def chunk_spec(**changes):
    return make_spec(Unit.CHUNK, **({"group_size": 1, "units_per_update": 1} | changes))


async def write(ledger, trajectory, index=0, *, final=False, accuracy=1.0, version=0, who=GENERATOR):
    """Write one window of three tokens, and its reward when it is the last."""
    chunk = make_chunk(trajectory, index, final=final, context=3 * index, version=version)
    answer = await ledger.write_chunk(who, chunk)
    assert answer.status is WriteStatus.STORED
    if final:
        await ledger.write_score(SCORER, chunk.id, reward(accuracy))
    return answer


async def leased(ledger, number, who=GENERATOR):
    return [lease.trajectory for lease in (await ledger.lease(who, max_trajectories=number)).leases]


async def test_windows_of_one_trajectory_are_settled_dropped_and_returned_each_for_itself(bench):
    ledger = await bench.open(chunk_spec(eta=3))
    [one] = await leased(ledger, 1)
    for index in range(3):
        await write(ledger, one, index, final=index == 2)
    claims = [await ledger.claim(LEARNER, policy_version=0) for _ in range(3)]
    assert [claim.units for claim in claims] == [("t.0.0.0",), ("t.0.0.1",), ("t.0.0.2",)]
    await ledger.drop(LEARNER, claims[0], "t.0.0.0", DropReason.VALUE_WARMUP)
    newer = Incarnation(Role.LEARNER, "learner-0", 2)
    await bench.set_epoch("learner-0", 2)
    assert await ledger.recover(newer, (claims[2].claim_id,)) == 1
    audit = await ledger.audit()
    assert audit.balances
    assert (audit.tokens.trained, audit.tokens.dropped) == (3, {"value_warmup": 3})
    assert audit.trajectories.in_flight == {"ready": 1}
    last = await ledger.claim(newer, policy_version=0)
    assert last.units == ("t.0.0.1",)
    await ledger.drop(newer, last, "t.0.0.1", DropReason.STALE)
    audit = await ledger.audit()
    assert audit.balances
    assert (audit.trajectories.trained, audit.groups.trained) == (1, 1), "a window of it was trained"
    assert audit.tokens.dropped == {"value_warmup": 3, "stale": 3}
    assert (await ledger.totals()).credit_used == 1


async def test_a_trajectory_without_trained_windows_is_dropped_for_its_last_reason(bench):
    ledger = await bench.open(chunk_spec(eta=3))
    [one] = await leased(ledger, 1)
    for index in range(2):
        await write(ledger, one, index, final=index == 1)
    for reason in (DropReason.VALUE_WARMUP, DropReason.NON_FINITE):
        claim = await ledger.claim(LEARNER, policy_version=0)
        await ledger.drop(LEARNER, claim, claim.units[0], reason)
    audit = await ledger.audit()
    assert audit.balances
    assert audit.trajectories.dropped == {"non_finite": 1}
    assert (await ledger.totals()).credit_used == 0


async def test_warm_up_drops_every_claimed_window_and_credit_flows_without_a_new_version(bench):
    ledger = await bench.open(chunk_spec(group_size=2, units_per_update=2, eta=0, oversampling=1.5))
    for _ in range(5):
        for trajectory in await leased(ledger, 2):
            await write(ledger, trajectory, final=True)
        claim = await ledger.claim(LEARNER, policy_version=0)
        for unit in claim.units:
            await ledger.drop(LEARNER, claim, unit, DropReason.VALUE_WARMUP)
        await ledger.settle(LEARNER, (claim.claim_id,))
    totals = await ledger.totals()
    assert (totals.credit_used, totals.policy_version) == (0, 0)
    assert totals.num_groups_dropped == {"value_warmup": 5}
    assert (await ledger.audit()).balances


async def test_a_parked_trajectory_does_not_age_nor_hold_an_update_back(bench):
    ledger = await bench.open(chunk_spec())
    one, two = await leased(ledger, 2)
    parked = await write(ledger, one)
    assert not parked.keeps_lease
    await write(ledger, two, final=True)
    for version in (0, 1):
        claim = await ledger.claim(LEARNER, policy_version=version)
        await ledger.settle(LEARNER, (claim.claim_id,))
        await ledger.advance(LEARNER, version + 1)
    waiting = await ledger.claim(LEARNER, policy_version=2)
    assert waiting == ClaimRefused(ClaimWait.NOT_ENOUGH, 0, 1, None)
    [again] = await leased(ledger, 1)
    assert again == one
    assert (await ledger.claim(LEARNER, policy_version=2)).wait is ClaimWait.NOT_ENOUGH
    await write(ledger, one, 1, final=True, version=2)
    assert (await ledger.claim(LEARNER, policy_version=3)).units == ("t.0.0.1",), "its age is that of its own tokens"


async def test_a_begun_window_that_would_be_stale_next_is_waited_for(bench):
    ledger = await bench.open(chunk_spec(eta=1, units_per_update=2, late=LatePolicy.WAIT))
    names = await leased(ledger, 4)
    for name in names[1:]:
        await write(ledger, name, final=True)
    claim = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (claim.claim_id,))
    await ledger.advance(LEARNER, 1)
    for name in await leased(ledger, 2):
        await write(ledger, name, final=True, version=1)
    waiting = await ledger.claim(LEARNER, policy_version=1)
    assert (waiting.wait, waiting.oldest_running) == (ClaimWait.LATE_WORK, "t.0.0.0")
    await write(ledger, names[0], final=True)
    assert (await ledger.claim(LEARNER, policy_version=1)).units[0] == "t.0.0.0"


async def test_closed_admission_starves_with_parked_windows_and_cancelling_ends_them(bench):
    ledger = await bench.open(chunk_spec(eta=0))
    [one] = await leased(ledger, 1)
    assert not (await write(ledger, one)).keeps_lease
    claim = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (claim.claim_id,))
    await ledger.advance(LEARNER, 1)
    await ledger.close_admission(LEARNER)
    assert (await ledger.lease(GENERATOR, max_trajectories=1)).refusal is Refusal.CLOSED
    assert (await ledger.claim(LEARNER, policy_version=1)).wait is ClaimWait.STARVED
    assert (await ledger.audit()).trajectories.in_flight == {"open": 1}
    assert await ledger.cancel_in_flight(LEARNER) == 1
    audit = await ledger.audit()
    assert audit.balances
    assert (audit.trajectories.trained, audit.groups.trained, audit.groups.in_flight) == (1, 1, {})
    queues = {stat.name: stat.depth for stat in await ledger.queues()}
    assert (queues["parked"], queues["bytes"]) == (0, 0)


async def test_a_dead_letter_costs_its_window_only_and_another_generator_goes_on(bench):
    ledger = await bench.open(chunk_spec(eta=3, fields=frozenset({Field.REWARD, Field.REFERENCE})))
    [one] = await leased(ledger, 1)
    assert (await write(ledger, one)).keeps_lease
    for _ in range(2):
        await ledger.fail_score(SCORER, ChunkId(one, 0), Field.REFERENCE, "boom")
    assert await ledger.give_back(GENERATOR) == 1
    [lease] = (await ledger.lease(OTHER_GENERATOR, max_trajectories=1)).leases
    assert (lease.trajectory, lease.next_index, lease.last_chunk.id) == (one, 1, ChunkId(one, 0))
    audit = await ledger.audit()
    assert audit.balances
    assert (audit.tokens.dropped, audit.trajectories.dropped) == ({"dead_letter": 3}, {})
