"""The learner's wait: one question, and chores beside it that have ended when it returns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.contract import WaitingFor
from protocol.errors import WeightsDamaged
from protocol.ids import Role
from tests.manual_clock import ManualClock, settle
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from workers.learner.work_wait import Chore, NotYet, WorkWait


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
        assert await WorkWait(ctx, [Chore("c", 1.0, chore)]).until(work.ask) == "batch"
        assert (work.num_asked, chore.num_begun) == (1, 0)


async def test_each_chore_has_its_own_pace_which_goes_on_from_one_wait_to_the_next(tmp_path: Path) -> None:
    async with context(tmp_path) as (ctx, clock, tasks):
        often, seldom = Counted(), Counted()
        wait = WorkWait(ctx, [Chore("often", 0.5, often), Chore("seldom", 4.0, seldom)])
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
        job = tasks.create_task(WorkWait(ctx, [Chore("repairing weights", 1.0, slow)]).until(work.ask))
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
        wait = WorkWait(ctx, [Chore("c", 1.0, chore)])
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
                await WorkWait(ctx, [Chore("repairing weights", 1.0, damaged)]).until(Work().ask)
            assert caught.group_contains(WeightsDamaged, match="version 3")

        job = tasks.create_task(learner())
        await clock.advance(0.5)
        assert job.done()
