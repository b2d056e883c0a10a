"""Looks into every ledger: open groups, staleness, and drops against what was trained."""

from __future__ import annotations

import math

import pytest

from pipeline.ledger.admin import Place
from pipeline.ledger.inspection import (
    MAX_STALENESS,
    MIN_RESPONSES,
    DropsView,
    EndedRow,
    ResponseTally,
    drops_value,
    favours_short,
    waits_for,
)
from pipeline.ledger.types import Claim, DropReason, LatePolicy, Restart, Unit
from protocol.ids import ChunkId, TrajectoryId
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


async def update(ledger, lengths: dict[int, int], *, leased: int = 0, policy_version: int = 0) -> Claim:
    """Finish a group of two for each of ``lengths``, by group, and claim what is ready."""
    await ledger.lease(GENERATOR, max_trajectories=leased or 2 * len(lengths))
    for group, tokens in lengths.items():
        for member in (0, 1):
            await write_response(ledger, TrajectoryId("t", group, member), accuracy=float(member), tokens=tokens)
    claim = await ledger.claim(LEARNER, policy_version=policy_version)
    assert isinstance(claim, Claim), claim
    return claim


# -- open groups ---------------------------------------------------------------------------------


async def test_an_open_group_tells_who_has_the_rest_what_each_waits_for_and_since_when(bench):
    ledger, inspection = await bench.with_inspection(make_spec(group_size=4, fields=BOTH))
    await ledger.lease(GENERATOR, max_trajectories=2)
    await ledger.lease(OTHER_GENERATOR, max_trajectories=1)
    bench.now += 2.0
    done, unscored = TrajectoryId("t", 0, 0), TrajectoryId("t", 0, 1)
    for trajectory in (done, unscored):
        await ledger.write_chunk(GENERATOR, make_chunk(trajectory))
        await ledger.write_score(SCORER, ChunkId(trajectory, 0), value())
    await ledger.write_score(SCORER, ChunkId(done, 0), reward())
    bench.now += 3.0

    found = await inspection.groups()
    assert (found.unit, found.group_size, found.num_groups, found.num_running) == (Unit.GROUP, 4, 1, 1)
    (group,) = found.groups
    assert (group.number, group.prompt, group.age_s, group.num_done, group.num_left) == (0, 0, 5.0, 1, 0)
    sampled, leased, unheld = group.waited
    assert (sampled.name, sampled.place, sampled.since_s) == ("t.0.1", Place.FINISHED, 3.0)
    assert [lack.field for lack in sampled.lacks] == [Field.REWARD]
    assert (leased.name, leased.place, leased.holder, leased.since_s) == ("t.0.2", Place.LEASED, "generator-1#1", 5.0)
    assert (unheld.name, unheld.place) == ("t.0.3", Place.OPEN)
    assert [waits_for(one) for one in group.waited] == ["reward", "generator-1#1", "a generator"]


async def test_a_group_whose_members_lack_nothing_is_not_open(bench):
    ledger, inspection = await bench.with_inspection(make_spec())
    await ledger.lease(GENERATOR, max_trajectories=4)
    for member in (0, 1):
        await write_response(ledger, TrajectoryId("t", 0, member), accuracy=float(member))
    found = await inspection.groups()
    assert ([group.number for group in found.groups], found.num_groups, found.num_running) == ([1], 2, 1)


@pytest.mark.parametrize("unit", Unit)
async def test_of_many_open_groups_the_oldest_are_shown(bench, unit):
    ledger, inspection = await bench.with_inspection(make_spec(unit, units_per_update=8))
    await ledger.lease(GENERATOR, max_trajectories=12)
    await write_response(ledger, TrajectoryId("t", 1, 0))
    found = await inspection.groups(max_groups=3)
    assert [group.number for group in found.groups] == [0, 1, 2]
    assert found.num_groups == 6
    assert [group.num_done for group in found.groups] == [0, 1, 0]


async def test_members_that_left_and_windows_that_wait_for_credit_are_told_apart(bench):
    ledger, inspection = await bench.with_inspection(make_spec(Unit.CHUNK, units_per_update=1, eta=1))
    gone, parked = TrajectoryId("t", 0, 0), TrajectoryId("t", 0, 1)
    await ledger.lease(GENERATOR, max_trajectories=2)
    await write_response(ledger, gone)
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert isinstance(claim, Claim)
    await ledger.write_chunk(GENERATOR, make_chunk(parked, final=False))
    (group,) = (await inspection.groups()).groups
    (one,) = group.waited
    assert (group.num_done, group.num_left, one.name, one.place) == (1, 0, "t.0.1", Place.PARKED)
    assert waits_for(one) == "credit"
    await ledger.settle(LEARNER, (claim.claim_id,))
    (group,) = (await inspection.groups()).groups
    assert (group.num_done, group.num_left) == (0, 1)


async def test_a_group_that_one_scorer_judges_waits_for_that_scorer(bench):
    ledger, inspection = await bench.with_inspection(make_spec())
    await ledger.lease(GENERATOR, max_trajectories=2)
    for member in (0, 1):
        await ledger.write_chunk(GENERATOR, make_chunk(TrajectoryId("t", 0, member)))
    assert (await inspection.groups()).groups[0].judged_by == ""
    await ledger.finished_group(SCORER, 0, num_members=2)
    (group,) = (await inspection.groups()).groups
    assert group.judged_by == "reward-0#1"
    assert [waits_for(one, group.judged_by) for one in group.waited] == ["reward-0#1"] * 2


# -- staleness -----------------------------------------------------------------------------------


async def test_staleness_is_counted_for_what_is_running_ready_claimed_trained_and_dropped(bench):
    ledger, inspection = await bench.with_inspection(make_spec(eta=1, late=LatePolicy.DROP, oversampling=2.0))
    await ledger.lease(GENERATOR, max_trajectories=10)
    for group in range(3):
        for member in (0, 1):
            await write_response(ledger, TrajectoryId("t", group, member), accuracy=float(member))
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert isinstance(claim, Claim)
    await ledger.advance(LEARNER, 1)
    found = await inspection.versions()
    assert (found.policy_version, found.eta) == (1, 1)
    assert (found.ready, found.running, found.num_unbegun) == ({1: 1}, {1: 2}, 0)
    assert (found.claimed, found.num_claimed, found.trained, found.dropped) == ({0: 2}, 2, {}, {})

    await ledger.settle(LEARNER, (claim.claim_id,), num_updates=1)
    await ledger.advance(LEARNER, 2)
    await ledger.claim(LEARNER, policy_version=2)
    found = await inspection.versions()
    assert (found.ready, found.running, found.claimed) == ({}, {2: 2}, {})
    assert (found.trained, found.dropped) == ({0: 2}, {"stale": {2: 1}})


async def test_a_unit_dropped_out_of_a_claim_is_as_stale_as_the_claim_says(bench):
    ledger, inspection = await bench.with_inspection(make_spec(eta=2))
    await ledger.advance(LEARNER, 1)
    claim = await update(ledger, {0: 3, 1: 3}, policy_version=1)
    await ledger.advance(LEARNER, 2)
    await ledger.drop(LEARNER, claim, "0", DropReason.NON_FINITE)
    await ledger.recover(LEARNER, (claim.claim_id,))
    found = await inspection.versions()
    assert (found.trained, found.dropped) == ({1: 1}, {"non_finite": {1: 1}})


@pytest.mark.parametrize("unit", [Unit.TRAJECTORY, Unit.CHUNK])
async def test_smaller_units_are_counted_each_by_its_own_oldest_token(bench, unit):
    ledger, inspection = await bench.with_inspection(make_spec(unit, units_per_update=2, eta=2))
    await ledger.lease(GENERATOR, max_trajectories=2)
    await write_response(ledger, TrajectoryId("t", 0, 0), version=0)
    await ledger.advance(LEARNER, 1)
    await write_response(ledger, TrajectoryId("t", 0, 1), version=1)
    assert (await inspection.versions()).ready == {0: 1, 1: 1}
    claim = await ledger.claim(LEARNER, policy_version=1)
    assert isinstance(claim, Claim)
    await ledger.settle(LEARNER, (claim.claim_id,))
    assert (await inspection.versions()).trained == {0: 1, 1: 1}


async def test_a_learner_that_went_back_counts_updates_not_version_numbers(bench):
    ledger, inspection = await bench.with_inspection(make_spec(eta=1))
    await ledger.resume_from(LEARNER, Restart(40, 0))
    await ledger.lease(GENERATOR, max_trajectories=4)
    for group in (0, 1):
        for member in (0, 1):
            await write_response(ledger, TrajectoryId("t", group, member), accuracy=float(member), version=40)
    assert (await inspection.versions()).ready == {0: 2}
    claim = await ledger.claim(LEARNER, policy_version=41)
    assert isinstance(claim, Claim)
    await ledger.settle(LEARNER, (claim.claim_id,))
    assert (await inspection.versions()).trained == {1: 2}


async def test_more_staleness_than_is_counted_counts_as_the_most(bench):
    ledger, inspection = await bench.with_inspection(make_spec())
    await ledger.lease(GENERATOR, max_trajectories=2)
    await ledger.advance(LEARNER, 1000)
    assert (await inspection.versions()).running == {MAX_STALENESS: 1}


# -- drops ---------------------------------------------------------------------------------------


async def test_drops_have_length_and_difficulty_beside_what_was_trained(bench):
    ledger, inspection = await bench.with_inspection(make_spec(signal_filter=True, eta=1))
    claim = await update(ledger, {0: 4, 1: 8})
    await ledger.settle(LEARNER, (claim.claim_id,))
    await ledger.lease(GENERATOR, max_trajectories=2)
    for member in (0, 1):
        await write_response(ledger, TrajectoryId("t", 2, member), accuracy=0.0, tokens=20)
    found = await inspection.drops()
    (row,) = found.dropped
    assert (row.reason, row.num_groups, row.num_trajectories, row.num_tokens) == ("no_signal", 1, 2, 40)
    assert (row.responses.mean_length, row.responses.mean_difficulty) == (20.0, 1.0)
    trained = found.trained
    assert (trained.num_groups, trained.num_trajectories, trained.num_tokens) == (2, 4, 24)
    assert (trained.responses.mean_length, trained.responses.mean_difficulty) == (6.0, 0.5)
    # two groups of two, whose lengths are 4 and 8: their sample variance is 8
    assert found.group_size == 2
    assert trained.responses.squared_error(found.group_size) == pytest.approx(8 / 2)
    assert found.warnings == ()


async def test_unfinished_responses_are_counted_and_have_no_length(bench):
    ledger, inspection = await bench.with_inspection(make_spec())
    await ledger.lease(GENERATOR, max_trajectories=2)
    await ledger.write_chunk(GENERATOR, make_chunk(TrajectoryId("t", 0, 0), tokens=7))
    await ledger.write_chunk(GENERATOR, make_chunk(TrajectoryId("t", 0, 1), tokens=5, final=False))
    await ledger.cancel_in_flight(LEARNER)
    (row,) = (await inspection.drops()).dropped
    assert (row.reason, row.num_trajectories, row.num_tokens) == ("cancelled", 2, 12)
    assert row.responses == ResponseTally(num_responses=1, num_tokens=7, sum_squares=49)
    assert row.responses.mean_difficulty is None


async def test_a_response_of_several_windows_counts_once_with_its_whole_length(bench):
    ledger, inspection = await bench.with_inspection(make_spec(Unit.CHUNK, group_size=1, units_per_update=1, eta=2))
    await ledger.lease(GENERATOR, max_trajectories=1)
    one = TrajectoryId("t", 0, 0)
    await ledger.write_chunk(GENERATOR, make_chunk(one, 0, final=False))
    first = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (first.claim_id,))
    assert (await inspection.drops()).trained.responses.num_responses == 0
    await ledger.write_chunk(GENERATOR, make_chunk(one, 1, tokens=5, context=3))
    await ledger.write_score(SCORER, ChunkId(one, 1), reward(0.25))
    last = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (last.claim_id,))
    responses = (await inspection.drops()).trained.responses
    assert (responses.num_responses, responses.mean_length, responses.mean_difficulty) == (1, 8.0, 0.75)


@pytest.mark.parametrize("accuracy", [float("nan"), -3.0, 7.0])
async def test_an_accuracy_that_is_none_breaks_no_count(bench, accuracy):
    ledger, inspection = await bench.with_inspection(make_spec(Unit.TRAJECTORY, group_size=1, units_per_update=1))
    await ledger.lease(GENERATOR, max_trajectories=1)
    await write_response(ledger, TrajectoryId("t", 0, 0), accuracy=accuracy)
    claim = await ledger.claim(LEARNER, policy_version=0)
    await ledger.settle(LEARNER, (claim.claim_id,))
    assert (await inspection.drops()).trained.responses.mean_difficulty == (0.0 if accuracy > 1 else 1.0)


def row(reason: str, lengths: list[int]) -> EndedRow:
    total = sum(lengths)
    tally = ResponseTally(len(lengths), total, sum(length * length for length in lengths))
    return EndedRow(reason, 0, len(lengths), total, tally)


SHORT, LONG = [90, 110] * MIN_RESPONSES, [140, 160] * MIN_RESPONSES


def test_a_drop_that_favours_short_answers_is_warned_of_with_its_standard_error():
    warning = favours_short(row("stale", LONG), row("", SHORT), 1)
    assert "dropping as stale favours short answers: 200 dropped responses have 150.0 tokens on average" in warning
    # two samples of 200 with a deviation of 10: the root of 2 * 100 / 199 is 1.0
    assert "200 trained ones 100.0; that is 50.0 (standard error at most 1.0) more" in warning
    assert DropsView(row("", SHORT), (row("stale", LONG),), 1).warnings == (warning,)


def test_drops_as_json_have_their_means_and_the_same_fields_without_any_work():
    found = DropsView(row("", SHORT), (row("stale", LONG),), 1)
    full, empty = drops_value(found), drops_value(DropsView(row("", []), (), 1))
    (dropped,) = full["dropped"]
    assert (dropped["reason"], dropped["num_responses"], dropped["mean_length"]) == ("stale", 200, 150.0)
    assert full["trained"]["mean_length_error"] ** 2 == pytest.approx(100 / 199)
    assert full["warnings"] == list(found.warnings) != []
    assert (empty.keys(), empty["trained"].keys()) == (full.keys(), dropped.keys())
    assert (empty["trained"]["mean_length"], empty["dropped"], empty["warnings"]) == (None, [], [])


def test_groups_of_one_length_are_as_uncertain_as_one_response_each():
    lengths = [90, 110] * 20
    alone, grouped = row("", lengths).responses, row("", [length for length in lengths for _ in range(16)]).responses
    assert grouped.squared_error(16) == pytest.approx(alone.squared_error(1))
    assert grouped.squared_error(len(lengths) * 16) == math.inf


def test_no_warning_when_responses_differ_as_much_as_so_few_groups_do_by_chance():
    dropped, trained = row("stale", [40, 260] * 160), row("", [20, 220] * 160)
    assert favours_short(dropped, trained, 1)
    assert favours_short(dropped, trained, 16) == ""


@pytest.mark.parametrize("group_size", [1, 5, 16])
def test_a_warning_needs_a_hundred_responses_and_twenty_groups_of_each_kind(group_size: int):
    fewest = max(100, 20 * group_size)
    assert favours_short(row("stale", [150] * fewest), row("", [100] * fewest), group_size)
    for dropped, trained in ((fewest - 1, fewest), (fewest, fewest - 1)):
        assert favours_short(row("stale", [150] * dropped), row("", [100] * trained), group_size) == ""


@pytest.mark.parametrize(
    ("why", "dropped", "trained"),
    [
        ("the dropped are shorter", row("stale", SHORT), row("", LONG)),
        ("too few were dropped", row("stale", LONG[: MIN_RESPONSES - 1]), row("", SHORT)),
        ("too few were trained", row("stale", LONG), row("", SHORT[: MIN_RESPONSES - 1])),
        ("it is less than a tenth", row("stale", [109] * 1000), row("", [100] * 1000)),
        ("it is chance", row("stale", [1, 300] * 50), row("", [1, 250] * 50)),
        ("the run was ended", row("cancelled", LONG), row("", SHORT)),
    ],
)
def test_no_warning_without_a_reason(why, dropped, trained):
    assert favours_short(dropped, trained, 1) == "", why


async def test_work_of_an_earlier_release_is_shown_without_what_it_did_not_keep(bench):
    if bench.kind != "redis":
        return
    ledger, inspection = await bench.with_inspection(make_spec())
    one = TrajectoryId("t", 0, 0)
    await ledger.lease(GENERATOR, max_trajectories=2)
    for member in (0, 1):
        await write_response(ledger, TrajectoryId("t", 0, member))
    redis = bench.client
    await redis.hdel("{test}:group:0", "admitted_s", "correct")
    await redis.hdel("{test}:trajectory:t.0.0", "leases", "lease:0")
    await redis.hdel("{test}:chunk:t.0.0.0", "by", "from:reward")
    life = await inspection.life(one)
    assert (life.admitted_s, life.leases, life.chunks[0].worker, life.chunks[0].scores) == (None, (), "", ())
    assert [group.age_s for group in (await inspection.groups()).groups] == []
    await ledger.cancel_in_flight(LEARNER)
    (row,) = (await inspection.drops()).dropped
    assert (row.responses.num_responses, row.responses.mean_difficulty) == (2, None)
    assert (await inspection.life(one)).end.reason == "cancelled"


async def test_a_group_that_an_earlier_release_began_to_score_has_no_difficulty(bench):
    """Its sum of accuracies would lack the first ones."""
    if bench.kind != "redis":
        return
    ledger, inspection = await bench.with_inspection(make_spec())
    await ledger.lease(GENERATOR, max_trajectories=2)
    await write_response(ledger, TrajectoryId("t", 0, 0))
    await bench.client.hdel("{test}:group:0", "correct")
    await write_response(ledger, TrajectoryId("t", 0, 1), accuracy=0.0)
    await ledger.cancel_in_flight(LEARNER)
    (row,) = (await inspection.drops()).dropped
    assert (row.responses.num_responses, row.responses.num_judged) == (2, 0)
