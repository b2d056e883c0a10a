"""Every ledger, with a clock and epochs that tests drive by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest
import redis.asyncio

from pipeline.ledger.contract import Ledger
from pipeline.ledger.memory.ledger import MemoryLedger
from pipeline.ledger.redis import keys
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.sharded.ledger import ShardedLedger
from pipeline.ledger.types import LedgerSpec


@dataclass
class Bench:
    """A ledger that is being tested."""

    kind: str
    client: redis.asyncio.Redis
    now: float = 1000.0
    epochs: dict[str, int] = field(default_factory=dict)
    ledger: Ledger | None = None
    shards: Sequence[MemoryLedger] = ()
    """Of a sharded ledger: one, so that all is in its order."""

    async def open(self, spec: LedgerSpec) -> Ledger:
        if self.ledger is None:
            if self.kind == "memory":
                self.ledger = self.memory()
            elif self.kind == "sharded":
                self.shards = [self.memory()]
                self.ledger = ShardedLedger(self.shards)
            else:
                self.ledger = RedisLedger(self.client, spec.run, now=lambda: self.now)
        await self.ledger.open(spec)
        return self.ledger

    def memory(self) -> MemoryLedger:
        return MemoryLedger(lambda worker: self.epochs.get(worker, 0), lambda: self.now)

    async def set_epoch(self, worker: str, epoch: int) -> None:
        self.epochs[worker] = epoch
        await self.client.hset(keys.epochs("test"), worker, epoch)


@pytest.fixture(params=["memory", "redis", "sharded"])
async def bench(request, redis_client) -> AsyncIterator[Bench]:
    yield Bench(request.param, redis_client)
