"""When a generator asks for leases, and for how many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pipeline.ledger.types import Lease, LeaseGrant, Refusal
from protocol.ids import Incarnation, Role, TrajectoryId
from tests.manual_clock import ManualClock
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from workers.generator.leasing import Leasing


class _Ledger:
    """Grants at most ``left`` more trajectories, once ``is_reachable`` is set."""

    def __init__(self, left: int) -> None:
        self.left, self.asked = left, list[int]()
        self.is_reachable = asyncio.Event()
        self.is_reachable.set()

    async def lease(self, who: Incarnation, *, max_trajectories: int, policy_version: int | None) -> LeaseGrant:
        self.asked.append(max_trajectories)
        await self.is_reachable.wait()
        num = min(max_trajectories, self.left)
        self.left -= num
        leases = tuple(Lease(TrajectoryId("t", self.left, place), 0, 0, None) for place in range(num))
        return LeaseGrant(leases, None if num == max_trajectories else Refusal.NO_CREDIT)


@asynccontextmanager
async def leasing_from(tmp_path: Path, left: int) -> AsyncGenerator[tuple[Leasing, Any, ManualClock]]:
    clock, ledger = ManualClock(), _Ledger(left)
    async with asyncio.TaskGroup() as tasks:
        ctx = await context_of(
            small_config(tmp_path), tmp_path, Role.GENERATOR, "generator-0", tasks, MemoryRegistry(clock),
            zmq_transport(), clock,
        )  # fmt: skip
        ctx.ledger = ledger  # pyright: ignore[reportAttributeAccessIssue]
        yield Leasing(ctx), ledger, clock
        ctx.close()


async def granted(leasing: Leasing, num_free_slots: int) -> int | None:
    """Return how many were granted, or None without a request."""
    leasing.ask(num_free_slots, 0)
    await leasing.join()
    grant = leasing.take()
    return None if grant is None else len(grant.leases)


async def test_a_ledger_that_does_not_answer_keeps_nobody_waiting_and_is_asked_once(tmp_path: Path) -> None:
    async with leasing_from(tmp_path, left=9) as (leasing, ledger, _clock):
        ledger.is_reachable.clear()
        for _ in range(3):
            leasing.ask(2, 0)
            await asyncio.sleep(0)
            assert not leasing.has_answer and leasing.take() is None
        ledger.is_reachable.set()
        await leasing.join()
        assert leasing.has_answer and ledger.asked == [2]
        leasing.ask(2, 0)
        grant = leasing.take()
        assert grant is not None and len(grant.leases) == 2 and ledger.asked == [2], "an answer is taken first"


async def test_as_many_are_leased_ahead_as_slots_come_free_in_a_fifth_of_a_second(tmp_path: Path) -> None:
    async with leasing_from(tmp_path, left=99) as (leasing, ledger, clock):
        for _ in range(16):
            assert await granted(leasing, 0) is None, "nothing is known of the rate"
            leasing.slot_came_free()
            await clock.advance(0.05)
        assert await granted(leasing, 0) == 4
        assert await granted(leasing, -4) is None, "they are there"
        assert await granted(leasing, 3) == 3 + 4
        await clock.advance(2.0)
        assert await granted(leasing, 0) == 1
        await clock.advance(60.0)
        assert await granted(leasing, 0) is None, "slots come free rarely, and others can use it sooner"
        assert ledger.asked == [4, 7, 1]


async def test_a_refusal_to_lease_ahead_puts_off_no_lease_for_a_free_slot(tmp_path: Path) -> None:
    async with leasing_from(tmp_path, left=3) as (leasing, ledger, clock):
        for _ in range(16):
            leasing.slot_came_free()
            await clock.advance(0.05)
        assert await granted(leasing, 1) == 3
        assert await granted(leasing, 0) is None, "there was no more"
        ledger.left = 1
        assert await granted(leasing, 1) == 1
        assert await granted(leasing, 1) == 0
        ledger.left = 9
        assert await granted(leasing, 1) is None, "the next request comes after a pause"
        leasing.credit_came()
        assert await granted(leasing, 1) == 5
