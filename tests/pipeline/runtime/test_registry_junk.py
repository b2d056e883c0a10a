"""What any worker's token may write into the registry's server ends no reader, and hides no healthy entry."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import msgspec
import pytest
import redis.asyncio

from pipeline.ledger.redis import keys
from pipeline.ledger.redis.client import connect
from pipeline.runtime.registry.contract import FailureReport, Fleet, RunState, RunStatus, Topic
from pipeline.runtime.registry.entries import RelayAnnouncement
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.registry.redis_heartbeats import RedisHeartbeatWriter
from pipeline.runtime.registry.redis_keys import TYPES, keys_of
from protocol.errors import Fenced
from protocol.ids import Incarnation, Role
from tests.pipeline.runtime.registries import announcement, beat_of, caught_up

RUN = "junk"
HEALTHY = ("generator-0", "reward-0")
JUNK = (
    b"",
    b"\xff\xfe\x00",
    b"{",
    b"null",
    b"[]",
    b"[" * 100_000,
    b'{"unknown":' + b"[" * 100_000,
    b'{"evictions":"[{\\"unknown\\":' + b"[" * 100_000 + b'"}',
    b"abc",
    b"-7",
    b"1" * 300,
    b'{"who":{"role":"generator","worker":"generator-0","epoch":1}}',
    b'{"state":"sleeping"}',
)
SCORES = ("inf", "-inf", "1e300", "-1e300", "0")


@pytest.fixture
async def run(redis_server: str) -> AsyncIterator[tuple[RedisRegistry, RedisHeartbeatWriter, redis.asyncio.Redis]]:
    client = connect(redis_server)
    await client.flushall()
    registry, writer = RedisRegistry(client, RUN), RedisHeartbeatWriter(redis_server, RUN)
    yield registry, writer, client
    await asyncio.to_thread(writer.close)
    await registry.aclose()


async def begin(registry: RedisRegistry, writer: RedisHeartbeatWriter) -> dict[str, Incarnation]:
    """Fill a registry with all that healthy workers and their supervisor write."""
    workers = {name: await registry.register(Role(name.partition("-")[0]), name) for name in HEALTHY}
    for who in workers.values():
        await registry.set_endpoint(who, f"ipc://{who.worker}")
        await registry.announce_relay(who, RelayAnnouncement(worker=who.worker, endpoint="ipc://relay"))
        await asyncio.to_thread(writer.beat, beat_of(who))
    learner = await registry.register(Role.LEARNER, "learner")
    await registry.announce_weights(learner, announcement(1))
    await registry.depart(learner, FailureReport(who=learner, error="E", message="m"))
    await registry.set_fleet(Fleet({Role.GENERATOR: 1}))
    await registry.set_run_status(RunStatus(RunState.RUNNING))
    return workers


async def read_all(registry: RedisRegistry, who: Incarnation) -> None:
    """Make every reading call."""
    beats = await registry.heartbeats()
    assert set(HEALTHY) <= {beat.who.worker for beat in beats}
    assert all(abs(beat.silent_s) < 1e9 and abs(beat.clock_ahead_s) < 1e11 for beat in beats)
    assert set(HEALTHY) <= {beat.who.worker for beat in await registry.heartbeats_of([*HEALTHY, "other"])}
    assert "generator-0" in {beat.who.worker for beat in await registry.heartbeats(Role.GENERATOR)}
    assert (await registry.endpoints(Role.REWARD, silent=True))["reward-0"] == ("ipc://reward-0", "")
    assert "m" in {failure.message for failure in await registry.failures()}
    await registry.reaching_generators()
    await registry.relays(who, [0, 1, 2])
    await registry.epoch("other")
    assert (await registry.run_status()).state is RunState.RUNNING
    await registry.fleet()
    await registry.settings_changes()
    await registry.last_settings_change()
    await registry.weights()
    await registry.notifications(dict.fromkeys(Topic, "0 "), timeout_s=0.01)


async def litter(client: redis.asyncio.Redis, dice: random.Random) -> None:
    """Write junk into every key of the registry, beside what is there."""
    names = keys_of(RUN)
    for key, kind in TYPES.items():
        for entry in ("other", b"\xff\xfe", "", "a b\n\x1b[31m"):
            junk = dice.choice(JUNK)
            if kind == "hash":
                await client.hset(names[key], entry, junk)
            elif kind == "zset":
                await client.execute_command(
                    "ZADD", names[key], dice.choice(SCORES), junk if key == "failures" else entry
                )
            elif kind == "set":
                await client.sadd(names[key], entry)
            elif kind == "stream":
                await client.xadd(names[key], {entry: junk})
            elif kind == "list":
                await client.rpush(names[key], junk)


@pytest.mark.parametrize("seed", range(4))
async def test_junk_in_every_key_leaves_every_reader_alive_and_every_healthy_entry_read(
    run: tuple[RedisRegistry, RedisHeartbeatWriter, redis.asyncio.Redis], seed: int
) -> None:
    registry, writer, client = run
    workers = await begin(registry, writer)
    await read_all(registry, workers["reward-0"])
    await litter(client, random.Random(seed))
    fresh = RedisRegistry(client, RUN)
    for reader in (registry, fresh):
        await read_all(reader, workers["reward-0"])
    assert fresh.unreadable
    for name in ("other", "third"):
        who = await registry.register(Role.GENERATOR, name)
        await registry.set_endpoint(who, f"ipc://{name}")
        assert await asyncio.to_thread(writer.beat, beat_of(who))
        assert (await registry.endpoints(Role.GENERATOR))[name] == (f"ipc://{name}", "")
        assert name in {beat.who.worker for beat in await fresh.heartbeats()}


async def test_every_entry_that_cannot_be_read_is_named_with_its_worker(
    run: tuple[RedisRegistry, RedisHeartbeatWriter, redis.asyncio.Redis],
) -> None:
    registry, writer, client = run
    await begin(registry, writer)
    assert await registry.check_entries() == {}
    hashes = ("epochs", "endpoints", "heartbeats", "relays")
    for key in hashes:
        for name in ("other", b"\xff\xfe"):
            await client.hset(keys_of(RUN)[key], name, b"\xff{")  # pyright: ignore[reportArgumentType]
    await client.zadd(keys.failures(RUN), {"[": 1.0})
    for name in ("other", b"\xff\xfe"):
        await client.execute_command("ZADD", keys.seen(RUN), "1", name)
    named = {f"{key} of {name}" for key in hashes for name in ("other", "\\xff\\xfe")}
    assert set(await registry.check_entries()) == named | {"failures"}
    await registry.register(Role.GENERATOR, "other")
    assert "epochs of other" not in await registry.check_entries()


async def test_a_mailbox_that_was_known_stays_so_when_its_entry_becomes_junk(
    run: tuple[RedisRegistry, RedisHeartbeatWriter, redis.asyncio.Redis], redis_server: str
) -> None:
    registry, writer, client = run
    await begin(registry, writer)
    mailbox = {"reward-0": ("ipc://reward-0", "")}
    assert await registry.endpoints(Role.REWARD, silent=True) == mailbox
    await client.hset(keys.endpoints(RUN), "reward-0", b"\xff{")  # pyright: ignore[reportArgumentType]
    await client.zadd(keys.endpoint_changes(RUN), {"reward-0": 1e6})
    assert await registry.endpoints(Role.REWARD, silent=True) == mailbox
    await registry._connection.aclose()
    assert await registry.endpoints(Role.REWARD, silent=True) == mailbox, "all is read again on a new connection"
    assert "endpoints of reward-0" in registry.unreadable
    who = await registry.register(Role.REWARD, "reward-0")
    await registry.set_endpoint(who, "ipc://again")
    assert await registry.endpoints(Role.REWARD, silent=True) == {"reward-0": ("ipc://again", "")}


@pytest.mark.parametrize("key", ["heartbeats", "endpoints", "epochs"])
async def test_a_workers_own_entry_that_cannot_be_read_is_named_and_written_anew(
    run: tuple[RedisRegistry, RedisHeartbeatWriter, redis.asyncio.Redis], key: str
) -> None:
    registry, writer, client = run
    await begin(registry, writer)
    who = await registry.register(Role.GENERATOR, "generator-1")
    for junk in JUNK:
        await registry.set_endpoint(who, "ipc://generator-1")
        await asyncio.to_thread(writer.beat, beat_of(who))
        await client.hset(keys_of(RUN)[key], "generator-1", junk)
        fresh = RedisRegistry(client, RUN)
        await fresh.heartbeats()
        await fresh.endpoints(Role.GENERATOR)
        await fresh.epoch("generator-1")
        # an empty endpoint is no mailbox
        if key == "heartbeats" or (key == "endpoints" and junk):
            assert f"{key} of generator-1" in fresh.unreadable
        before = who.epoch
        who = await registry.register(Role.GENERATOR, "generator-1")
        assert who.epoch > before
        await registry.set_endpoint(who, "ipc://again")
        assert await asyncio.to_thread(writer.beat, beat_of(who))
        assert "generator-1" in {beat.who.worker for beat in await fresh.heartbeats()}
        assert (await fresh.endpoints(Role.GENERATOR))["generator-1"] == ("ipc://again", "")
        assert not {"heartbeats of generator-1", "endpoints of generator-1"} & fresh.unreadable.keys()


async def test_an_epoch_that_is_none_fences_its_worker_and_no_other(
    run: tuple[RedisRegistry, RedisHeartbeatWriter, redis.asyncio.Redis],
) -> None:
    registry, writer, client = run
    workers = await begin(registry, writer)
    who, other = workers["generator-0"], workers["reward-0"]
    await client.hset(keys.epochs(RUN), who.worker, "abc")
    assert not await asyncio.to_thread(writer.beat, beat_of(who))
    with pytest.raises(Fenced):
        await registry.set_endpoint(who, "ipc://x")
    assert await asyncio.to_thread(writer.beat, beat_of(other))
    newer = await registry.register(who.role, who.worker)
    assert newer.epoch > who.epoch
    assert (await registry.fence(who.worker)) == newer.epoch + 1


@pytest.mark.parametrize("key", [key for key in TYPES if key not in ("fleet", "settings_changes")])
async def test_a_key_of_another_type_is_removed_and_its_entries_are_written_anew(
    run: tuple[RedisRegistry, RedisHeartbeatWriter, redis.asyncio.Redis], key: str
) -> None:
    registry, writer, client = run
    workers = await begin(registry, writer)
    name = keys_of(RUN)[key]
    await client.delete(name)
    await (client.lpush(name, "x") if TYPES[key] == "string" else client.set(name, "x"))
    await registry.heartbeats()
    await registry.endpoints(Role.REWARD)
    await registry.failures()
    await registry.reaching_generators()
    await registry.heartbeats(Role.GENERATOR)
    assert (await registry.run_status()).state is RunState.RUNNING
    await registry.weights()
    await registry.notifications(dict.fromkeys(Topic, "0 "), timeout_s=0.01)
    for who in workers.values():
        newer = await registry.register(who.role, who.worker)
        assert newer.epoch > who.epoch
        await registry.set_endpoint(newer, f"ipc://{who.worker}")
        await registry.announce_relay(newer, RelayAnnouncement(worker=who.worker, endpoint="ipc://relay"))
        assert await asyncio.to_thread(writer.beat, beat_of(newer))
    assert {beat.who.worker for beat in await registry.heartbeats()} == set(HEALTHY)
    assert await client.type(name) in (TYPES[key].encode(), b"none")


async def test_news_whose_ids_are_used_up_are_told_all_the_same(
    run: tuple[RedisRegistry, RedisHeartbeatWriter, redis.asyncio.Redis],
) -> None:
    registry, writer, client = run
    workers = await begin(registry, writer)
    for topic in Topic:
        await client.xadd(keys.notifications(RUN, topic), {"x": "y"}, id=f"{2**64 - 1}-{2**64 - 1}")
    seen = await caught_up(registry)
    await registry.set_run_status(RunStatus(RunState.STOPPING))
    await registry.set_endpoint(workers["reward-0"], "ipc://new")
    found = await registry.notifications(seen, timeout_s=0.05)
    assert {Topic.RUN, Topic.ENDPOINTS} <= found.keys()


async def test_numbers_that_no_worker_reports_are_dropped(
    run: tuple[RedisRegistry, RedisHeartbeatWriter, redis.asyncio.Redis],
) -> None:
    registry, writer, client = run
    workers = await begin(registry, writer)
    good = beat_of(workers["generator-0"])
    for change in ({"progress": 10**40}, {"pid": -1}, {"at_s": 1e300}, {"at_s": -1.0}, {"who": workers["reward-0"]}):
        junk = msgspec.to_builtins(msgspec.structs.replace(good, **change))
        text = msgspec.json.encode({**junk, "progress": 0}).replace(
            b'"progress":0', b'"progress":%d' % junk["progress"]
        )
        await client.hset(keys.heartbeats(RUN), "generator-0", text)
        fresh = RedisRegistry(client, RUN)
        assert {beat.who.worker for beat in await fresh.heartbeats()} == {"reward-0"}
        assert set(fresh.unreadable) == {"heartbeats of generator-0"}


async def test_a_fleet_of_another_type_is_set_anew(
    run: tuple[RedisRegistry, RedisHeartbeatWriter, redis.asyncio.Redis],
) -> None:
    registry, writer, client = run
    await begin(registry, writer)
    await client.delete(keys.fleet(RUN))
    await client.lpush(keys.fleet(RUN), "x")
    assert await registry.fleet() is None
    await registry.set_fleet(Fleet({Role.GENERATOR: 2}))
    assert await registry.fleet() == Fleet({Role.GENERATOR: 2})
