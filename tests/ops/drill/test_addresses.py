"""A drill's address in a mailbox's place reaches senders that knew the mailbox."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from ops.drill.addresses import mailbox_addresses, put_address
from ops.drill.fleet import RUN, DrillFleet
from pipeline.ledger.address import LedgerAddress, write_address
from pipeline.ledger.redis.client import connect
from pipeline.runtime.registry.redis import RedisRegistry
from protocol.ids import Role


class Fleet:
    """The parts of a drill's fleet that addresses need."""

    def __init__(self, run_dir: Path, server: str) -> None:
        self.run_dir = run_dir
        self._client = redis.Redis.from_url(server)

    def ledger(self, *command: Any) -> Any:
        return self._client.execute_command(*command)


@pytest.fixture
def fleet(tmp_path: Path, redis_server: str) -> DrillFleet:
    write_address(tmp_path, LedgerAddress(url=redis_server))
    return cast("DrillFleet", Fleet(tmp_path, redis_server))


def test_a_sender_that_knows_the_mailbox_reads_the_drills_address_as_a_change(
    fleet: DrillFleet, redis_server: str
) -> None:
    async def register() -> None:
        registry = RedisRegistry(connect(redis_server), RUN)
        who = await registry.register(Role.REWARD, "reward-0")
        await registry.set_endpoint(who, "ipc:///own", public_key="its key")
        await registry.aclose()

    async def endpoints(sender: RedisRegistry) -> tuple[str, str]:
        return (await sender.endpoints(Role.REWARD))["reward-0"]

    asyncio.run(register())
    with asyncio.Runner() as runner:
        sender = RedisRegistry(connect(redis_server), RUN)
        assert runner.run(endpoints(sender)) == ("ipc:///own", "its key")
        ((who, address),) = mailbox_addresses(fleet).items()
        assert (who.worker, who.role, address) == ("reward-0", Role.REWARD, "ipc:///own")
        runner.run(asyncio.to_thread(put_address, fleet, who, "ipc:///drill"))
        assert runner.run(endpoints(sender)) == ("ipc:///drill", "its key")
        runner.run(sender.aclose())


def test_an_incarnation_with_a_successor_gets_no_address(fleet: DrillFleet, redis_server: str) -> None:
    async def twice() -> None:
        registry = RedisRegistry(connect(redis_server), RUN)
        await registry.set_endpoint(await registry.register(Role.REWARD, "reward-0"), "ipc:///first")
        await registry.aclose()

    asyncio.run(twice())
    ((first, _),) = mailbox_addresses(fleet).items()
    asyncio.run(twice())
    put_address(fleet, first, "ipc:///drill")
    assert "ipc:///drill" not in mailbox_addresses(fleet).values()
