"""Claims about a learner that goes on from an older checkpoint: nothing counts twice, nothing is
forgotten, nothing ages."""

from __future__ import annotations

import msgspec
import pytest

from pipeline.ledger.types import Claim, ClaimRefused, Refusal, Restart, Unit, WriteStatus
from pipeline.ledger.version_history import VersionHistory
from protocol.errors import Fenced, LedgerError
from protocol.ids import Incarnation
from protocol.trajectory import Segment
from tests.pipeline.ledger.builders import GENERATOR, LEARNER, SCORER, make_chunk, make_spec, reward

UNITS = (Unit.GROUP, Unit.TRAJECTORY, Unit.CHUNK)


def test_a_version_stands_for_the_updates_of_the_line_that_it_is_on():
    version_history = VersionHistory().after(Restart(0, 0)).after(Restart(6, 3)).after(Restart(9, 4))
    assert [version_history.updates(version) for version in range(11)] == [0, 1, 2, 3, 4, 5, 3, 4, 5, 4, 5]
    # the one before died before it had published
    again = version_history.after(Restart(9, 5))
    assert again.restarts == (Restart(0, 0), Restart(6, 3), Restart(9, 5))


async def fill(ledger, version: int) -> int:
    """Finish all that there is credit for; return how many trajectories."""
    grant = await ledger.lease(GENERATOR, max_trajectories=100, policy_version=version)
    for lease in grant.leases:
        chunk = make_chunk(lease.trajectory, version=version)
        assert (await ledger.write_chunk(GENERATOR, chunk)).status is WriteStatus.STORED
        assert await ledger.write_score(SCORER, chunk.id, reward(lease.trajectory.member % 2)) is WriteStatus.STORED
    return len(grant.leases)


async def update(ledger, who, version: int) -> Claim:
    """Claim at a version and publish the next."""
    claim = await ledger.claim(who, policy_version=version)
    assert isinstance(claim, Claim)
    await ledger.advance(who, version + 1)
    return claim


@pytest.mark.parametrize("unit", UNITS)
async def test_what_comes_back_to_an_older_checkpoint_is_as_fresh_as_it_was(bench, unit):
    ledger = await bench.open(make_spec(unit, eta=1))
    await ledger.resume_from(LEARNER, Restart(0, 0))
    version, claims = 0, []
    for _ in range(5):
        await fill(ledger, version)
        claims.append(await update(ledger, LEARNER, version))
        version += 1
    await fill(ledger, version)
    await ledger.settle(LEARNER, (claims[0].claim_id,), num_updates=1)
    admitted = (await ledger.audit()).trajectories.admitted
    newer = Incarnation(LEARNER.role, LEARNER.worker, 2)
    await bench.set_epoch(LEARNER.worker, 2)
    with pytest.raises(Fenced):
        await ledger.resume_from(LEARNER, Restart(6, 1))
    assert await ledger.recover(newer, ()) == sum(len(claim.units) for claim in claims[1:])
    assert await ledger.resume_from(newer, Restart(6, 1)) == 0
    assert await ledger.restarts() == (Restart(0, 0), Restart(6, 1))
    totals = await ledger.totals()
    assert (totals.policy_version, totals.credit_limit) == (6, (1 + 1 + 1) * 4), "credit is counted in updates"
    assert await fill(ledger, 6) == 0, "nothing new is admitted before the learner has caught up"
    for lost in claims[1:]:
        again = await update(ledger, newer, version := version + 1)
        assert again.units == lost.units
        await fill(ledger, version + 1)
    audit = await ledger.audit()
    assert audit.balances
    assert not audit.trajectories.dropped, "a unit was dropped for its age, though no update had passed"
    assert audit.trajectories.admitted == admitted
    await update(ledger, newer, version := version + 1)
    assert await fill(ledger, version + 1) > 0


@pytest.mark.parametrize("unit", UNITS)
async def test_units_of_a_lost_checkpoint_count_as_given_up_and_return_their_credit(bench, unit):
    ledger = await bench.open(make_spec(unit, eta=1))
    await ledger.resume_from(LEARNER, Restart(0, 0))
    for version in range(4):
        await fill(ledger, version)
        claim = await update(ledger, LEARNER, version)
        await ledger.settle(LEARNER, (claim.claim_id,), num_updates=version + 1)
    before = await ledger.audit()
    assert before.trajectories.trained == 16
    assert await ledger.resume_from(LEARNER, Restart(5, 2)) == 8
    audit = await ledger.audit()
    assert audit.balances
    assert audit.trajectories.trained == 8
    assert audit.groups.dropped == {"rolled_back": 4}
    assert audit.trajectories.dropped == {"rolled_back": 8}
    assert audit.tokens.dropped == {"rolled_back": 24}
    assert await ledger.resume_from(LEARNER, Restart(5, 2)) == 0, "a repeat gives nothing more up"
    assert (await ledger.audit()) == audit
    assert await fill(ledger, 5) == 4 * (1 + 2 + 1) - 8 - sum(before.trajectories.in_flight.values())
    assert (await ledger.lease(GENERATOR, max_trajectories=1, policy_version=5)).refusal is Refusal.NO_CREDIT


async def test_going_back_to_an_unsettled_point_is_refused_except_to_the_start(bench):
    ledger = await bench.open(make_spec(eta=1))
    claims = []
    for version in range(3):
        await fill(ledger, version)
        claims.append((await update(ledger, LEARNER, version)).claim_id)
    await ledger.settle(LEARNER, tuple(claims), num_updates=3)
    before = await ledger.audit()
    with pytest.raises(LedgerError, match="does not know a checkpoint of 2 updates"):
        await ledger.resume_from(LEARNER, Restart(4, 2))
    assert await ledger.audit() == before and await ledger.restarts() == ()
    assert await ledger.resume_from(LEARNER, Restart(4, 0)) == 12
    assert (await ledger.audit()).groups.trained == 0


async def test_a_drop_of_claims_that_no_update_trained_on_marks_nothing(bench):
    ledger = await bench.open(make_spec(eta=1))
    await fill(ledger, 0)
    claim = await update(ledger, LEARNER, 0)
    await ledger.settle(LEARNER, (claim.claim_id,))
    assert await ledger.resume_from(LEARNER, Restart(2, 0)) == 0


@pytest.mark.parametrize("unit", UNITS)
async def test_restored_weights_sample_nothing_that_would_be_too_old_at_its_turn(bench, unit):
    ledger = await bench.open(make_spec(unit, eta=1))
    await ledger.resume_from(LEARNER, Restart(0, 0))
    claims = []
    for version in range(5):
        await fill(ledger, version)
        claims.append((await update(ledger, LEARNER, version)).claim_id)
    begun = await ledger.lease(GENERATOR, max_trajectories=4, policy_version=5)
    assert len(begun.leases) == 4
    # it dies, as everything does
    assert await ledger.give_back(GENERATOR) == 4
    await ledger.settle(LEARNER, (claims[0],), num_updates=1)
    await ledger.recover(LEARNER, ())
    await ledger.resume_from(LEARNER, Restart(6, 1))
    for version in range(6, 10):
        refused = await ledger.lease(GENERATOR, max_trajectories=8, policy_version=version)
        assert refused.leases == () and refused.refusal is Refusal.NO_CREDIT
        await update(ledger, LEARNER, version)
    assert await fill(ledger, 10) == 4
    claim = await update(ledger, LEARNER, 10)
    assert not (await ledger.audit()).trajectories.dropped
    assert len(claim.units) > 0


async def test_a_learner_that_waits_for_a_unit_is_given_it_although_it_catches_up(bench):
    """One member is sampled by restored weights, so the group is as old as they are; its other
    member must come, too."""
    ledger = await bench.open(make_spec(Unit.GROUP, eta=1))
    await ledger.resume_from(LEARNER, Restart(0, 0))
    for version in range(5):
        await fill(ledger, version)
        await update(ledger, LEARNER, version)
    held = (await ledger.lease(GENERATOR, max_trajectories=1, policy_version=5)).leases[0].trajectory
    await ledger.recover(LEARNER, ())
    await ledger.resume_from(LEARNER, Restart(6, 0))
    await ledger.write_chunk(GENERATOR, make_chunk(held, version=6))
    grant = await ledger.lease(GENERATOR, max_trajectories=8, policy_version=6)
    assert [lease.trajectory.group for lease in grant.leases] == [held.group]


@pytest.mark.parametrize("unit", UNITS)
async def test_a_chunk_of_abandoned_and_restored_weights_is_as_old_as_the_restored(bench, unit):
    """Its smallest version is 3, but version 4 stands for fewer updates: it is as old as those."""
    ledger = await bench.open(make_spec(unit, eta=1, group_size=1, units_per_update=1))
    await ledger.resume_from(LEARNER, Restart(0, 0))
    for version in range(3):
        await fill(ledger, version)
        await update(ledger, LEARNER, version)
    held = (await ledger.lease(GENERATOR, max_trajectories=1, policy_version=3)).leases[0].trajectory
    await ledger.resume_from(LEARNER, Restart(4, 2))
    chunk = msgspec.structs.replace(make_chunk(held, tokens=4), segments=(Segment(3, 2), Segment(4, 2)))
    await ledger.write_chunk(GENERATOR, chunk)
    await ledger.write_score(SCORER, chunk.id, reward(1))
    # four updates
    await ledger.advance(LEARNER, 6)
    refused = await ledger.claim(LEARNER, policy_version=6)
    assert isinstance(refused, ClaimRefused) and refused.num_ready == 0
    assert set((await ledger.audit()).trajectories.dropped) == {"stale"}
