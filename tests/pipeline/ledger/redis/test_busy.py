"""A server that runs a script for too long answers BUSY: that is "not now", for every caller."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import redis

from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.connection import PipelinedConnection
from pipeline.ledger.redis.permitted_keys import PermittedKeys
from pipeline.ledger.redis.tokens import TokenAdmin
from pipeline.ledger.server.embedded import EmbeddedServer
from pipeline.ledger.server.probe import ServerAction, ServerState, ServerWatch
from pipeline.runtime.registry.contract import Topic
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.registry.redis_heartbeats import RedisHeartbeatWriter
from protocol.errors import LedgerUnavailable
from protocol.ids import Role
from tests.pipeline.runtime.registries import beat_of

pytestmark = pytest.mark.timeout(60)

SPIN = """
if ARGV[2] == '1' then redis.call('SET', 'written', 'x') end
local began = redis.call('TIME')
repeat
  local now = redis.call('TIME')
until (now[1] - began[1]) + (now[2] - began[2]) / 1e6 >= tonumber(ARGV[1])
return 1
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path_factory.mktemp("busy"), max_memory_mb=64)
    server.start()
    with redis.Redis.from_url(server.url) as client:
        client.config_set("lua-time-limit", 50)
    yield server
    server.stop()


class Spinning:
    """A script that runs in a thread, and holds the server."""

    def __init__(self, url: str, seconds: float, *, writes: bool = False) -> None:
        self._url, self._words = url, (str(seconds), "01"[writes])
        self.error = ""
        self._thread = threading.Thread(target=self._spin)
        self._thread.start()
        with redis.Redis.from_url(url) as client:
            for _ in range(500):
                try:
                    client.ping()
                except redis.ResponseError as error:
                    assert str(error).startswith("BUSY ")
                    return
                time.sleep(0.01)
        raise AssertionError("the server was never busy")

    def _spin(self) -> None:
        with redis.Redis.from_url(self._url, socket_timeout=60) as client:
            try:
                client.eval(SPIN, 0, *self._words)
            except redis.RedisError as error:
                self.error = str(error)

    def join(self) -> None:
        self._thread.join()


@pytest.fixture
async def registry(server: EmbeddedServer) -> AsyncIterator[RedisRegistry]:
    registry = RedisRegistry(connect(server.url), "busy")
    yield registry
    await registry.aclose()


async def test_every_caller_waits_for_a_busy_server_and_goes_on(
    server: EmbeddedServer, registry: RedisRegistry
) -> None:
    who = await registry.register(Role.REWARD, "reward-0")
    writer = RedisHeartbeatWriter(server.url, "busy", timeout_s=20.0)
    client = connect(server.url, patience_s=20.0)
    link, tokens, permitted = PipelinedConnection(client), TokenAdmin(client, "busy"), PermittedKeys(client, "busy")
    assert await asyncio.to_thread(writer.beat, beat_of(who))
    spinning = await asyncio.to_thread(Spinning, server.url, 2.0)
    async with asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(link.ask("PING")),
            tasks.create_task(link.ask_all([("PING",), ("GET", "nothing")], raises=False)),
            tasks.create_task(asyncio.to_thread(writer.beat, beat_of(who))),
            tasks.create_task(registry.heartbeats()),
            tasks.create_task(tokens.rows()),
            tasks.create_task(permitted.read()),
        ]
        waiting = tasks.create_task(registry.notifications({Topic.RUN: "0 "}, timeout_s=0.1))
    await asyncio.to_thread(spinning.join)
    assert asked[0].result() == b"PONG"
    assert asked[1].result() == [b"PONG", None]
    assert asked[2].result() is True
    assert [beat.who for beat in asked[3].result()] == [who]
    assert waiting.result().keys() <= {Topic.RUN}
    await link.aclose()
    await tokens.aclose()
    await permitted.aclose()
    await asyncio.to_thread(writer.close)


async def test_a_client_that_connects_to_a_busy_server_waits_too(server: EmbeddedServer) -> None:
    spinning = await asyncio.to_thread(Spinning, server.url, 1.5)
    client = connect(server.url, client_name="late")
    link = PipelinedConnection(client)
    assert await link.ask("PING") == b"PONG"
    await link.aclose()
    await client.aclose()
    await asyncio.to_thread(spinning.join)


async def test_a_server_busy_beyond_the_patience_is_unavailable_in_words_that_say_what_ends_it(
    server: EmbeddedServer,
) -> None:
    spinning = await asyncio.to_thread(Spinning, server.url, 2.0)
    registry = RedisRegistry(connect(server.url, patience_s=0.3), "busy")
    with pytest.raises(LedgerUnavailable, match=r"busy in a script.*SCRIPT KILL"):
        await registry.heartbeats()
    await asyncio.to_thread(spinning.join)
    assert await registry.heartbeats() is not None
    await registry.aclose()


@pytest.mark.parametrize("writes", [False, True])
def test_a_script_without_end_is_ended_and_with_it_the_server_if_it_wrote(tmp_path: Path, writes: bool) -> None:
    server = EmbeddedServer(tmp_path, max_memory_mb=64)
    server.start()
    with redis.Redis.from_url(server.url) as client:
        client.config_set("lua-time-limit", 50)
        client.set("kept", "x")
        client.execute_command("WAITAOF", 1, 0, 0) if writes else None
    pid = server.pid()
    spinning = Spinning(server.url, 600.0, writes=writes)
    assert server.read_state().state is ServerState.BUSY
    watch, clock = ServerWatch(patience_s=20.0), time.monotonic()
    try:
        for second in range(0, 30, 2):
            server.supervise(watch, clock + second)
            time.sleep(0.1)
            if server.read_state().state is ServerState.SERVES:
                break
        spinning.join()
        assert spinning.error
        assert (server.pid() == pid) is not writes
        with redis.Redis.from_url(server.url) as client:
            assert client.get("kept") == b"x"
            assert client.get("written") is None
    finally:
        server.stop()


def _busy() -> Callable[[float], ServerAction]:
    from pipeline.ledger.server.probe import ProbeResult

    watch = ServerWatch(patience_s=60.0)
    return lambda at_s: watch.evaluate(ProbeResult(ServerState.BUSY), at_s)


def test_a_busy_server_is_left_alone_then_its_script_is_ended_then_the_server() -> None:
    see = _busy()
    assert {see(at_s) for at_s in (0.0, 10.0, 29.0)} == {ServerAction.LEAVE}
    assert {see(at_s) for at_s in (30.0, 59.0)} == {ServerAction.END_SCRIPT}
    assert see(60.0) is ServerAction.REPLACE
