"""Claims about relays in a registry: their order, and when one is forgotten."""

from __future__ import annotations

import pytest
import redis.asyncio
import redis.exceptions

from pipeline.runtime.registry.contract import (
    Registry,
    RelayAnnouncement,
    RelayPlace,
)
from pipeline.runtime.registry.redis import RedisRegistry
from protocol.errors import Fenced
from protocol.ids import Role
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.runtime.registries import Subject


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
