"""Calls that share a trip to the server: each gets its own answer, and nobody's trouble is another's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import ResponseError

from pipeline.replay.connect import connect
from pipeline.replay.trips import MAX_CALLS, Trips

PUSH = "redis.call('RPUSH', KEYS[1], ARGV[1]); return ARGV[1]"
FAIL = "return redis.error_reply('FENCED 7')"
SLOW = "local n = 0; for i = 1, 3e6 do n = n + i end; return 'slow'"


@pytest.fixture
async def client(redis_server, redis_client) -> AsyncIterator[redis.asyncio.Redis]:
    client = connect(redis_server)
    yield client
    await client.aclose()


@pytest.fixture
def shared(client, monkeypatch) -> list[int]:
    """Return a list that grows with every trip that calls share."""
    pipeline, trips = client.pipeline, []

    def counted(**options):
        trips.append(1)
        return pipeline(**options)

    monkeypatch.setattr(client, "pipeline", counted)
    return trips


async def together(calls) -> list:
    async def settled(call):
        try:
            return await call
        except (ResponseError, LostConnection) as error:
            return error

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(settled(call)) for call in calls]
    return [task.result() for task in asked]


async def under_way(tasks: asyncio.TaskGroup, call) -> asyncio.Task:
    """Return a call's task when it has left for the server."""
    task = tasks.create_task(call)
    for _ in range(3):
        await asyncio.sleep(0)
    return task


async def test_what_is_asked_in_one_turn_of_the_loop_shares_a_trip_in_the_order_of_asking(client, shared):
    trips, push = Trips(client), client.register_script(PUSH)
    names = [f"{number}".encode() for number in range(20)]
    assert await together([trips.ask(push, "list", [name]) for name in names]) == names
    assert await client.lrange("list", 0, -1) == names
    assert len(shared) == 1


async def test_what_is_asked_while_a_trip_is_under_way_shares_the_next(client, shared):
    trips, slow, push = Trips(client), client.register_script(SLOW), client.register_script(PUSH)
    async with asyncio.TaskGroup() as tasks:
        await under_way(tasks, trips.ask(slow, "list", []))
        late = [tasks.create_task(trips.ask(push, "list", [f"{number}"])) for number in range(20)]
    assert [task.result() for task in late] == [f"{number}".encode() for number in range(20)]
    assert len(shared) == 1, "the first left alone, the others together"


async def test_a_trip_is_bounded(client, shared):
    trips, push = Trips(client), client.register_script(PUSH)
    names = [f"{number}".encode() for number in range(2 * MAX_CALLS + 1)]
    assert await together([trips.ask(push, "list", [name]) for name in names]) == names
    assert len(shared) == 2


async def test_a_call_that_fails_fails_alone(client):
    trips, push, fail = Trips(client), client.register_script(PUSH), client.register_script(FAIL)
    answers = await together([trips.ask(fail if number == 2 else push, "list", ["x"]) for number in range(5)])
    assert [isinstance(answer, ResponseError) for answer in answers] == [False, False, True, False, False]
    assert str(answers[2]) == "FENCED 7"
    assert await client.llen("list") == 4


async def test_a_server_that_has_forgotten_the_scripts_is_told_them_again(client):
    trips, push = Trips(client), client.register_script(PUSH)
    assert await trips.ask(push, "list", ["first"]) == b"first"
    await client.script_flush()
    assert await together([trips.ask(push, "list", [f"{n}"]) for n in range(4)]) == [b"0", b"1", b"2", b"3"]
    assert await client.llen("list") == 5


async def test_a_caller_that_is_cancelled_in_a_shared_trip_takes_no_answer_away_from_others(client):
    trips, slow, push = Trips(client), client.register_script(SLOW), client.register_script(PUSH)
    await together([trips.ask(slow, "list", []), trips.ask(push, "list", ["known"])])
    async with asyncio.TaskGroup() as tasks:
        first = await under_way(tasks, trips.ask(slow, "list", []))
        leader = tasks.create_task(trips.ask(slow, "list", []))
        follower = tasks.create_task(trips.ask(push, "list", ["mine"]))
        await first
        await asyncio.sleep(0)  # the second trip is on its way, led by the one that is cancelled
        leader.cancel()
    assert leader.cancelled()
    assert follower.result() == b"mine"


@pytest.mark.timeout(30)
async def test_a_caller_that_is_given_up_on_the_way_takes_nobody_else_out_of_the_queue(client):
    trips, slow, push = Trips(client), client.register_script(SLOW), client.register_script(PUSH)
    await together([trips.ask(slow, "list", []), trips.ask(push, "list", ["known"])])
    async with asyncio.TaskGroup() as tasks:
        first = await under_way(tasks, trips.ask(slow, "list", []))
        leader = tasks.create_task(trips.ask(slow, "list", []))
        passenger = tasks.create_task(trips.ask(push, "list", ["given up"]))
        await first
        await asyncio.sleep(0)  # the second trip is on its way, with the one that is cancelled
        late = tasks.create_task(trips.ask(push, "list", ["late"]))
        await asyncio.sleep(0)  # it waits for the third
        passenger.cancel()
    assert leader.result() == b"slow"
    assert late.result() == b"late"
    assert await client.lrange("list", -1, -1) == [b"late"]


async def test_a_caller_that_is_cancelled_before_its_trip_asks_nothing(client):
    trips, slow, push = Trips(client), client.register_script(SLOW), client.register_script(PUSH)
    async with asyncio.TaskGroup() as tasks:
        await under_way(tasks, trips.ask(slow, "list", []))
        waiting = tasks.create_task(trips.ask(push, "list", ["never"]))
        await asyncio.sleep(0)
        waiting.cancel()
    assert await trips.ask(push, "list", ["later"]) == b"later"
    assert await client.lrange("list", 0, -1) == [b"later"]


async def test_a_leader_that_is_cancelled_before_it_leaves_hands_the_trip_over(client, shared):
    trips, push = Trips(client), client.register_script(PUSH)
    async with asyncio.TaskGroup() as tasks:
        leader = tasks.create_task(trips.ask(push, "list", ["never"]))
        others = [tasks.create_task(trips.ask(push, "list", [f"{number}"])) for number in range(3)]
        await asyncio.sleep(0)
        leader.cancel()
    assert leader.cancelled()
    assert [task.result() for task in others] == [b"0", b"1", b"2"]
    assert await client.lrange("list", 0, -1) == [b"0", b"1", b"2"]
    assert len(shared) == 1


async def test_one_that_is_to_lead_the_next_trip_and_is_cancelled_hands_it_over(client):
    trips, push = Trips(client), client.register_script(PUSH)
    async with asyncio.TaskGroup() as tasks:
        first = await under_way(tasks, trips.ask(push, "list", ["first"]))
        appointed = tasks.create_task(trips.ask(push, "list", ["never"]))
        last = tasks.create_task(trips.ask(push, "list", ["last"]))
        first.add_done_callback(lambda _: appointed.cancel())
    assert appointed.cancelled()
    assert last.result() == b"last"
    assert await trips.ask(push, "list", ["later"]) == b"later"


async def test_a_server_that_is_away_is_away_for_all_of_a_trip():
    client = connect("unix:///nonexistent/socket", num_retries=0)
    trips, push = Trips(client), client.register_script(PUSH)
    answers = await together([trips.ask(push, "list", ["x"]) for _ in range(3)])
    assert all(isinstance(answer, LostConnection) for answer in answers)
    await client.aclose()
