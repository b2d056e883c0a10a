"""Both ledgers give the value worker every finished trajectory once, under any end of its unit."""

import numpy as np
import pytest

from pipeline.ledger.types import DropReason, FinishedClaim, Refusal, Unit, WriteStatus
from protocol.errors import ConfigError, Fenced, LedgerError
from protocol.ids import ChunkId, Incarnation, Role
from protocol.trajectory import Field, RewardScore, ValueScore
from tests.pipeline.ledger.builders import GENERATOR, LEARNER, SCORER, make_chunk, make_spec, reward, value

VALUE = Incarnation(Role.VALUE, "value-0", 1)
FIELDS = frozenset({Field.REWARD, Field.VALUE})


def critic_spec(unit=Unit.CHUNK, **changes):
    return make_spec(unit, **({"fields": FIELDS, "value_training": True} | changes))


async def write(ledger, trajectory, index=0, *, final=True, tokens=3):
    """Write one chunk, in a response whose chunks have three tokens each."""
    chunk = make_chunk(trajectory, index, final=final, tokens=tokens, context=3 * index)
    assert (await ledger.write_chunk(GENERATOR, chunk)).status is WriteStatus.STORED
    return chunk.id


async def finish(ledger, trajectory, accuracy=1.0):
    chunk = await write(ledger, trajectory)
    await ledger.write_score(SCORER, chunk, reward(accuracy))
    await ledger.write_score(VALUE, chunk, value())
    return chunk


async def leased(ledger, number):
    grant = await ledger.lease(GENERATOR, max_trajectories=number)
    return [lease.trajectory for lease in grant.leases]


async def depth(ledger, name="finished"):
    return {stat.name: stat.depth for stat in await ledger.queues()}[name]


@pytest.mark.parametrize("order", [("value 0", "value 1", "reward"), ("reward", "value 1", "value 0")])
@pytest.mark.parametrize("unit", Unit)
async def test_a_trajectory_is_claimable_with_the_write_that_completes_it_and_not_before(bench, unit, order):
    ledger = await bench.open(critic_spec(unit))
    [one] = await leased(ledger, 1)
    await write(ledger, one, 0, final=False)
    await write(ledger, one, 1)
    for what in order:
        assert await ledger.claim_finished(VALUE, num_trajectories=1) == 0
        name, _, index = what.partition(" ")
        score = value() if name == "value" else reward()
        assert await ledger.write_score(VALUE, ChunkId(one, int(index or 1)), score) is WriteStatus.STORED
    claim = await ledger.claim_finished(VALUE, num_trajectories=1)
    [trajectory] = claim.trajectories
    assert trajectory.chunk.id == ChunkId(one, 1)
    assert trajectory.reward == reward()
    assert [scores.values.size for scores in trajectory.values] == [3, 3]
    assert sum(scores.values.size for scores in trajectory.values) == trajectory.chunk.response_length


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("unit", Unit)
async def test_values_of_windows_of_one_length_come_by_window_whatever_order_they_were_written_in(bench, unit, order):
    ledger = await bench.open(critic_spec(unit, group_size=1, units_per_update=2))
    [one] = await leased(ledger, 1)
    chunks = [await write(ledger, one, index, final=index == 2) for index in range(3)]
    for index in order:
        values = np.full(3, index, np.float32)
        await ledger.write_score(VALUE, chunks[index], ValueScore(values=values, value_version=0))
    await ledger.write_score(SCORER, chunks[2], reward())
    [trajectory] = (await ledger.claim_finished(VALUE, num_trajectories=1)).trajectories
    assert [score.values.tolist() for score in trajectory.values] == [[index] * 3 for index in (0.0, 1.0, 2.0)]


async def test_settled_or_dropped_windows_leave_their_values_to_the_trajectory(bench):
    ledger = await bench.open(critic_spec(group_size=1, units_per_update=2))
    [one, two] = await leased(ledger, 2)
    await write(ledger, one, 0, final=False)
    await ledger.write_score(VALUE, ChunkId(one, 0), value())
    await finish(ledger, two)
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert claim.units == ("t.0.0.0", "t.1.0.0")
    await ledger.drop(LEARNER, claim, "t.0.0.0", DropReason.VALUE_WARMUP)
    await ledger.settle(LEARNER, (claim.claim_id,))
    assert await ledger.peek("t.0.0.0") == await ledger.peek("t.1.0.0") == []
    await write(ledger, one, 1)
    await ledger.write_score(SCORER, ChunkId(one, 1), reward())
    await ledger.write_score(VALUE, ChunkId(one, 1), value())
    claim = await ledger.claim_finished(VALUE, num_trajectories=2)
    assert [(str(t.chunk.id), len(t.values)) for t in claim.trajectories] == [("t.0.0.1", 2), ("t.1.0.0", 1)]
    assert (await ledger.audit()).finished.in_flight == {"claimed": 2}


async def test_a_batch_is_claimed_exactly_in_order_of_admission_and_each_trajectory_once(bench):
    ledger = await bench.open(critic_spec(Unit.TRAJECTORY))
    names = await leased(ledger, 5)
    for name in reversed(names):
        await finish(ledger, name)
    bench.now += 3.0
    stat = {stat.name: stat for stat in await ledger.queues()}["finished"]
    assert (stat.depth, stat.limit, stat.oldest_age_s, stat.waiting_for) == (5, None, 3.0, "value")
    first = await ledger.claim_finished(VALUE, num_trajectories=2)
    second = await ledger.claim_finished(VALUE, num_trajectories=2)
    claimed = [t.chunk.trajectory for claim in (first, second) for t in claim.trajectories]
    assert claimed == names[:4]
    assert await ledger.claim_finished(VALUE, num_trajectories=2) == 1
    assert (await depth(ledger), await depth(ledger, "finished_claimed")) == (1, 4)


async def test_settling_value_batches_twice_counts_once_and_frees_what_was_kept(bench):
    ledger = await bench.open(critic_spec(Unit.TRAJECTORY, units_per_update=2))
    for name in await leased(ledger, 2):
        await finish(ledger, name)
    unit_claim = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (unit_claim.claim_id,))
    assert await depth(ledger, "bytes") > 1024
    claim = await ledger.claim_finished(VALUE, num_trajectories=2)
    assert await ledger.settle_finished(VALUE, (claim.claim_id, claim.claim_id)) == 1
    assert await ledger.settle_finished(VALUE, (claim.claim_id,)) == 0
    audit = await ledger.audit()
    assert audit.balances
    assert (audit.finished.admitted, audit.finished.trained, audit.finished.in_flight) == (2, 2, {})
    assert await depth(ledger, "bytes") == 0
    if bench.kind == "redis":
        assert not [key for key in await bench.client.keys("*") if b"finished" in key]


async def test_a_new_value_worker_gets_back_what_its_checkpoint_does_not_hold(bench):
    ledger = await bench.open(critic_spec(Unit.TRAJECTORY))
    names = await leased(ledger, 4)
    for name in names:
        await finish(ledger, name)
    held = await ledger.claim_finished(VALUE, num_trajectories=2)
    lost = await ledger.claim_finished(VALUE, num_trajectories=2)
    await bench.set_epoch("value-0", 2)
    newer = Incarnation(Role.VALUE, "value-0", 2)
    for call in (
        ledger.claim_finished(VALUE, num_trajectories=1),
        ledger.settle_finished(VALUE, (lost.claim_id,)),
        ledger.recover_finished(VALUE, ()),
    ):
        with pytest.raises(Fenced):
            await call
    assert await ledger.recover_finished(newer, (held.claim_id, "value-0#1/never")) == 2
    assert await ledger.recover_finished(newer, (held.claim_id,)) == 0
    assert await ledger.settle_finished(newer, (lost.claim_id,)) == 0
    again = await ledger.claim_finished(newer, num_trajectories=2)
    assert [t.chunk.trajectory for t in again.trajectories] == names[2:]
    assert (await ledger.audit()).finished.trained == 2


async def test_a_new_value_worker_keeps_the_claims_that_its_weights_hold_and_no_disk_does(bench):
    ledger = await bench.open(critic_spec(Unit.TRAJECTORY))
    names = await leased(ledger, 6)
    for name in names:
        await finish(ledger, name)
    on_disk, in_memory, lost = [await ledger.claim_finished(VALUE, num_trajectories=2) for _ in range(3)]
    ids = (on_disk.claim_id, in_memory.claim_id, lost.claim_id)
    assert await ledger.missing((*ids, "another")) == ("another",)
    await bench.set_epoch("value-0", 2)
    newer = Incarnation(Role.VALUE, "value-0", 2)
    # in both it is settled, as the disk holds it
    assert await ledger.recover_finished(newer, ids[:1], kept=ids[:2]) == 2
    assert await ledger.missing(ids) == (ids[0], ids[2])
    audit = await ledger.audit()
    assert audit.balances and audit.finished.trained == 2, "what is kept is not settled"
    again = await ledger.claim_finished(newer, num_trajectories=2)
    assert [t.chunk.trajectory for t in again.trajectories] == names[4:]
    assert await ledger.settle_finished(newer, ids[1:2]) == 1
    assert (await ledger.audit()).finished.trained == 4


@pytest.mark.parametrize("unit", Unit)
@pytest.mark.parametrize("reason", [DropReason.NON_FINITE, DropReason.VALUE_WARMUP])
async def test_non_finite_units_never_train_the_critic_and_other_drops_do(bench, unit, reason):
    ledger = await bench.open(critic_spec(unit, units_per_update=2))
    for name in await leased(ledger, 2):
        await finish(ledger, name)
    claim = await ledger.claim(LEARNER, policy_version=0)
    for name in claim.units:
        await ledger.drop(LEARNER, claim, name, reason)
    spoiled = reason is DropReason.NON_FINITE
    assert await depth(ledger) == (0 if spoiled else 2)
    audit = await ledger.audit()
    assert audit.balances
    assert audit.finished.dropped == ({"non_finite": 2} if spoiled else {})
    assert sum(audit.trajectories.dropped.values()) == 2
    assert (await ledger.totals()).num_groups_dropped == {reason.value: 1}


async def test_a_spoiled_trajectory_leaves_even_a_value_batch_for_good(bench):
    ledger = await bench.open(critic_spec(group_size=1, units_per_update=2))
    [one, two] = await leased(ledger, 2)
    await write(ledger, one, 0, final=False)
    await ledger.write_score(VALUE, ChunkId(one, 0), value())
    await finish(ledger, two)
    batch = await ledger.claim_finished(VALUE, num_trajectories=1)
    claim = await ledger.claim(LEARNER, policy_version=0)
    for name in claim.units:
        await ledger.drop(LEARNER, claim, name, DropReason.NON_FINITE)
    assert await depth(ledger, "finished_claimed") == 0
    assert await ledger.settle_finished(VALUE, (batch.claim_id,)) == 1
    await write(ledger, one, 1)
    await ledger.write_score(SCORER, ChunkId(one, 1), reward())
    await ledger.write_score(VALUE, ChunkId(one, 1), value())
    assert await ledger.claim_finished(VALUE, num_trajectories=1) == 0
    audit = await ledger.audit()
    assert audit.balances
    assert (audit.finished.admitted, audit.finished.trained, audit.finished.dropped) == (1, 0, {"non_finite": 1})
    assert (await ledger.totals()).num_ready_units == 1, "its last window itself is sound and goes to the learner"
    await ledger.cancel_in_flight(LEARNER, DropReason.STALE)
    assert await depth(ledger, "bytes") == 0


async def test_nothing_is_kept_of_a_spoiled_trajectory_once_its_windows_are_gone(bench):
    ledger = await bench.open(critic_spec(group_size=1, units_per_update=1))
    [one] = await leased(ledger, 1)
    await write(ledger, one, 0, final=False)
    for _ in range(2):
        await ledger.fail_score(VALUE, ChunkId(one, 0), Field.VALUE, "boom")
    await write(ledger, one, 1)
    await ledger.write_score(VALUE, ChunkId(one, 1), value())
    await ledger.write_score(SCORER, ChunkId(one, 1), reward())
    claim = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (claim.claim_id,))
    assert await depth(ledger, "bytes") == 0
    assert (await ledger.audit()).trajectories.trained == 1


@pytest.mark.parametrize("unit", Unit)
async def test_a_dead_letter_never_trains_the_critic(bench, unit):
    ledger = await bench.open(critic_spec(unit, group_size=1, units_per_update=1))
    [one] = await leased(ledger, 1)
    chunk = await write(ledger, one, 0, final=False)
    await ledger.write_score(VALUE, chunk, value())
    kept = await depth(ledger, "bytes")
    last = await write(ledger, one, 1)
    await ledger.write_score(VALUE, last, value())
    for _ in range(2):
        await ledger.fail_score(SCORER, last, Field.REWARD, "boom")
    assert await ledger.claim_finished(VALUE, num_trajectories=1) == 0
    assert (await ledger.audit()).balances
    if unit is Unit.CHUNK:
        assert await depth(ledger, "bytes") < kept, "only the first window's own data is left"
    else:
        assert await depth(ledger, "bytes") == 0


async def test_a_group_without_signal_waits_for_values_and_trains_the_critic_alone(bench):
    ledger = await bench.open(critic_spec(Unit.GROUP, signal_filter=True))
    names = await leased(ledger, 2)
    chunks = [await write(ledger, name) for name in names]
    for chunk in chunks:
        await ledger.write_score(SCORER, chunk, reward(1.0))
    assert (await ledger.totals()).num_groups_dropped == {}
    for chunk in chunks:
        assert await ledger.write_score(VALUE, chunk, value()) is WriteStatus.STORED
    assert (await ledger.totals()).num_groups_dropped == {"no_signal": 1}
    assert isinstance(await ledger.claim_finished(VALUE, num_trajectories=2), FinishedClaim)


@pytest.mark.parametrize("unit", Unit)
async def test_a_masked_response_waits_for_values_and_trains_the_critic_alone(bench, unit):
    """With unit chunk only its last window is masked: the others were trained on as they came."""
    ledger = await bench.open(critic_spec(unit, group_size=1, units_per_update=1))
    [name] = await leased(ledger, 1)
    chunks = [await write(ledger, name, 0, final=False), await write(ledger, name, 1)]
    await ledger.write_score(VALUE, chunks[0], value())
    num_windows = int(unit is Unit.CHUNK)
    assert (await ledger.totals()).num_ready_units == num_windows
    await ledger.write_score(SCORER, chunks[1], RewardScore(reward=-1.0, accuracy=0.0, masked=True))
    assert (await ledger.audit()).tokens.dropped == {}
    await ledger.write_score(VALUE, chunks[1], value())
    audit = await ledger.audit()
    assert audit.balances
    assert audit.tokens.dropped == {"no_signal": 3 if unit is Unit.CHUNK else 6}
    assert (await ledger.totals()).num_ready_units == num_windows
    assert isinstance(await ledger.claim_finished(VALUE, num_trajectories=1), FinishedClaim)


async def test_what_waits_for_the_critic_counts_for_the_watermark(bench):
    ledger = await bench.open(critic_spec(Unit.TRAJECTORY, units_per_update=2, max_bytes=1000))
    for name in await leased(ledger, 2):
        await finish(ledger, name)
    claim = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (claim.claim_id,))
    await ledger.advance(LEARNER, 1)
    assert (await ledger.lease(GENERATOR, max_trajectories=1)).refusal is Refusal.MEMORY
    batch = await ledger.claim_finished(VALUE, num_trajectories=2)
    await ledger.settle_finished(VALUE, (batch.claim_id,))
    assert len(await leased(ledger, 1)) == 1


@pytest.mark.parametrize("unit", Unit)
async def test_cancelling_leaves_only_what_the_value_worker_has_trained_on(bench, unit):
    ledger = await bench.open(critic_spec(unit, units_per_update=2, eta=2))
    names = await leased(ledger, 6)
    for name in names[:4]:
        await finish(ledger, name)
    chunk = await write(ledger, names[4], final=False)
    await ledger.write_score(VALUE, chunk, value())
    claim = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (claim.claim_id,))
    batch = await ledger.claim_finished(VALUE, num_trajectories=1)
    await ledger.cancel_in_flight(LEARNER)
    audit = await ledger.audit()
    assert audit.balances
    assert (audit.finished.dropped, audit.finished.in_flight) == ({"cancelled": 3}, {"claimed": 1})
    assert await ledger.settle_finished(VALUE, (batch.claim_id,)) == 1
    audit = await ledger.audit()
    assert audit.balances
    assert (audit.finished.trained, audit.finished.in_flight) == (1, {})
    assert await depth(ledger, "bytes") == 0
    if bench.kind == "redis":
        assert not [key for key in await bench.client.keys("*") if b"finished" in key]


async def test_evaluation_never_reaches_the_critic_and_no_critic_means_nothing_stored(bench):
    ledger = await bench.open(make_spec(fields=FIELDS))
    for name in await leased(ledger, 1):
        await finish(ledger, name)
    with pytest.raises(LedgerError, match="value_training"):
        await ledger.claim_finished(VALUE, num_trajectories=1)
    assert "finished" not in {stat.name for stat in await ledger.queues()}
    assert (await ledger.audit()).finished.admitted == 0


async def test_an_empty_value_batch_and_a_critic_without_values_are_refused(bench):
    with pytest.raises(ConfigError, match="add reward and value"):
        await bench.open(make_spec(value_training=True))
    ledger = await bench.open(critic_spec())
    with pytest.raises(ValueError, match="at least 1"):
        await ledger.claim_finished(VALUE, num_trajectories=0)
