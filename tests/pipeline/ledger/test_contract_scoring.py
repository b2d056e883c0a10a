"""Every ledger's promises on late scores: work is handed out again, or is a dead letter."""

import pytest

from pipeline.ledger.types import MAX_SHOWN, EvaluationRequest, Unit, WriteStatus
from protocol.errors import Fenced
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
from protocol.trajectory import Field, RewardScore
from tests.pipeline.ledger.builders import (
    GENERATOR,
    LEARNER,
    SCORER,
    finish,
    make_chunk,
    make_spec,
    reward,
)


async def test_overdue_work_is_handed_out_again_once_a_deadline(bench):
    ledger = await bench.open(make_spec())
    leases = (await ledger.lease(GENERATOR, max_trajectories=2)).leases
    chunks = [make_chunk(lease.trajectory) for lease in leases]
    await ledger.write_chunk(GENERATOR, chunks[1])
    bench.now += 1.0
    await ledger.write_chunk(GENERATOR, chunks[0])
    assert await ledger.overdue(SCORER, Field.REWARD, max_chunks=9) == []
    bench.now += 5.0
    handed = await ledger.overdue(SCORER, Field.REWARD, max_chunks=9)
    assert [one.chunk.id for one in handed] == [chunks[1].id, chunks[0].id]
    assert await ledger.overdue(SCORER, Field.REWARD, max_chunks=9) == []
    assert await ledger.overdue(SCORER, Field.REFERENCE, max_chunks=9) == []


@pytest.mark.parametrize("unit", Unit)
async def test_a_groups_final_chunks_are_handed_out_when_all_of_it_has_ended(bench, unit):
    ledger = await bench.open(make_spec(unit, eta=4))
    leases = (await ledger.lease(GENERATOR, max_trajectories=4)).leases
    first, second, other = (lease.trajectory for lease in leases[:3])
    await ledger.write_chunk(GENERATOR, make_chunk(first))
    await ledger.write_chunk(GENERATOR, make_chunk(second, final=False))
    await ledger.write_chunk(GENERATOR, make_chunk(other))
    assert await ledger.finished_group(SCORER, first.group, num_members=2) == []
    assert await ledger.finished_group(SCORER, 77, num_members=2) == []
    await ledger.write_chunk(GENERATOR, make_chunk(second, 1, context=3))
    ended = await ledger.finished_group(SCORER, first.group, num_members=2)
    assert [str(chunk.id) for chunk in ended] == [f"{first}.0", f"{second}.1"]
    assert ended[1].finish_reason.is_final
    await ledger.cancel_in_flight(LEARNER)
    bench.now += 60.0
    assert await ledger.finished_group(SCORER, first.group, num_members=2) == []


@pytest.mark.parametrize("unit", Unit)
async def test_a_group_is_given_to_one_scorer_until_its_deadline_or_its_failure(bench, unit):
    ledger = await bench.open(make_spec(unit, eta=4, max_attempts=9))
    other = Incarnation(Role.REWARD, "reward-1", 1)
    chunks = [make_chunk(lease.trajectory) for lease in (await ledger.lease(GENERATOR, max_trajectories=2)).leases]
    for chunk in chunks:
        await ledger.write_chunk(GENERATOR, chunk)

    async def given(who: Incarnation) -> int:
        return len(await ledger.finished_group(who, 0, num_members=2))

    assert [await given(other), await given(SCORER), await given(other)] == [2, 0, 0]
    bench.now += 4.0
    await ledger.extend_scoring(SCORER, Field.REWARD, ())
    await ledger.extend_scoring(other, Field.REWARD, tuple(chunk.id for chunk in chunks))
    bench.now += 4.0
    assert await ledger.overdue(SCORER, Field.REWARD, max_chunks=9) == [], "they are being judged"
    assert await given(SCORER) == 0
    bench.now += 2.0
    assert await given(SCORER) == 2, "the first is late, or dead"
    await ledger.extend_scoring(other, Field.REWARD, (chunks[0].id,))
    await ledger.fail_score(other, chunks[0].id, Field.REWARD, "boom")
    assert await given(other) == 0, "it has lost the group, and returns nothing of another's"
    await ledger.fail_score(SCORER, chunks[0].id, Field.REWARD, "boom")
    assert await given(other) == 2, "at once"
    await ledger.write_score(other, chunks[0].id, reward(1.0))
    bench.now += 6.0
    assert await given(SCORER) == 2, "a scored member is still in it"
    await ledger.write_score(SCORER, chunks[1].id, reward(0.0))
    bench.now += 6.0
    assert [await given(SCORER), await given(other)] == [0, 0], "all are scored: there is nothing to judge"


async def test_deadlines_of_chunks_in_the_work_are_extended_and_those_of_others_pass(bench):
    ledger = await bench.open(make_spec())
    one, two = [make_chunk(lease.trajectory) for lease in (await ledger.lease(GENERATOR, max_trajectories=2)).leases]
    for chunk in (one, two):
        await ledger.write_chunk(GENERATOR, chunk)
    bench.now += 4.0
    gone = ChunkId(TrajectoryId("t", 7, 0), 0)
    await ledger.extend_scoring(SCORER, Field.REWARD, (one.id, gone))
    bench.now += 2.0
    assert [late.chunk.id for late in await ledger.overdue(SCORER, Field.REWARD, max_chunks=9)] == [two.id]
    bench.now += 3.0
    assert [late.chunk.id for late in await ledger.overdue(SCORER, Field.REWARD, max_chunks=9)] == [one.id]


async def test_chunks_of_a_lost_scorer_are_due_at_once_and_no_others(bench):
    ledger = await bench.open(make_spec())
    lost, kept = [make_chunk(lease.trajectory) for lease in (await ledger.lease(GENERATOR, max_trajectories=2)).leases]
    for chunk in (lost, kept):
        await ledger.write_chunk(GENERATOR, chunk)
    bench.now += 1.0
    gone = ChunkId(TrajectoryId("t", 7, 0), 0)
    assert await ledger.expire_scoring(GENERATOR, Field.REWARD, (lost.id, gone, lost.id)) == 1
    assert [late.chunk.id for late in await ledger.overdue(SCORER, Field.REWARD, max_chunks=9)] == [lost.id]
    await ledger.write_score(SCORER, lost.id, reward(1.0))
    assert await ledger.expire_scoring(GENERATOR, Field.REWARD, (lost.id,)) == 0, "it has its score"
    assert await ledger.expire_scoring(GENERATOR, Field.REWARD, ()) == 0
    assert await ledger.overdue(SCORER, Field.REWARD, max_chunks=9) == []
    bench.now += 4.0
    assert [late.chunk.id for late in await ledger.overdue(SCORER, Field.REWARD, max_chunks=9)] == [kept.id]
    bench.now += 5.0
    assert await ledger.expire_scoring(GENERATOR, Field.REWARD, (kept.id,)) == 0, "it is due already"
    await bench.set_epoch(GENERATOR.worker, GENERATOR.epoch + 1)
    with pytest.raises(Fenced):
        await ledger.expire_scoring(GENERATOR, Field.REWARD, (kept.id,))


async def test_a_fenced_scorers_group_is_given_to_another_at_once(bench):
    ledger = await bench.open(make_spec(eta=4))
    other = Incarnation(Role.REWARD, "reward-1", 1)
    for lease in (await ledger.lease(GENERATOR, max_trajectories=2)).leases:
        await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory))
    assert len(await ledger.finished_group(SCORER, 0, num_members=2)) == 2
    await bench.set_epoch("reward-7", SCORER.epoch + 1)
    assert await ledger.finished_group(other, 0, num_members=2) == []
    await bench.set_epoch(SCORER.worker, SCORER.epoch + 1)
    assert len(await ledger.finished_group(other, 0, num_members=2)) == 2
    assert await ledger.finished_group(Incarnation(Role.REWARD, "reward-2", 1), 0, num_members=2) == []


@pytest.mark.parametrize("unit", Unit)
async def test_work_that_scorers_fail_on_as_often_as_allowed_becomes_a_dead_letter(bench, unit):
    ledger = await bench.open(make_spec(unit))
    leases = (await ledger.lease(GENERATOR, max_trajectories=2)).leases
    chunk = make_chunk(leases[0].trajectory)
    await ledger.write_chunk(GENERATOR, chunk)
    assert not await ledger.fail_score(SCORER, chunk.id, Field.REWARD, "boom 1")
    assert [late.chunk.id for late in await ledger.overdue(SCORER, Field.REWARD, max_chunks=9)] == [chunk.id]
    assert await ledger.fail_score(SCORER, chunk.id, Field.REWARD, "boom 2")
    assert not await ledger.fail_score(SCORER, chunk.id, Field.REWARD, "boom 3")
    [letter] = await ledger.dead_letters()
    assert (letter.chunk, letter.role, letter.error, letter.num_attempts) == (str(chunk.id), "reward", "boom 2", 2)
    totals, audit = await ledger.totals(), await ledger.audit()
    assert audit.balances
    assert totals.credit_used == (0 if unit is Unit.GROUP else 1)
    assert await ledger.overdue(SCORER, Field.REWARD, max_chunks=9) == []
    other = await ledger.write_chunk(GENERATOR, make_chunk(leases[1].trajectory))
    assert other.status is (WriteStatus.FENCED if unit is Unit.GROUP else WriteStatus.STORED), "one of two is no group"


@pytest.mark.parametrize("unit", Unit)
async def test_responses_that_the_learner_never_claims_can_be_read_once(bench, unit):
    ledger = await bench.open(make_spec(unit, signal_filter=unit is Unit.GROUP))
    for lease in (await ledger.lease(GENERATOR, max_trajectories=2)).leases:
        chunk = make_chunk(lease.trajectory)
        await ledger.write_chunk(GENERATOR, chunk)
        score = RewardScore(reward=-1.0, accuracy=0.0, masked=unit is not Unit.GROUP)
        await ledger.write_score(SCORER, chunk.id, score)
    await ledger.request_evaluation(LEARNER, EvaluationRequest(0, 0, 1, 2, 0.0))
    for lease in (await ledger.lease(GENERATOR, max_trajectories=2)).leases:
        await finish(ledger, lease)
    shown = await ledger.take_shown(LEARNER)
    found = [(one.kind, str(one.chunk.trajectory), one.reward.accuracy) for one in shown]
    assert found == [("evaluation", "e0.0.0", 1.0), ("no_signal", "t.0.0", 0.0), ("no_signal", "t.0.1", 0.0)]
    assert await ledger.take_shown(LEARNER) == ()


async def test_of_each_kind_a_bounded_number_is_kept_for_reading(bench):
    ledger = await bench.open(make_spec(Unit.TRAJECTORY, eta=40))
    leases = (await ledger.lease(GENERATOR, max_trajectories=2 * MAX_SHOWN)).leases
    assert len(leases) == 2 * MAX_SHOWN
    for lease in leases:
        chunk = make_chunk(lease.trajectory)
        await ledger.write_chunk(GENERATOR, chunk)
        await ledger.write_score(SCORER, chunk.id, RewardScore(reward=-1.0, accuracy=0.0, masked=True))
    assert len(await ledger.take_shown(LEARNER)) == MAX_SHOWN
