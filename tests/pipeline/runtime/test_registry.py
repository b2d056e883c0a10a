"""Promises of every registry; each test runs on the memory and on the Redis implementation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import redis.asyncio
import redis.exceptions
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.runtime.registry.contract import (
    MAX_REACHING,
    Drain,
    Fleet,
    Heartbeat,
    HeartbeatWriter,
    LinkReport,
    Registry,
    RelayAnnouncement,
    RelayPlace,
    RunState,
    RunStatus,
    Topic,
    WaitingFor,
    WeightsAnnouncement,
)
from pipeline.runtime.registry.memory import MemoryRegistry
from pipeline.runtime.registry.redis import RedisHeartbeatWriter, RedisRegistry
from protocol.errors import Fenced, LedgerUnavailable
from protocol.ids import Incarnation, Role
from protocol.messages import BASE_VERSION
from tests.own_server import own_server
from tests.pipeline.ledger.builders import make_spec


@dataclass
class Subject:
    registry: Registry
    writer: HeartbeatWriter


@pytest.fixture(params=["memory", "redis"])
async def subject(request: pytest.FixtureRequest, redis_server: str) -> AsyncIterator[Subject]:
    if request.param == "memory":
        registry = MemoryRegistry()
        yield Subject(registry, registry.writer())
        return
    client = connect(redis_server)
    await client.flushall()
    writer = RedisHeartbeatWriter(redis_server, "contract")
    registry = RedisRegistry(client, "contract")
    yield Subject(registry, writer)
    await asyncio.to_thread(writer.close)
    await registry.aclose()
    await registry.aclose()


def beat_of(who: Incarnation, **changes: object) -> Heartbeat:
    fields = {
        "who": who,
        "pid": 42,
        "host": "somewhere",
        "at_s": 1_000.5,
        "started_s": 900.0,
        "progress": 7,
        "progress_at_s": 1_000.0,
        "waiting_for": WaitingFor.ROOM,
        "detail": "reward-0 has no room",
        "policy_version": 3,
        "rss_bytes": 123,
        "counters": {"chunks": 5.0},
        "links": (LinkReport(name="generator-0>reward-0", sent=9, refused=1),),
    }
    return Heartbeat(**{**fields, **changes})  # type: ignore[arg-type]


async def heartbeats(registry: Registry, role: Role | None = None, **asked: int) -> list[Heartbeat]:
    """Return the heartbeats as they were written: without the registry's own additions."""
    found = await registry.heartbeats(role, **asked)
    return [msgspec.structs.replace(beat, silent_s=0.0, clock_ahead_s=0.0) for beat in found]


def announcement(version: int, digest: str = "xxh3-128:0") -> WeightsAnnouncement:
    return WeightsAnnouncement(policy_version=version, digest=digest, path="/w", num_bytes=1, host="h")


async def test_epochs_of_a_worker_only_grow_and_are_its_own(subject: Subject):
    registry = subject.registry
    assert await registry.epoch("generator-0") == 0
    first = await registry.register(Role.GENERATOR, "generator-0")
    second = await registry.register(Role.GENERATOR, "generator-0")
    assert (first.epoch, second.epoch) == (1, 2)
    assert await registry.fence("generator-0") == 3
    assert await registry.epoch("generator-0") == 3
    assert (await registry.register(Role.GENERATOR, "generator-1")).epoch == 1


async def test_a_heartbeat_comes_back_as_it_was_written(subject: Subject):
    who = await subject.registry.register(Role.GENERATOR, "generator-0")
    assert await asyncio.to_thread(subject.writer.beat, beat_of(who))
    assert await heartbeats(subject.registry) == [beat_of(who)]
    assert [beat.who for beat in await subject.registry.heartbeats_of([who.worker, "another"])] == [who]
    assert await subject.registry.heartbeats_of(["another"]) == await subject.registry.heartbeats_of([]) == []
    assert await asyncio.to_thread(subject.writer.beat, beat_of(who, progress=8))
    assert [beat.progress for beat in await subject.registry.heartbeats()] == [8]


async def test_heartbeats_of_a_role_and_of_laggards_are_read_without_the_others(subject: Subject):
    registry, beats = subject.registry, {}
    for role, worker, version in (
        (Role.GENERATOR, "generator-0", 3), (Role.GENERATOR, "generator-1", 5), (Role.GENERATOR, "generator-2", -1),
        (Role.VALUE, "value", 0), (Role.LEARNER, "learner", 5),
    ):  # fmt: skip
        beats[worker] = beat_of(await registry.register(role, worker), policy_version=version)
        assert await asyncio.to_thread(subject.writer.beat, beats[worker])
    assert await heartbeats(registry, Role.VALUE) == [beats["value"]]
    assert await heartbeats(registry, Role.REWARD) == []
    assert await heartbeats(registry, Role.GENERATOR) == [beats[f"generator-{n}"] for n in range(3)]
    assert await heartbeats(registry, Role.GENERATOR, below_version=5) == [beats["generator-0"], beats["generator-2"]]
    assert await heartbeats(registry, Role.GENERATOR, below_version=0) == [beats["generator-2"]]
    # it takes the newer version, another departs, and a third is fenced
    beats["generator-0"] = msgspec.structs.replace(beats["generator-0"], policy_version=6)
    assert await asyncio.to_thread(subject.writer.beat, beats["generator-0"])
    assert await heartbeats(registry, Role.GENERATOR, below_version=6) == [beats["generator-1"], beats["generator-2"]]
    await registry.depart(beats["generator-2"].who)
    await registry.fence("generator-1")
    assert await heartbeats(registry, Role.GENERATOR) == [beats["generator-0"]]


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


async def test_generators_that_reach_scorers_are_known_with_their_age(subject: Subject):
    registry = subject.registry
    assert await registry.reaching_generators() == {}

    async def beat(worker: str, **changes: object) -> Incarnation:
        who = await registry.register(Role.REWARD if worker.startswith("reward") else Role.GENERATOR, worker)
        assert await asyncio.to_thread(subject.writer.beat, beat_of(who, **changes))
        return who

    await beat("reward-0")
    await beat("generator-0", policy_version=-1)
    await beat("generator-1", unreached="reward-0 at tcp://10.0.0.1:1 (no answer for 9 s)")
    assert await registry.reaching_generators() == {}
    last = [await beat(f"generator-{n}") for n in range(2, 5)]
    # the learner is no scorer
    last.append(await beat("generator-5", unreached="learner at tcp://10.0.0.1:1 (no answer for 9 s)"))
    found = await registry.reaching_generators()
    assert set(found) == {f"generator-{n}" for n in range(2, 6)}
    assert all(0.0 <= age_s < 5.0 for age_s in found.values())
    await registry.depart(last[-1])
    await registry.fence("generator-4")
    assert set(await registry.reaching_generators()) == {"generator-2", "generator-3"}
    cut_off = beat_of(last[0], unreached="reward-0 at tcp://10.0.0.1:1 (no answer for 9 s)")
    assert await asyncio.to_thread(subject.writer.beat, cut_off)
    assert set(await registry.reaching_generators()) == {"generator-3"}
    for n in range(20, 60):
        await beat(f"generator-{n}")
    assert len(await registry.reaching_generators()) == MAX_REACHING, "some are enough"


@pytest.mark.parametrize("ahead_s", [-60.0, 0.0, 60.0])
async def test_a_heartbeats_age_is_by_the_registrys_clock_whatever_the_workers_shows(subject: Subject, ahead_s: float):
    who = await subject.registry.register(Role.REWARD, "reward-0")
    assert await asyncio.to_thread(subject.writer.beat, beat_of(who, at_s=time.time() + ahead_s))
    await asyncio.sleep(0.1)
    (beat,) = await subject.registry.heartbeats()
    assert 0.1 <= beat.silent_s < 5.0
    assert ahead_s - 5.0 < beat.clock_ahead_s < ahead_s + 1.0


async def test_a_fenced_incarnation_cannot_beat_bind_publish_or_remove_its_successor(subject: Subject):
    registry = subject.registry
    old = await registry.register(Role.LEARNER, "learner-0")
    new = await registry.register(Role.LEARNER, "learner-0")
    await registry.set_endpoint(new, "ipc://new")
    assert await asyncio.to_thread(subject.writer.beat, beat_of(new))

    assert not await asyncio.to_thread(subject.writer.beat, beat_of(old, progress=99))
    with pytest.raises(Fenced, match="learner-0#1 is fenced: the newest epoch of learner-0 is 2"):
        await registry.set_endpoint(old, "ipc://old")
    with pytest.raises(Fenced):
        await registry.announce_weights(old, announcement(1))
    await registry.depart(old)

    assert await heartbeats(registry) == [beat_of(new)]
    assert await registry.endpoints(Role.LEARNER) == {"learner-0": ("ipc://new", "")}
    assert await registry.weights() is None


async def test_one_that_never_registered_is_fenced(subject: Subject):
    stranger = Incarnation(role=Role.REWARD, worker="reward-9", epoch=1)
    assert not await asyncio.to_thread(subject.writer.beat, beat_of(stranger))
    with pytest.raises(Fenced):
        await subject.registry.set_endpoint(stranger, "ipc://x")
    assert await subject.registry.heartbeats() == []


async def test_fencing_forgets_the_endpoint_and_the_heartbeat_of_the_dead(subject: Subject):
    who = await subject.registry.register(Role.REWARD, "reward-0")
    await subject.registry.set_endpoint(who, "ipc://r")
    await asyncio.to_thread(subject.writer.beat, beat_of(who))
    await subject.registry.fence("reward-0")
    assert await subject.registry.endpoints(Role.REWARD) == {}
    assert await subject.registry.heartbeats() == []


async def test_endpoints_are_listed_by_role_with_their_keys_as_soon_as_they_are_bound(subject: Subject):
    reward = await subject.registry.register(Role.REWARD, "reward-0")
    reference = await subject.registry.register(Role.REFERENCE, "reference-0")
    # has bound nothing yet
    await subject.registry.register(Role.REWARD, "reward-1")
    await subject.registry.set_endpoint(reward, "tcp://10.0.0.1:5555", public_key="key")
    await subject.registry.set_endpoint(reference, "ipc://b")
    assert await subject.registry.endpoints(Role.REWARD) == {"reward-0": ("tcp://10.0.0.1:5555", "key")}
    assert await subject.registry.endpoints(Role.REFERENCE) == {"reference-0": ("ipc://b", "")}


async def test_one_that_departs_leaves_nothing_but_its_epoch(subject: Subject):
    who = await subject.registry.register(Role.REWARD, "reward-0")
    await subject.registry.set_endpoint(who, "ipc://r")
    await asyncio.to_thread(subject.writer.beat, beat_of(who))
    await subject.registry.depart(who)
    await subject.registry.depart(who)
    assert await subject.registry.endpoints(Role.REWARD) == {}
    assert await subject.registry.heartbeats() == []
    assert await subject.registry.epoch("reward-0") == 1


async def test_published_versions_only_grow(subject: Subject):
    who = await subject.registry.register(Role.LEARNER, "learner-0")
    assert await subject.registry.weights() is None
    await subject.registry.announce_weights(who, announcement(0))
    await subject.registry.announce_weights(who, announcement(2))
    # a repeat, after a lost answer
    await subject.registry.announce_weights(who, announcement(2))
    for version in (1, 2):
        with pytest.raises(ValueError, match=f"announced policy version {version}, but 2 is published"):
            await subject.registry.announce_weights(who, announcement(version, "xxh3-128:1"))
    assert await subject.registry.weights() == announcement(2)


async def test_a_version_is_announced_with_the_base_that_it_needs(subject: Subject):
    who = await subject.registry.register(Role.LEARNER, "learner-0")
    whole = announcement(1)
    adapter = msgspec.structs.replace(whole, base=announcement(BASE_VERSION, "xxh3-128:b"))
    await subject.registry.announce_weights(who, adapter)
    assert await subject.registry.weights() == adapter != whole


async def test_the_fleet_and_the_run_status_are_what_was_set_last(subject: Subject):
    assert await subject.registry.fleet() is None
    assert await subject.registry.run_status() == RunStatus(RunState.STARTING)
    await subject.registry.set_fleet(Fleet({Role.GENERATOR: 2}))
    await subject.registry.set_fleet(Fleet({Role.GENERATOR: 4, Role.REWARD: 1}))
    await subject.registry.set_run_status(RunStatus(RunState.RUNNING))
    await subject.registry.set_run_status(RunStatus(RunState.FAILED, "reward-0 kept failing"))
    assert await subject.registry.fleet() == Fleet({Role.GENERATOR: 4, Role.REWARD: 1})
    assert await subject.registry.run_status() == RunStatus(RunState.FAILED, "reward-0 kept failing")


async def test_a_fleet_is_replaced_only_while_it_is_the_one_that_was_read(subject: Subject):
    registry = subject.registry
    first = Fleet({Role.LEARNER: 1, Role.GENERATOR: 2})
    assert not await registry.replace_fleet(first, Fleet({Role.GENERATOR: 9}))
    await registry.set_fleet(first)
    by_demand = Fleet({Role.LEARNER: 1, Role.GENERATOR: 4}, demand="the learner waits 50 % of its time")
    read = await registry.fleet()
    assert read == first and read is not None
    assert await registry.replace_fleet(read, by_demand)
    assert not await registry.replace_fleet(read, Fleet({Role.GENERATOR: 3}))
    assert await registry.fleet() == by_demand
    by_hand = Fleet({Role.LEARNER: 1, Role.GENERATOR: 4}, is_by_hand=True)
    await registry.set_fleet(by_hand)
    assert await registry.fleet() == by_hand
    drains = (Drain("generator-hostb-x3f9a1-0", 12), Drain("reward-0", 3, is_replaced=True))
    drained = Fleet({Role.GENERATOR: 4}, drains=drains)
    assert await registry.replace_fleet(by_hand, drained)
    assert await registry.fleet() == drained


NOTHING_HEARD = dict.fromkeys(Topic, "")


async def caught_up(registry: Registry) -> dict[Topic, str]:
    """Return the newest notification of every topic."""
    return NOTHING_HEARD | await registry.notifications(NOTHING_HEARD, timeout_s=0.001)


async def test_whoever_waits_for_news_is_told_what_changed_and_can_read_it_then(subject: Subject):
    registry = subject.registry
    learner = await registry.register(Role.LEARNER, "learner-0")
    seen = await caught_up(registry)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(registry.notifications(seen, timeout_s=4.0))
        # the subscriber does not wait for that
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


def relay(worker: str, endpoint: str = "tcp://10.0.0.1:1") -> RelayAnnouncement:
    return RelayAnnouncement(worker=worker, endpoint=endpoint, public_key="k")


async def test_relays_keep_the_order_in_which_they_came_and_see_only_earlier_ones(subject: Subject):
    registry = subject.registry
    names = ("generator-2", "generator-0", "generator-1")
    who = {name: await registry.register(Role.GENERATOR, name) for name in names}
    for place, name in enumerate(names):
        assert await registry.announce_relay(who[name], relay(name)) == RelayPlace(place, place + 1)
    moved = relay("generator-2", "tcp://10.0.0.2:2")
    assert await registry.announce_relay(who["generator-2"], moved) == RelayPlace(0, 3)
    assert await registry.relays(who["generator-1"], [1, 0]) == [relay("generator-0"), moved]
    assert await registry.relays(who["generator-0"], [2, 1, 0]) == [moved], "never itself, nor one that came later"
    assert await registry.relays(who["generator-2"], [0, 1]) == []
    assert await registry.relays(who["generator-1"], []) == []


async def test_a_relay_that_was_replaced_or_left_is_forgotten_and_the_others_move_up(subject: Subject):
    registry = subject.registry
    names = ("generator-0", "generator-1", "generator-2")
    who = {name: await registry.register(Role.GENERATOR, name) for name in names}
    for name in names:
        await registry.announce_relay(who[name], relay(name))
    again = await registry.register(Role.GENERATOR, "generator-0")
    with pytest.raises(Fenced):
        await registry.announce_relay(who["generator-0"], relay("generator-0"))
    assert await registry.relays(who["generator-2"], [0]) == []
    assert await registry.relays(who["generator-2"], [0]) == [relay("generator-1")]
    await registry.depart(who["generator-1"])
    assert await registry.relays(who["generator-2"], [0]) == []
    assert await registry.announce_relay(who["generator-2"], relay("generator-2")) == RelayPlace(0, 1)
    assert await registry.announce_relay(again, relay("generator-0")) == RelayPlace(1, 2)


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_a_silent_relay_is_forgotten(kind: str, redis_client: redis.asyncio.Redis):
    if kind == "memory":
        # silent from the very next moment
        registry: Registry = MemoryRegistry(unlisted_after_s=-1.0)
    else:
        registry = RedisRegistry(redis_client, "r", unlisted_after_s=-10.0)
    first, second = [await registry.register(Role.GENERATOR, f"generator-{number}") for number in (0, 1)]
    await registry.announce_relay(first, relay("generator-0"))
    await registry.announce_relay(second, relay("generator-1"))
    assert await registry.relays(second, [0]) == []
    assert await registry.announce_relay(second, relay("generator-1")) == RelayPlace(0, 1)


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


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["register", "fence", "beat", "depart"]), st.integers(0, 3)), max_size=30))
async def test_only_the_newest_incarnation_is_ever_seen(steps: list[tuple[str, int]]):
    registry = MemoryRegistry()
    lives: list[Incarnation] = []
    newest = 0
    for action, back in steps:
        if action == "register":
            lives.append(await registry.register(Role.REWARD, "reward-0"))
            newest = lives[-1].epoch
        elif action == "fence":
            newest = await registry.fence("reward-0")
        elif lives:
            who = lives[-1 - min(back, len(lives) - 1)]
            if action == "beat":
                assert registry.beat(beat_of(who)) is (who.epoch == newest)
            else:
                await registry.depart(who)
        assert all(beat.who.epoch == newest for beat in await registry.heartbeats())
    assert await registry.epoch("reward-0") == newest
