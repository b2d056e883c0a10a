"""Every ledger's promises on guidance: due after its reward, given with it, written once."""

from __future__ import annotations

import msgspec
import pytest

from pipeline.ledger.admin import RequeueRequest
from pipeline.ledger.types import ClaimRefused, ClaimWait, DropReason, EvaluationRequest, Unit, WriteStatus
from protocol.errors import ConfigError
from protocol.ids import Incarnation, Role, TrajectoryId
from protocol.trajectory import Field, Guidance, RewardScore, TrajectoryChunk
from tests.pipeline.ledger.builders import GENERATOR, LEARNER, SCORER, guidance, make_chunk, make_spec, reward, value

GUIDE = Incarnation(Role.REFERENCE, "reference-0", 1)
OTHER_GUIDE = Incarnation(Role.REFERENCE, "reference-1", 1)
WITH_TEXTS = RewardScore(
    reward=-1.0, accuracy=0.0, guidance=Guidance(gold_text="13", judge_text="step 3 says 14, should be 13")
)


def guided_spec(unit=Unit.TRAJECTORY, **changes):
    """Return the settings of a run with guidance, an update of which is one response."""
    sizes = {"group_size": 2, "units_per_update": 2} if unit is Unit.GROUP else {"group_size": 1, "units_per_update": 1}
    return make_spec(unit, **(sizes | {"fields": frozenset({Field.REWARD, Field.GUIDANCE})} | changes))


async def write_final(ledger, number=1) -> list[TrajectoryChunk]:
    """Lease so many responses, and write each as one chunk."""
    leases = (await ledger.lease(GENERATOR, max_trajectories=number)).leases
    chunks = [make_chunk(lease.trajectory) for lease in leases]
    for chunk in chunks:
        assert (await ledger.write_chunk(GENERATOR, chunk)).status is WriteStatus.STORED
    return chunks


async def due(ledger, who=GUIDE, max_chunks=9):
    return await ledger.overdue(who, Field.GUIDANCE, max_chunks=max_chunks)


@pytest.mark.parametrize("unit", Unit)
async def test_guidance_is_due_at_once_after_its_reward_and_never_before(bench, unit):
    ledger = await bench.open(guided_spec(unit))
    chunk, *_ = await write_final(ledger, 2 if unit is Unit.GROUP else 1)
    bench.now += 60.0
    assert await due(ledger) == [], "a late reward makes no guidance due"
    assert await ledger.write_score(SCORER, chunk.id, WITH_TEXTS) is WriteStatus.STORED
    assert [late.chunk.id for late in await due(ledger)] == [chunk.id]
    assert await due(ledger) == [], "it is being scored"


async def test_guidance_is_given_with_its_reward_and_other_fields_with_no_score(bench):
    ledger = await bench.open(guided_spec(fields=frozenset({Field.REWARD, Field.VALUE, Field.GUIDANCE})))
    [chunk] = await write_final(ledger)
    bench.now += 60.0
    [late] = await ledger.overdue(SCORER, Field.REWARD, max_chunks=9)
    assert late.scores == {}
    await ledger.write_score(SCORER, chunk.id, WITH_TEXTS)
    [late] = await due(ledger)
    assert late.scores == {Field.REWARD: WITH_TEXTS}
    assert repr(late.chunk) == repr(chunk)
    [late] = await ledger.overdue(SCORER, Field.VALUE, max_chunks=9)
    assert late.scores == {}


async def test_the_oldest_rewards_are_guided_first_up_to_the_wanted_number(bench):
    ledger = await bench.open(guided_spec(units_per_update=4))
    chunks = await write_final(ledger, 3)
    order = [chunks[2], chunks[0], chunks[1]]
    for number, chunk in enumerate(order):
        await ledger.write_score(SCORER, chunk.id, msgspec.structs.replace(WITH_TEXTS, reward=float(number)))
        bench.now += 1.0
    first, second = await due(ledger, max_chunks=2), await due(ledger, OTHER_GUIDE)
    assert [late.chunk.id for late in (*first, *second)] == [chunk.id for chunk in order]
    assert [late.scores[Field.REWARD].reward for late in (*first, *second)] == [0.0, 1.0, 2.0], "each with its own"


@pytest.mark.parametrize("unit", Unit)
async def test_a_finished_response_is_not_ready_without_its_guidance(bench, unit):
    ledger = await bench.open(guided_spec(unit))
    chunks = await write_final(ledger, 2 if unit is Unit.GROUP else 1)
    for number, chunk in enumerate(chunks):
        await ledger.write_score(SCORER, chunk.id, reward(float(number)))
    for chunk in chunks:
        refused = await ledger.claim(LEARNER, policy_version=0)
        assert isinstance(refused, ClaimRefused)
        assert refused.wait is ClaimWait.NOT_ENOUGH
        assert await ledger.write_score(GUIDE, chunk.id, guidance()) is WriteStatus.STORED
    claim = await ledger.claim(LEARNER, policy_version=0)
    fetched = [scored for unit in await ledger.fetch(claim) for member in unit.trajectories for scored in member]
    assert [set(scored.scores) for scored in fetched] == [{Field.REWARD, Field.GUIDANCE}] * len(chunks)
    assert await ledger.settle(LEARNER, (claim.claim_id,)) == 1
    assert (await ledger.audit()).balances
    assert {queue.name: queue.depth for queue in await ledger.queues()}["bytes"] == 0


async def test_guidance_is_written_once_and_not_before_its_reward(bench):
    ledger = await bench.open(guided_spec())
    [chunk] = await write_final(ledger)
    assert await ledger.write_score(GUIDE, chunk.id, guidance()) is WriteStatus.UNKNOWN
    await ledger.write_score(SCORER, chunk.id, WITH_TEXTS)
    assert await ledger.write_score(GUIDE, chunk.id, guidance()) is WriteStatus.STORED
    stored = await ledger.peek(str(chunk.id))
    assert await ledger.write_score(OTHER_GUIDE, chunk.id, guidance(2)) is WriteStatus.DUPLICATE
    assert await ledger.peek(str(chunk.id)) == stored
    assert len(stored) == 3
    bench.now += 60.0
    assert await due(ledger) == []


async def test_guidance_of_a_lost_worker_is_overdue_again_after_the_deadline(bench):
    ledger = await bench.open(guided_spec())
    [chunk] = await write_final(ledger)
    await ledger.write_score(SCORER, chunk.id, WITH_TEXTS)
    assert len(await due(ledger)) == 1
    bench.now += 4.0
    await ledger.extend_scoring(GUIDE, Field.GUIDANCE, (chunk.id,))
    bench.now += 4.0
    assert await due(ledger, OTHER_GUIDE) == [], "the first is still at work"
    bench.now += 1.0
    [late] = await due(ledger, OTHER_GUIDE)
    assert (late.chunk.id, late.scores) == (chunk.id, {Field.REWARD: WITH_TEXTS})


async def test_guidance_that_fails_is_due_at_once_and_then_a_dead_letter(bench):
    ledger = await bench.open(guided_spec())
    [chunk] = await write_final(ledger)
    assert not await ledger.fail_score(GUIDE, chunk.id, Field.GUIDANCE, "boom"), "it is not due yet"
    await ledger.write_score(SCORER, chunk.id, WITH_TEXTS)
    assert not await ledger.fail_score(GUIDE, chunk.id, Field.GUIDANCE, "boom 1")
    assert len(await due(ledger)) == 1
    assert await ledger.fail_score(GUIDE, chunk.id, Field.GUIDANCE, "boom 2")
    [letter] = await ledger.dead_letters()
    assert (letter.chunk, letter.role, letter.worker) == (str(chunk.id), "guidance", str(GUIDE))
    assert await due(ledger) == []
    audit = await ledger.audit()
    assert audit.balances
    assert audit.trajectories.dropped == {"dead_letter": 1}


async def test_evaluation_needs_no_guidance(bench):
    ledger = await bench.open(guided_spec())
    request = EvaluationRequest(0, 0, num_prompts=1, samples_per_prompt=1, temperature=0.0)
    await ledger.request_evaluation(LEARNER, request)
    [chunk] = await write_final(ledger)
    assert chunk.trajectory == TrajectoryId("e0", 0, 0)
    assert await ledger.write_score(GUIDE, chunk.id, guidance()) is WriteStatus.UNKNOWN
    assert await ledger.write_score(SCORER, chunk.id, reward()) is WriteStatus.STORED
    assert await due(ledger) == []
    assert len((await ledger.evaluation(0)).samples) == 1


async def test_of_windows_that_are_units_the_last_one_alone_waits_for_guidance(bench):
    ledger = await bench.open(guided_spec(Unit.CHUNK, eta=3))
    [lease] = (await ledger.lease(GENERATOR, max_trajectories=1)).leases
    first = make_chunk(lease.trajectory, final=False)
    await ledger.write_chunk(GENERATOR, first)
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert claim.units == (str(first.id),)
    assert await ledger.write_score(GUIDE, first.id, guidance()) is WriteStatus.UNKNOWN
    last = make_chunk(lease.trajectory, 1, context=3)
    await ledger.write_chunk(GENERATOR, last)
    await ledger.write_score(SCORER, last.id, WITH_TEXTS)
    assert isinstance(await ledger.claim(LEARNER, policy_version=0), ClaimRefused)
    [late] = await due(ledger)
    assert late.chunk.response_length == 6, "the whole response is in it"
    await ledger.write_score(GUIDE, last.id, guidance(6))
    assert (await ledger.claim(LEARNER, policy_version=0)).units == (str(last.id),)


@pytest.mark.parametrize("unit", [Unit.TRAJECTORY, Unit.CHUNK])
async def test_a_window_that_goes_on_makes_no_guidance_due(bench, unit):
    ledger = await bench.open(guided_spec(unit, eta=3))
    [lease] = (await ledger.lease(GENERATOR, max_trajectories=1)).leases
    await ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory, final=False))
    bench.now += 60.0
    assert await due(ledger) == []


async def test_a_group_without_signal_leaves_before_it_is_guided(bench):
    ledger = await bench.open(guided_spec(Unit.GROUP, signal_filter=True))
    for chunk in await write_final(ledger, 2):
        await ledger.write_score(SCORER, chunk.id, reward(1.0))
    assert await due(ledger) == []
    audit = await ledger.audit()
    assert audit.balances
    assert audit.groups.dropped == {DropReason.NO_SIGNAL.value: 1}


async def test_a_critics_responses_are_kept_whole_beside_guidance(bench):
    fields = frozenset({Field.REWARD, Field.VALUE, Field.GUIDANCE})
    ledger = await bench.open(guided_spec(fields=fields, value_training=True))
    [chunk] = await write_final(ledger)
    for who, score in ((SCORER, WITH_TEXTS), (GUIDE, guidance()), (SCORER, value())):
        assert await ledger.write_score(who, chunk.id, score) is WriteStatus.STORED
    kept = await ledger.claim_finished(Incarnation(Role.VALUE, "value-0", 1), num_trajectories=1)
    [one] = kept.trajectories
    assert (one.reward, len(one.values)) == (WITH_TEXTS, 1)


async def test_the_queue_of_guidance_is_as_old_as_its_oldest_reward(bench):
    ledger = await bench.open(guided_spec(units_per_update=2))
    chunks = await write_final(ledger, 2)
    bench.now += 30.0
    for chunk in chunks:
        await ledger.write_score(SCORER, chunk.id, WITH_TEXTS)
        bench.now += 2.0
    found = {queue.name: queue for queue in await ledger.queues()}["guidance"]
    assert (found.depth, found.waiting_for) == (2, "reference")
    assert found.oldest_age_s == pytest.approx(4.0)
    await due(ledger, max_chunks=1)
    found = {queue.name: queue for queue in await ledger.queues()}["guidance"]
    assert found.depth == 2, "a chunk that is being scored still lacks it"


async def test_a_run_without_guidance_has_no_queue_of_it_and_takes_none(bench):
    ledger = await bench.open(guided_spec(fields=frozenset({Field.REWARD})))
    [chunk] = await write_final(ledger)
    assert await ledger.write_score(SCORER, chunk.id, WITH_TEXTS) is WriteStatus.STORED
    assert await ledger.write_score(GUIDE, chunk.id, guidance()) is WriteStatus.UNKNOWN
    assert await due(ledger) == []
    assert "guidance" not in {queue.name for queue in await ledger.queues()}


async def test_what_waits_for_guidance_is_known_with_its_age_and_can_be_made_due(bench):
    ledger, admin = await bench.with_admin(guided_spec())
    [chunk] = await write_final(ledger)
    bench.now += 30.0
    [unit] = (await admin.waits()).units
    assert [lack.field for lack in unit.trajectories[0].lacks] == [Field.REWARD], "guidance waits for the reward"
    await ledger.write_score(SCORER, chunk.id, WITH_TEXTS)
    await due(ledger)
    bench.now += 2.0
    [unit] = (await admin.waits()).units
    [lack] = unit.trajectories[0].lacks
    assert (lack.field, lack.age_s, lack.overdue_s) == (Field.GUIDANCE, pytest.approx(2.0), pytest.approx(-3.0))
    assert (await admin.requeue(RequeueRequest(field=Field.GUIDANCE))).num_due == 1
    assert len(await due(ledger)) == 1
    assert (await admin.requeue(RequeueRequest(trajectories=(chunk.trajectory,)))).num_due == 1
    await ledger.write_score(GUIDE, chunk.id, guidance())
    [stored] = await admin.stored()
    assert stored.fields == (Field.REWARD, Field.GUIDANCE)


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("unit", Unit)
async def test_the_life_of_a_response_has_its_guidance_while_it_is_there_and_after(bench, unit, is_over):
    ledger, inspection = await bench.with_inspection(guided_spec(unit))
    chunks = await write_final(ledger, 2 if unit is Unit.GROUP else 1)
    for number, chunk in enumerate(chunks):
        await ledger.write_score(SCORER, chunk.id, reward(float(number)))
        bench.now += 2.0
        await ledger.write_score(GUIDE, chunk.id, guidance())
    if is_over:
        claim = await ledger.claim(LEARNER, policy_version=0)
        await ledger.settle(LEARNER, (claim.claim_id,))
    life = await inspection.life(chunks[0].trajectory)
    [row] = life.chunks
    assert [(score.field, score.who, score.at_s) for score in row.scores] == [
        (Field.REWARD, str(SCORER), 1000.0),
        (Field.GUIDANCE, str(GUIDE), 1002.0),
    ]


async def test_guidance_without_a_reward_is_refused_as_a_setting(bench):
    with pytest.raises(ConfigError, match="add reward"):
        await bench.open(guided_spec(fields=frozenset({Field.GUIDANCE})))
