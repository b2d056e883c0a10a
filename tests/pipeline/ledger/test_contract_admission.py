"""Every ledger's promises on admission: the staleness bound, credit, versions, evaluation."""

from pipeline.ledger.types import (
    EvaluationRequest,
    Refusal,
    Unit,
    WriteStatus,
)
from protocol.ids import ChunkId
from protocol.trajectory import Field
from tests.pipeline.ledger.builders import (
    GENERATOR,
    LEARNER,
    OTHER_GENERATOR,
    SCORER,
    finish,
    make_chunk,
    make_spec,
    reward,
)


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


async def test_the_watermark_stops_admission_until_the_learner_makes_room(bench):
    ledger = await bench.open(make_spec(max_bytes=1))
    for lease in (await ledger.lease(GENERATOR, max_trajectories=4)).leases:
        await finish(ledger, lease)
    assert (await ledger.lease(GENERATOR, max_trajectories=1)).refusal is Refusal.MEMORY
    claim = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (claim.claim_id,))
    assert len((await ledger.lease(GENERATOR, max_trajectories=1)).leases) == 1


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
