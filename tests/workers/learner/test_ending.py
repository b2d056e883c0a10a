"""When data is hopeless, and when a learner only waits: judged on a real ledger, whose generators
are driven by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.ledger.types import ClaimRefused, DropReason, Lease, Unit
from protocol.ids import Incarnation
from protocol.trajectory import Field
from tests.oracle.ledger.admin import MemoryAdmin
from tests.oracle.ledger.ledger import MemoryLedger
from tests.pipeline.ledger.builders import GENERATOR, LEARNER, OTHER_GENERATOR, SCORER, make_chunk, make_spec, reward
from workers.learner.ending import NoSignalStop

LIMIT = 6
NO_SIGNAL = DropReason.NO_SIGNAL.value


class Run:
    """A ledger of groups of two, two groups an update, and a learner that requests
    batches from it."""

    def __init__(self, max_groups: int = LIMIT) -> None:
        self.now = 0.0
        self.ledger = MemoryLedger(lambda _: 1, lambda: self.now)
        self.no_signal = NoSignalStop(max_groups)

    async def open(self, **settings: Any) -> Run:
        await self.ledger.open(make_spec(signal_filter=True, oversampling=4.0, **settings))
        return self

    async def lease(self, num_groups: int, who: Incarnation = GENERATOR) -> list[Lease]:
        grant = await self.ledger.lease(who, max_trajectories=2 * num_groups)
        assert len(grant.leases) == 2 * num_groups, grant.refusal
        return list(grant.leases)

    async def finish(self, leases: list[Lease], *, good: bool, who: Incarnation = GENERATOR) -> None:
        for lease in leases:
            chunk = make_chunk(lease.trajectory)
            await self.ledger.write_chunk(who, chunk)
            await self.ledger.write_score(SCORER, chunk.id, reward(lease.trajectory.member if good else 0.0))

    async def sample(self, num_groups: int, *, good: bool) -> None:
        for _ in range(num_groups):
            await self.finish(await self.lease(1), good=good)

    async def fail(self, leases: Sequence[Lease], who: Incarnation) -> None:
        for lease in leases:
            chunk = make_chunk(lease.trajectory)
            await self.ledger.write_chunk(who, chunk)
            await self.ledger.fail_score(SCORER, chunk.id, Field.REWARD, "Traceback")

    async def look(self) -> Counter[str] | None:
        outcome = await self.ledger.claim(LEARNER, policy_version=0)
        if not isinstance(outcome, ClaimRefused):
            self.no_signal.claimed()
            return None
        return self.no_signal.evaluate(outcome, await self.ledger.totals())

    async def verdict(self) -> Counter[str] | None:
        """Look as often as a learner does in a moment in which nothing happens."""
        return [await self.look() for _ in range(3)][-1]


async def test_groups_without_signal_in_a_row_are_hopeless_once_the_limit_is_reached():
    run = await Run().open()
    assert await run.verdict() is None
    await run.sample(LIMIT - 1, good=False)
    assert await run.verdict() is None
    assert run.no_signal.num_unusable == LIMIT - 1
    await run.sample(1, good=False)
    assert await run.verdict() == Counter({NO_SIGNAL: LIMIT})
    run.no_signal.claimed()
    assert run.no_signal.num_unusable == 0


async def test_in_a_pause_of_admission_data_is_not_judged():
    run = await Run().open()
    await run.verdict()
    await run.sample(LIMIT, good=False)
    assert isinstance(run.ledger, MemoryLedger)
    admin = MemoryAdmin(run.ledger, lambda _: 1)
    await admin.pause(by="operator@host", reason="a better verifier")
    assert await run.verdict() is None
    assert run.no_signal.num_unusable == LIMIT
    await admin.resume()
    assert await run.verdict() == Counter({NO_SIGNAL: LIMIT})


async def test_a_learner_with_enough_units_that_waits_for_late_work_is_never_hopeless():
    """A generator that is cut off holds old work, which would be too stale after this update;
    others go on sampling."""
    run = await Run().open(eta=0)
    late = await run.lease(1, OTHER_GENERATOR)
    await run.sample(3, good=True)
    for _ in range(4 * LIMIT):
        await run.sample(1, good=False)
        assert await run.verdict() is None
    await run.lease(1)
    await run.finish(late, good=False, who=OTHER_GENERATOR)
    assert await run.verdict() is None
    assert (await run.ledger.totals()).num_ready_units == 3


async def test_one_unit_that_becomes_ready_begins_the_count_anew():
    run = await Run().open()
    await run.verdict()
    for _ in range(LIMIT - 1):
        await run.sample(1, good=False)
        assert await run.verdict() is None
    await run.sample(1, good=True)
    assert await run.verdict() is None
    await run.sample(LIMIT - 1, good=False)
    assert await run.verdict() is None
    await run.sample(1, good=False)
    assert await run.verdict() == Counter({NO_SIGNAL: LIMIT})


@pytest.mark.parametrize("good", [True, False])
async def test_what_was_in_flight_when_the_limit_was_reached_is_waited_for(good: bool):
    run = await Run().open()
    await run.verdict()
    late = await run.lease(1, OTHER_GENERATOR)
    for _ in range(3 * LIMIT):
        await run.sample(1, good=False)
        assert await run.verdict() is None
    await run.finish(late, good=good, who=OTHER_GENERATOR)
    assert await run.verdict() == (None if good else Counter({NO_SIGNAL: 3 * LIMIT + 1}))


async def test_work_that_was_admitted_after_the_limit_was_reached_keeps_no_verdict_back():
    run = await Run().open()
    await run.verdict()
    await run.sample(LIMIT, good=False)
    assert await run.look() is None, "at the first look it is found out what is in flight"
    await run.lease(3)
    assert await run.look() == Counter({NO_SIGNAL: LIMIT})


async def test_a_claimed_batch_begins_the_count_anew_even_if_as_many_units_are_ready():
    run = await Run().open()
    await run.sample(1, good=True)
    await run.verdict()
    await run.sample(LIMIT - 1, good=False)
    assert await run.verdict() is None
    await run.sample(2, good=True)
    # takes two of three
    await run.look()
    assert (await run.ledger.totals()).num_ready_units == 1
    await run.sample(1, good=False)
    assert await run.verdict() is None


async def test_responses_that_cannot_be_scored_are_told_apart():
    run = await Run().open(unit=Unit.GROUP, max_attempts=1)
    await run.verdict()
    for _ in range(LIMIT):
        await run.fail(await run.lease(1), GENERATOR)
    assert await run.verdict() == Counter({DropReason.DEAD_LETTER.value: LIMIT})


@pytest.mark.parametrize("unit", [Unit.TRAJECTORY, Unit.CHUNK])
async def test_the_oldest_work_is_recognised_by_its_group_whatever_the_unit(unit: Unit):
    run = Run(max_groups=1)
    await run.ledger.open(make_spec(unit=unit, max_attempts=1, oversampling=4.0))
    await run.verdict()
    late = (await run.ledger.lease(OTHER_GENERATOR, max_trajectories=2)).leases
    await run.fail((await run.ledger.lease(GENERATOR, max_trajectories=2)).leases, GENERATOR)
    assert await run.verdict() is None, f"{late[0].trajectory} is in flight"
    await run.fail(late, OTHER_GENERATOR)
    assert await run.verdict() == Counter({DropReason.DEAD_LETTER.value: 2})


async def test_a_limit_of_zero_bears_any_data():
    run = await Run(max_groups=0).open()
    await run.sample(4 * LIMIT, good=False)
    assert await run.verdict() is None
