"""An operator's side of both ledgers: the needs of the next update, and putting work back."""

from __future__ import annotations

import pytest

from pipeline.ledger.admin import Place, RequeueRequest
from pipeline.ledger.types import (
    Claim,
    ClaimWait,
    DropReason,
    EvaluationRequest,
    LatePolicy,
    Pause,
    Refusal,
    Restart,
    Unit,
    WriteStatus,
)
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
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

BOTH = frozenset({Field.REWARD, Field.VALUE})


async def fail_for_good(ledger, chunk: ChunkId, field: Field = Field.REWARD) -> None:
    assert not await ledger.fail_score(SCORER, chunk, field, "boom")
    assert await ledger.fail_score(SCORER, chunk, field, "boom")


# -- what the next update waits for --------------------------------------------------------------


async def test_a_group_lists_incomplete_members_their_holders_and_overdue_fields(bench):
    ledger, admin = await bench.with_admin(make_spec(group_size=4, fields=BOTH))
    await ledger.lease(GENERATOR, max_trajectories=2)
    await ledger.lease(OTHER_GENERATOR, max_trajectories=1)
    done, unscored = TrajectoryId("t", 0, 0), TrajectoryId("t", 0, 1)
    for trajectory in (done, unscored):
        await ledger.write_chunk(GENERATOR, make_chunk(trajectory, 0, final=False))
        await ledger.write_chunk(GENERATOR, make_chunk(trajectory, 1))
    for chunk in (ChunkId(done, 0), ChunkId(done, 1)):
        await ledger.write_score(SCORER, chunk, value())
    await ledger.write_score(SCORER, ChunkId(done, 1), reward())
    bench.now += 8.0
    await ledger.fail_score(SCORER, ChunkId(unscored, 1), Field.REWARD, "boom")

    waits = await admin.waits()
    assert (waits.num_needed, waits.num_ready, waits.num_running) == (1, 0, 1)
    (unit,) = waits.units
    assert (unit.name, unit.oldest_version, unit.num_complete) == ("0", 0, 1)
    sampled, leased, nobodys = unit.trajectories
    assert (sampled.name, sampled.place, sampled.holder, sampled.num_chunks) == ("t.0.1", Place.FINISHED, "", 2)
    first, second = sampled.lacks
    assert (first.field, first.num_chunks, first.chunk, first.num_failures) == (Field.REWARD, 1, "t.0.1.1", 1)
    assert (first.age_s, first.overdue_s) == (8.0, 0.0), "a failure makes it due at once"
    assert (second.field, second.num_chunks, second.chunk) == (Field.VALUE, 2, "t.0.1.0")
    assert (second.age_s, second.overdue_s) == (8.0, 3.0)
    assert (leased.name, leased.place, leased.holder, leased.since_s) == ("t.0.2", Place.LEASED, "generator-1#1", 8.0)
    assert (nobodys.name, nobodys.place, nobodys.holder, nobodys.lacks) == ("t.0.3", Place.OPEN, "", ())
    (holder,) = waits.holders
    assert (holder.who, holder.num_trajectories, holder.lease_left_s) == ("generator-1#1", 1, 2.0)


async def test_a_chunk_unit_lacks_only_what_is_its_own(bench):
    ledger, admin = await bench.with_admin(make_spec(Unit.CHUNK, fields=BOTH, units_per_update=2))
    (lease,) = (await ledger.lease(GENERATOR, max_trajectories=1)).leases
    await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory, 0, final=False))
    names = {unit.name: unit.trajectories for unit in (await admin.waits()).units}
    assert list(names) == ["t.0.0.0", "t.0.0.1", "t.0.1.0"]
    (written,), (growing,), (untouched,) = names.values()
    assert (written.place, [lack.field for lack in written.lacks]) == (Place.FINISHED, [Field.VALUE])
    assert (growing.place, growing.holder, growing.lacks) == (Place.LEASED, "generator-0#1", ())
    assert untouched.place is Place.OPEN


async def test_with_enough_ready_units_the_oldest_by_version_are_waited_for(bench):
    ledger, admin = await bench.with_admin(make_spec(Unit.TRAJECTORY, units_per_update=2, eta=1, late=LatePolicy.WAIT))
    leases = (await ledger.lease(GENERATOR, max_trajectories=4)).leases
    for lease in leases[2:]:
        await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory))
        await ledger.write_score(SCORER, ChunkId(lease.trajectory, 0), reward())
    await ledger.advance(LEARNER, 1)
    waits = await admin.waits(max_units=1)
    assert (waits.num_ready, waits.num_needed, waits.num_running) == (2, 2, 2)
    assert [(unit.name, unit.oldest_version) for unit in waits.units] == [("t.0.0", 0)]


async def test_what_is_stored_is_the_newest_chunk_of_each_response_with_what_it_has(bench):
    ledger, admin = await bench.with_admin(make_spec(group_size=2, units_per_update=4, fields=BOTH))
    assert await admin.stored() == ()
    await ledger.lease(GENERATOR, max_trajectories=4)
    first, second, third = TrajectoryId("t", 0, 0), TrajectoryId("t", 0, 1), TrajectoryId("t", 1, 0)
    await ledger.write_chunk(GENERATOR, make_chunk(first, 0, final=False))
    bench.now += 2.0
    await ledger.write_chunk(GENERATOR, make_chunk(first, 1))
    await ledger.write_chunk(GENERATOR, make_chunk(second, 0, final=False))
    await ledger.write_chunk(GENERATOR, make_chunk(third, 0, final=False))
    await ledger.write_score(SCORER, ChunkId(first, 1), reward())
    bench.now += 3.0
    a, b, c = await admin.stored()
    assert (a.chunk, a.is_final, a.fields, a.age_s) == ("t.1.0.0", False, (), 3.0)
    assert (b.chunk, b.is_final, b.fields, b.age_s) == ("t.0.0.1", True, (Field.REWARD,), 3.0)
    assert (c.chunk, c.is_final) == ("t.0.1.0", False)
    assert b.num_tokens > c.num_tokens > 0
    assert [one.chunk for one in await admin.stored(max_trajectories=1)] == ["t.1.0.0"]


async def test_of_chunks_that_are_settled_nothing_is_stored(bench):
    ledger, admin = await bench.with_admin(make_spec(Unit.CHUNK, group_size=1, units_per_update=1))
    (lease,) = (await ledger.lease(GENERATOR, max_trajectories=1)).leases
    await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory, 0, final=False))
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert isinstance(claim, Claim)
    assert [one.chunk for one in await admin.stored()] == ["t.0.0.0"]
    await ledger.settle(LEARNER, (claim.claim_id,))
    assert await admin.stored() == ()


async def test_evaluation_is_told_apart(bench):
    ledger, admin = await bench.with_admin(make_spec())
    await ledger.request_evaluation(LEARNER, EvaluationRequest(0, 0, 3, 1, 0.0))
    one, _ = (await ledger.lease(GENERATOR, max_trajectories=2)).leases
    await ledger.write_chunk(GENERATOR, make_chunk(one.trajectory))
    waits = await admin.waits()
    assert (waits.num_evaluation_open, waits.num_evaluation_unscored) == (1, 1)
    assert [(holder.num_trajectories, holder.num_evaluation) for holder in waits.holders] == [(1, 1)]


# -- putting back --------------------------------------------------------------------------------


async def test_a_workers_trajectories_open_at_once_and_its_late_write_has_no_effect(bench):
    ledger, admin = await bench.with_admin(make_spec())
    leases = (await ledger.lease(GENERATOR, max_trajectories=2)).leases
    answer = await admin.requeue(RequeueRequest(worker="generator-0"))
    assert (answer.num_opened, answer.unknown) == (2, ())
    again = (await ledger.lease(OTHER_GENERATOR, max_trajectories=2)).leases
    assert [lease.trajectory for lease in again] == [lease.trajectory for lease in leases]
    late = await ledger.write_chunk(GENERATOR, make_chunk(leases[0].trajectory))
    assert late.status is WriteStatus.FENCED
    assert (await admin.requeue(RequeueRequest(worker="generator-0"))).num_opened == 0
    assert (await ledger.audit()).balances


async def test_named_trajectories_are_opened_and_what_they_lack_is_due_now(bench):
    ledger, admin = await bench.with_admin(make_spec(fields=BOTH))
    one, other = (await ledger.lease(GENERATOR, max_trajectories=2)).leases
    await ledger.write_chunk(GENERATOR, make_chunk(one.trajectory, 0, final=False))
    assert await ledger.overdue(SCORER, Field.VALUE, max_chunks=9) == []
    answer = await admin.requeue(RequeueRequest(trajectories=(one.trajectory,)))
    assert (answer.num_opened, answer.num_due) == (1, 1)
    assert [late.chunk.id.index for late in await ledger.overdue(SCORER, Field.VALUE, max_chunks=9)] == [0]
    (again,) = (await ledger.lease(OTHER_GENERATOR, max_trajectories=1)).leases
    assert (again.trajectory, again.next_index) == (one.trajectory, 1)
    assert (await ledger.write_chunk(GENERATOR, make_chunk(other.trajectory))).status is WriteStatus.STORED


async def test_every_chunk_that_lacks_a_field_is_due_now_and_those_of_other_fields_are_not(bench):
    ledger, admin = await bench.with_admin(make_spec(fields=BOTH))
    for lease in (await ledger.lease(GENERATOR, max_trajectories=2)).leases:
        await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory))
    assert (await admin.requeue(RequeueRequest(field=Field.REWARD))).num_due == 2
    assert len(await ledger.overdue(SCORER, Field.REWARD, max_chunks=9)) == 2
    assert await ledger.overdue(SCORER, Field.VALUE, max_chunks=9) == []


async def test_an_unknown_name_is_told_and_nothing_is_changed(bench):
    ledger, admin = await bench.with_admin(make_spec())
    (lease,) = (await ledger.lease(GENERATOR, max_trajectories=1)).leases
    gone = TrajectoryId("t", 99, 0)
    assert (await admin.requeue(RequeueRequest(trajectories=(lease.trajectory, gone)))).unknown == ("t.99.0",)
    assert (await admin.requeue(RequeueRequest(worker="generator-7"))).unknown == ("generator-7",)
    assert (await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory))).status is WriteStatus.STORED


# -- dead letters --------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", Unit)
async def test_a_retried_dead_letters_prompt_becomes_a_new_group_before_fresh_ones(bench, unit):
    ledger, admin = await bench.with_admin(make_spec(unit))
    leases = (await ledger.lease(GENERATOR, max_trajectories=4)).leases
    for lease in leases:
        await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory))
    lost = ChunkId(TrajectoryId("t", 1, 0), 0)
    await fail_for_good(ledger, lost)
    (letter,) = await ledger.dead_letters()
    assert (letter.chunk, letter.prompt) == ("t.1.0.0", 1)

    answer = await admin.retry(("t.1.0.0",))
    assert (answer.prompts, answer.num_letters) == ((1,), 1)
    assert await ledger.dead_letters() == []
    assert (await admin.retry(("t.1.0.0",))).unknown == ("t.1.0.0",), "a letter is retried once"
    await ledger.advance(LEARNER, 2)
    fresh = (await ledger.lease(GENERATOR, max_trajectories=4, policy_version=2)).leases
    assert [(str(lease.trajectory), lease.prompt) for lease in fresh] == [
        ("t.2.0", 1),
        ("t.2.1", 1),
        ("t.3.0", 2),
        ("t.3.1", 2),
    ]
    assert (await ledger.write_score(SCORER, lost, reward())) is WriteStatus.UNKNOWN, "the old group is gone for good"
    audit = await ledger.audit()
    assert audit.balances
    assert audit.groups.admitted == 4
    assert audit.tokens.dropped == {DropReason.DEAD_LETTER.value: 6 if unit is Unit.GROUP else 3}


async def test_two_letters_of_one_group_are_one_prompt_and_no_chunks_mean_all_of_them(bench):
    ledger, admin = await bench.with_admin(make_spec(Unit.TRAJECTORY))
    for lease in (await ledger.lease(GENERATOR, max_trajectories=2)).leases:
        await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory))
        await fail_for_good(ledger, ChunkId(lease.trajectory, 0))
    await ledger.request_evaluation(LEARNER, EvaluationRequest(0, 0, 1, 1, 0.0))
    (evaluated,) = (await ledger.lease(GENERATOR, max_trajectories=1)).leases
    await ledger.write_chunk(GENERATOR, make_chunk(evaluated.trajectory))
    await fail_for_good(ledger, ChunkId(evaluated.trajectory, 0))
    assert (await admin.retry(("e0.0.0.0",))).unknown == ("e0.0.0.0",)
    answer = await admin.retry(None)
    assert (answer.prompts, answer.num_letters) == ((0,), 2)
    assert [letter.chunk for letter in await ledger.dead_letters()] == ["e0.0.0.0"]


async def test_an_exhausted_stream_starves_only_after_its_retried_prompts(bench):
    ledger, admin = await bench.with_admin(make_spec(num_prompts=1, units_per_update=2))
    for lease in (await ledger.lease(GENERATOR, max_trajectories=2)).leases:
        await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory))
    await fail_for_good(ledger, ChunkId(TrajectoryId("t", 0, 1), 0))
    assert (await ledger.totals()).is_exhausted
    await admin.retry(None)
    assert not (await ledger.totals()).is_exhausted
    assert {queue.name: queue.depth for queue in await ledger.queues()}["again"] == 1
    assert (await ledger.claim(LEARNER, policy_version=0)).wait.value == "not_enough"
    grant = await ledger.lease(GENERATOR, max_trajectories=9)
    assert ([lease.prompt for lease in grant.leases], grant.refusal) == ([0, 0], Refusal.EXHAUSTED)
    for lease in grant.leases:
        await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory))
        await ledger.write_score(SCORER, ChunkId(lease.trajectory, 0), reward())
    assert isinstance(await ledger.claim(LEARNER, policy_version=0), Claim)


async def test_once_admission_is_closed_nothing_is_admitted_again(bench):
    ledger, admin = await bench.with_admin(make_spec())
    for lease in (await ledger.lease(GENERATOR, max_trajectories=2)).leases:
        await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory))
    await fail_for_good(ledger, ChunkId(TrajectoryId("t", 0, 1), 0))
    await ledger.close_admission(LEARNER)
    assert (await admin.retry(None)).is_closed
    assert len(await ledger.dead_letters()) == 1


# -- pauses --------------------------------------------------------------------------------------


async def test_a_pause_admits_no_group_and_finishes_those_that_are_admitted(bench):
    ledger, admin = await bench.with_admin(make_spec(units_per_update=4))
    begun = (await ledger.lease(GENERATOR, max_trajectories=1)).leases
    paused = await admin.pause(by="operator@host", reason="a new verifier")
    assert paused == Pause(1000.0, "operator@host", "a new verifier")
    grant = await ledger.lease(OTHER_GENERATOR, max_trajectories=8)
    assert [str(lease.trajectory) for lease in grant.leases] == ["t.0.1"], "the other member of the admitted group"
    assert grant.refusal is Refusal.PAUSED
    for who, lease in ((GENERATOR, begun[0]), (OTHER_GENERATOR, grant.leases[0])):
        await ledger.write_chunk(who, make_chunk(lease.trajectory))
        await ledger.write_score(SCORER, ChunkId(lease.trajectory, 0), reward(lease.trajectory.member))
    totals = await ledger.totals()
    assert (totals.num_groups_admitted, totals.num_ready_units, totals.paused) == (1, 1, paused)
    assert (await ledger.audit()).balances


async def test_a_resumed_ledger_admits_again_and_returns_the_pause(bench):
    ledger, admin = await bench.with_admin(make_spec())
    assert await admin.resume() is None
    paused = await admin.pause(by="operator@host")
    bench.now += 60.0
    assert await admin.pause(by="other@host", reason="another") == paused, "the first pause stands"
    assert await admin.resume() == paused
    assert await admin.resume() is None
    grant = await ledger.lease(GENERATOR, max_trajectories=2)
    assert (len(grant.leases), grant.refusal) == (2, None)
    assert (await ledger.totals()).paused is None


async def test_windows_of_begun_trajectories_go_on_in_a_pause(bench):
    ledger, admin = await bench.with_admin(make_spec(Unit.CHUNK, units_per_update=2, eta=1))
    (lease,) = (await ledger.lease(GENERATOR, max_trajectories=1)).leases
    await admin.pause(by="operator@host")
    write = await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory, 0, final=False))
    assert write.keeps_lease
    assert await ledger.give_back(GENERATOR) == 1
    grant = await ledger.lease(OTHER_GENERATOR, max_trajectories=8)
    assert [(str(one.trajectory), one.next_index) for one in grant.leases] == [("t.0.0", 1), ("t.0.1", 0)]
    # parked: the next window waits for credit, and takes it in a pause
    await ledger.write_chunk(OTHER_GENERATOR, make_chunk(lease.trajectory, 1, final=False, context=3))
    write = await ledger.write_chunk(OTHER_GENERATOR, make_chunk(lease.trajectory, 2, final=False, context=6))
    assert not write.keeps_lease
    await ledger.advance(LEARNER, 1)
    again = await ledger.lease(OTHER_GENERATOR, max_trajectories=8, policy_version=1)
    assert [(str(one.trajectory), one.next_index) for one in again.leases] == [("t.0.0", 3)]
    assert again.refusal is Refusal.PAUSED


async def test_evaluation_goes_on_in_a_pause(bench):
    ledger, admin = await bench.with_admin(make_spec())
    await admin.pause(by="operator@host")
    request = EvaluationRequest(0, policy_version=0, num_prompts=1, samples_per_prompt=1, temperature=0.0)
    await ledger.request_evaluation(LEARNER, request)
    grant = await ledger.lease(GENERATOR, max_trajectories=2)
    assert [str(lease.trajectory) for lease in grant.leases] == ["e0.0.0"]
    assert grant.refusal is Refusal.PAUSED


async def test_a_pause_outlives_the_learner_and_starves_no_claim(bench):
    ledger, admin = await bench.with_admin(make_spec(units_per_update=2, num_prompts=9))
    await admin.pause(by="operator@host")
    waited = await ledger.claim(LEARNER, policy_version=0)
    assert waited.wait is ClaimWait.NOT_ENOUGH, "starved would end the run"
    successor = Incarnation(Role.LEARNER, LEARNER.worker, 2)
    await bench.set_epoch(successor.worker, 2)
    await ledger.recover(successor, ())
    await ledger.resume_from(successor, Restart(policy_version=1, num_updates=0))
    assert (await ledger.lease(GENERATOR, max_trajectories=2)).refusal is Refusal.PAUSED


async def test_what_cannot_be_admitted_at_all_is_said_before_a_pause(bench):
    ledger, admin = await bench.with_admin(make_spec(num_prompts=1))
    await ledger.lease(GENERATOR, max_trajectories=2)
    await admin.pause(by="operator@host")
    assert (await ledger.lease(GENERATOR, max_trajectories=2)).refusal is Refusal.EXHAUSTED
    await ledger.close_admission(LEARNER)
    assert (await ledger.lease(GENERATOR, max_trajectories=2)).refusal is Refusal.CLOSED
