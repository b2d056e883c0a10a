"""Claims about ``make_durable``: confirmed writes survive, and doubt is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.server.embedded import EmbeddedServer
from protocol.errors import Fenced
from tests.own_server import own_server
from tests.pipeline.ledger.builders import LEARNER, make_spec

RUN = "durable"


async def test_it_returns_only_when_the_file_on_the_disk_has_caught_up(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, max_memory_mb=64)
    server.start()
    ledger = RedisLedger(connect(server.url), RUN)
    try:
        await ledger.open(make_spec(run=RUN))
        with redis.Redis.from_url(server.url) as client:
            for _ in range(3):
                await ledger.advance(LEARNER, 1)
                assert await ledger.make_durable(LEARNER) is True
                info = client.info("persistence")
                assert info["aof_pending_bio_fsync"] == 0 or info["aof_buffer_length"] == 0
            client.config_set("maxmemory", "1mb")
            assert await ledger.make_durable(LEARNER) is True, "a full server can still be made durable"
            client.config_set("maxmemory", "64mb")
            client.hset(f"{{{RUN}}}:epochs", LEARNER.worker, LEARNER.epoch + 1)
            with pytest.raises(Fenced):
                await ledger.make_durable(LEARNER)
            client.config_set("appendonly", "no")
            client.hset(f"{{{RUN}}}:epochs", LEARNER.worker, LEARNER.epoch)
            for number in (1, 2):
                assert await ledger.make_durable(LEARNER) is False, "without a file nothing is durable"
                assert (await ledger.totals()).num_unflushed == number
                assert (await ledger.audit()).num_unflushed == number
            client.config_set("appendonly", "yes")
            assert await ledger.make_durable(LEARNER) is True
            assert (await ledger.totals()).num_unflushed == (await ledger.audit()).num_unflushed == 0
    finally:
        await ledger.aclose()
        server.stop()


async def test_a_server_that_does_not_permit_the_question_cannot_say(tmp_path: Path) -> None:
    with own_server(tmp_path, "appendonly yes", "user default on nopass ~* &* +@all -waitaof") as url:
        ledger = RedisLedger(connect(url), RUN)
        await ledger.open(make_spec(run=RUN))
        assert await ledger.make_durable(LEARNER) is False
        assert (await ledger.totals()).num_unflushed == 1
        await ledger.aclose()
