"""A run's ledger over several servers: who is named, what is connected, what is refused."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pipeline.config.load import load_config
from pipeline.config.public import public_settings
from pipeline.ledger.address import LedgerAddress, known_shards, write_address
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.server.embedded import check_shards
from pipeline.ledger.sharded.servers import ledger_servers
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.run_ledger import run_ledger
from protocol.errors import ConfigError, Fenced, LedgerUnavailable
from protocol.ids import Role, TrajectoryId
from tests.pipeline.ledger.builders import GENERATOR, make_chunk, make_spec

SPEC = make_spec(units_per_update=8)
SECRET = "redis://:hunter2@10.0.0.9:6379/0"


@asynccontextmanager
async def two(redis_server, *, other: str | None = None, patience_s: float = 5.0):
    """A ledger over two databases of one server, or over one and another server."""
    urls = [f"{redis_server}?db=0", f"{redis_server}?db=1" if other is None else other]
    ledger = ledger_servers([connect(url, patience_s=patience_s) for url in urls], "test", urls)
    try:
        yield ledger
    finally:
        await ledger.aclose()


async def test_an_error_names_the_server_that_does_not_answer(redis_server, redis_client, tmp_path):
    gone = f"unix://{tmp_path}/nothing-here"
    async with two(redis_server, other=gone, patience_s=0.2) as ledger:
        troubles = []
        ledger.on_trouble(troubles.append)
        with pytest.raises(LedgerUnavailable, match=f"ledger server {gone}: .*does not answer"):
            await ledger.open(SPEC)
        assert troubles[0].startswith(f"ledger server {gone}: ")
        assert troubles[-1] == ""


async def test_a_worker_connects_only_to_the_servers_that_it_needs(redis_server, redis_client):
    async with two(redis_server) as ledger:
        await ledger.open(SPEC)
    before = await connections(redis_client)
    async with two(redis_server) as worker:
        await worker.lease(GENERATOR, max_trajectories=2)
        await worker.write_chunk(GENERATOR, make_chunk(TrajectoryId("t", 0, 0)))
        assert await connections(redis_client) == before + 1
        await worker.lease(GENERATOR, max_trajectories=100)
        assert await connections(redis_client) == before + 2


async def connections(client) -> int:
    return len(await client.client_list())


async def test_a_fence_reaches_the_servers_beside_the_registrys(redis_server, redis_client):
    async with two(redis_server) as ledger:
        await ledger.open(SPEC)
        registry = RedisRegistry(connect(redis_server), "test", also_fence=ledger.fence)
        who = await registry.register(Role.GENERATOR, "generator-1")
        assert [str(one.trajectory) for one in (await ledger.lease(who, max_trajectories=1)).leases] == ["t.1.0"]
        await registry.fence("generator-1")
        with pytest.raises(Fenced):
            await ledger.write_chunk(who, make_chunk(TrajectoryId("t", 1, 0)))
        await registry.aclose()


async def test_a_run_has_the_servers_of_its_address(redis_server, redis_client, tmp_path):
    write_address(tmp_path, LedgerAddress(url=f"{redis_server}?db=0"))
    one = run_ledger(connect(redis_server), "test", tmp_path, connect)
    assert isinstance(one, RedisLedger)
    await one.aclose()
    write_address(tmp_path, LedgerAddress(url=f"{redis_server}?db=0", shards=(f"{redis_server}?db=1",)))
    several = run_ledger(connect(redis_server), "test", tmp_path, connect)
    assert not isinstance(several, RedisLedger)
    assert several.num_shards == 2
    await several.aclose()


def test_a_resumed_run_has_the_same_servers_with_their_passwords(tmp_path):
    with pytest.raises(ConfigError, match="without its password"):
        known_shards(tmp_path, ("redis://***@10.0.0.9:6379/0",))
    write_address(tmp_path, LedgerAddress(url=SECRET, shards=(SECRET,)))
    assert known_shards(tmp_path, ("redis://***@10.0.0.9:6379/0",)) == (SECRET,)
    with pytest.raises(ConfigError, match=r"names 0 further servers, but the run began with 1"):
        known_shards(tmp_path, ())
    with pytest.raises(ConfigError, match="without its password"):
        known_shards(tmp_path, ("redis://***@elsewhere:6379/0",))
    assert known_shards(tmp_path, ("redis://moved:6379/0",)) == ("redis://moved:6379/0",)


def test_no_password_of_a_further_server_is_in_a_record():
    config = load_config([Path("configs/demo.toml")], [f"ledger.shards=['{SECRET}']"])
    assert public_settings(config)["ledger"]["shards"] == ["redis://***@10.0.0.9:6379/0"]
    assert "hunter2" not in repr(LedgerAddress(url=SECRET, shards=(SECRET,)))


def test_further_servers_need_a_first_one_that_others_reach():
    check_shards((SECRET,), has_url=True)
    check_shards((), has_url=False)
    with pytest.raises(ConfigError, match="give the first one's address"):
        check_shards((SECRET,), has_url=False)
