"""The promises of both ledgers, one claim a test."""

import pytest

from pipeline.ledger.types import (
    Claim,
    ClaimRefused,
    ClaimWait,
    DropReason,
    EvaluationRequest,
    LatePolicy,
    Refusal,
    Unit,
    WriteStatus,
)
from protocol.errors import ConfigError, Fenced, LedgerError, LedgerMismatch
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
from protocol.trajectory import Field, FinishReason, RewardScore
from tests.pipeline.ledger.builders import (
    GENERATOR,
    LEARNER,
    OTHER_GENERATOR,
    SCORER,
    make_chunk,
    make_spec,
    reference,
    reward,
)


async def finish(ledger, lease, *, version=0, accuracy=1.0, who=GENERATOR):
    """Write a leased trajectory's final chunk and its reward."""
    chunk = make_chunk(lease.trajectory, lease.next_index, version=version)
    assert (await ledger.write_chunk(who, chunk)).status is WriteStatus.STORED
    assert await ledger.write_score(SCORER, chunk.id, reward(accuracy)) is WriteStatus.STORED
    return chunk


async def test_a_group_is_admitted_whole_and_members_over_the_limit_stay_open(bench):
    ledger = await bench.open(make_spec(group_size=4, units_per_update=4))
    first = await ledger.lease(GENERATOR, max_trajectories=3)
    assert [str(lease.trajectory) for lease in first.leases] == ["t.0.0", "t.0.1", "t.0.2"]
    second = await ledger.lease(OTHER_GENERATOR, max_trajectories=1)
    assert [str(lease.trajectory) for lease in second.leases] == ["t.0.3"]
    totals = await ledger.totals()
    assert (totals.num_groups_admitted, totals.next_group, totals.credit_used) == (1, 1, 4)


async def test_admission_stops_at_the_staleness_bound_and_says_so(bench):
    ledger = await bench.open(make_spec())
    grant = await ledger.lease(GENERATOR, max_trajectories=100)
    assert len(grant.leases) == 8
    assert grant.refusal is Refusal.NO_CREDIT
    await ledger.advance(LEARNER, 1)
    assert len((await ledger.lease(GENERATOR, max_trajectories=100)).leases) == 4
    await ledger.advance(LEARNER, 0)
    assert (await ledger.totals()).policy_version == 1


async def test_a_generator_that_is_behind_the_published_version_is_given_evaluation_only(bench):
    ledger = await bench.open(make_spec())
    await ledger.advance(LEARNER, 2)
    refused = await ledger.lease(GENERATOR, max_trajectories=4, policy_version=1)
    assert (refused.leases, refused.refusal) == ((), Refusal.BEHIND)
    await ledger.request_evaluation(
        LEARNER, EvaluationRequest(0, policy_version=2, num_prompts=1, samples_per_prompt=1, temperature=0.0)
    )
    [lease] = (await ledger.lease(GENERATOR, max_trajectories=4, policy_version=1)).leases
    assert lease.evaluation is not None
    assert len((await ledger.lease(GENERATOR, max_trajectories=4, policy_version=2)).leases) == 4


async def test_a_next_window_waits_until_its_generator_has_taken_the_published_version(bench):
    ledger = await bench.open(make_spec(Unit.CHUNK))
    [lease] = (await ledger.lease(GENERATOR, max_trajectories=1, policy_version=0)).leases
    await ledger.advance(LEARNER, 1)
    written = await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory, final=False, version=0))
    assert (written.status, written.keeps_lease) == (WriteStatus.STORED, False)
    assert (await ledger.lease(GENERATOR, max_trajectories=1, policy_version=0)).refusal is Refusal.BEHIND
    [again] = (await ledger.lease(GENERATOR, max_trajectories=1, policy_version=1)).leases
    assert (again.trajectory, again.next_index) == (lease.trajectory, 1)


async def test_oversampling_admits_the_floor_of_its_surplus(bench):
    ledger = await bench.open(make_spec(oversampling=1.75, eta=0))
    assert (await ledger.totals()).credit_limit == 7
    assert len((await ledger.lease(GENERATOR, max_trajectories=100)).leases) == 6


async def test_the_prompt_stream_ends_as_exhausted_and_a_closed_one_as_closed(bench):
    ledger = await bench.open(make_spec(num_prompts=1))
    grant = await ledger.lease(GENERATOR, max_trajectories=100)
    assert (len(grant.leases), grant.refusal) == (2, Refusal.EXHAUSTED)
    await ledger.close_admission(LEARNER)
    assert (await ledger.lease(GENERATOR, max_trajectories=1)).refusal is Refusal.CLOSED


async def test_a_dead_generators_trajectories_continue_before_new_prompts(bench):
    ledger = await bench.open(make_spec())
    await ledger.lease(GENERATOR, max_trajectories=2)
    begun = TrajectoryId("t", 0, 1)
    await ledger.write_chunk(GENERATOR, make_chunk(begun, final=False))
    bench.now += 10.0
    grant = await ledger.lease(OTHER_GENERATOR, max_trajectories=3)
    assert [(str(x.trajectory), x.next_index) for x in grant.leases] == [("t.0.0", 0), ("t.0.1", 1), ("t.1.0", 0)]
    assert grant.leases[0].last_chunk is None
    assert grant.leases[1].last_chunk.id == ChunkId(begun, 0)
    late = await ledger.write_chunk(GENERATOR, make_chunk(begun, 1))
    assert (late.status, late.keeps_lease) == (WriteStatus.FENCED, False)


async def test_a_renewed_lease_is_kept(bench):
    ledger = await bench.open(make_spec(num_prompts=1))
    await ledger.lease(GENERATOR, max_trajectories=2)
    bench.now += 9.0
    await ledger.renew(GENERATOR)
    bench.now += 9.0
    assert (await ledger.lease(OTHER_GENERATOR, max_trajectories=2)).leases == ()


async def test_an_older_incarnation_is_fenced_and_loses_its_trajectories_at_once(bench):
    ledger = await bench.open(make_spec())
    await ledger.lease(GENERATOR, max_trajectories=2)
    await bench.set_epoch("generator-0", 2)
    for call in (
        ledger.lease(GENERATOR, max_trajectories=1),
        ledger.renew(GENERATOR),
        ledger.write_chunk(GENERATOR, make_chunk(TrajectoryId("t", 0, 0))),
        ledger.give_back(GENERATOR),
    ):
        with pytest.raises(Fenced, match="epoch 2"):
            await call
    newer = Incarnation(Role.GENERATOR, "generator-0", 2)
    grant = await ledger.lease(newer, max_trajectories=2)
    assert [str(lease.trajectory) for lease in grant.leases] == ["t.0.0", "t.0.1"]


async def test_given_back_trajectories_are_leased_again(bench):
    ledger = await bench.open(make_spec())
    await ledger.lease(GENERATOR, max_trajectories=4)
    assert await ledger.give_back(GENERATOR, (TrajectoryId("t", 1, 0), TrajectoryId("t", 9, 9))) == 1
    assert await ledger.give_back(GENERATOR) == 3
    assert await ledger.give_back(GENERATOR) == 0
    grant = await ledger.lease(OTHER_GENERATOR, max_trajectories=4)
    assert [str(lease.trajectory) for lease in grant.leases] == ["t.0.0", "t.0.1", "t.1.0", "t.1.1"]


@pytest.mark.parametrize("unit", Unit)
async def test_a_writer_whose_earlier_chunk_the_server_lost_can_let_others_sample_it_again(bench, unit):
    """A server that died may come back without its last writes: its writer is then ahead of it."""
    ledger = await bench.open(make_spec(unit, group_size=1, units_per_update=1))
    [lease] = (await ledger.lease(GENERATOR, max_trajectories=1)).leases
    ahead = await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory, index=1, context=3))
    assert (ahead.status, ahead.keeps_lease) == (WriteStatus.FENCED, False)
    assert await ledger.give_back(GENERATOR, (lease.trajectory,)) == 1
    [again] = (await ledger.lease(OTHER_GENERATOR, max_trajectories=1)).leases
    assert (again.trajectory, again.next_index, again.last_chunk) == (lease.trajectory, 0, None)


@pytest.mark.parametrize("unit", Unit)
async def test_a_chunk_repeated_after_a_lost_reply_counts_once_even_after_settling(bench, unit):
    ledger = await bench.open(make_spec(unit, group_size=1, units_per_update=1))
    [lease] = (await ledger.lease(GENERATOR, max_trajectories=1)).leases
    chunk = await finish(ledger, lease)
    repeat = await ledger.write_chunk(GENERATOR, chunk)
    assert (repeat.status, repeat.keeps_lease) == (WriteStatus.DUPLICATE, False)
    assert await ledger.write_score(SCORER, chunk.id, reward()) is WriteStatus.DUPLICATE
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert await ledger.settle(LEARNER, (claim.claim_id,)) == 1
    assert (await ledger.write_chunk(GENERATOR, chunk)).status is WriteStatus.FENCED
    assert await ledger.write_score(SCORER, chunk.id, reward()) is WriteStatus.UNKNOWN
    assert (await ledger.totals()).num_tokens_trained == 3
    assert (await ledger.audit()).balances


async def test_a_repeated_window_keeps_the_lease(bench):
    ledger = await bench.open(make_spec())
    [lease] = (await ledger.lease(GENERATOR, max_trajectories=1)).leases
    chunk = make_chunk(lease.trajectory, final=False)
    assert (await ledger.write_chunk(GENERATOR, chunk)).keeps_lease
    repeat = await ledger.write_chunk(GENERATOR, chunk)
    assert (repeat.status, repeat.keeps_lease) == (WriteStatus.DUPLICATE, True)
    assert (await ledger.totals()).num_tokens_generated == 3


async def test_other_bytes_under_a_written_chunks_name_are_fenced(bench):
    ledger = await bench.open(make_spec())
    [lease] = (await ledger.lease(GENERATOR, max_trajectories=1)).leases
    await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory, final=False))
    other = await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory, final=False, tokens=5))
    assert other.status is WriteStatus.FENCED


async def test_an_aborted_or_empty_chunk_is_refused(bench):
    ledger = await bench.open(make_spec())
    [lease] = (await ledger.lease(GENERATOR, max_trajectories=1)).leases
    chunk = make_chunk(lease.trajectory)
    aborted = type(chunk)(**{name: getattr(chunk, name) for name in chunk.__struct_fields__} | {
        "finish_reason": FinishReason.ABORT, "response_text": None})  # fmt: skip
    with pytest.raises(ValueError, match="aborted"):
        await ledger.write_chunk(GENERATOR, aborted)


async def test_a_unit_is_ready_when_the_last_needed_field_is_written_in_any_order(bench):
    ledger = await bench.open(make_spec(units_per_update=2, fields=frozenset({Field.REWARD, Field.REFERENCE})))
    leases = (await ledger.lease(GENERATOR, max_trajectories=2)).leases
    chunks = [make_chunk(lease.trajectory) for lease in leases]
    await ledger.write_chunk(GENERATOR, chunks[0])
    await ledger.write_score(SCORER, chunks[0].id, reference())
    await ledger.write_score(SCORER, chunks[0].id, reward())
    await ledger.write_chunk(GENERATOR, chunks[1])
    await ledger.write_score(SCORER, chunks[1].id, reward())
    assert (await ledger.totals()).num_ready_units == 0
    await ledger.write_score(SCORER, chunks[1].id, reference())
    assert (await ledger.totals()).num_ready_units == 1
    [unit] = await ledger.fetch(await ledger.claim(LEARNER, policy_version=0))
    assert unit.name == "0"
    assert [set(scored.scores) for [scored] in unit.trajectories] == [{Field.REWARD, Field.REFERENCE}] * 2


async def test_a_group_without_signal_is_dropped_by_raw_accuracy_and_its_credit_returns(bench):
    ledger = await bench.open(make_spec(signal_filter=True))
    leases = (await ledger.lease(GENERATOR, max_trajectories=4)).leases
    for lease, accuracy in zip(leases, [1.0, 1.0, 1.0, 0.0], strict=True):
        await finish(ledger, lease, accuracy=accuracy)
    totals = await ledger.totals()
    assert (totals.num_ready_units, totals.credit_used) == (1, 2)
    assert totals.num_groups_dropped == {"no_signal": 1}
    audit = await ledger.audit()
    assert audit.balances
    assert audit.tokens.dropped == {"no_signal": 6}


async def test_the_filter_goes_by_raw_accuracy_and_never_by_the_shaped_reward(bench):
    """Two right answers, one of them too long, teach nothing but to be short; equal rewards may
    hide right and wrong."""
    ledger = await bench.open(make_spec(signal_filter=True, units_per_update=2))
    leases = (await ledger.lease(GENERATOR, max_trajectories=4)).leases
    scores = [(1.0, 1.0), (0.25, 1.0), (0.5, 1.0), (0.5, 0.0)]
    for lease, (shaped, accuracy) in zip(leases, scores, strict=True):
        chunk = make_chunk(lease.trajectory)
        await ledger.write_chunk(GENERATOR, chunk)
        await ledger.write_score(SCORER, chunk.id, RewardScore(reward=shaped, accuracy=accuracy))
    assert (await ledger.audit()).groups.dropped == {"no_signal": 1}
    assert (await ledger.claim(LEARNER, policy_version=0)).units == ("1",)


async def test_claims_follow_the_order_of_admission_not_of_completion(bench):
    ledger = await bench.open(make_spec())
    leases = (await ledger.lease(GENERATOR, max_trajectories=8)).leases
    for lease in reversed(leases):
        await finish(ledger, lease)
    assert (await ledger.claim(LEARNER, policy_version=0)).units == ("0", "1")
    assert (await ledger.claim(LEARNER, policy_version=1)).units == ("2", "3")


async def test_a_stale_unit_is_never_claimed(bench):
    ledger = await bench.open(make_spec(late=LatePolicy.DROP))
    leases = (await ledger.lease(GENERATOR, max_trajectories=8)).leases
    for lease in leases[:4]:
        await finish(ledger, lease, version=0)
    for lease in leases[4:]:
        await finish(ledger, lease, version=1)
    claim = await ledger.claim(LEARNER, policy_version=2)
    assert claim.units == ("2", "3")
    assert (await ledger.audit()).groups.dropped == {"stale": 2}


async def test_a_claim_waits_for_late_work_under_wait_and_not_under_drop(bench):
    ledger = await bench.open(make_spec())
    leases = (await ledger.lease(GENERATOR, max_trajectories=8)).leases
    for lease in leases[2:]:
        await finish(ledger, lease)
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert claim.units == ("1", "2")
    await ledger.advance(LEARNER, 1)
    for lease in (await ledger.lease(GENERATOR, max_trajectories=4)).leases:
        await finish(ledger, lease, version=1)
    waiting = await ledger.claim(LEARNER, policy_version=1)
    assert waiting == ClaimRefused(ClaimWait.LATE_WORK, 3, 2, "0")
    for lease in leases[:2]:
        await finish(ledger, lease)
    assert (await ledger.claim(LEARNER, policy_version=1)).units == ("0", "3")


@pytest.mark.parametrize("late", LatePolicy)
async def test_without_lag_an_update_waits_for_all_begun_work_or_drops_it(bench, late):
    ledger = await bench.open(make_spec(eta=0, units_per_update=2, oversampling=2.0, late=late))
    leases = (await ledger.lease(GENERATOR, max_trajectories=4)).leases
    for lease in leases[2:]:
        await finish(ledger, lease)
    outcome = await ledger.claim(LEARNER, policy_version=0)
    if late is LatePolicy.WAIT:
        assert outcome == ClaimRefused(ClaimWait.LATE_WORK, 1, 1, "0")
    else:
        assert outcome.units == ("1",)


@pytest.mark.parametrize(("oversampling", "waits"), [(1.0, True), (2.0, False)])
async def test_late_work_that_oversampling_makes_spare_is_not_waited_for(bench, oversampling, waits):
    """Two groups run that only this update or the next can train. Without surplus both are needed;
    with it one may be late."""
    ledger = await bench.open(make_spec(units_per_update=2, eta=2, oversampling=oversampling))
    await ledger.lease(GENERATOR, max_trajectories=4)
    await ledger.advance(LEARNER, 1)
    for lease in (await ledger.lease(OTHER_GENERATOR, max_trajectories=2)).leases:
        await finish(ledger, lease, version=1, who=OTHER_GENERATOR)
    outcome = await ledger.claim(LEARNER, policy_version=1)
    if waits:
        assert outcome == ClaimRefused(ClaimWait.LATE_WORK, 1, 1, "0")
    else:
        assert outcome.units == ("2",)


async def test_a_stream_that_can_never_fill_an_update_again_is_starved(bench):
    ledger = await bench.open(make_spec(num_prompts=1))
    for lease in (await ledger.lease(GENERATOR, max_trajectories=2)).leases:
        assert (await ledger.claim(LEARNER, policy_version=0)).wait is ClaimWait.NOT_ENOUGH
        await finish(ledger, lease)
    assert await ledger.claim(LEARNER, policy_version=0) == ClaimRefused(ClaimWait.STARVED, 1, 2, None)


async def test_settling_twice_counts_once_and_leaves_nothing_behind(bench):
    ledger = await bench.open(make_spec())
    for lease in (await ledger.lease(GENERATOR, max_trajectories=4)).leases:
        await finish(ledger, lease)
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert await ledger.settle(LEARNER, (claim.claim_id,)) == 1
    assert await ledger.settle(LEARNER, (claim.claim_id, claim.claim_id)) == 0
    audit = await ledger.audit()
    assert (audit.groups.trained, audit.trajectories.trained, audit.tokens.trained) == (2, 4, 12)
    assert audit.balances
    with pytest.raises(LedgerError, match="not in the ledger"):
        await ledger.fetch(claim)
    if bench.kind == "redis":
        left = {key.decode() for key in await bench.client.keys("*")}
        assert left <= {
            "{test}:spec",
            "{test}:settings",
            "{test}:counters",
            "{test}:tallies",
            "{test}:lives",
            "{test}:lives_order",
            "{test}:holders",
            "{test}:asked:generator-0#1",
            "{test}:asked:learner-0#1",
        }
        assert int(await bench.client.hget("{test}:counters", "bytes")) == 0


async def test_a_new_learner_gets_back_what_its_checkpoint_does_not_hold(bench):
    ledger = await bench.open(make_spec())
    for lease in (await ledger.lease(GENERATOR, max_trajectories=8)).leases:
        await finish(ledger, lease)
    held = await ledger.claim(LEARNER, policy_version=0)
    lost = await ledger.claim(LEARNER, policy_version=1)
    await bench.set_epoch("learner-0", 2)
    newer = Incarnation(Role.LEARNER, "learner-0", 2)
    with pytest.raises(Fenced):
        await ledger.settle(LEARNER, (lost.claim_id,))
    assert await ledger.recover(newer, (held.claim_id,)) == 2
    assert await ledger.recover(newer, (held.claim_id,)) == 0
    assert (await ledger.audit()).groups.trained == 2
    assert (await ledger.claim(newer, policy_version=1)).units == lost.units


async def test_a_unit_dropped_from_a_claim_returns_its_credit_once(bench):
    ledger = await bench.open(make_spec())
    for lease in (await ledger.lease(GENERATOR, max_trajectories=4)).leases:
        await finish(ledger, lease)
    claim = await ledger.claim(LEARNER, policy_version=0)
    for _ in range(2):
        await ledger.drop(LEARNER, claim, "0", DropReason.NON_FINITE)
    assert (await ledger.totals()).credit_used == 2
    assert [unit.name for unit in await ledger.fetch(claim)] == ["1"]
    await ledger.settle(LEARNER, (claim.claim_id,))
    audit = await ledger.audit()
    assert (audit.groups.trained, audit.groups.dropped) == (1, {"non_finite": 1})


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
    assert [chunk.id for chunk in handed] == [chunks[1].id, chunks[0].id]
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
    assert [chunk.id for chunk in await ledger.overdue(SCORER, Field.REWARD, max_chunks=9)] == [two.id]
    bench.now += 3.0
    assert [chunk.id for chunk in await ledger.overdue(SCORER, Field.REWARD, max_chunks=9)] == [one.id]


async def test_all_workers_together_spend_up_to_the_limit_and_a_higher_one_gives_more(bench):
    ledger = await bench.open(make_spec())
    other = Incarnation(Role.REWARD, "reward-1", 1)

    async def spent(limit: int) -> list[bool]:
        return [await ledger.spend(who, "endpoint/quality", limit=limit) for who in (SCORER, other, SCORER, other)]

    assert await spent(3) == [True, True, True, False]
    assert await ledger.spend(SCORER, "endpoint/another", limit=1)
    assert await spent(5) == [True, True, False, False]


@pytest.mark.parametrize("unit", Unit)
async def test_work_that_scorers_fail_on_as_often_as_allowed_becomes_a_dead_letter(bench, unit):
    ledger = await bench.open(make_spec(unit))
    leases = (await ledger.lease(GENERATOR, max_trajectories=2)).leases
    chunk = make_chunk(leases[0].trajectory)
    await ledger.write_chunk(GENERATOR, chunk)
    assert not await ledger.fail_score(SCORER, chunk.id, Field.REWARD, "boom 1")
    assert [late.id for late in await ledger.overdue(SCORER, Field.REWARD, max_chunks=9)] == [chunk.id]
    assert await ledger.fail_score(SCORER, chunk.id, Field.REWARD, "boom 2")
    assert not await ledger.fail_score(SCORER, chunk.id, Field.REWARD, "boom 3")
    [letter] = await ledger.dead_letters()
    assert (letter.chunk, letter.role, letter.error, letter.num_attempts) == (str(chunk.id), "reward", "boom 2", 2)
    totals, audit = await ledger.totals(), await ledger.audit()
    assert audit.balances
    assert totals.credit_used == (0 if unit is Unit.GROUP else 1)
    assert await ledger.overdue(SCORER, Field.REWARD, max_chunks=9) == []
    other = await ledger.write_chunk(GENERATOR, make_chunk(leases[1].trajectory))
    assert other.status is (WriteStatus.FENCED if unit is Unit.GROUP else WriteStatus.STORED)


async def test_the_watermark_stops_admission_until_the_learner_makes_room(bench):
    ledger = await bench.open(make_spec(max_bytes=1))
    for lease in (await ledger.lease(GENERATOR, max_trajectories=4)).leases:
        await finish(ledger, lease)
    assert (await ledger.lease(GENERATOR, max_trajectories=1)).refusal is Refusal.MEMORY
    claim = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (claim.claim_id,))
    assert len((await ledger.lease(GENERATOR, max_trajectories=1)).leases) == 1


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


async def test_a_window_without_credit_is_parked_and_goes_on_before_new_prompts(bench):
    ledger = await bench.open(make_spec(Unit.CHUNK, group_size=1, units_per_update=1))
    first, second = (await ledger.lease(GENERATOR, max_trajectories=2)).leases
    parked = await ledger.write_chunk(GENERATOR, make_chunk(first.trajectory, final=False))
    assert (parked.status, parked.keeps_lease) == (WriteStatus.STORED, False)
    assert (await ledger.lease(GENERATOR, max_trajectories=1)).refusal is Refusal.NO_CREDIT
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert claim.units == ("t.0.0.0",)
    await ledger.settle(LEARNER, (claim.claim_id,))
    await ledger.advance(LEARNER, 1)
    [again] = (await ledger.lease(OTHER_GENERATOR, max_trajectories=5)).leases
    assert (again.trajectory, again.next_index) == (first.trajectory, 1)
    assert again.last_chunk.id == ChunkId(first.trajectory, 0)
    await ledger.write_chunk(OTHER_GENERATOR, make_chunk(first.trajectory, 1, context=3, version=1))
    await ledger.write_score(SCORER, ChunkId(first.trajectory, 1), reward())
    await ledger.write_chunk(GENERATOR, make_chunk(second.trajectory))
    await ledger.write_score(SCORER, ChunkId(second.trajectory, 0), reward())
    claim = await ledger.claim(LEARNER, policy_version=1)
    await ledger.settle(LEARNER, (claim.claim_id,))
    audit = await ledger.audit()
    assert audit.balances
    assert claim.units == ("t.1.0.0",), "the older version goes first, or it would be stale at the next update"


async def test_evaluation_goes_first_takes_no_credit_and_keeps_only_its_samples(bench):
    ledger = await bench.open(make_spec())
    request = EvaluationRequest(
        *(3, 1, 2, 1, 0.0), min_p=0.1, frequency_penalty=0.5, stop_strings=("é", "b"), max_response_tokens=7
    )
    for _ in range(2):
        await ledger.request_evaluation(LEARNER, request)
    leases = (await ledger.lease(GENERATOR, max_trajectories=3)).leases
    assert [str(lease.trajectory) for lease in leases] == ["e3.0.0", "e3.1.0", "t.0.0"]
    assert leases[0].evaluation == request
    good, bad = leases[0].trajectory, leases[1].trajectory
    assert (await ledger.write_chunk(GENERATOR, make_chunk(good, final=False, version=1))).keeps_lease
    await ledger.write_chunk(GENERATOR, make_chunk(good, 1, context=3, version=2))
    await ledger.write_chunk(GENERATOR, make_chunk(bad))
    assert await ledger.peek(f"{good}.0") == []
    assert await ledger.write_score(SCORER, ChunkId(good, 1), reward()) is WriteStatus.STORED
    state = await ledger.evaluation(3)
    assert not state.is_complete
    for _ in range(2):
        await ledger.fail_score(SCORER, ChunkId(bad, 0), Field.REWARD, "boom")
    state = await ledger.evaluation(3)
    [sample] = state.samples
    assert (sample.accuracy, sample.num_tokens, sample.oldest_version, sample.newest_version) == (1.0, 6, 1, 2)
    assert (state.num_failed, state.is_complete) == (1, True)
    totals, audit = await ledger.totals(), await ledger.audit()
    assert (totals.credit_used, totals.num_tokens_generated) == (2, 0)
    assert audit.balances
    assert await ledger.evaluation(4) is None


async def test_evaluation_goes_before_trajectories_that_wait_for_another_generator(bench):
    ledger = await bench.open(make_spec())
    await ledger.lease(GENERATOR, max_trajectories=2)
    assert await ledger.give_back(GENERATOR) == 2
    await ledger.request_evaluation(LEARNER, EvaluationRequest(0, 0, 1, 1, 0.0))
    leases = (await ledger.lease(OTHER_GENERATOR, max_trajectories=2)).leases
    assert [str(lease.trajectory) for lease in leases] == ["e0.0.0", "t.0.0"]


async def test_an_evaluation_lease_ends_like_any_other(bench):
    ledger = await bench.open(make_spec())
    await ledger.request_evaluation(LEARNER, EvaluationRequest(0, 0, 1, 1, 0.0))
    await ledger.lease(GENERATOR, max_trajectories=1)
    bench.now += 10.0
    [lease] = (await ledger.lease(OTHER_GENERATOR, max_trajectories=1)).leases
    assert (str(lease.trajectory), lease.last_chunk) == ("e0.0.0", None)


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


async def test_a_claim_is_kept_in_full_across_chunks(bench):
    ledger = await bench.open(make_spec(Unit.TRAJECTORY, units_per_update=1))
    [lease] = (await ledger.lease(GENERATOR, max_trajectories=1)).leases
    await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory, final=False))
    chunk = make_chunk(lease.trajectory, 1, context=3)
    await ledger.write_chunk(GENERATOR, chunk)
    await ledger.write_score(SCORER, chunk.id, reward())
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert isinstance(claim, Claim)
    [unit] = await ledger.fetch(claim)
    assert [scored.chunk.id.index for scored in unit.trajectories[0]] == [0, 1]
    assert unit.trajectories[0][1].chunk.tokens.tolist() == [0, 1, 2]
