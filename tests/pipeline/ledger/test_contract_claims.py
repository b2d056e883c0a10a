"""Every ledger's promises on claims: what is ready, what is too stale, what settling does."""

import pytest

from pipeline.ledger.types import (
    Claim,
    ClaimRefused,
    ClaimWait,
    DropReason,
    LatePolicy,
    Unit,
    UnitLetter,
    WriteStatus,
)
from protocol.errors import Fenced, LedgerError
from protocol.ids import ChunkId, Incarnation, Role
from protocol.trajectory import Field, RewardScore
from tests.pipeline.ledger.builders import (
    GENERATOR,
    LEARNER,
    OTHER_GENERATOR,
    SCORER,
    finish,
    make_chunk,
    make_spec,
    reference,
    reward,
)


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


async def _scored(ledger, lease, *, masked: bool, accuracy: float = 0.0) -> None:
    chunk = make_chunk(lease.trajectory, lease.next_index)
    await ledger.write_chunk(GENERATOR, chunk)
    score = RewardScore(reward=accuracy, accuracy=accuracy, masked=masked)
    assert await ledger.write_score(SCORER, chunk.id, score) is WriteStatus.STORED


@pytest.mark.parametrize("signal_filter", [False, True])
async def test_a_group_whose_every_response_is_masked_has_no_signal_whatever_the_filter(bench, signal_filter):
    ledger = await bench.open(make_spec(signal_filter=signal_filter, fields=frozenset({Field.REWARD, Field.REFERENCE})))
    leases = (await ledger.lease(GENERATOR, max_trajectories=4)).leases
    for lease, masked, accuracy in zip(leases, [True, True, True, False], [0.0, 1.0, 0.0, 1.0], strict=True):
        await _scored(ledger, lease, masked=masked, accuracy=accuracy)
    totals = await ledger.totals()
    assert (totals.num_groups_dropped, totals.credit_used) == ({"no_signal": 1}, 2)
    for lease in leases[2:]:
        await ledger.write_score(SCORER, ChunkId(lease.trajectory, 0), reference())
    assert (await ledger.totals()).num_ready_units == 1
    audit = await ledger.audit()
    assert audit.balances
    assert (audit.trajectories.dropped, audit.tokens.dropped) == ({"no_signal": 2}, {"no_signal": 6})


async def test_a_masked_response_that_is_claimed_by_itself_has_no_signal(bench):
    ledger = await bench.open(make_spec(Unit.TRAJECTORY, units_per_update=2))
    leases = (await ledger.lease(GENERATOR, max_trajectories=2)).leases
    for lease, masked in zip(leases, [True, False], strict=True):
        await _scored(ledger, lease, masked=masked)
    totals = await ledger.totals()
    assert (totals.num_ready_units, totals.credit_used) == (1, 1)
    audit = await ledger.audit()
    assert audit.balances
    assert audit.trajectories.dropped == {"no_signal": 1}


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
            "{test}:moved",
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


async def test_a_new_learner_keeps_the_claims_that_its_weights_hold_and_no_disk_does(bench):
    ledger = await bench.open(make_spec(units_per_update=2, eta=3))
    for lease in (await ledger.lease(GENERATOR, max_trajectories=6)).leases:
        await finish(ledger, lease)
    on_disk, in_memory, lost = [await ledger.claim(LEARNER, policy_version=0) for _ in range(3)]
    ids = (on_disk.claim_id, in_memory.claim_id, lost.claim_id)
    assert await ledger.missing((*ids, "another")) == ("another",)
    await bench.set_epoch("learner-0", 2)
    newer = Incarnation(Role.LEARNER, "learner-0", 2)
    assert await ledger.recover(newer, ids[:1], kept=ids[1:2]) == len(lost.units)
    assert await ledger.missing(ids) == (ids[0], ids[2])
    audit = await ledger.audit()
    assert audit.balances and audit.groups.trained == 1, "what is kept is not settled"
    assert (await ledger.claim(newer, policy_version=0)).units == lost.units
    assert [unit.name for unit in await ledger.fetch(in_memory)] == [*in_memory.units]
    assert await ledger.settle(newer, ids[1:2], num_updates=2) == 1
    assert (await ledger.audit()).groups.trained == 2


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


@pytest.mark.parametrize("unit", Unit)
async def test_a_unit_that_is_dropped_with_its_reason_is_a_dead_letter_that_can_be_retried(bench, unit):
    ledger, admin = await bench.with_admin(make_spec(unit))
    for lease in (await ledger.lease(GENERATOR, max_trajectories=4)).leases:
        await finish(ledger, lease)
    claim = await ledger.claim(LEARNER, policy_version=0)
    bad = claim.units[-1]
    [held] = [one for one in await ledger.fetch(claim) if one.name == bad]
    chunk = held.trajectories[0][-1].chunk.id
    for _ in range(2):
        await ledger.drop(LEARNER, claim, bad, DropReason.NON_FINITE, UnitLetter(chunk, "loss nan, twice"))
    [letter] = await ledger.dead_letters()
    expected = (str(chunk), "learner", str(LEARNER), "loss nan, twice", 1, chunk.trajectory.group)
    assert (letter.chunk, letter.role, letter.worker, letter.error, letter.num_attempts, letter.prompt) == expected
    audit = await ledger.audit()
    assert audit.balances and sum(audit.tokens.dropped.values()) > 0
    assert (await admin.retry((letter.chunk,))).prompts == (chunk.trajectory.group,)
    assert await ledger.dead_letters() == []


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
