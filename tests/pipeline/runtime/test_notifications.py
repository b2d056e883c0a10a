"""A subscriber that is notified reads at once; a subscriber that is not reads a little later all
the same."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from pipeline.ledger.redis.client import connect
from pipeline.runtime.clock import RealClock
from pipeline.runtime.notifications import Notifications
from pipeline.runtime.registry.contract import RunState, RunStatus, Topic
from pipeline.runtime.registry.memory import MemoryRegistry
from pipeline.runtime.registry.redis import RedisRegistry
from protocol.errors import LedgerUnavailable
from protocol.ids import Role
from tests.manual_clock import ManualClock, settle


class Away(MemoryRegistry):
    """A registry whose server can be taken away."""

    is_away = False

    async def notifications(self, seen: Mapping[Topic, str], *, timeout_s: float) -> dict[Topic, str]:
        if self.is_away:
            raise LedgerUnavailable("away")
        return await super().notifications(seen, timeout_s=timeout_s)


async def test_every_bell_of_a_topic_rings_and_no_other() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    notifications = Notifications(registry, clock)
    bells = [notifications.subscribe(topic) for topic in (Topic.RUN, Topic.RUN, Topic.WEIGHTS)]
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(notifications.watch())
        await settle()
        await registry.set_run_status(RunStatus(RunState.RUNNING))
        await settle()
        assert [subscribe.is_set() for subscribe in bells] == [True, True, False]
        for subscribe in bells:
            subscribe.clear()
        await clock.advance(60.0)
        assert not any(subscribe.is_set() for subscribe in bells), "what was heard once is not told again"
        watch.cancel()


async def test_what_happens_while_the_server_is_away_is_told_when_it_is_back() -> None:
    clock = ManualClock()
    registry = Away(clock)
    registry.is_away = True
    notifications = Notifications(registry, clock)
    subscribe = notifications.subscribe(Topic.RUN)
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(notifications.watch())
        await registry.set_run_status(RunStatus(RunState.STOPPING))
        await clock.advance(30.0)
        assert not subscribe.is_set()
        registry.is_away = False
        await clock.advance(2.0)
        assert subscribe.is_set()
        watch.cancel()


async def test_a_watch_on_a_server_is_ended_at_once_in_the_middle_of_its_wait(redis_server: str) -> None:
    registry = RedisRegistry(connect(redis_server), "news")
    await registry.register(Role.LEARNER, "learner")
    notifications = Notifications(registry, RealClock())
    subscribe = notifications.subscribe(Topic.RUN)
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(notifications.watch())
        await registry.set_run_status(RunStatus(RunState.RUNNING))
        await asyncio.wait_for(subscribe.wait(), 5.0)
        # it waits again
        await asyncio.sleep(0.02)
        watch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(watch), 1.0)
    assert (await registry.run_status()).state is RunState.RUNNING, "the client is whole"
    await registry.aclose()
