"""Claims that need a real server: no memory, lost replies, its clock, two callers at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.exceptions

from pipeline.ledger.life import TrajectoryLife
from pipeline.ledger.redis import keys
from pipeline.ledger.redis.admin import RedisInspection
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.types import Claim, EvaluationRequest, Refusal, Unit, WriteStatus
from protocol.errors import ConfigError, LedgerError, LedgerFull, LedgerUnavailable
from protocol.ids import Incarnation, Role
from protocol.trajectory import Field
from tests.pipeline.ledger.builders import (
    GENERATOR,
    LEARNER,
    OTHER_GENERATOR,
    SCORER,
    make_chunk,
    make_spec,
    reference,
    reward,
    value,
)


async def server_s(client) -> float:
    """Return the server's time, in seconds."""
    seconds, micros = await client.time()
    return seconds + micros / 1e6


async def dump(client) -> dict[bytes, bytes]:
    return {key: await client.dump(key) for key in await client.keys("*")}


@pytest.fixture
async def full(redis_client):
    """Return switches that put the server over, and back under, its memory limit."""

    async def fill() -> None:
        await redis_client.config_set("maxmemory-policy", "noeviction")
        await redis_client.config_set("maxmemory", "1mb")

    async def empty() -> None:
        await redis_client.config_set("maxmemory", "0")

    yield fill, empty
    await empty()


async def test_a_full_server_refuses_new_work_whole_and_lets_through_what_makes_room(redis_client, full):
    fill, empty = full
    ledger = RedisLedger(redis_client, "test")
    await ledger.open(make_spec(fields=frozenset({Field.REWARD, Field.REFERENCE})))
    leases = (await ledger.lease(GENERATOR, max_trajectories=5)).leases
    chunks = [make_chunk(lease.trajectory) for lease in leases]
    for chunk in chunks[:4]:
        await ledger.write_chunk(GENERATOR, chunk)
    await fill()
    before = await dump(redis_client)
    with pytest.raises(LedgerFull, match="nothing was changed"):
        await ledger.write_chunk(GENERATOR, chunks[4])
    with pytest.raises(LedgerFull):
        await ledger.request_evaluation(LEARNER, EvaluationRequest(0, 0, 2, 1, 0.0))
    grant = await ledger.lease(OTHER_GENERATOR, max_trajectories=2)
    assert (grant.leases, grant.refusal) == ((), Refusal.MEMORY)
    assert await dump(redis_client) == before

    for chunk in chunks[:4]:
        for score in (reward(), reference()):
            assert await ledger.write_score(SCORER, chunk.id, score) is WriteStatus.STORED
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert isinstance(claim, Claim)
    assert len(await ledger.fetch(claim)) == 2
    assert await ledger.settle(LEARNER, (claim.claim_id,)) == 1
    await ledger.advance(LEARNER, 1)
    await ledger.renew(GENERATOR)
    assert await ledger.give_back(GENERATOR) == 1
    await empty()
    assert (await ledger.audit()).balances
    assert len((await ledger.lease(GENERATOR, max_trajectories=1)).leases) == 1


async def losing_the_reply(ledger, name, call):
    """Let the server do its part, then cut the connection before the caller has the answer; return
    that answer."""
    answers = []
    send = ledger._call

    async def cut(*args, **arguments):
        answers.append(await send(*args, **arguments))
        raise LedgerUnavailable("the reply was lost")

    ledger._call = cut
    with pytest.raises(LedgerUnavailable):
        await call
    ledger._call = send
    [reply] = answers
    if name == "claim_finished":
        return [trajectory.decode() for trajectory in reply[1:]]
    if name == "lease":
        return [row[0].decode() for row in reply[1:]]
    return tuple(unit.decode() for unit in reply[2:])


async def test_a_lease_or_claim_whose_reply_was_lost_is_given_again_not_anew(redis_client):
    ledger = RedisLedger(redis_client, "test")
    await ledger.open(make_spec())
    lost = await losing_the_reply(ledger, "lease", ledger.lease(GENERATOR, max_trajectories=4))
    again = (await ledger.lease(GENERATOR, max_trajectories=4)).leases
    assert [str(lease.trajectory) for lease in again] == lost
    assert (await ledger.totals()).num_groups_admitted == 2
    for lease in again:
        chunk = make_chunk(lease.trajectory)
        await ledger.write_chunk(GENERATOR, chunk)
        await ledger.write_score(SCORER, chunk.id, reward())
    lost_claim = await losing_the_reply(ledger, "claim", ledger.claim(LEARNER, policy_version=0))
    claim = await ledger.claim(LEARNER, policy_version=0)
    assert isinstance(claim, Claim)
    assert claim.units == lost_claim


async def test_a_value_batch_whose_reply_was_lost_is_given_again_also_by_a_full_server(redis_client, full):
    fill, _ = full
    ledger = RedisLedger(redis_client, "test")
    await ledger.open(make_spec(Unit.TRAJECTORY, fields=frozenset({Field.REWARD, Field.VALUE}), value_training=True))
    for lease in (await ledger.lease(GENERATOR, max_trajectories=3)).leases:
        chunk = make_chunk(lease.trajectory)
        await ledger.write_chunk(GENERATOR, chunk)
        await ledger.write_score(SCORER, chunk.id, value())
        await ledger.write_score(SCORER, chunk.id, reward())
    await fill()
    lost = await losing_the_reply(ledger, "claim_finished", ledger.claim_finished(SCORER, num_trajectories=2))
    again = await ledger.claim_finished(SCORER, num_trajectories=2)
    assert not isinstance(again, int)
    assert [str(trajectory.chunk.trajectory) for trajectory in again.trajectories] == lost == ["t.0.0", "t.0.1"]
    assert await ledger.settle_finished(SCORER, (again.claim_id,)) == 1
    assert await ledger.claim_finished(SCORER, num_trajectories=2) == 1
    assert await ledger.recover_finished(SCORER, ()) == 0


async def test_without_a_clock_of_its_own_the_ledger_uses_the_servers(redis_client):
    ledger = RedisLedger(redis_client, "test")
    await ledger.open(make_spec(lease_s=0.05))
    began = await server_s(redis_client)
    await ledger.lease(GENERATOR, max_trajectories=2)
    until = await redis_client.zscore("{test}:holders", str(GENERATOR))
    assert began <= until - 0.05 + 1e-6
    assert until - 0.05 - 1e-6 <= await server_s(redis_client)
    async with asyncio.timeout(5.0):
        while (await ledger.lease(OTHER_GENERATOR, max_trajectories=1)).leases[0].trajectory.group != 0:
            await ledger.give_back(OTHER_GENERATOR)


async def test_a_time_that_is_kept_is_the_servers_even_early_in_its_second(redis_client):
    ledger = RedisLedger(redis_client, "test")
    await ledger.open(make_spec(group_size=1))
    # the places after the point then begin with 0, which a number would lose
    _, micros = await redis_client.time()
    await asyncio.sleep((1_000_000 - micros) / 1e6)
    began = await server_s(redis_client)
    (lease,) = (await ledger.lease(GENERATOR, max_trajectories=1)).leases
    ended = await server_s(redis_client)
    life = await RedisInspection(ledger).life(lease.trajectory)
    assert isinstance(life, TrajectoryLife)
    assert life.admitted_s is not None
    assert began <= life.admitted_s <= ended


async def test_callers_at_once_never_get_the_same_trajectory_or_unit(redis_server, redis_client):
    spec = make_spec(units_per_update=8, eta=3)
    client = connect(redis_server)
    replays = [RedisLedger(client, "test") for _ in range(4)]
    await replays[0].open(spec)
    async with asyncio.TaskGroup() as group:
        who = [Incarnation(Role.GENERATOR, f"generator-{number}", 1) for number in range(4)]
        grants = [
            group.create_task(ledger.lease(name, max_trajectories=8)) for ledger, name in zip(replays, who, strict=True)
        ]
    leased = [
        (lease.trajectory, name) for task, name in zip(grants, who, strict=True) for lease in task.result().leases
    ]
    assert len(leased) == len({trajectory for trajectory, _ in leased}) == 32
    async with asyncio.TaskGroup() as group:
        for trajectory, name in leased:
            group.create_task(replays[0].write_chunk(name, make_chunk(trajectory)))
    async with asyncio.TaskGroup() as group:
        for trajectory, _ in leased:
            group.create_task(replays[1].write_score(SCORER, make_chunk(trajectory).id, reward()))
    async with asyncio.TaskGroup() as group:
        learners = [Incarnation(Role.LEARNER, f"learner-{number}", 1) for number in range(4)]
        claims = [
            group.create_task(ledger.claim(name, policy_version=0))
            for ledger, name in zip(replays, learners, strict=True)
        ]
    answers = [task.result() for task in claims]
    units = [unit for claim in answers if isinstance(claim, Claim) for unit in claim.units]
    assert sorted(units, key=int) == [str(number) for number in range(16)]
    await client.aclose()


async def test_every_ledger_key_has_the_runs_hash_tag(redis_client):
    ledger = RedisLedger(redis_client, "test")
    await ledger.open(make_spec())
    for lease in (await ledger.lease(GENERATOR, max_trajectories=5)).leases:
        chunk = make_chunk(lease.trajectory)
        await ledger.write_chunk(GENERATOR, chunk)
        await ledger.write_score(SCORER, chunk.id, reward())
    await ledger.claim(LEARNER, policy_version=0)
    await ledger.request_evaluation(LEARNER, EvaluationRequest(0, 0, 1, 1, 0.0))
    found = [key.decode() for key in await redis_client.keys("*")]
    assert len(found) > 10
    assert all(key.startswith(keys.prefix("test")) for key in found)


async def test_a_reader_that_never_opened_the_ledger_fetches_or_gets_an_error(redis_client):
    writer, reader = RedisLedger(redis_client, "test"), RedisLedger(redis_client, "test")
    with pytest.raises(LedgerError, match="not opened"):
        await reader.totals()
    await writer.open(make_spec(units_per_update=2))
    for lease in (await writer.lease(GENERATOR, max_trajectories=2)).leases:
        chunk = make_chunk(lease.trajectory)
        await writer.write_chunk(GENERATOR, chunk)
        await writer.write_score(SCORER, chunk.id, reward())
    claim = await writer.claim(LEARNER, policy_version=0)
    assert isinstance(claim, Claim)
    assert [unit.name for unit in await reader.fetch(claim)] == ["0"]


async def test_a_ledger_that_an_earlier_release_made_is_refused_by_name(redis_client):
    await RedisLedger(redis_client, "test").open(make_spec())
    await redis_client.delete(keys.settings("test"))
    with pytest.raises(LedgerError, match="an earlier release made this ledger"):
        await RedisLedger(redis_client, "test").open(make_spec())


async def test_scripts_are_sent_again_to_a_server_that_forgot_them(redis_client):
    ledger = RedisLedger(redis_client, "test")
    await ledger.open(make_spec())
    await ledger.totals()
    await redis_client.script_flush()
    assert (await ledger.totals()).credit_used == 0


async def test_no_server_is_unavailable_and_a_bad_url_a_setting(tmp_path):
    client = connect(f"unix://{tmp_path}/nobody", patience_s=0.2)
    with pytest.raises(LedgerUnavailable, match="is it running"):
        await RedisLedger(client, "test").totals()
    await client.aclose()
    with pytest.raises(ConfigError, match=r"\*\*\*@host") as refused:
        connect("http://user:secret@host")
    assert "secret" not in str(refused.value)


async def test_more_callers_than_connections_wait_their_turn(redis_server, redis_client):
    client = connect(redis_server, max_connections=2)
    ledger = RedisLedger(client, "test")
    await ledger.open(make_spec())
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ledger.totals()) for _ in range(50)]
    assert {task.result().credit_limit for task in tasks} == {8}
    await client.aclose()


async def test_a_cancelled_task_that_talks_to_the_ledger_without_pause_ends(redis_server):
    client = connect(redis_server)

    async def talk() -> None:
        while True:
            await client.hget("a", "b")

    for turn in range(20):
        async with asyncio.TaskGroup() as tasks:
            talking = tasks.create_task(talk())
            await asyncio.sleep(0.001 * turn)
            talking.cancel()
            async with asyncio.timeout(5.0):
                await asyncio.wait([talking])
        assert talking.cancelled()
    await client.aclose()


@pytest.fixture
async def connection(redis_server, redis_client):
    client = connect(redis_server)
    connection = await client.connection_pool.get_connection()
    yield connection
    await client.connection_pool.release(connection)
    await client.aclose()


async def test_a_trip_of_values_longer_than_any_buffer_arrives_whole_and_in_order(redis_server, redis_client):
    client = connect(redis_server)
    values = [bytes([number]) * (number * 50_000 + 1) for number in range(20)]
    async with client.pipeline(transaction=False) as pipe:
        for value_bytes in values:
            pipe.rpush("list", value_bytes)
            pipe.incrbyfloat("sum", 0.5)
        answers = await pipe.execute()
    assert answers == [answer for number in range(1, 21) for answer in (number, number / 2)]
    assert await client.lrange("list", 0, -1) == values
    await client.aclose()


async def test_the_rest_of_a_command_is_never_sent_on_a_new_connection(connection, redis_client):
    def pieces():
        yield connection.pack_command("SET", "whole", "yes")[0]
        connection._writer.close()
        # as a client that is closed in another task leaves it
        connection._reader = connection._writer = None
        yield connection.pack_command("SET", "torn", "yes")[0]

    with pytest.raises(redis.exceptions.ConnectionError, match="closed while a command was written"):
        await connection.send_packed_command(pieces())
    assert not connection.is_connected
    assert await redis_client.exists("torn") == 0


async def test_an_argument_that_cannot_be_sent_is_refused_before_anything_is(redis_server, redis_client):
    client = connect(redis_server)
    unsendable: Any = object()
    with pytest.raises(redis.exceptions.DataError):
        await client.set("key", unsendable)
    assert await client.exists("key") == 0
    await client.aclose()


@pytest.mark.parametrize("unit", Unit)
async def test_a_run_without_guidance_stores_and_asks_for_nothing_of_it(redis_client, redis_server, unit):
    ledger, watcher = RedisLedger(connect(redis_server), "test"), connect(redis_server)
    asked: list[str] = []
    async with watcher.monitor() as monitor:
        fields = frozenset({Field.REWARD, Field.REFERENCE, Field.VALUE})
        await ledger.open(make_spec(unit, fields=fields, units_per_update=2, eta=4, value_training=True))
        for number, lease in enumerate((await ledger.lease(GENERATOR, max_trajectories=2)).leases):
            chunk = make_chunk(lease.trajectory)
            await ledger.write_chunk(GENERATOR, chunk)
            for score in (reference(), value(), reward(float(number))):
                await ledger.write_score(SCORER, chunk.id, score)
        claim = await ledger.claim(LEARNER, policy_version=0)
        assert isinstance(claim, Claim)
        assert await ledger.fetch(claim)
        await ledger.settle(LEARNER, (claim.claim_id,))
        await ledger.totals()
        await redis_client.echo("that was all")
        while "that was all" not in (command := (await monitor.next_command())["command"]):
            # a script's text is the same for all runs
            asked += [] if command.startswith("EVAL ") else [command]
    stored = (await dump(redis_client)).values()
    await ledger.aclose()
    await watcher.aclose()
    assert any("from:reference" in command for command in asked), "the scripts' own commands are among them"
    for trace in ("guidance", "rewarded_s"):
        assert not [command for command in asked if trace in command]
        assert not [packed for packed in stored if trace.encode() in packed]
