"""What both ledgers promise the value worker: every finished trajectory once, whole, whatever
becomes of its unit.
"""

import pytest

from pipeline.ledger.contract import DropReason, FinishedClaim, Refusal, Unit, WriteStatus
from protocol.errors import ConfigError, Fenced, LedgerError
from protocol.ids import ChunkId, Incarnation, Role
from protocol.trajectory import Field
from tests.pipeline.ledger.builders import GENERATOR, LEARNER, SCORER, make_chunk, make_spec, reward, value

VALUE = Incarnation(Role.VALUE, "value-0", 1)
FIELDS = frozenset({Field.REWARD, Field.VALUE})


def critic_spec(unit=Unit.CHUNK, **changes):
    return make_spec(unit, **({"fields": FIELDS, "value_training": True} | changes))


async def write(replay, trajectory, index=0, *, final=True, tokens=3):
    """Write one chunk, in a response whose chunks have three tokens each."""
    chunk = make_chunk(trajectory, index, final=final, tokens=tokens, context=3 * index)
    assert (await replay.write_chunk(GENERATOR, chunk)).status is WriteStatus.STORED
    return chunk.id


async def finish(replay, trajectory, accuracy=1.0):
    chunk = await write(replay, trajectory)
    await replay.write_score(SCORER, chunk, reward(accuracy))
    await replay.write_score(VALUE, chunk, value())
    return chunk


async def leased(replay, number):
    grant = await replay.lease(GENERATOR, max_trajectories=number)
    return [lease.trajectory for lease in grant.leases]


async def depth(replay, name="finished"):
    return {stat.name: stat.depth for stat in await replay.queues()}[name]


@pytest.mark.parametrize("order", [("value 0", "value 1", "reward"), ("reward", "value 1", "value 0")])
@pytest.mark.parametrize("unit", Unit)
async def test_a_trajectory_is_claimable_with_the_write_that_completes_it_and_not_before(bench, unit, order):
    replay = await bench.open(critic_spec(unit))
    [one] = await leased(replay, 1)
    await write(replay, one, 0, final=False)
    await write(replay, one, 1)
    for what in order:
        assert await replay.claim_finished(VALUE, num_trajectories=1) == 0
        name, _, index = what.partition(" ")
        score = value() if name == "value" else reward()
        assert await replay.write_score(VALUE, ChunkId(one, int(index or 1)), score) is WriteStatus.STORED
    claim = await replay.claim_finished(VALUE, num_trajectories=1)
    [trajectory] = claim.trajectories
    assert trajectory.chunk.id == ChunkId(one, 1)
    assert trajectory.reward == reward()
    assert [scores.values.size for scores in trajectory.values] == [3, 3]
    assert sum(scores.values.size for scores in trajectory.values) == trajectory.chunk.response_length


async def test_windows_that_were_settled_or_dropped_long_ago_leave_their_values_to_the_trajectory(bench):
    replay = await bench.open(critic_spec(group_size=1, units_per_update=2))
    [one, two] = await leased(replay, 2)
    await write(replay, one, 0, final=False)
    await replay.write_score(VALUE, ChunkId(one, 0), value())
    await finish(replay, two)
    claim = await replay.claim(LEARNER, policy_version=0)
    assert claim.units == ("t.0.0.0", "t.1.0.0")
    await replay.drop(LEARNER, claim, "t.0.0.0", DropReason.VALUE_WARMUP)
    await replay.settle(LEARNER, (claim.claim_id,))
    assert await replay.peek("t.0.0.0") == await replay.peek("t.1.0.0") == []
    await write(replay, one, 1)
    await replay.write_score(SCORER, ChunkId(one, 1), reward())
    await replay.write_score(VALUE, ChunkId(one, 1), value())
    claim = await replay.claim_finished(VALUE, num_trajectories=2)
    assert [(str(t.chunk.id), len(t.values)) for t in claim.trajectories] == [("t.0.0.1", 2), ("t.1.0.0", 1)]
    assert (await replay.audit()).finished.in_flight == {"claimed": 2}


async def test_a_batch_is_claimed_exactly_in_order_of_admission_and_each_trajectory_once(bench):
    replay = await bench.open(critic_spec(Unit.TRAJECTORY))
    names = await leased(replay, 5)
    for name in reversed(names):
        await finish(replay, name)
    bench.now += 3.0
    stat = {stat.name: stat for stat in await replay.queues()}["finished"]
    assert (stat.depth, stat.limit, stat.oldest_age_s, stat.waiting_for) == (5, None, 3.0, "value")
    first = await replay.claim_finished(VALUE, num_trajectories=2)
    second = await replay.claim_finished(VALUE, num_trajectories=2)
    claimed = [t.chunk.trajectory for claim in (first, second) for t in claim.trajectories]
    assert claimed == names[:4]
    assert await replay.claim_finished(VALUE, num_trajectories=2) == 1
    assert (await depth(replay), await depth(replay, "finished_claimed")) == (1, 4)


async def test_settling_value_batches_twice_counts_once_and_frees_what_was_kept(bench):
    replay = await bench.open(critic_spec(Unit.TRAJECTORY, units_per_update=2))
    for name in await leased(replay, 2):
        await finish(replay, name)
    unit_claim = await replay.claim(LEARNER, policy_version=0)
    await replay.settle(LEARNER, (unit_claim.claim_id,))
    assert await depth(replay, "bytes") > 1024
    claim = await replay.claim_finished(VALUE, num_trajectories=2)
    assert await replay.settle_finished(VALUE, (claim.claim_id, claim.claim_id)) == 1
    assert await replay.settle_finished(VALUE, (claim.claim_id,)) == 0
    audit = await replay.audit()
    assert audit.balances
    assert (audit.finished.admitted, audit.finished.trained, audit.finished.in_flight) == (2, 2, {})
    assert await depth(replay, "bytes") == 0
    if bench.kind == "redis":
        assert not [key for key in await bench.client.keys("*") if b"finished" in key]


async def test_a_new_value_worker_gets_back_what_its_checkpoint_does_not_hold(bench):
    replay = await bench.open(critic_spec(Unit.TRAJECTORY))
    names = await leased(replay, 4)
    for name in names:
        await finish(replay, name)
    held = await replay.claim_finished(VALUE, num_trajectories=2)
    lost = await replay.claim_finished(VALUE, num_trajectories=2)
    await bench.set_epoch("value-0", 2)
    newer = Incarnation(Role.VALUE, "value-0", 2)
    for call in (
        replay.claim_finished(VALUE, num_trajectories=1),
        replay.settle_finished(VALUE, (lost.claim_id,)),
        replay.recover_finished(VALUE, ()),
    ):
        with pytest.raises(Fenced):
            await call
    assert await replay.recover_finished(newer, (held.claim_id, "value-0#1/never")) == 2
    assert await replay.recover_finished(newer, (held.claim_id,)) == 0
    assert await replay.settle_finished(newer, (lost.claim_id,)) == 0
    again = await replay.claim_finished(newer, num_trajectories=2)
    assert [t.chunk.trajectory for t in again.trajectories] == names[2:]
    assert (await replay.audit()).finished.trained == 2


@pytest.mark.parametrize("unit", Unit)
@pytest.mark.parametrize("reason", [DropReason.NON_FINITE, DropReason.VALUE_WARMUP])
async def test_what_the_learner_found_not_finite_never_trains_the_critic_and_other_drops_do(bench, unit, reason):
    replay = await bench.open(critic_spec(unit, units_per_update=2))
    for name in await leased(replay, 2):
        await finish(replay, name)
    claim = await replay.claim(LEARNER, policy_version=0)
    for name in claim.units:
        await replay.drop(LEARNER, claim, name, reason)
    spoiled = reason is DropReason.NON_FINITE
    assert await depth(replay) == (0 if spoiled else 2)
    audit = await replay.audit()
    assert audit.balances
    assert audit.finished.dropped == ({"non_finite": 2} if spoiled else {})
    assert sum(audit.trajectories.dropped.values()) == 2
    assert (await replay.totals()).num_groups_dropped == {reason.value: 1}


async def test_a_spoiled_trajectory_leaves_even_a_value_batch_and_later_windows_do_not_bring_it_back(bench):
    replay = await bench.open(critic_spec(group_size=1, units_per_update=2))
    [one, two] = await leased(replay, 2)
    await write(replay, one, 0, final=False)
    await replay.write_score(VALUE, ChunkId(one, 0), value())
    await finish(replay, two)
    batch = await replay.claim_finished(VALUE, num_trajectories=1)
    claim = await replay.claim(LEARNER, policy_version=0)
    for name in claim.units:
        await replay.drop(LEARNER, claim, name, DropReason.NON_FINITE)
    assert await depth(replay, "finished_claimed") == 0
    assert await replay.settle_finished(VALUE, (batch.claim_id,)) == 1
    await write(replay, one, 1)
    await replay.write_score(SCORER, ChunkId(one, 1), reward())
    await replay.write_score(VALUE, ChunkId(one, 1), value())
    assert await replay.claim_finished(VALUE, num_trajectories=1) == 0
    audit = await replay.audit()
    assert audit.balances
    assert (audit.finished.admitted, audit.finished.trained, audit.finished.dropped) == (1, 0, {"non_finite": 1})
    assert (await replay.totals()).num_ready_units == 1, "its last window itself is sound and goes to the learner"
    await replay.cancel_in_flight(LEARNER, DropReason.STALE)
    assert await depth(replay, "bytes") == 0


async def test_nothing_is_kept_of_a_spoiled_trajectory_once_its_windows_are_gone(bench):
    replay = await bench.open(critic_spec(group_size=1, units_per_update=1))
    [one] = await leased(replay, 1)
    await write(replay, one, 0, final=False)
    for _ in range(2):
        await replay.fail_score(VALUE, ChunkId(one, 0), Field.VALUE, "boom")
    await write(replay, one, 1)
    await replay.write_score(VALUE, ChunkId(one, 1), value())
    await replay.write_score(SCORER, ChunkId(one, 1), reward())
    claim = await replay.claim(LEARNER, policy_version=0)
    await replay.settle(LEARNER, (claim.claim_id,))
    assert await depth(replay, "bytes") == 0
    assert (await replay.audit()).trajectories.trained == 1


@pytest.mark.parametrize("unit", Unit)
async def test_a_dead_letter_never_trains_the_critic(bench, unit):
    replay = await bench.open(critic_spec(unit, group_size=1, units_per_update=1))
    [one] = await leased(replay, 1)
    chunk = await write(replay, one, 0, final=False)
    await replay.write_score(VALUE, chunk, value())
    if unit is Unit.CHUNK:
        kept = await depth(replay, "bytes")
    last = await write(replay, one, 1)
    await replay.write_score(VALUE, last, value())
    for _ in range(2):
        await replay.fail_score(SCORER, last, Field.REWARD, "boom")
    assert await replay.claim_finished(VALUE, num_trajectories=1) == 0
    assert (await replay.audit()).balances
    if unit is Unit.CHUNK:
        assert await depth(replay, "bytes") < kept, "only the first window's own data is left"
    else:
        assert await depth(replay, "bytes") == 0


async def test_a_group_without_signal_waits_for_its_values_and_then_trains_the_critic_alone(bench):
    replay = await bench.open(critic_spec(Unit.GROUP, signal_filter=True))
    names = await leased(replay, 2)
    chunks = [await write(replay, name) for name in names]
    for chunk in chunks:
        await replay.write_score(SCORER, chunk, reward(1.0))
    assert (await replay.totals()).num_groups_dropped == {}
    for chunk in chunks:
        assert await replay.write_score(VALUE, chunk, value()) is WriteStatus.STORED
    assert (await replay.totals()).num_groups_dropped == {"no_signal": 1}
    assert isinstance(await replay.claim_finished(VALUE, num_trajectories=2), FinishedClaim)


async def test_what_waits_for_the_critic_counts_for_the_watermark(bench):
    replay = await bench.open(critic_spec(Unit.TRAJECTORY, units_per_update=2, max_bytes=1000))
    for name in await leased(replay, 2):
        await finish(replay, name)
    claim = await replay.claim(LEARNER, policy_version=0)
    await replay.settle(LEARNER, (claim.claim_id,))
    await replay.advance(LEARNER, 1)
    assert (await replay.lease(GENERATOR, max_trajectories=1)).refusal is Refusal.MEMORY
    batch = await replay.claim_finished(VALUE, num_trajectories=2)
    await replay.settle_finished(VALUE, (batch.claim_id,))
    assert len(await leased(replay, 1)) == 1


@pytest.mark.parametrize("unit", Unit)
async def test_cancelling_forgets_what_waits_or_is_incomplete_and_leaves_what_the_value_worker_has_trained_on(
    bench, unit
):
    replay = await bench.open(critic_spec(unit, units_per_update=2, eta=2))
    names = await leased(replay, 6)
    for name in names[:4]:
        await finish(replay, name)
    chunk = await write(replay, names[4], final=False)
    await replay.write_score(VALUE, chunk, value())
    claim = await replay.claim(LEARNER, policy_version=0)
    await replay.settle(LEARNER, (claim.claim_id,))
    batch = await replay.claim_finished(VALUE, num_trajectories=1)
    await replay.cancel_in_flight(LEARNER)
    audit = await replay.audit()
    assert audit.balances
    assert (audit.finished.dropped, audit.finished.in_flight) == ({"cancelled": 3}, {"claimed": 1})
    assert await replay.settle_finished(VALUE, (batch.claim_id,)) == 1
    audit = await replay.audit()
    assert audit.balances
    assert (audit.finished.trained, audit.finished.in_flight) == (1, {})
    assert await depth(replay, "bytes") == 0
    if bench.kind == "redis":
        assert not [key for key in await bench.client.keys("*") if b"finished" in key]


async def test_evaluation_never_reaches_the_critic_nor_does_a_run_without_one_keep_anything(bench):
    replay = await bench.open(make_spec(fields=FIELDS))
    for name in await leased(replay, 1):
        await finish(replay, name)
    with pytest.raises(LedgerError, match="value_training"):
        await replay.claim_finished(VALUE, num_trajectories=1)
    assert "finished" not in {stat.name for stat in await replay.queues()}
    assert (await replay.audit()).finished.admitted == 0


async def test_an_empty_value_batch_and_a_critic_without_values_are_refused(bench):
    with pytest.raises(ConfigError, match="add reward and value"):
        await bench.open(make_spec(value_training=True))
    replay = await bench.open(critic_spec())
    with pytest.raises(ValueError, match="at least 1"):
        await replay.claim_finished(VALUE, num_trajectories=0)
