"""Claims about the registry on a Redis server: writes, reads, connections, limits."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import redis.asyncio
import redis.exceptions

from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.runtime.registry.contract import (
    RunState,
    RunStatus,
    Topic,
)
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.registry.redis_heartbeats import RedisHeartbeatWriter
from protocol.errors import LedgerUnavailable
from protocol.ids import Incarnation, Role
from tests.own_server import own_server
from tests.pipeline.ledger.builders import make_spec
from tests.pipeline.runtime.registries import NOTHING_HEARD, announcement, beat_of, heartbeats


async def test_a_server_that_lost_the_indexes_has_them_again_after_the_next_heartbeat(
    redis_client: redis.asyncio.Redis, redis_server: str
):
    registry, writer = RedisRegistry(redis_client, "index"), RedisHeartbeatWriter(redis_server, "index")
    who = await registry.register(Role.GENERATOR, "generator-0")
    for _ in range(2):
        assert await asyncio.to_thread(writer.beat, beat_of(who))
    await redis_client.delete("{index}:versions", "{index}:reaching")
    # as a restart does
    await redis_client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    for _ in range(2):
        assert await asyncio.to_thread(writer.beat, beat_of(who))
    assert [beat.who for beat in await registry.heartbeats(Role.GENERATOR)] == [who]
    assert set(await registry.reaching_generators()) == {"generator-0"}
    await asyncio.to_thread(writer.close)


async def test_most_heartbeats_are_read_and_are_not_written_to_the_append_only_file(tmp_path: Path):
    with own_server(tmp_path, "appendonly yes", "appendfsync always") as url:
        client = connect(url)
        registry, writer = RedisRegistry(client, "kept"), RedisHeartbeatWriter(url, "kept")
        who = await registry.register(Role.GENERATOR, "generator-0")

        async def size() -> int:
            return int((await client.info("persistence"))["aof_current_size"])

        async def written(progress: int) -> int:
            before = await size()
            beat = beat_of(who, progress=progress, detail="x" * 200)
            assert await asyncio.to_thread(writer.beat, beat)
            assert await heartbeats(registry) == [beat]
            return await size() - before

        grown = [await written(progress) for progress in range(12)]
        kept = [progress for progress, num_bytes in enumerate(grown) if num_bytes > 200]
        assert [num_bytes for num_bytes in grown if num_bytes <= 200] == [0] * (12 - len(kept))
        assert kept[0] == 0 and len(kept) in (3, 4), "the first one, and then one of four"
        await asyncio.to_thread(writer.close)
        await registry.aclose()


async def test_a_second_look_at_all_heartbeats_reads_those_that_came_since(
    redis_client: redis.asyncio.Redis, redis_server: str
):
    registry, writer = RedisRegistry(redis_client, "looks"), RedisHeartbeatWriter(redis_server, "looks")
    whos = [await registry.register(Role.GENERATOR, f"generator-{n}") for n in range(40)]

    def beat(progress: int, *of: Incarnation) -> None:
        for who in of:
            assert writer.beat(beat_of(who, progress=progress, detail="x" * 200))

    async def look() -> tuple[dict[str, int], int]:
        before = (await redis_client.info("commandstats")).get("cmdstat_hmget", {"calls": 0})["calls"]
        found = {beat.who.worker: beat.progress for beat in await registry.heartbeats()}
        return found, (await redis_client.info("commandstats")).get("cmdstat_hmget", {"calls": 0})["calls"] - before

    await asyncio.to_thread(beat, 1, *whos)
    assert await look() == ({who.worker: 1 for who in whos}, 1)
    assert await look() == ({who.worker: 1 for who in whos}, 0), "nothing came"
    await asyncio.to_thread(beat, 2, whos[7])
    await registry.depart(whos[8])
    await registry.fence("generator-9")
    reborn = await registry.register(Role.GENERATOR, "generator-10")
    left = {who.worker: 1 for who in whos if who.worker not in ("generator-8", "generator-9", "generator-10")}
    assert (await look())[0] == left | {"generator-7": 2}
    await asyncio.to_thread(beat, 3, reborn)
    assert (await look())[0] == left | {"generator-7": 2, "generator-10": 3}
    await asyncio.to_thread(writer.close)


async def test_a_workers_ledger_and_registry_make_one_connection(redis_server: str, redis_client: redis.asyncio.Redis):
    async def num_connections() -> int:
        return int((await redis_client.info("stats"))["total_connections_received"])

    client = connect(redis_server)
    ledger = RedisLedger(client, "test")
    registry = RedisRegistry(client, "test", connection=ledger.connection)
    before = await num_connections()
    await registry.register(Role.GENERATOR, "generator-0")
    await ledger.open(make_spec())
    await registry.run_status()
    assert await num_connections() == before + 1
    await registry.aclose()


async def test_two_runs_under_one_server_do_not_see_each_other(redis_client: redis.asyncio.Redis):
    one, other = RedisRegistry(redis_client, "one"), RedisRegistry(redis_client, "other")
    await one.register(Role.REWARD, "reward-0")
    assert await other.epoch("reward-0") == 0


async def test_a_server_at_its_memory_limit_still_takes_heartbeats_versions_and_status(
    redis_client: redis.asyncio.Redis, redis_server: str
):
    registry = RedisRegistry(redis_client, "full")
    who = await registry.register(Role.LEARNER, "learner-0")
    writer = RedisHeartbeatWriter(redis_server, "full")
    await redis_client.config_set("maxmemory", "1")
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            await redis_client.set("anything", "x")
        assert await asyncio.to_thread(writer.beat, beat_of(who))
        await registry.announce_weights(who, announcement(1))
        await registry.set_endpoint(who, "ipc://l")
        await registry.set_run_status(RunStatus(RunState.STOPPING))
        assert (await registry.register(Role.REWARD, "reward-0")).epoch == 1
        assert await registry.weights() == announcement(1)
        assert await heartbeats(registry) == [beat_of(who)]
        await registry.fence("learner-0")
        assert set(await registry.notifications(NOTHING_HEARD, timeout_s=0.001)) == set(Topic)
    finally:
        await redis_client.config_set("maxmemory", "0")
        await asyncio.to_thread(writer.close)


async def test_no_server_is_ledger_unavailable_and_says_so_soon():
    registry = RedisRegistry(connect("unix:///nowhere/at/all.sock", patience_s=0.3), "r")
    writer = RedisHeartbeatWriter("unix:///nowhere/at/all.sock", "r")
    began = time.monotonic()
    with pytest.raises(LedgerUnavailable, match="does not answer"):
        await registry.heartbeats()
    with pytest.raises(LedgerUnavailable):
        await asyncio.to_thread(writer.beat, beat_of(Incarnation(role=Role.REWARD, worker="reward-0", epoch=1)))
    assert time.monotonic() - began < 10.0
    await asyncio.to_thread(writer.close)
    await registry.aclose()
