"""Every ledger's promises on leases and the chunks that are written under them."""

import pytest

from pipeline.ledger.types import (
    Unit,
    WriteStatus,
)
from protocol.errors import Fenced
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
from protocol.trajectory import FinishReason
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
