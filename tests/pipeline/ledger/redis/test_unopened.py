"""A claim about workers that never open the ledger, and so do not know its settings."""

from __future__ import annotations

import pytest
import redis.asyncio

from pipeline.ledger.redis.ledger import RedisLedger
from protocol.trajectory import Field
from tests.pipeline.ledger.builders import GENERATOR, SCORER, make_chunk, make_spec


@pytest.mark.parametrize("has_turns", [False, True])
async def test_a_scorer_that_has_not_opened_the_ledger_reads_what_is_overdue(
    redis_client: redis.asyncio.Redis, has_turns: bool
) -> None:
    now = [1000.0]
    fields = {Field.REWARD, Field.TURN} if has_turns else {Field.REWARD}
    ledger = RedisLedger(redis_client, "test", now=lambda: now[0])
    await ledger.open(make_spec(fields=frozenset(fields)))
    await redis_client.hset("{test}:epochs", mapping={GENERATOR.worker: 1, SCORER.worker: 1})
    chunks = [make_chunk(lease.trajectory) for lease in (await ledger.lease(GENERATOR, max_trajectories=2)).leases]
    for chunk in chunks:
        await ledger.write_chunk(GENERATOR, chunk)
    now[0] += 1000.0
    scorer = RedisLedger(redis_client, "test", now=lambda: now[0])
    found = await scorer.overdue(SCORER, Field.REWARD, max_chunks=9)
    assert [(one.chunk.id, one.scores) for one in found] == [(chunk.id, {}) for chunk in chunks]
