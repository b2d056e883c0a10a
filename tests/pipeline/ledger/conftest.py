"""Every ledger, with a clock and epochs that tests drive by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import redis.asyncio

from pipeline.ledger.admin import LedgerAdmin
from pipeline.ledger.contract import Ledger
from pipeline.ledger.inspection import LedgerInspection
from pipeline.ledger.redis import keys
from pipeline.ledger.redis.admin import RedisAdmin, RedisInspection
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.types import LedgerSpec
from tests.oracle.ledger.admin import MemoryAdmin
from tests.oracle.ledger.inspection import MemoryInspection
from tests.oracle.ledger.ledger import MemoryLedger
from tests.pipeline.ledger.builders import GENERATOR, OTHER_GENERATOR


@dataclass
class Bench:
    """A ledger that is being tested."""

    kind: str
    client: redis.asyncio.Redis
    now: float = 1000.0
    epochs: dict[str, int] = field(default_factory=dict)
    ledger: Ledger | None = None

    async def open(self, spec: LedgerSpec) -> Ledger:
        if self.ledger is None:
            if self.kind == "memory":
                self.ledger = self.memory()
            else:
                self.ledger = RedisLedger(self.client, spec.run, now=lambda: self.now)
        await self.ledger.open(spec)
        return self.ledger

    async def with_admin(self, spec: LedgerSpec) -> tuple[Ledger, LedgerAdmin]:
        """Return the ledger and a person's side of it, with two generators registered."""
        ledger = await self._with_generators(spec)
        if isinstance(ledger, RedisLedger):
            return ledger, RedisAdmin(ledger)
        assert isinstance(ledger, MemoryLedger)
        return ledger, MemoryAdmin(ledger, lambda worker: self.epochs.get(worker, 0))

    async def with_inspection(self, spec: LedgerSpec) -> tuple[Ledger, LedgerInspection]:
        """Return the ledger and the looks into it, with two generators registered."""
        ledger = await self._with_generators(spec)
        if isinstance(ledger, RedisLedger):
            return ledger, RedisInspection(ledger)
        assert isinstance(ledger, MemoryLedger)
        return ledger, MemoryInspection(ledger)

    async def _with_generators(self, spec: LedgerSpec) -> Ledger:
        ledger = await self.open(spec)
        for who in (GENERATOR, OTHER_GENERATOR):
            await self.set_epoch(who.worker, who.epoch)
        return ledger

    def memory(self) -> MemoryLedger:
        return MemoryLedger(lambda worker: self.epochs.get(worker, 0), lambda: self.now)

    async def set_epoch(self, worker: str, epoch: int) -> None:
        self.epochs[worker] = epoch
        await self.client.hset(keys.epochs("test"), worker, epoch)


@pytest.fixture(params=["memory", "redis"])
async def bench(request, redis_client) -> AsyncIterator[Bench]:
    yield Bench(request.param, redis_client)
