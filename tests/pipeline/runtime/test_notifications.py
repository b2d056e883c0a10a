"""A subscriber that is notified reads at once; a subscriber that is not reads a little later all
the same."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from pipeline.ledger.redis.client import connect
from pipeline.runtime.clock import RealClock
from pipeline.runtime.notifications import Notifications
from pipeline.runtime.registry.contract import FleetSummary, RunState, RunStatus, Topic
from pipeline.runtime.registry.redis import RedisRegistry
from protocol.errors import LedgerUnavailable
from protocol.ids import Role
from tests.manual_clock import ManualClock, settle
from tests.oracle.registry import MemoryRegistry


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


async def test_a_heartbeats_answer_wakes_for_silent_mailboxes_and_for_another_server() -> None:
    clock = ManualClock()
    looks: list[None] = []

    class Looked(MemoryRegistry):
        def look_again(self) -> None:
            looks.append(None)

    notifications = Notifications(Looked(clock), clock)
    mailboxes, run = (notifications.subscribe(topic) for topic in (Topic.ENDPOINTS, Topic.RUN))
    notifications.update_fleet(FleetSummary(9, 0, 1))
    assert not mailboxes.is_set() and not looks
    notifications.update_fleet(FleetSummary(9, 1, 1))
    assert mailboxes.is_set() and not run.is_set() and not looks
    mailboxes.clear()
    notifications.update_fleet(FleetSummary(9, 1, 2))
    assert looks and not mailboxes.is_set()


async def test_a_wait_for_news_outlasts_the_limit_of_an_answer(redis_server: str) -> None:
    registry = RedisRegistry(connect(redis_server, timeout_s=0.2, patience_s=0.4), "held")
    client = connect(redis_server)
    before = (await client.info("stats"))["total_connections_received"]
    began = asyncio.get_running_loop().time()
    assert await registry.notifications({Topic.RUN: ""}, timeout_s=1.0) == {}
    assert asyncio.get_running_loop().time() - began >= 0.9
    assert (await client.info("stats"))["total_connections_received"] == before + 1, "it connected once"
    await registry.aclose()
    await client.aclose()


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_lost_connection_ends_a_wait_for_news_with_a_look(redis_server: str, is_told: bool) -> None:
    """Another server may have other news: here its numbers are lower."""
    client = connect(redis_server)
    registry, writer = RedisRegistry(connect(redis_server, client_name="waits"), "lost"), RedisRegistry(client, "lost")
    await writer.set_run_status(RunStatus(RunState.RUNNING))
    seen = await registry.notifications(dict.fromkeys(Topic, ""), timeout_s=0.001)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(registry.notifications(dict.fromkeys(Topic, "") | seen, timeout_s=60.0))
        await asyncio.sleep(0.1)
        await client.delete("{lost}:news:run")
        await client.xadd("{lost}:news:run", {"news": "1"}, id="1-1")
        if is_told:
            registry.look_again()
        else:
            waits = [one["id"] for one in await client.client_list() if one["name"] == "waits"]
            for one in waits:
                await client.client_kill_filter(_id=one)
        found = await asyncio.wait_for(waiting, 5.0)
    assert list(found) == [Topic.RUN]
    await registry.aclose()
    await writer.aclose()
