"""The learner's wait: one question, and chores beside it that have ended when it returns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.ledger.pacing import Forecast
from pipeline.ledger.types import ClaimRefused, DropReason, Unit
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.contract import Heartbeat, WaitingFor
from pipeline.training.critic_gate import GATE_OPEN
from protocol.errors import WeightsDamaged
from protocol.ids import Incarnation, Role
from protocol.trajectory import Field
from tests.manual_clock import ManualClock, settle
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import make_chunk, make_spec, reward, value
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from workers.learner.claim_loop import ClaimLoop, CriticWatch, NotYet, PeriodicTask


class Work:
    """A ledger that has nothing until it is filled."""

    def __init__(self) -> None:
        self.answer: str | None = None
        self.num_asked = 0

    async def ask(self) -> str | NotYet:
        self.num_asked += 1
        return NotYet(0.1) if self.answer is None else self.answer


class Counted:
    """A chore that counts its turns; each takes until ``end`` is set, if it is to be slow."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self.num_begun = self.num_ended = 0
        self.end = asyncio.Event()
        if not is_slow:
            self.end.set()

    async def __call__(self) -> None:
        self.num_begun += 1
        await self.end.wait()
        self.num_ended += 1


@asynccontextmanager
async def context(folder: Path) -> AsyncIterator[tuple[ActorContext, ManualClock, asyncio.TaskGroup]]:
    async with asyncio.TaskGroup() as tasks:
        clock = ManualClock()
        registry, transport = MemoryRegistry(clock), zmq_transport()
        ctx = await context_of(small_config(folder), folder, Role.LEARNER, "learner", tasks, registry, transport, clock)
        yield ctx, clock, tasks
        ctx.close()


async def test_work_that_is_ready_is_taken_without_any_chore(tmp_path: Path) -> None:
    async with context(tmp_path) as (ctx, _, _):
        work, chore = Work(), Counted()
        work.answer = "batch"
        assert await ClaimLoop(ctx, [PeriodicTask("c", 1.0, chore)]).until(work.ask) == "batch"
        assert (work.num_asked, chore.num_begun) == (1, 0)


async def test_each_chore_has_its_own_pace_which_goes_on_from_one_wait_to_the_next(tmp_path: Path) -> None:
    async with context(tmp_path) as (ctx, clock, tasks):
        often, seldom = Counted(), Counted()
        wait = ClaimLoop(ctx, [PeriodicTask("often", 0.5, often), PeriodicTask("seldom", 4.0, seldom)])
        for _ in range(4):
            work = Work()
            job = tasks.create_task(wait.until(work.ask))
            await clock.advance(2.05)
            work.answer = "batch"
            await clock.advance(0.1)
            assert job.result() == "batch"
            assert 15 <= work.num_asked <= 25
        assert 14 <= often.num_begun <= 18, "every half second of the eight that were waited"
        assert 2 <= seldom.num_begun <= 3, "not once a wait"


async def test_no_chore_is_under_way_when_the_wait_returns(tmp_path: Path) -> None:
    async with context(tmp_path) as (ctx, clock, tasks):
        work, slow = Work(), Counted(is_slow=True)
        job = tasks.create_task(ClaimLoop(ctx, [PeriodicTask("repairing weights", 1.0, slow)]).until(work.ask))
        await clock.advance(0.5)
        work.answer = "batch"
        await clock.advance(0.5)
        assert not job.done() and (slow.num_begun, slow.num_ended) == (1, 0)
        assert (ctx.worker_state.kind, ctx.worker_state.detail) == (WaitingFor.COMPUTE, "repairing weights")
        slow.end.set()
        await settle()
        assert job.result() == "batch" and slow.num_ended == 1
        await clock.advance(10.0)
        assert slow.num_begun == 1


async def test_the_drain_ends_the_wait_without_an_answer(tmp_path: Path) -> None:
    async with context(tmp_path) as (ctx, clock, tasks):
        chore = Counted()
        wait = ClaimLoop(ctx, [PeriodicTask("c", 1.0, chore)])
        job = tasks.create_task(wait.until(Work().ask))
        await clock.advance(0.55)
        assert wait.waited_s == pytest.approx(0.55)
        ctx.draining.set()
        await clock.advance(0.1)
        assert job.result() is None and wait.waited_s == 0.0
        await clock.advance(10.0)
        assert chore.num_begun == 1


async def test_an_error_of_a_chore_ends_the_wait(tmp_path: Path) -> None:
    async with context(tmp_path) as (ctx, clock, tasks):

        async def damaged() -> None:
            raise WeightsDamaged("version 3 is damaged")

        async def learner() -> None:
            with pytest.raises(ExceptionGroup) as caught:
                await ClaimLoop(ctx, [PeriodicTask("repairing weights", 1.0, damaged)]).until(Work().ask)
            assert caught.group_contains(WeightsDamaged, match="version 3")

        job = tasks.create_task(learner())
        await clock.advance(0.5)
        assert job.done()


@given(st.floats(0.5, 200.0), st.integers(1, 500))
def test_at_a_steady_rate_few_polls_notice_the_last_unit_within_the_least_pause(rate: float, needed: int) -> None:
    forecast = Forecast(least_s=0.02, most_s=0.1)
    now, asked = 0.0, 0
    done_s = needed / rate
    while (ready := int(now * rate)) < needed:
        now += forecast.pause_s(now, num_ready=ready, num_needed=needed)
        asked += 1
    assert now - done_s <= 0.1
    assert asked <= 12 + done_s / 0.1 + 2.0 / rate / 0.02
    if rate >= 50.0:
        assert now - done_s <= 0.04, "with many units, it is known when the last one comes"


def test_while_nothing_comes_questions_grow_rarer() -> None:
    forecast = Forecast(least_s=0.02, most_s=0.1)
    pauses = [forecast.pause_s(now, num_ready=3, num_needed=8) for now in (0.0, 0.1, 0.5, 0.8, 5.0)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.02, 0.1)


def test_units_that_are_dropped_begin_a_new_forecast() -> None:
    forecast = Forecast(least_s=0.02, most_s=0.1)
    forecast.pause_s(0.0, num_ready=5, num_needed=8)
    forecast.pause_s(1.0, num_ready=7, num_needed=8)
    assert forecast.pause_s(1.1, num_ready=2, num_needed=8) == 0.02


def test_polls_grow_rarer_too_when_enough_are_ready_and_another_wait_goes_on() -> None:
    forecast = Forecast(least_s=0.02, most_s=0.1)
    forecast.pause_s(0.0, num_ready=0, num_needed=8)
    pauses = [forecast.pause_s(now, num_ready=9, num_needed=8) for now in (0.3, 0.5, 0.8, 5.0)]
    assert pauses == pytest.approx([0.03, 0.05, 0.08, 0.1])


GENERATOR = Incarnation(Role.GENERATOR, "generator-0", 1)
SCORER = Incarnation(Role.REWARD, "reward-0", 1)


@asynccontextmanager
async def learner(folder: Path, unit: Unit) -> AsyncIterator[ActorContext]:
    async with asyncio.TaskGroup() as tasks:
        clock = ManualClock()
        registry, transport = MemoryRegistry(clock), zmq_transport()
        ctx = await context_of(small_config(folder), folder, Role.LEARNER, "learner", tasks, registry, transport, clock)
        fields = frozenset({Field.REWARD, Field.VALUE})
        await ctx.ledger.open(make_spec(unit, fields=fields, value_training=True, eta=0, group_size=1))
        yield ctx
        ctx.close()


async def beat(ctx: ActorContext, is_open: bool) -> None:
    who = await ctx.registry.register(Role.VALUE, "value")
    assert isinstance(ctx.registry, MemoryRegistry)
    now = ctx.clock.time()
    ctx.registry.beat(
        Heartbeat(
            who=who,
            pid=1,
            host="here",
            at_s=now,
            started_s=now,
            progress=1,
            progress_at_s=now,
            waiting_for=WaitingFor.INPUT,
            counters={GATE_OPEN: float(is_open)},
        )
    )


@pytest.mark.parametrize("unit", list(Unit))
async def test_what_is_ready_before_the_critic_is_dropped_and_generation_goes_on(tmp_path: Path, unit: Unit) -> None:
    async with learner(tmp_path, unit) as ctx:
        watch = CriticWatch(ctx, was_open=False)
        # with eta = 0 each batch's credit is only there because that before it was dropped
        for batch in range(3):
            grant = await ctx.ledger.lease(GENERATOR, max_trajectories=100)
            assert len(grant.leases) == 4
            for lease in grant.leases:
                chunk = make_chunk(lease.trajectory)
                await ctx.ledger.write_chunk(GENERATOR, chunk)
                assert isinstance(await watch.drop_batch(0), ClaimRefused)
                await ctx.ledger.write_score(SCORER, chunk.id, reward(lease.trajectory.group % 2))
                await ctx.ledger.write_score(SCORER, chunk.id, value())
            assert await watch.drop_batch(0) is None
            audit = await ctx.ledger.audit()
            assert audit.balances
            assert audit.trajectories.dropped == {DropReason.VALUE_WARMUP: 4 * (batch + 1)}
            # the critic learns from them all the same
            assert audit.finished.in_flight == {"waiting": 4 * (batch + 1)}


async def test_a_gate_that_was_seen_open_stays_open_when_the_value_worker_dies(tmp_path: Path) -> None:
    async with learner(tmp_path, Unit.CHUNK) as ctx:
        watch = CriticWatch(ctx, was_open=False)
        await watch.poll()
        assert not watch.is_open and "no heartbeat" in watch.trouble
        await beat(ctx, False)
        await watch.poll()
        assert watch.trouble == "" and not watch.is_open
        await beat(ctx, True)
        await watch.poll()
        assert watch.trouble == "" and watch.is_open
        await advance(ctx, 30.0)
        await watch.poll()
        assert "silent for 30 s" in watch.trouble and watch.is_open


async def advance(ctx: ActorContext, seconds: float) -> None:
    assert isinstance(ctx.clock, ManualClock)
    await ctx.clock.advance(seconds)


@pytest.mark.parametrize(("pretrain_steps", "is_open"), [(0, True), (1, False)])
async def test_a_gate_that_asks_for_no_steps_is_open_before_the_value_worker_says_so(
    tmp_path: Path, pretrain_steps: int, is_open: bool
) -> None:
    async with learner(tmp_path, Unit.GROUP) as ctx:
        section = ctx.config.value.model_copy(update={"pretrain_steps": pretrain_steps})
        ctx.config = ctx.config.model_copy(update={"value": section})
        watch = CriticWatch(ctx, was_open=False)
        await watch.poll()
        assert watch.is_open is is_open
