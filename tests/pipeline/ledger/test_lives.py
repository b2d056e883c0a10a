"""The lives of trajectories, in every ledger: their leases, chunks, scores and ends."""

from __future__ import annotations

from pipeline.ledger.life import EITHER_END, MAX_LIVES
from pipeline.ledger.types import DropReason, LatePolicy, Unit
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
    write_response,
)

BOTH = frozenset({Field.REWARD, Field.VALUE})


async def test_a_life_has_each_lease_chunk_and_score_and_the_update_that_trained_it(bench):
    ledger, inspection = await bench.with_inspection(make_spec(eta=2, fields=BOTH))
    one = TrajectoryId("t", 0, 0)
    await ledger.lease(GENERATOR, max_trajectories=4)
    bench.now += 1.0
    await ledger.write_chunk(GENERATOR, make_chunk(one, 0, final=False))
    await ledger.give_back(GENERATOR, (one,))
    await ledger.lease(OTHER_GENERATOR, max_trajectories=1)
    bench.now += 1.0
    await ledger.write_chunk(OTHER_GENERATOR, make_chunk(one, 1, tokens=5, context=3))
    life = await inspection.life(one)
    assert (life.state, life.prompt, life.admitted_s, life.num_tokens, life.end) == ("finished", 0, 1000.0, 8, None)
    assert [(lease.who, lease.at_s) for lease in life.leases] == [("generator-0#1", 1000.0), ("generator-1#1", 1001.0)]
    assert [(c.worker, c.versions, c.num_tokens, c.written_s) for c in life.chunks] == [
        ("generator-0#1", (0,), 3, 1001.0),
        ("generator-1#1", (0,), 5, 1002.0),
    ]

    bench.now += 1.0
    for chunk in (ChunkId(one, 0), ChunkId(one, 1)):
        await ledger.write_score(SCORER, chunk, value())
    await ledger.write_score(SCORER, ChunkId(one, 1), reward(0.5))
    for trajectory in (TrajectoryId("t", 0, 1), TrajectoryId("t", 1, 0), TrajectoryId("t", 1, 1)):
        await ledger.write_chunk(GENERATOR, make_chunk(trajectory))
        await ledger.write_score(SCORER, ChunkId(trajectory, 0), value())
        await ledger.write_score(SCORER, ChunkId(trajectory, 0), reward())
    assert (await inspection.life(one)).state == "ready"
    bench.now += 1.0
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert (await inspection.life(one)).state == "claimed"
    bench.now += 1.0
    await ledger.settle(LEARNER, (claim.claim_id,))
    life = await inspection.life(one)
    assert (life.state, life.ready_s, life.claimed_s, life.num_leases) == ("trained", 1003.0, 1004.0, 2)
    assert (life.end.at_s, life.end.update, life.end.staleness) == (1005.0, 1, 0)
    first, last = life.chunks
    assert [(score.field, score.who, score.at_s) for score in last.scores] == [
        (Field.REWARD, "reward-0#1", 1003.0),
        (Field.VALUE, "reward-0#1", 1003.0),
    ]
    assert [(score.accuracy, score.reward) for score in (*last.scores, *first.scores)] == [
        (0.5, 0.0),
        (None, None),
        (None, None),
    ]


async def test_a_life_is_read_though_its_workers_are_named_with_tabs_and_ends_of_lines(bench):
    ledger, inspection = await bench.with_inspection(make_spec(group_size=1))
    one, odd = TrajectoryId("t", 0, 0), "a\tb\nc d\x7f\r"
    generator, scorer = Incarnation(Role.GENERATOR, odd, 1), Incarnation(Role.REWARD, odd, 1)
    await ledger.lease(generator, max_trajectories=1)
    await ledger.write_chunk(generator, make_chunk(one, 0))
    await ledger.write_score(scorer, ChunkId(one, 0), reward())
    life = await inspection.life(one)
    [lease], [chunk] = life.leases, life.chunks
    [score] = chunk.scores
    assert [lease.who, chunk.worker, score.who] == ["a b c d\x7f\r#1"] * 3


async def test_a_dropped_life_says_for_which_reason_and_how_stale(bench):
    ledger, inspection = await bench.with_inspection(make_spec(eta=1, late=LatePolicy.DROP))
    await ledger.lease(GENERATOR, max_trajectories=2)
    for member in (0, 1):
        await write_response(ledger, TrajectoryId("t", 0, member))
    await ledger.claim(LEARNER, policy_version=2)
    life = await inspection.life(TrajectoryId("t", 0, 1))
    assert (life.state, life.end.reason, life.end.staleness, life.end.update) == ("dropped", "stale", 2, None)


async def test_stale_units_leave_the_oldest_first_and_names_of_one_age_as_texts(bench):
    ledger, inspection = await bench.with_inspection(make_spec(group_size=1, units_per_update=1, eta=11))
    await ledger.lease(GENERATOR, max_trajectories=11)
    for group in (1, 2, 10):
        await write_response(ledger, TrajectoryId("t", group, 0), version=int(group == 1))
    await ledger.claim(LEARNER, policy_version=20)
    assert (await inspection.life(TrajectoryId("t", 11, 0))).lives == ("t.10.0", "t.1.0")


async def test_lives_that_end_together_count_from_the_versions_of_their_own_claims(bench):
    ledger, inspection = await bench.with_inspection(make_spec(group_size=1, units_per_update=1, eta=3))
    await ledger.lease(GENERATOR, max_trajectories=2)
    claims: list[str] = []
    for group in (0, 1):
        await write_response(ledger, TrajectoryId("t", group, 0))
        claims.append((await ledger.claim(LEARNER, policy_version=group)).claim_id)
    await ledger.settle(LEARNER, tuple(claims))
    lives = [await inspection.life(TrajectoryId("t", group, 0)) for group in (0, 1)]
    assert [life.end.num_updates for life in lives] == [0, 1]


async def test_each_chunk_has_an_end_of_its_own_if_it_is_the_unit(bench):
    ledger, inspection = await bench.with_inspection(make_spec(Unit.CHUNK, group_size=1, units_per_update=1, eta=2))
    one = TrajectoryId("t", 0, 0)
    await ledger.lease(GENERATOR, max_trajectories=1)
    await ledger.write_chunk(GENERATOR, make_chunk(one, 0, final=False))
    claim = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (claim.claim_id,))
    await ledger.advance(LEARNER, 1)
    life = await inspection.life(one)
    assert (life.state, life.chunks[0].end.update) == ("leased", 1)
    await ledger.write_chunk(GENERATOR, make_chunk(one, 1, version=1, context=3))
    await ledger.write_score(SCORER, ChunkId(one, 1), reward())
    claim = await ledger.claim(LEARNER, policy_version=1)
    await ledger.drop(LEARNER, claim, "t.0.0.1", DropReason.NON_FINITE)
    life = await inspection.life(one)
    assert (life.state, life.num_chunks) == ("trained", 2)
    assert [(chunk.end.update, chunk.end.reason) for chunk in life.chunks] == [(1, ""), (None, "non_finite")]


async def test_of_a_long_life_the_first_and_last_chunks_and_the_last_leases_are_kept(bench):
    ledger, inspection = await bench.with_inspection(make_spec(Unit.TRAJECTORY, group_size=1, units_per_update=1))
    one = TrajectoryId("t", 0, 0)
    for index in range(70):
        await ledger.lease(GENERATOR, max_trajectories=1)
        await ledger.write_chunk(GENERATOR, make_chunk(one, index, final=index == 69, context=3 * index))
        await ledger.give_back(GENERATOR)
        bench.now += 1.0
    await ledger.write_score(SCORER, ChunkId(one, 69), reward())
    before = await inspection.life(one)
    claim = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (claim.claim_id,))
    for life in (before, await inspection.life(one)):
        assert (life.num_chunks, life.num_leases) == (70, 70)
        assert [chunk.index for chunk in life.chunks] == [*range(EITHER_END), *range(70 - EITHER_END, 70)]
        assert [lease.at_s for lease in life.leases] == [1066.0, 1067.0, 1068.0, 1069.0]


async def test_only_the_newest_lives_are_kept(bench):
    ledger, inspection = await bench.with_inspection(
        make_spec(Unit.TRAJECTORY, group_size=100, units_per_update=5100, eta=1)
    )
    leases = (await ledger.lease(GENERATOR, max_trajectories=MAX_LIVES + 100)).leases
    assert len(leases) == MAX_LIVES + 100
    await ledger.cancel_in_flight(LEARNER)
    gone = await inspection.life(TrajectoryId("t", 0, 99))
    assert gone.words == (
        "t.0.99 is not known: it left the ledger, which keeps the lives of the newest 10,000; lives are kept from t.1.0 to "
        "t.100.99"
    )
    assert (await inspection.life(TrajectoryId("t", 1, 0))).end.reason == "cancelled"
    if bench.kind == "redis":
        assert await bench.client.hlen("{test}:lives") == await bench.client.llen("{test}:lives_order") == MAX_LIVES


async def test_an_unknown_name_is_answered_with_what_exists(bench):
    ledger, inspection = await bench.with_inspection(make_spec(group_size=2))
    assert (await inspection.life(TrajectoryId("t", 0, 0))).words == "t.0.0 is not known: no group is admitted yet"
    await ledger.lease(GENERATOR, max_trajectories=4)
    there = "; groups 0 to 1 are in the ledger"
    for name, why in (
        ("t.7.0", "2 groups are admitted"),
        ("t.0.5", "members of a group are 0 to 1"),
        ("e0.3.0", "evaluation responses are known while they are in the ledger"),
    ):
        assert (await inspection.life(TrajectoryId.parse(name))).words == f"{name} is not known: {why}{there}"
