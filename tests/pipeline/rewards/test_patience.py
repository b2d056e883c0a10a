"""A wait that no standstill of the machine or the process uses up."""

import asyncio

import pytest

from pipeline.rewards.patience import Waited, patience


def test_a_standstill_counts_no_more_than_two_steps() -> None:
    waited = Waited(0.0, 0.1)
    waited.step(0.1)
    waited.step(3600.1)
    assert waited.seconds == pytest.approx(0.3)
    assert waited.step(3600.2) == pytest.approx(0.4)


async def test_a_wait_ends_after_its_limit_and_not_before() -> None:
    with pytest.raises(TimeoutError):
        async with patience(0.05):
            await asyncio.Event().wait()
    async with patience(30.0):
        pass


async def test_what_becomes_ready_while_all_stood_still_is_not_late() -> None:
    now_s, ready = 0.0, asyncio.Event()

    def clock() -> float:
        nonlocal now_s
        # each look finds that an hour has passed, as after a standstill of the whole machine
        now_s += 3600.0
        if now_s > 4 * 3600.0:
            ready.set()
        return now_s

    async with patience(0.1, clock=clock, step_s=0.01):
        await ready.wait()
