"""Every ledger's promises on trajectories with an environment: they wait for its turns, which nobody holds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pipeline.ledger.admin import Place, RequeueRequest
from pipeline.ledger.inspection import waits_for
from pipeline.ledger.types import (
    ChunkWrite,
    Claim,
    ClaimRefused,
    ClaimWait,
    EvaluationRequest,
    FinishedClaim,
    LatePolicy,
    Restart,
    Unit,
    WriteStatus,
)
from protocol.errors import ConfigError
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
from protocol.trajectory import Field
from tests.pipeline.ledger.builders import (
    ENVIRONMENT,
    GENERATOR,
    LEARNER,
    OTHER_GENERATOR,
    SCORER,
    guidance,
    make_chunk,
    make_spec,
    make_turn_chunk,
    reference,
    reward,
    turn,
    value,
)

CRITIC = Incarnation(Role.VALUE, "value-0", 1)
ENDED = ChunkWrite(WriteStatus.STORED, keeps_lease=False)
UNITS = pytest.mark.parametrize("unit", Unit)


def spec(unit=Unit.TRAJECTORY, *more: Field, **changes):
    """Return the settings of a run with an environment, an update of which is one response (of two, a group)."""
    sizes = {"group_size": 2, "units_per_update": 2} if unit is Unit.GROUP else {"group_size": 1, "units_per_update": 1}
    return make_spec(unit, **(sizes | {"fields": frozenset({Field.REWARD, Field.TURN, *more})} | changes))


async def lease(ledger, number=1, who=GENERATOR) -> list[Any]:
    return list((await ledger.lease(who, max_trajectories=number)).leases)


async def opened(ledger, number=1, *, version=0) -> list[TrajectoryId]:
    """Lease so many trajectories and write their opening chunks."""
    names = [one.trajectory for one in await lease(ledger, number)]
    for name in names:
        assert await ledger.write_chunk(GENERATOR, make_turn_chunk(name, version=version)) == ENDED
    return names


async def answer(ledger, name, index=0, *, is_done=False):
    return await ledger.write_score(ENVIRONMENT, ChunkId(name, index), turn(is_done=is_done))


async def play(ledger, name, *, version=0, accuracy: float | None = 1.0) -> None:
    """Answer a trajectory's opening, sample one turn, which is the last, and give its verdict."""
    await answer(ledger, name)
    [one] = await lease(ledger)
    assert one.trajectory == name
    await ledger.write_chunk(GENERATOR, make_turn_chunk(name, 1, version=version, context=one.turn.tokens.size))
    await answer(ledger, name, 1, is_done=True)
    if accuracy is not None:
        assert await ledger.write_score(SCORER, ChunkId(name, 1), reward(accuracy)) is WriteStatus.STORED


async def fail_for_good(ledger, chunk: ChunkId, field=Field.TURN) -> None:
    assert not await ledger.fail_score(ENVIRONMENT, chunk, field, "boom")
    assert await ledger.fail_score(ENVIRONMENT, chunk, field, "boom")


async def depths(ledger) -> dict[str, int]:
    return {stat.name: stat.depth for stat in await ledger.queues() if stat.depth and stat.name != "credit"}


# -- waiting --------------------------------------------------------------------------------------


@UNITS
async def test_after_an_opening_chunk_a_trajectory_waits_for_its_turn_alone_held_by_nobody(bench, unit):
    ledger, admin = await bench.with_admin(spec(unit, Field.REFERENCE, Field.VALUE))
    [name] = await opened(ledger)
    queued = await depths(ledger)
    queued.pop("bytes")
    assert queued == {"turn": 1} | ({"open": 1} if unit is Unit.GROUP else {})
    waits = await admin.waits()
    assert waits.holders == ()
    [row, *_] = waits.units[0].trajectories
    assert (row.name, row.holder, [lack.field for lack in row.lacks]) == (str(name), "", [Field.TURN])
    assert row.place is (Place.FINISHED if unit is Unit.CHUNK else Place.WAITING)
    assert waits_for(row) == "environment"
    audit = await ledger.audit()
    assert audit.balances
    assert audit.trajectories.in_flight == {"waiting": 1} | ({"open": 1} if unit is Unit.GROUP else {})
    assert audit.tokens.admitted == 0


@UNITS
async def test_a_turns_end_lacks_its_turn_and_what_every_window_lacks_but_no_verdict(bench, unit):
    ledger, admin = await bench.with_admin(spec(unit, Field.REFERENCE, Field.GUIDANCE, eta=3))
    [name] = await opened(ledger)
    await answer(ledger, name)
    await lease(ledger)
    assert await ledger.write_chunk(GENERATOR, make_turn_chunk(name, 1)) == ENDED
    [row, *_] = (await admin.waits()).units[0].trajectories
    assert [lack.field for lack in row.lacks] == [Field.REFERENCE, Field.TURN]
    assert await ledger.write_score(SCORER, ChunkId(name, 1), reward()) is WriteStatus.UNKNOWN
    assert isinstance(await ledger.claim(LEARNER, policy_version=0), ClaimRefused)


@UNITS
async def test_a_waiting_trajectory_is_given_to_no_generator_whoever_is_silent_or_replaced(bench, unit):
    ledger, inspection = await bench.with_inspection(spec(unit))
    [name] = await opened(ledger)
    bench.now += 60.0
    await bench.set_epoch(GENERATOR.worker, 2)
    assert name not in [one.trajectory for one in await lease(ledger, 9, OTHER_GENERATOR)]
    assert await ledger.give_back(OTHER_GENERATOR, (name,)) == 0
    assert (await ledger.write_chunk(OTHER_GENERATOR, make_turn_chunk(name, 1))).status is WriteStatus.FENCED
    assert (await inspection.life(name)).state == "waiting"
    assert (await ledger.audit()).balances


@UNITS
async def test_the_end_of_a_turn_is_written_once(bench, unit):
    ledger = await bench.open(spec(unit))
    [name] = await opened(ledger)
    again = ChunkWrite(WriteStatus.DUPLICATE, keeps_lease=False)
    assert await ledger.write_chunk(GENERATOR, make_turn_chunk(name)) == again
    await answer(ledger, name)
    assert await ledger.write_chunk(GENERATOR, make_turn_chunk(name)) == again
    assert (await ledger.write_chunk(GENERATOR, make_turn_chunk(name, 1))).status is WriteStatus.FENCED


async def test_turns_need_a_run_that_has_them_and_only_chunk_0_may_be_empty(bench):
    ledger = await bench.open(spec())
    [one] = await lease(ledger)
    late = msgspec.structs.replace(make_turn_chunk(one.trajectory), id=ChunkId(one.trajectory, 1))
    for chunk in (late, make_chunk(one.trajectory, tokens=0)):
        with pytest.raises(ValueError, match="no tokens"):
            await ledger.write_chunk(GENERATOR, chunk)


async def test_a_turn_in_a_run_without_them_is_refused(bench):
    ledger = await bench.open(make_spec())
    [one] = await lease(ledger)
    with pytest.raises(ValueError, match="ends a turn"):
        await ledger.write_chunk(GENERATOR, make_turn_chunk(one.trajectory))


async def test_turns_without_a_reward_are_refused_as_a_setting(bench):
    with pytest.raises(ConfigError, match="add reward"):
        await bench.open(make_spec(fields=frozenset({Field.TURN})))


# -- turns ----------------------------------------------------------------------------------------


@UNITS
async def test_a_turn_opens_its_trajectory_again_before_new_prompts_and_comes_with_the_lease(bench, unit):
    ledger = await bench.open(spec(unit, eta=3))
    [name] = await opened(ledger)
    bench.now += 3.0
    assert await answer(ledger, name) is WriteStatus.STORED
    assert (await depths(ledger))["parked" if unit is Unit.CHUNK else "open"] == (2 if unit is Unit.GROUP else 1)
    [again] = await lease(ledger, 1, OTHER_GENERATOR)
    assert (again.trajectory, again.next_index) == (name, 1)
    assert repr(again.last_chunk) == repr(make_turn_chunk(name))
    assert repr(again.turn) == repr(turn())
    window = make_chunk(name, 1, final=False)
    assert (await ledger.write_chunk(OTHER_GENERATOR, window)).keeps_lease
    await ledger.give_back(OTHER_GENERATOR)
    [again] = await lease(ledger)
    assert (again.next_index, again.turn) == (2, None), "its last chunk ended no turn"


async def test_the_turn_stays_with_the_last_chunk_when_that_has_left(bench):
    ledger = await bench.open(spec(Unit.CHUNK, eta=3))
    [name] = await opened(ledger)
    await answer(ledger, name)
    assert await ledger.peek(f"{name}.0") == [], "nothing of an opening chunk is trained on"
    [again] = await lease(ledger)
    assert repr(again.turn) == repr(turn())
    await ledger.write_chunk(GENERATOR, make_turn_chunk(name, 1))
    await ledger.write_score(ENVIRONMENT, ChunkId(name, 1), turn(tokens=5))
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert claim.units == (f"{name}.1",)
    await ledger.settle(LEARNER, (claim.claim_id,))
    [again] = await lease(ledger)
    assert again.last_chunk.id == ChunkId(name, 1)
    assert again.turn.tokens.size == 5
    await ledger.write_chunk(GENERATOR, make_chunk(name, 2, final=False))
    claim = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (claim.claim_id,))
    await ledger.give_back(GENERATOR)
    [again] = await lease(ledger)
    assert (again.last_chunk.id, again.turn) == (ChunkId(name, 2), None), "an older chunk's turn is no answer to it"
    await ledger.write_chunk(GENERATOR, make_chunk(name, 3))
    await ledger.write_score(SCORER, ChunkId(name, 3), reward())
    claim = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (claim.claim_id,))
    assert await depths(ledger) == {}, "nor are its bytes counted any more"
    assert (await ledger.audit()).balances


@UNITS
async def test_the_last_turn_ends_the_trajectory_and_makes_its_verdict_due_at_once(bench, unit):
    ledger = await bench.open(spec(unit, Field.GUIDANCE, eta=3))
    names = await opened(ledger, 2 if unit is Unit.GROUP else 1)
    for name in names:
        bench.now += 2.0
        await play(ledger, name, accuracy=None)
        [late] = await ledger.overdue(SCORER, Field.REWARD, max_chunks=9)
        assert (late.chunk.id, repr(late.scores)) == (ChunkId(name, 1), repr({Field.TURN: turn(is_done=True)}))
        assert (await ledger.write_chunk(GENERATOR, make_turn_chunk(name, 2))).status is WriteStatus.FENCED
        assert await ledger.write_score(SCORER, late.chunk.id, reward(float(name.member))) is WriteStatus.STORED
        assert isinstance(await ledger.claim(LEARNER, policy_version=0), ClaimRefused)
        assert await ledger.write_score(SCORER, late.chunk.id, guidance()) is WriteStatus.STORED
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert isinstance(claim, Claim)
    [unit_] = await ledger.fetch(claim)
    for member in unit_.trajectories:
        assert set(member[-1].scores) == {Field.REWARD, Field.GUIDANCE, Field.TURN}
        assert [len(scored.scores) for scored in member[:-1]] == ([] if unit is Unit.CHUNK else [1])
    await ledger.settle(LEARNER, (claim.claim_id,))
    audit = await ledger.audit()
    assert audit.balances
    assert (audit.groups.trained, audit.trajectories.trained) == (1, len(names))
    assert audit.tokens.trained == 3 * len(names)
    assert await depths(ledger) == {}


async def test_a_response_that_was_not_finished_by_a_turn_comes_to_its_scorer_without_one(bench):
    ledger = await bench.open(spec(group_size=2))
    one, two = await lease(ledger, 2)
    await ledger.write_chunk(GENERATOR, make_chunk(one.trajectory))
    await ledger.write_chunk(GENERATOR, make_turn_chunk(two.trajectory))
    bench.now += 60.0
    assert [late.scores for late in await ledger.overdue(SCORER, Field.REWARD, max_chunks=9)] == [{}]
    [late] = await ledger.overdue(ENVIRONMENT, Field.TURN, max_chunks=9)
    assert (late.chunk.is_opening, late.scores) == (True, {})


@UNITS
async def test_a_turn_is_written_once_and_too_late_when_its_chunk_has_gone(bench, unit):
    ledger = await bench.open(spec(unit, eta=3))
    names = await opened(ledger, 2 if unit is Unit.GROUP else 1)
    assert await answer(ledger, names[0]) is WriteStatus.STORED
    gone = WriteStatus.UNKNOWN if unit is Unit.CHUNK else WriteStatus.DUPLICATE
    assert await answer(ledger, names[0], is_done=True) is gone
    await lease(ledger, 9)
    assert await ledger.write_chunk(GENERATOR, make_turn_chunk(names[0], 1)) == ENDED
    assert await answer(ledger, names[0], 1) is WriteStatus.STORED
    stored = await ledger.peek(f"{names[0]}.1")
    assert await answer(ledger, names[0], 1, is_done=True) is WriteStatus.DUPLICATE
    assert await ledger.peek(f"{names[0]}.1") == stored
    await ledger.cancel_in_flight(LEARNER)
    assert await answer(ledger, names[0], 1) is WriteStatus.UNKNOWN


async def test_a_window_that_ends_no_turn_takes_none(bench):
    ledger = await bench.open(spec())
    [one] = await lease(ledger)
    await ledger.write_chunk(GENERATOR, make_chunk(one.trajectory, final=False))
    assert await answer(ledger, one.trajectory) is WriteStatus.UNKNOWN
    assert one.trajectory not in [other.trajectory for other in await lease(ledger, 9, OTHER_GENERATOR)]


@pytest.mark.parametrize("more", [(), (Field.GUIDANCE,)])
async def test_a_run_with_turns_has_guidance_only_if_its_fields_do(bench, more):
    ledger, inspection = await bench.with_inspection(spec(Unit.TRAJECTORY, *more))
    [name] = await opened(ledger)
    await play(ledger, name)
    assert ("guidance" in {stat.name for stat in await ledger.queues()}) == bool(more)
    assert len(await ledger.overdue(SCORER, Field.GUIDANCE, max_chunks=9)) == len(more)
    assert isinstance(await ledger.claim(LEARNER, policy_version=0), Claim) != bool(more)
    scores = (await inspection.life(name)).chunks[1].scores
    assert [(score.field, score.who) for score in scores] == [
        (Field.REWARD, str(SCORER)),
        (Field.TURN, str(ENVIRONMENT)),
    ]


async def test_the_queues_name_who_answers_and_a_verdict_is_waited_for_since_the_last_turn(bench):
    ledger = await bench.open(spec())
    [name] = await opened(ledger)
    bench.now += 7.0
    queue = {stat.name: stat for stat in await ledger.queues()}["turn"]
    assert (queue.depth, queue.oldest_age_s, queue.waiting_for) == (1, pytest.approx(7.0), "environment")
    await answer(ledger, name)
    await lease(ledger)
    await ledger.write_chunk(GENERATOR, make_turn_chunk(name, 1))
    bench.now += 20.0
    await answer(ledger, name, 1, is_done=True)
    bench.now += 1.0
    assert {stat.name: stat for stat in await ledger.queues()}["reward"].oldest_age_s == pytest.approx(1.0)


async def test_a_judge_of_whole_groups_gets_the_last_turn_of_each_member(bench):
    ledger = await bench.open(spec(Unit.GROUP))
    one, two = await opened(ledger, 2)
    await play(ledger, one, accuracy=None)
    assert await ledger.finished_group(SCORER, 0, num_members=2) == [], "one goes on"
    await answer(ledger, two)
    await lease(ledger)
    await ledger.write_chunk(GENERATOR, make_chunk(two, 1))
    first, second = await ledger.finished_group(SCORER, 0, num_members=2)
    assert (repr(first.turn), second.turn) == (repr(turn(is_done=True)), msgspec.UNSET)


# -- ages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [Unit.TRAJECTORY, Unit.CHUNK])
async def test_a_trajectory_that_was_only_opened_does_not_age_nor_hold_an_update_back(bench, unit):
    ledger, inspection = await bench.with_inspection(spec(unit, late=LatePolicy.WAIT, eta=1))
    [name] = await opened(ledger)
    assert ((await inspection.versions()).running, (await inspection.versions()).num_unbegun) == ({}, 1)
    for version in (1, 2):
        [other] = await lease(ledger)
        await ledger.write_chunk(GENERATOR, make_chunk(other.trajectory, version=version - 1))
        await ledger.write_score(SCORER, ChunkId(other.trajectory, 0), reward())
        claim = await ledger.claim(LEARNER, policy_version=version - 1)
        assert isinstance(claim, Claim)
        await ledger.settle(LEARNER, (claim.claim_id,))
        await ledger.advance(LEARNER, version)
    await answer(ledger, name)
    [again] = await lease(ledger)
    assert again.trajectory == name
    assert (await inspection.versions()).running == {0: 1}, "dated when its tokens may begin"
    await ledger.give_back(GENERATOR)
    assert (await inspection.versions()).running == {}
    await lease(ledger)
    await ledger.write_chunk(GENERATOR, make_turn_chunk(name, 1, version=2))
    await answer(ledger, name, 1, is_done=True)
    await ledger.write_score(SCORER, ChunkId(name, 1), reward())
    assert isinstance(await ledger.claim(LEARNER, policy_version=3), Claim), "its age is that of its tokens"


async def test_an_opening_chunk_makes_no_group_older(bench):
    ledger = await bench.open(spec(Unit.GROUP, eta=1))
    names = await opened(ledger, 2)
    await ledger.advance(LEARNER, 2)
    for name in names:
        await play(ledger, name, version=2, accuracy=float(name.member))
    assert isinstance(await ledger.claim(LEARNER, policy_version=3), Claim)


async def test_tokens_age_while_their_trajectory_waits(bench):
    ledger = await bench.open(spec(Unit.TRAJECTORY, eta=1, units_per_update=1, oversampling=3.0))
    [name] = await opened(ledger)
    await answer(ledger, name)
    await lease(ledger)
    await ledger.write_chunk(GENERATOR, make_turn_chunk(name, 1))
    other = [one.trajectory for one in await lease(ledger, 2)]
    for one in other:
        await ledger.write_chunk(GENERATOR, make_chunk(one))
        await ledger.write_score(SCORER, ChunkId(one, 0), reward())
    await ledger.claim(LEARNER, policy_version=0)
    await ledger.advance(LEARNER, 1)
    refused = await ledger.claim(LEARNER, policy_version=1)
    assert (refused.wait, refused.oldest_running) == (ClaimWait.LATE_WORK, str(name))


# -- opening chunks as units ----------------------------------------------------------------------


@pytest.mark.parametrize("is_done", [False, True])
async def test_an_opening_chunk_that_is_a_unit_leaves_with_its_turn_and_returns_its_credit(bench, is_done):
    ledger = await bench.open(spec(Unit.CHUNK, eta=0))
    [name] = await opened(ledger)
    assert (await ledger.totals()).credit_used == 1
    await answer(ledger, name, is_done=is_done)
    totals, audit = await ledger.totals(), await ledger.audit()
    assert (totals.credit_used, totals.num_ready_units, audit.balances) == (0, 0, True)
    if is_done:
        assert audit.trajectories.dropped == audit.groups.dropped == {"no_signal": 1}
        assert await depths(ledger) == {}
        return
    assert audit.trajectories.in_flight == {"open": 1}
    await lease(ledger)
    assert (await ledger.totals()).credit_used == 1, "the next window takes it again"
    await ledger.write_chunk(GENERATOR, make_turn_chunk(name, 1))
    await answer(ledger, name, 1, is_done=True)
    await ledger.write_score(SCORER, ChunkId(name, 1), reward())
    claim = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (claim.claim_id,))
    audit = await ledger.audit()
    assert (audit.trajectories.trained, audit.groups.trained, audit.balances) == (1, 1, True)


async def test_a_trajectory_that_ends_before_it_has_tokens_has_no_signal(bench):
    ledger = await bench.open(spec())
    [name] = await opened(ledger)
    await answer(ledger, name, is_done=True)
    audit = await ledger.audit()
    assert (audit.trajectories.dropped, audit.balances) == ({"no_signal": 1}, True)
    assert await depths(ledger) == {}


@pytest.mark.parametrize("all_end", [False, True])
async def test_a_member_that_ends_before_it_has_tokens_is_judged_with_its_group(bench, all_end):
    ledger = await bench.open(spec(Unit.GROUP))
    one, two = await opened(ledger, 2)
    await answer(ledger, one, is_done=True)
    assert await ledger.write_score(SCORER, ChunkId(one, 0), reward(0.0)) is WriteStatus.STORED
    if all_end:
        await answer(ledger, two, is_done=True)
        await ledger.write_score(SCORER, ChunkId(two, 0), reward(1.0))
        assert (await ledger.totals()).num_groups_dropped == {"no_signal": 1}
    else:
        await play(ledger, two)
        assert isinstance(await ledger.claim(LEARNER, policy_version=0), Claim)
    assert (await ledger.audit()).balances


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1])
async def test_a_group_goes_on_without_a_member_whose_environment_failed(bench, index):
    ledger = await bench.open(spec(Unit.GROUP, Field.GUIDANCE, group_size=3, units_per_update=3))
    one, two, three = await opened(ledger, 3)
    if index:
        await answer(ledger, one)
        await lease(ledger)
        await ledger.write_chunk(GENERATOR, make_turn_chunk(one, 1))
    await fail_for_good(ledger, ChunkId(one, index))
    [letter] = await ledger.dead_letters()
    assert (letter.chunk, letter.role, letter.worker) == (f"{one}.{index}", "turn", str(ENVIRONMENT))
    assert await answer(ledger, one, index) is WriteStatus.UNKNOWN
    assert (await ledger.audit()).trajectories.in_flight == {"finished": 1, "waiting": 2}
    for name, accuracy in ((two, 0.0), (three, 1.0)):
        await play(ledger, name, accuracy=accuracy)
        assert isinstance(await ledger.claim(LEARNER, policy_version=0), ClaimRefused)
        await ledger.write_score(SCORER, ChunkId(name, 1), guidance())
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert isinstance(claim, Claim)
    [unit] = await ledger.fetch(claim)
    assert [Field.REWARD in member[-1].scores for member in unit.trajectories] == [False, True, True]
    assert [len(member) for member in unit.trajectories] == [index + 1, 2, 2]
    assert (await ledger.audit()).balances
    await ledger.settle(LEARNER, (claim.claim_id,))
    audit = await ledger.audit()
    assert audit.balances
    assert (audit.groups.trained, audit.groups.dropped) == (1, {})
    assert (audit.trajectories.trained, audit.trajectories.dropped) == (2, {"dead_letter": 1})
    assert (audit.tokens.trained, sum(audit.tokens.dropped.values())) == (6, 3 * index)
    assert await depths(ledger) == {"dead": 1}


async def test_an_environment_that_fails_last_completes_its_group(bench):
    ledger = await bench.open(spec(Unit.GROUP, group_size=3, units_per_update=3))
    one, two, three = await opened(ledger, 3)
    for name, accuracy in ((two, 0.0), (three, 1.0)):
        await play(ledger, name, accuracy=accuracy)
    assert [chunk.id.index for chunk in await ledger.finished_group(SCORER, 0, num_members=3)] == []
    await fail_for_good(ledger, ChunkId(one, 0))
    assert (await ledger.audit()).trajectories.in_flight == {"ready": 3}
    assert isinstance(await ledger.claim(LEARNER, policy_version=0), Claim)


async def test_a_judge_of_groups_is_not_kept_waiting_by_a_failed_environment(bench):
    ledger = await bench.open(spec(Unit.GROUP, group_size=3, units_per_update=3))
    one, two, three = await opened(ledger, 3)
    await fail_for_good(ledger, ChunkId(one, 0))
    for name in (two, three):
        await play(ledger, name, accuracy=None)
    assert [chunk.trajectory for chunk in await ledger.finished_group(SCORER, 0, num_members=3)] == [two, three]


@UNITS
async def test_a_unit_whose_environment_fails_is_a_dead_letter_with_its_trajectory(bench, unit):
    ledger = await bench.open(spec(unit, eta=3))
    names = await opened(ledger, 2 if unit is Unit.GROUP else 1)
    await answer(ledger, names[0])
    await lease(ledger, 1)
    await ledger.write_chunk(GENERATOR, make_turn_chunk(names[0], 1))
    await fail_for_good(ledger, ChunkId(names[0], 1))
    audit = await ledger.audit()
    assert audit.balances
    assert audit.trajectories.dropped == {"dead_letter": len(names)}
    assert (audit.groups.dropped, audit.groups.in_flight) == ({"dead_letter": 1}, {})
    assert ((await ledger.totals()).credit_used, await depths(ledger)) == (0, {"dead": 1})


async def test_a_failure_before_the_last_attempt_makes_the_turn_due_at_once_and_a_lost_worker_at_its_deadline(bench):
    ledger = await bench.open(spec())
    [name] = await opened(ledger)
    chunk = ChunkId(name, 0)
    assert await ledger.overdue(ENVIRONMENT, Field.TURN, max_chunks=9) == []
    assert not await ledger.fail_score(ENVIRONMENT, chunk, Field.TURN, "boom")
    assert len(await ledger.overdue(ENVIRONMENT, Field.TURN, max_chunks=9)) == 1
    bench.now += 4.0
    await ledger.extend_scoring(ENVIRONMENT, Field.TURN, (chunk,))
    bench.now += 4.0
    assert await ledger.overdue(ENVIRONMENT, Field.TURN, max_chunks=9) == []
    assert await ledger.expire_scoring(GENERATOR, Field.TURN, (chunk,)) == 1
    assert len(await ledger.overdue(ENVIRONMENT, Field.TURN, max_chunks=9)) == 1
    assert await answer(ledger, name) is WriteStatus.STORED


async def test_a_chunk_that_dies_of_another_scorer_takes_the_turn_that_it_waits_for_with_it(bench):
    ledger = await bench.open(spec(Unit.CHUNK, Field.REFERENCE, eta=3))
    [name] = await opened(ledger)
    await answer(ledger, name)
    await lease(ledger)
    await ledger.write_chunk(GENERATOR, make_turn_chunk(name, 1))
    await fail_for_good(ledger, ChunkId(name, 1), Field.REFERENCE)
    assert await answer(ledger, name, 1) is WriteStatus.UNKNOWN
    audit = await ledger.audit()
    assert audit.balances
    assert (audit.trajectories.dropped, audit.trajectories.in_flight) == ({"dead_letter": 1}, {})


async def test_a_chunk_that_dies_after_its_turn_costs_its_window_only(bench):
    ledger = await bench.open(spec(Unit.CHUNK, Field.REFERENCE, eta=3))
    [name] = await opened(ledger)
    await answer(ledger, name)
    await lease(ledger)
    await ledger.write_chunk(GENERATOR, make_turn_chunk(name, 1))
    await answer(ledger, name, 1)
    await fail_for_good(ledger, ChunkId(name, 1), Field.REFERENCE)
    [again] = await lease(ledger)
    assert (again.last_chunk.id, repr(again.turn)) == (ChunkId(name, 1), repr(turn()))


# -- the value worker -----------------------------------------------------------------------------


@UNITS
async def test_a_critic_gets_the_values_of_the_chunks_that_have_tokens(bench, unit):
    ledger = await bench.open(spec(unit, Field.VALUE, eta=3, value_training=True))
    names = await opened(ledger, 2 if unit is Unit.GROUP else 1)
    for name in names:
        await play(ledger, name)
        assert await ledger.claim_finished(CRITIC, num_trajectories=1) == 0
        assert await ledger.write_score(SCORER, ChunkId(name, 1), value()) is WriteStatus.STORED
        finished = await ledger.claim_finished(CRITIC, num_trajectories=1)
        assert isinstance(finished, FinishedClaim)
        [kept] = finished.trajectories
        assert (kept.chunk.id, [values.values.size for values in kept.values]) == (ChunkId(name, 1), [3])
        await ledger.settle_finished(CRITIC, (finished.claim_id,))
    claim = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (claim.claim_id,))
    assert await depths(ledger) == {}


async def test_a_critic_learns_from_no_member_without_tokens_or_whose_environment_failed(bench):
    ledger = await bench.open(spec(Unit.GROUP, Field.VALUE, group_size=4, units_per_update=4, value_training=True))
    done, failed, *others = await opened(ledger, 4)
    await answer(ledger, done, is_done=True)
    await ledger.write_score(SCORER, ChunkId(done, 0), reward(0.0))
    await answer(ledger, failed)
    await lease(ledger)
    await ledger.write_chunk(GENERATOR, make_turn_chunk(failed, 1))
    await ledger.write_score(SCORER, ChunkId(failed, 1), value())
    await fail_for_good(ledger, ChunkId(failed, 1))
    for name in others:
        await play(ledger, name)
        await ledger.write_score(SCORER, ChunkId(name, 1), value())
    assert await ledger.claim_finished(CRITIC, num_trajectories=3) == 2
    assert isinstance(await ledger.claim(LEARNER, policy_version=0), Claim)
    assert (await ledger.audit()).balances


# -- evaluation -----------------------------------------------------------------------------------


async def test_an_evaluation_response_waits_for_its_turns_and_is_scored_after_the_last(bench):
    ledger, admin = await bench.with_admin(spec(Unit.CHUNK, Field.REFERENCE))
    await ledger.request_evaluation(LEARNER, EvaluationRequest(0, 0, 1, 2, temperature=0.0))
    names = await opened(ledger, 2)
    waits = await admin.waits()
    assert (waits.num_evaluation_waiting, waits.num_evaluation_open, waits.num_evaluation_unscored) == (2, 0, 0)
    assert names == [TrajectoryId("e0", 0, 0), TrajectoryId("e0", 0, 1)]
    assert await depths(ledger) == {"turn": 2, "bytes": (await depths(ledger))["bytes"]}
    for name in names:
        assert await answer(ledger, name) is WriteStatus.STORED
    again = await lease(ledger, 2)
    assert [(one.trajectory, repr(one.turn)) for one in again] == [(name, repr(turn())) for name in names]
    for name in names:
        assert await ledger.write_chunk(GENERATOR, make_turn_chunk(name, 1, version=4)) == ENDED
    assert await ledger.write_score(SCORER, ChunkId(names[0], 1), reward()) is WriteStatus.UNKNOWN
    await answer(ledger, names[0], 1, is_done=True)
    [late] = await ledger.overdue(SCORER, Field.REWARD, max_chunks=9)
    assert repr(late.scores) == repr({Field.TURN: turn(is_done=True)})
    assert await ledger.write_score(SCORER, late.chunk.id, reward()) is WriteStatus.STORED
    await fail_for_good(ledger, ChunkId(names[1], 1))
    state = await ledger.evaluation(0)
    [sample] = state.samples
    assert (state.num_failed, state.is_complete) == (1, True)
    assert (sample.num_tokens, sample.oldest_version, sample.newest_version) == (3, 4, 4)
    assert await depths(ledger) == {"dead": 1}


async def test_an_evaluation_response_that_ends_before_it_has_tokens_is_scored(bench):
    ledger = await bench.open(spec())
    await ledger.request_evaluation(LEARNER, EvaluationRequest(0, 0, 1, 1, temperature=0.0))
    [name] = await opened(ledger)
    await answer(ledger, name, is_done=True)
    await ledger.write_score(SCORER, ChunkId(name, 0), reward())
    [sample] = (await ledger.evaluation(0)).samples
    assert (sample.num_tokens, sample.accuracy) == (0, 1.0)


# -- people, restarts and the end -----------------------------------------------------------------


async def test_a_person_makes_a_turn_due(bench):
    ledger, admin = await bench.with_admin(spec())
    [name] = await opened(ledger)
    requeued = await admin.requeue(RequeueRequest(trajectories=(name,)))
    assert (requeued.num_opened, requeued.num_due) == (0, 1)
    assert len(await ledger.overdue(ENVIRONMENT, Field.TURN, max_chunks=9)) == 1
    assert (await admin.requeue(RequeueRequest(field=Field.TURN))).num_due == 1
    await answer(ledger, name)
    [stored] = await admin.stored()
    assert stored.fields == (Field.TURN,)


@UNITS
async def test_a_new_learner_and_an_older_checkpoint_leave_waiting_trajectories_as_they_are(bench, unit):
    ledger = await bench.open(spec(unit))
    [name] = await opened(ledger)
    newer = Incarnation(Role.LEARNER, LEARNER.worker, 2)
    await bench.set_epoch(newer.worker, 2)
    await ledger.recover(newer, ())
    await ledger.resume_from(newer, Restart(policy_version=1, num_updates=0))
    assert (await ledger.audit()).trajectories.in_flight["waiting"] == 1
    assert await answer(ledger, name) is WriteStatus.STORED


@UNITS
async def test_the_end_of_a_run_drops_what_waits_and_its_prompt_comes_again(bench, unit):
    ledger = await bench.open(spec(unit, Field.REFERENCE, eta=3))
    names = await opened(ledger, 2 if unit is Unit.GROUP else 1)
    await answer(ledger, names[0])
    await lease(ledger, 1)
    await ledger.write_chunk(GENERATOR, make_turn_chunk(names[0], 1))
    assert (await ledger.audit()).trajectories.in_flight == {"waiting": len(names)}
    assert await ledger.cancel_in_flight(LEARNER) == 1
    audit = await ledger.audit()
    assert audit.balances
    assert (audit.trajectories.dropped, audit.trajectories.in_flight) == ({"cancelled": len(names)}, {})
    assert (audit.tokens.dropped, await depths(ledger)) == ({"cancelled": 3}, {"again": 1})
    [one, *_] = await lease(ledger)
    assert (one.trajectory.group, one.prompt) == (1, 0)


async def test_reference_scores_of_an_opening_chunk_are_refused(bench):
    ledger = await bench.open(spec(Unit.TRAJECTORY, Field.REFERENCE))
    [name] = await opened(ledger)
    assert await ledger.write_score(SCORER, ChunkId(name, 0), reference(0)) is WriteStatus.UNKNOWN
