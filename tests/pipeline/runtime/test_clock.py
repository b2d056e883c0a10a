"""Time driven by hand."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.runtime.clock import RealClock
from tests.manual_clock import ManualClock, settle


async def test_sleepers_wake_in_order_at_their_own_moments():
    clock, woken = ManualClock(start_s=0.0), []

    async def nap(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.monotonic()))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(nap("late", 3.0))
        tasks.create_task(nap("early", 1.0))
        await clock.advance(0.5)
        assert woken == []
        await clock.advance(10.0)
    assert woken == [("early", 1.0), ("late", 3.0)]
    assert clock.time() == 10.5


async def test_a_loop_that_sleeps_again_is_woken_as_often_as_time_passes():
    clock, turns = ManualClock(), []

    async def poll() -> None:
        while len(turns) < 10:
            await clock.sleep(1.0)
            turns.append(clock.monotonic())

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(poll())
        await clock.advance(9.5)
        assert len(turns) == 9
        await clock.advance(0.5)
    assert len(turns) == 10


async def test_a_cancelled_sleep_leaves_nothing_behind():
    clock = ManualClock()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(clock.sleep(5.0))
        await settle()
        assert clock.num_sleepers == 1
        task.cancel()
    assert clock.num_sleepers == 0


async def test_time_never_goes_back():
    with pytest.raises(ValueError, match="never goes back"):
        await ManualClock().advance(-1.0)


async def test_the_real_clock_moves():
    clock = RealClock()
    before = clock.monotonic()
    await clock.sleep(0.001)
    assert clock.monotonic() > before
    assert clock.time() > 1.6e9


@pytest.mark.parametrize("kind", ["manual", "real"])
async def test_a_wait_ends_when_its_event_is_set_long_before_its_limit(kind: str):
    clock = ManualClock() if kind == "manual" else RealClock()
    event = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(clock.wait(event, 3_600.0))
        await settle()
        assert not waiting.done()
        event.set()
    if isinstance(clock, ManualClock):
        assert clock.num_sleepers == 0, "nobody is left to be woken an hour later"


async def test_a_wait_for_what_never_comes_ends_at_its_limit():
    clock = ManualClock()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(clock.wait(asyncio.Event(), 2.0))
        await clock.advance(1.9)
        assert not waiting.done()
        await clock.advance(0.1)
        assert waiting.done()
    await RealClock().wait(asyncio.Event(), 0.001)
    await RealClock().wait(asyncio.Event(), -1.0)
