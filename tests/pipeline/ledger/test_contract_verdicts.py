"""Every ledger's promises on groups of which members get no verdict."""

import pytest

from pipeline.ledger.types import Claim, FinishedClaim, LedgerSpec, Unit, WriteStatus
from protocol.ids import ChunkId
from protocol.trajectory import Field, RewardScore
from tests.pipeline.ledger.builders import GENERATOR, LEARNER, SCORER, guidance, make_chunk, make_spec, reward, value


def spec(**settings: object) -> LedgerSpec:
    return make_spec(**{"group_size": 4, "units_per_update": 4, "eta": 1, "max_attempts": 2, **settings})


async def sampled(ledger, num_members: int = 4) -> list[ChunkId]:
    """Write the responses of a whole group; return their chunks."""
    leases = (await ledger.lease(GENERATOR, max_trajectories=num_members)).leases
    for lease in leases:
        assert (await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory))).status is WriteStatus.STORED
    return [ChunkId(lease.trajectory, 0) for lease in leases]


def score(number: int, *, masked: bool) -> RewardScore:
    accuracy = number / 3 if masked else 1.0
    return RewardScore(reward=accuracy, accuracy=accuracy, masked=masked)


async def fail_for_good(ledger, chunk: ChunkId) -> None:
    assert not await ledger.fail_score(SCORER, chunk, Field.REWARD, "late")
    assert await ledger.fail_score(SCORER, chunk, Field.REWARD, "late")


async def claimed(ledger):
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert isinstance(claim, Claim), claim
    [unit] = await ledger.fetch(claim)
    return claim, unit


@pytest.mark.parametrize("dies_last", [False, True])
async def test_a_group_goes_on_without_a_member_that_has_no_verdict_and_the_books_have_it_as_dropped(bench, dies_last):
    ledger = await bench.open(spec())
    chunks = await sampled(ledger)
    if not dies_last:
        await fail_for_good(ledger, chunks[1])
    for number in (0, 2, 3):
        await ledger.write_score(SCORER, chunks[number], reward(float(number == 2)))
    if dies_last:
        await fail_for_good(ledger, chunks[1])
    assert [letter.chunk for letter in await ledger.dead_letters()] == [str(chunks[1])]
    claim, unit = await claimed(ledger)
    assert [Field.REWARD in member[-1].scores for member in unit.trajectories] == [True, False, True, True]
    assert (await ledger.audit()).balances
    await ledger.settle(LEARNER, (claim.claim_id,))
    audit = await ledger.audit()
    assert audit.balances
    assert (audit.groups.trained, audit.groups.dropped) == (1, {})
    assert (audit.trajectories.trained, audit.trajectories.dropped) == (3, {"dead_letter": 1})
    assert (audit.tokens.trained, audit.tokens.dropped) == (9, {"dead_letter": 3})


async def test_a_verdict_that_comes_after_the_last_attempt_changes_nothing(bench):
    ledger = await bench.open(spec())
    chunks = await sampled(ledger)
    await fail_for_good(ledger, chunks[0])
    assert await ledger.write_score(SCORER, chunks[0], reward(1.0)) is WriteStatus.UNKNOWN
    assert not await ledger.fail_score(SCORER, chunks[0], Field.REWARD, "late")
    bench.now += 60.0
    due = await ledger.overdue(SCORER, Field.REWARD, max_chunks=9)
    assert [one.chunk.id for one in due] == chunks[1:]
    assert [chunk.id for chunk in await ledger.finished_group(SCORER, 0, num_members=4)] == chunks[1:]


async def test_a_group_with_fewer_than_two_verdicts_is_a_dead_letter(bench):
    ledger = await bench.open(spec())
    chunks = await sampled(ledger)
    await ledger.write_score(SCORER, chunks[0], reward(1.0))
    for chunk in chunks[1:3]:
        await fail_for_good(ledger, chunk)
    assert (await ledger.totals()).num_groups_dropped == {}
    await fail_for_good(ledger, chunks[3])
    totals, audit = await ledger.totals(), await ledger.audit()
    assert (totals.num_groups_dropped, totals.credit_used, audit.balances) == ({"dead_letter": 1}, 0, True)
    assert audit.tokens.dropped == {"dead_letter": 12}


@pytest.mark.parametrize("dies_last", [False, True])
@pytest.mark.parametrize("masked", [False, True])
async def test_a_group_whose_other_members_have_no_signal_is_dropped_for_it(bench, dies_last, masked):
    ledger = await bench.open(spec(signal_filter=not masked))
    chunks = await sampled(ledger)
    if not dies_last:
        await fail_for_good(ledger, chunks[3])
    for number, chunk in enumerate(chunks[:3]):
        await ledger.write_score(SCORER, chunk, score(number, masked=masked))
    if dies_last:
        assert (await ledger.totals()).num_groups_dropped == {}
        await fail_for_good(ledger, chunks[3])
    assert (await ledger.totals()).num_groups_dropped == {"no_signal": 1}
    assert (await ledger.audit()).balances


async def test_guidance_of_a_member_without_a_verdict_is_not_waited_for(bench):
    ledger = await bench.open(spec(fields=frozenset({Field.REWARD, Field.GUIDANCE})))
    chunks = await sampled(ledger)
    await fail_for_good(ledger, chunks[0])
    for chunk in chunks[1:]:
        await ledger.write_score(SCORER, chunk, reward(1.0))
        await ledger.write_score(SCORER, chunk, guidance())
    await claimed(ledger)


async def test_a_critic_never_learns_from_a_member_without_a_verdict(bench):
    fields = frozenset({Field.REWARD, Field.VALUE})
    ledger = await bench.open(spec(fields=fields, value_training=True))
    chunks = await sampled(ledger)
    values = value()
    await ledger.write_score(SCORER, chunks[0], values)
    await fail_for_good(ledger, chunks[0])
    await fail_for_good(ledger, chunks[1])
    await ledger.write_score(SCORER, chunks[1], values)
    for chunk in chunks[2:]:
        await ledger.write_score(SCORER, chunk, reward(1.0))
        await ledger.write_score(SCORER, chunk, values)
    assert await ledger.claim_finished(SCORER, num_trajectories=3) == 2
    finished = await ledger.claim_finished(SCORER, num_trajectories=2)
    assert isinstance(finished, FinishedClaim)
    await ledger.settle_finished(SCORER, (finished.claim_id,))
    claim, _ = await claimed(ledger)
    await ledger.settle(LEARNER, (claim.claim_id,))
    assert (await ledger.audit()).balances
    [stored] = [queue.depth for queue in await ledger.queues() if queue.name == "bytes"]
    assert stored == 0, "nothing is left of the other two"


@pytest.mark.parametrize("unit", [Unit.TRAJECTORY, Unit.CHUNK])
async def test_a_trajectory_without_a_verdict_is_no_unit_and_its_group_mates_are(bench, unit):
    ledger = await bench.open(spec(unit=unit))
    chunks = await sampled(ledger)
    await fail_for_good(ledger, chunks[0])
    for chunk in chunks[1:]:
        await ledger.write_score(SCORER, chunk, reward(1.0))
    totals = await ledger.totals()
    assert (totals.num_ready_units, totals.credit_used) == (3, 3)
    audit = await ledger.audit()
    assert audit.balances and audit.trajectories.dropped == {"dead_letter": 1}
