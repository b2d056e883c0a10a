"""Claims about copies of a request that arrive long after its answer: they change no byte."""

from __future__ import annotations

import redis.asyncio

from pipeline.ledger.redis.ledger import RedisLedger
from protocol.ids import ChunkId, TrajectoryId
from tests.pipeline.ledger.builders import GENERATOR, SCORER, make_chunk, make_spec, reward
from tests.pipeline.ledger.lossy_redis import CONTENTS


async def test_a_copy_of_a_groups_request_after_its_scores_changes_nothing(redis_client: redis.asyncio.Redis) -> None:
    ledger = RedisLedger(redis_client, "test", now=lambda: 1000.0)
    await ledger.open(make_spec())
    await redis_client.hset("{test}:epochs", GENERATOR.worker, GENERATOR.epoch)
    await ledger.lease(GENERATOR, max_trajectories=2)
    members = [TrajectoryId("t", 0, member) for member in (0, 1)]
    for member in members:
        await ledger.write_chunk(GENERATOR, make_chunk(member))
    asked = {"group": "0", "members": 2, "request": 1}
    given = await ledger._call("finished_group", SCORER, **asked)
    assert len(given) == 4, "each with its turn or none"
    assert await ledger._call("finished_group", SCORER, **asked) == given, "the answer was lost"
    for member in members:
        await ledger.write_score(SCORER, ChunkId(member, 0), reward())
    before = await redis_client.eval(CONTENTS, 0)
    assert await ledger._call("finished_group", SCORER, **asked) == []
    assert await redis_client.eval(CONTENTS, 0) == before
