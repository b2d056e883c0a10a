"""Every registry, as its tests drive it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pipeline.ledger.redis.client import connect
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.registry.redis_heartbeats import RedisHeartbeatWriter
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.runtime.registries import Subject


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
