"""The runtime's services to an actor: one compute thread, named tasks, marks for the heartbeat."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from pipeline.process.exit_codes import ExitCode
from pipeline.runtime.context import ActorContext
from pipeline.runtime.process_setup import limit_threads, thread_environment
from pipeline.runtime.registry.contract import WaitingFor
from protocol.ids import Role
from tests.manual_clock import ManualClock
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[ActorContext]:
    async with asyncio.TaskGroup() as tasks:
        ctx = await context_of(
            small_config(folder),
            folder,
            Role.REWARD,
            "reward-0",
            tasks,
            MemoryRegistry(),
            zmq_transport(),
            ManualClock(),
        )
        yield ctx
        await ctx.cancel_spawned()
        ctx.close()


async def test_blocking_work_runs_in_order_on_one_thread_and_counts_as_progress(tmp_path: Path):
    order: list[int] = []

    def work(number: int) -> tuple[int, str]:
        order.append(number)
        return number, threading.current_thread().name

    async with opened(tmp_path) as ctx:
        async with asyncio.TaskGroup() as tasks:
            jobs = [tasks.create_task(ctx.compute(work, number)) for number in range(5)]
        assert [job.result()[0] for job in jobs] == order == [0, 1, 2, 3, 4]
        assert len({job.result()[1] for job in jobs}) == 1
        assert threading.current_thread().name not in {job.result()[1] for job in jobs}
        assert ctx.worker_state.heartbeat().progress == 5


async def test_while_computing_the_loop_lives_and_the_heartbeat_says_compute(tmp_path: Path):
    began, release = threading.Event(), threading.Event()

    def work() -> bool:
        began.set()
        return release.wait(10.0)

    async with opened(tmp_path) as ctx:
        ctx.waiting_for(WaitingFor.INPUT)
        job = ctx.tasks.create_task(ctx.compute(work))
        assert await asyncio.to_thread(began.wait, 10.0)
        assert ctx.is_computing
        assert ctx.worker_state.heartbeat().waiting_for is WaitingFor.COMPILE, "its first call may compile"
        release.set()
        assert await job is True
        assert not ctx.is_computing
        assert ctx.worker_state.heartbeat().waiting_for is WaitingFor.INPUT


async def test_work_says_whether_it_is_new_and_keeps_to_a_wait_with_a_limit_of_its_own(tmp_path: Path):
    said: list[WaitingFor] = []

    async with opened(tmp_path) as ctx:

        def work() -> None:
            said.append(ctx.worker_state.heartbeat().waiting_for)

        # while it starts
        await ctx.compute(work)
        ctx.waiting_for(WaitingFor.INPUT)
        await ctx.compute(work)
        with ctx.waiting(WaitingFor.DISK):
            await ctx.compute(work)
        await ctx.compute(lambda: work())
    assert said == [WaitingFor.STARTING, WaitingFor.COMPUTE, WaitingFor.DISK, WaitingFor.COMPILE]


async def test_an_error_in_blocking_work_reaches_its_caller_and_is_no_progress(tmp_path: Path):
    async with opened(tmp_path) as ctx:
        with pytest.raises(ZeroDivisionError):
            await ctx.compute(lambda: 1 // 0)
        assert ctx.worker_state.heartbeat().progress == 0


async def test_an_endless_task_that_returns_before_the_drain_is_a_crash(tmp_path: Path):
    async def returns() -> None:
        return

    with pytest.raises(ExceptionGroup) as caught:
        async with opened(tmp_path) as ctx:
            ctx.spawn("short", returns())
            await asyncio.sleep(0.01)
    assert "task short of reward-0#1 returned" in str(caught.value.exceptions[0])

    async with opened(tmp_path) as ctx:
        ctx.spawn("job", returns(), endless=False)
        await asyncio.sleep(0)
    async with opened(tmp_path) as ctx:
        ctx.draining.set()
        ctx.spawn("drained", returns())
        await asyncio.sleep(0)


async def test_spawned_tasks_are_cancelled_after_the_drain(tmp_path: Path):
    ended: list[str] = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("endless")

    async with opened(tmp_path) as ctx:
        ctx.spawn("endless", endless())
        await asyncio.sleep(0)
        assert ended == []
    assert ended == ["endless"]


async def test_the_first_finish_counts(tmp_path: Path):
    async with opened(tmp_path) as ctx:
        ctx.finish(ExitCode.BAD_STEPS, "three in a row")
        ctx.finish()
        assert ctx.finished == (ExitCode.BAD_STEPS, "three in a row")


def test_threads_are_limited_for_every_numeric_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for name in thread_environment(1):
        monkeypatch.setenv(name, "before")
    limit_threads(3)
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "3"
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    with pytest.raises(ValueError, match="threads is 0"):
        limit_threads(0)


def test_a_limit_that_comes_after_torch_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", object())
    with pytest.raises(RuntimeError, match="after torch was imported"):
        limit_threads(1)


async def test_what_starting_takes_its_time_over_is_told_while_it_computes_and_no_later(tmp_path: Path):
    async with opened(tmp_path) as ctx:
        ctx.starting("loading a-model, 3 MB")
        told = await ctx.compute(ctx.worker_state.heartbeat)
        assert (told.waiting_for, told.detail) == (WaitingFor.STARTING, "loading a-model, 3 MB")
        ctx.waiting_for(WaitingFor.INPUT, "its mailbox")
        later = await ctx.compute(ctx.worker_state.heartbeat)
        assert (later.waiting_for, later.detail) == (WaitingFor.COMPUTE, "")


async def test_what_is_counted_adds_up_in_the_heartbeat(tmp_path: Path):
    async with opened(tmp_path) as ctx:
        ctx.count("failed")
        ctx.count("failed", 2)
        ctx.count("paused_s", 0.5)
        assert ctx.worker_state.heartbeat().counters == {"failed": 3, "paused_s": 0.5}


async def test_the_first_finished_piece_of_work_is_logged_and_later_ones_are_not(tmp_path: Path):
    async with opened(tmp_path) as ctx:
        with structlog.testing.capture_logs() as lines:
            ctx.deliver()
            ctx.deliver()
    assert ctx.delivered == 2
    assert [line["event"] for line in lines].count("first_work_done") == 1
