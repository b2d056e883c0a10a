"""Claims about a registry's notifications: each change is reported once, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import redis.asyncio
import redis.exceptions

from pipeline.ledger.redis.client import connect
from pipeline.runtime.registry.contract import (
    Fleet,
    HeartbeatWriter,
    Registry,
    RunState,
    RunStatus,
    Topic,
)
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.registry.redis_heartbeats import RedisHeartbeatWriter
from protocol.errors import Fenced
from protocol.ids import Incarnation, Role
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.runtime.registries import NOTHING_HEARD, Subject, announcement, beat_of, caught_up


async def test_whoever_waits_for_news_is_told_what_changed_and_can_read_it_then(subject: Subject):
    registry = subject.registry
    learner = await registry.register(Role.LEARNER, "learner-0")
    seen = {Topic.WEIGHTS: (await caught_up(registry))[Topic.WEIGHTS]}
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(registry.notifications(seen, timeout_s=60.0))
        # the subscriber does not wait for that: it is news of the run
        await registry.set_fleet(Fleet({Role.GENERATOR: 2}))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await registry.announce_weights(learner, announcement(1))
    assert list(waiting.result()) == [Topic.WEIGHTS]
    assert await registry.weights() == announcement(1)
    assert await registry.notifications(seen | waiting.result(), timeout_s=0.001) == {}


async def test_news_that_came_while_nobody_waited_is_told_at_the_next_call_and_once(subject: Subject):
    registry = subject.registry
    learner = await registry.register(Role.LEARNER, "learner-0")
    seen = await caught_up(registry)
    for version in (1, 2, 3):
        await registry.announce_weights(learner, announcement(version))
    await registry.set_run_status(RunStatus(RunState.RUNNING))
    found = await registry.notifications(seen, timeout_s=4.0)
    assert set(found) == {Topic.WEIGHTS, Topic.RUN}
    assert await registry.notifications(seen | found, timeout_s=0.001) == {}
    assert set(await registry.notifications(NOTHING_HEARD, timeout_s=0.001)) >= set(found), (
        "one who comes late hears it, too"
    )
    only_run = await registry.notifications({Topic.RUN: seen[Topic.RUN]}, timeout_s=4.0)
    assert list(only_run) == [Topic.RUN]


async def test_every_change_of_the_mailboxes_is_news_and_nothing_else_of_a_worker_is(subject: Subject):
    registry = subject.registry

    async def is_told(change: Callable[[], Awaitable[object]]) -> bool:
        seen = await caught_up(registry)
        await change()
        return Topic.ENDPOINTS in await registry.notifications(seen, timeout_s=0.001)

    async def bind(worker: str) -> Incarnation:
        who = await registry.register(Role.REWARD, worker)
        await registry.set_endpoint(who, "ipc://r")
        return who

    first = await registry.register(Role.REWARD, "reward-0")
    assert await is_told(lambda: registry.set_endpoint(first, "ipc://r"))
    assert not await is_told(lambda: registry.register(Role.GENERATOR, "generator-0"))
    assert not await is_told(lambda: asyncio.to_thread(subject.writer.beat, beat_of(first)))
    assert await is_told(lambda: registry.register(Role.REWARD, "reward-0")), "its old mailbox is gone"
    assert not await is_told(lambda: registry.fence("reward-0")), "it had none"
    second = await bind("reward-1")
    assert await is_told(lambda: registry.fence("reward-1"))
    assert not await is_told(lambda: registry.depart(second)), "a fenced one takes nothing away"
    third = await bind("reward-2")
    assert await is_told(lambda: registry.depart(third))


async def test_what_was_refused_is_no_news(subject: Subject):
    registry = subject.registry
    old = await registry.register(Role.LEARNER, "learner-0")
    new = await registry.register(Role.LEARNER, "learner-0")
    await registry.announce_weights(new, announcement(2))
    seen = await caught_up(registry)
    with pytest.raises(Fenced):
        await registry.announce_weights(old, announcement(3))
    with pytest.raises(Fenced):
        await registry.set_endpoint(old, "ipc://old")
    with pytest.raises(ValueError, match="versions only grow"):
        await registry.announce_weights(new, announcement(1))
    assert await registry.notifications(seen, timeout_s=0.001) == {}


@pytest.mark.parametrize("protocol", [2, 3])
async def test_news_is_read_in_both_versions_of_the_server_s_protocol(redis_server: str, protocol: int):
    url = f"{redis_server}{'&' if '?' in redis_server else '?'}protocol={protocol}"
    registry = RedisRegistry(connect(url), f"protocol-{protocol}")
    seen = await caught_up(registry)
    await registry.set_run_status(RunStatus(RunState.RUNNING))
    found = await registry.notifications(seen, timeout_s=4.0)
    assert list(found) == [Topic.RUN]
    assert await registry.notifications(seen | found, timeout_s=0.001) == {}
    await registry.aclose()


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_a_silent_worker_is_offered_no_messages_until_it_is_heard_again(
    kind: str, redis_client: redis.asyncio.Redis, redis_server: str
):
    if kind == "memory":
        # silent from the very next moment
        registry: Registry = MemoryRegistry(unlisted_after_s=-1.0)
        heard: Registry = MemoryRegistry()
        writer: HeartbeatWriter = heard.writer()  # type: ignore[attr-defined]
    else:
        registry, heard = RedisRegistry(redis_client, "r", unlisted_after_s=-10.0), RedisRegistry(redis_client, "r")
        writer = RedisHeartbeatWriter(redis_server, "r")
    who = await registry.register(Role.REWARD, "reward-0")
    await registry.set_endpoint(who, "ipc://r")
    assert await registry.endpoints(Role.REWARD) == {}
    who = await heard.register(Role.REWARD, "reward-0")
    await heard.set_endpoint(who, "ipc://r")
    assert await asyncio.to_thread(writer.beat, beat_of(who))
    assert await heard.endpoints(Role.REWARD) == {"reward-0": ("ipc://r", "")}
    await asyncio.to_thread(writer.close)


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_silence_and_its_end_are_news_of_the_mailboxes_and_of_no_other_worker(
    kind: str, redis_client: redis.asyncio.Redis, redis_server: str
):
    """A reader gets it at the end of its wait, and need not look again and again."""
    if kind == "memory":
        memory = MemoryRegistry(unlisted_after_s=0.3)
        registry, writer = memory, memory.writer()
    else:
        # the server's clock is read in whole seconds
        registry, writer = (
            RedisRegistry(redis_client, "r", unlisted_after_s=1.0),
            RedisHeartbeatWriter(redis_server, "r", unlisted_after_s=1.0),
        )
    who = await registry.register(Role.REWARD, "reward-0")
    # without a mailbox
    another = await registry.register(Role.GENERATOR, "generator-0")
    await registry.set_endpoint(who, "ipc://r")
    seen = await caught_up(registry)
    assert await registry.endpoints(Role.REWARD) != {}
    assert await registry.notifications(seen, timeout_s=0.01) == {}
    found: dict[Topic, str] = {}
    async with asyncio.timeout(10.0):
        while not found:
            found = await registry.notifications(seen, timeout_s=0.05)
    assert list(found) == [Topic.ENDPOINTS]
    assert await registry.endpoints(Role.REWARD) == {}
    assert await registry.endpoints(Role.REWARD, silent=True) == {"reward-0": ("ipc://r", "")}
    seen |= found
    assert await registry.notifications(seen, timeout_s=0.01) == {}, "it is told once"
    assert await asyncio.to_thread(writer.beat, beat_of(another))
    assert (writer.fleet.num_workers, writer.fleet.num_silent) == (2, 1), "a heartbeat's answer tells it, too"
    assert await asyncio.to_thread(writer.beat, beat_of(who))
    assert writer.fleet.num_silent == 0
    found = await registry.notifications(seen, timeout_s=0.01)
    assert list(found) == [Topic.ENDPOINTS]
    assert await registry.endpoints(Role.REWARD) != {}
    await asyncio.to_thread(writer.close)


async def test_a_reader_asks_for_the_mailboxes_that_changed_and_not_for_all(redis_client: redis.asyncio.Redis):
    registry, writer = RedisRegistry(redis_client, "many"), RedisRegistry(redis_client, "many")
    whos = [await writer.register(Role.REWARD, f"reward-{n}") for n in range(50)]
    for who in whos:
        await writer.set_endpoint(who, f"ipc://{who.worker}")
    assert len(await registry.endpoints(Role.REWARD)) == 50

    async def answer_bytes() -> int:
        """Return the bytes of the server's answer to one more read."""
        before = (await redis_client.info("stats"))["total_net_output_bytes"]
        await registry.endpoints(Role.REWARD)
        after = (await redis_client.info("stats"))["total_net_output_bytes"]
        again = (await redis_client.info("stats"))["total_net_output_bytes"]
        return after - before - (again - after)

    assert await answer_bytes() < 100, "nothing has changed"
    await writer.set_endpoint(whos[7], "ipc://elsewhere")
    await writer.depart(whos[8])
    await writer.fence("reward-9")
    assert await answer_bytes() < 500
    # the senders to all roles are woken together
    before = (await redis_client.info("commandstats"))["cmdstat_evalsha"]["calls"]
    async with asyncio.TaskGroup() as tasks:
        reads = [tasks.create_task(registry.endpoints(role)) for role in (Role.REWARD, Role.REFERENCE, Role.VALUE)]
    assert (await redis_client.info("commandstats"))["cmdstat_evalsha"]["calls"] == before + 1
    found = reads[0].result()
    assert found == await RedisRegistry(redis_client, "many").endpoints(Role.REWARD)
    assert len(found) == 48 and found["reward-7"] == ("ipc://elsewhere", "")


async def test_a_reader_of_a_server_that_lost_its_last_writes_reads_all_mailboxes_again(redis_server: str):
    client = connect(redis_server)
    await client.flushall()
    registry, other = RedisRegistry(connect(redis_server), "lost"), RedisRegistry(connect(redis_server), "lost")
    for n in range(3):
        await other.set_endpoint(await other.register(Role.REWARD, f"reward-{n}"), f"ipc://{n}")
    seen = await caught_up(registry)
    assert len(await registry.endpoints(Role.REWARD)) == 3
    await client.flushall()
    for n in range(3, 6):
        await other.set_endpoint(await other.register(Role.REWARD, f"reward-{n}"), f"ipc://{n}")
    # as a restart does
    await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert set(await registry.endpoints(Role.REWARD)) == {"reward-3", "reward-4", "reward-5"}
    assert set(await registry.notifications(seen, timeout_s=0.01)) == {Topic.ENDPOINTS}
    for each in (registry, other):
        await each.aclose()
    await client.aclose()


async def test_news_whose_numbers_went_back_is_told_all_the_same(redis_client: redis.asyncio.Redis):
    """A server that takes another's place has lost its last writes, and its clock is behind."""
    registry = RedisRegistry(redis_client, "back")
    await registry.set_run_status(RunStatus(RunState.RUNNING))
    key = b"{back}:news:run"
    assert await redis_client.xlen(key) == 1
    seen = await caught_up(registry)
    await redis_client.delete(key)
    await redis_client.xadd(key, {"changed": 1}, id="1-1")
    found = await registry.notifications(seen, timeout_s=0.01)
    assert list(found) == [Topic.RUN]
    assert await registry.notifications(seen | found, timeout_s=0.01) == {}
