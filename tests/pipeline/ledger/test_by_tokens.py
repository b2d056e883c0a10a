"""The ledger's contract again: each call is made by a join token of its caller's role.

So the rules of a role (``pipeline.ledger.redis.acl``) permit all that its workers do."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from pipeline.ledger.admin import LedgerAdmin
from pipeline.ledger.contract import Ledger
from pipeline.ledger.inspection import LedgerInspection
from pipeline.ledger.redis import keys
from pipeline.ledger.redis.acl import OWNERS, WRITTEN
from pipeline.ledger.redis.admin import RedisAdmin, RedisInspection
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.redis.tokens import TokenAdmin
from pipeline.ledger.token import ROLES, ledger_url
from pipeline.ledger.types import LedgerSpec
from protocol.ids import Incarnation, Role
from tests.pipeline.ledger import (
    test_contract,
    test_contract_admission,
    test_contract_claims,
    test_contract_leases,
    test_contract_scoring,
    test_contract_turns,
    test_finished_lane,
)
from tests.pipeline.ledger.conftest import Bench

SHARED = {
    name: claim
    for module in (
        test_contract,
        test_contract_admission,
        test_contract_leases,
        test_contract_claims,
        test_contract_scoring,
        test_contract_turns,
        test_finished_lane,
    )
    for name, claim in vars(module).items()
    if name.startswith("test_")
}
# It counts all keys of the server, and the tokens are some.
del SHARED["test_settling_twice_counts_once_and_leaves_nothing_behind"]
globals().update(SHARED)
OF_OWNER = frozenset({"audit", "queues", "dead_letters", "peek"})


class LedgerByRole:
    """Gives each call to the connection of its caller's role."""

    def __init__(self, owner: RedisLedger, roles: dict[Role, RedisLedger]) -> None:
        self._owner, self._roles = owner, roles

    async def open(self, spec: LedgerSpec) -> None:
        await self._owner.open(spec)
        for ledger in self._roles.values():
            await ledger.open(spec)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            who = next((one for one in given if isinstance(one, Incarnation)), None)
            role = Role.LEARNER if who is None else who.role
            ledger = self._owner if name in OF_OWNER else self._roles[role]
            return getattr(ledger, name)(*given, **named)

        return call


class TokenBench(Bench):
    """A bench whose ledger is reached by tokens."""

    def __init__(self, client: redis.asyncio.Redis, roles: dict[Role, redis.asyncio.Redis]) -> None:
        super().__init__("redis", client)
        self.roles = roles

    async def open(self, spec: LedgerSpec) -> Any:
        if self.ledger is None:
            owner = RedisLedger(self.client, spec.run, now=lambda: self.now)
            roles = {role: RedisLedger(client, spec.run, now=lambda: self.now) for role, client in self.roles.items()}
            self.owner = owner
            self.ledger: Any = LedgerByRole(owner, roles)
        await self.ledger.open(spec)
        return self.ledger

    async def with_admin(self, spec: LedgerSpec) -> tuple[Ledger, LedgerAdmin]:
        ledger = await self._with_generators(spec)
        return ledger, RedisAdmin(self.owner)

    async def with_inspection(self, spec: LedgerSpec) -> tuple[Ledger, LedgerInspection]:
        ledger = await self._with_generators(spec)
        return ledger, RedisInspection(self.owner)


@pytest.fixture
async def bench(redis_server: str, redis_client: redis.asyncio.Redis, tmp_path: Path) -> AsyncIterator[Bench]:
    admin = TokenAdmin(redis_client, "test")
    roles: dict[Role, redis.asyncio.Redis] = {}
    async with AsyncExitStack() as ends:
        for role in ROLES:
            token = await admin.create(role)
            ends.push_async_callback(admin.revoke, token.id)
            folder = tmp_path / role
            folder.mkdir()
            roles[role] = connect(ledger_url(redis_server, token, folder))
            ends.push_async_callback(roles[role].aclose)
        yield TokenBench(redis_client, roles)
    await admin.aclose()


def test_each_key_of_a_run_is_written_by_roles_or_by_its_owner_alone() -> None:
    table = re.findall(r"^\| ``\{run\}:([a-z_]+)", keys.__doc__ or "", re.MULTILINE)
    written = {name.partition(":")[0] for names in WRITTEN.values() for name in names}
    assert len(table) > 30
    assert {*table} - written - {*OWNERS} == set(), "pipeline.ledger.redis.acl: who writes it?"
    assert not written & {*OWNERS}
