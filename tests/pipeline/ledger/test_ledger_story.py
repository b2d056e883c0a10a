"""The memory and Redis ledgers through one seeded story with crashes, until they differ or it ends: it
reaches every step on both, and notices a difference.

``make soak`` makes the story longer: CHUNKS, SEED and UNITS_PER_UPDATE."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.ledger.address import read_address
from pipeline.ledger.redis import keys
from pipeline.ledger.redis.client import connect
from pipeline.ledger.server.embedded import EmbeddedServer
from pipeline.ledger.types import LatePolicy, LedgerSpec, Unit
from protocol.trajectory import Field
from tests.pipeline.ledger.ledger_story import RUN, Divergence, Story

CHUNKS, SEED, UNITS = (
    int(os.environ.get(name, default))
    for name, default in (("SOAK_CHUNKS", 2400), ("SOAK_SEED", 1), ("SOAK_UNITS_PER_UPDATE", 16))
)
ROUNDS, CRASH_EVERY = 6, 100
MAX_MEMORY_MB = 2048
ANSWER_S = 300.0


def specs(units_per_update: int) -> list[LedgerSpec]:
    """Return the specifications of the rounds: one for each way in which the ledger is used."""

    def spec(unit: Unit, **changes: Any) -> LedgerSpec:
        settings: dict[str, Any] = {
            "run": RUN,
            "unit": unit,
            "group_size": 4,
            "units_per_update": units_per_update,
            "eta": 2,
            "oversampling": 1.5,
            "lease_s": 20.0,
            "scoring_deadline_s": 8.0,
            "max_attempts": 2,
        }
        return LedgerSpec(**(settings | changes))

    critic = {"fields": frozenset({Field.REWARD, Field.VALUE}), "value_training": True}
    everything = frozenset(Field)
    return [
        spec(Unit.GROUP, signal_filter=True, fields=frozenset({Field.REWARD, Field.REFERENCE})),
        spec(Unit.CHUNK, **critic),
        spec(Unit.TRAJECTORY, **critic),
        spec(
            Unit.GROUP,
            eta=0,
            oversampling=2.0,
            late=LatePolicy.DROP,
            signal_filter=True,
            fields=frozenset({Field.REWARD, Field.TURN}),
        ),
        spec(Unit.CHUNK, eta=4, late=LatePolicy.DROP, fields=everything, max_bytes=4000 * units_per_update),
        spec(Unit.TRAJECTORY, eta=1, late=LatePolicy.DROP, fields=everything, value_training=True),
    ]


async def soak(folder: Path, *, num_chunks: int, seed: int, units_per_update: int) -> Counter[str]:
    """Run the story until so many chunks are written; return the counts of its steps. Raises
    Divergence."""
    happened: Counter[str] = Counter()
    server = EmbeddedServer(folder, max_memory_mb=MAX_MEMORY_MB)
    server.start(timeout_s=ANSWER_S)
    # a pipeline that was cut off by a time limit would be sent again, and its writes then truly be
    # duplicates
    client = connect(server.url, timeout_s=ANSWER_S, patience_s=100.0)
    try:
        for number in range(ROUNDS):
            await client.flushall()
            story = Story(client, specs(units_per_update)[number], random.Random(f"{seed}/{number}"), happened)
            await story.open()
            while happened["chunks"] < num_chunks * (number + 1) // ROUNDS:
                await story.step()
                if story.num_steps % CRASH_EVERY == 0:
                    await story.flush()
                    await crash(folder, server)
                    happened["server crashes"] += 1
                    await story.compare_everything()
            await story.finish()
    finally:
        await client.aclose()
        server.stop()
    return happened


async def crash(folder: Path, server: EmbeddedServer) -> None:
    """``kill -9`` the server, and start it again on its append-only file."""
    address = read_address(folder)
    assert address is not None
    os.kill(address.pid, signal.SIGKILL)
    await asyncio.to_thread(server.start, timeout_s=ANSWER_S)


@pytest.mark.timeout(max(600, CHUNKS // 20))
async def test_both_ledgers_agree_through_claims_leases_crashes_and_late_copies(tmp_path: Path) -> None:
    happened = await soak(tmp_path, num_chunks=CHUNKS, seed=SEED, units_per_update=UNITS)
    assert happened["chunks"] >= CHUNKS >= 150 * UNITS, "a shorter story does not reach every step"
    crashes = ("generator crashes", "learner crashes", "server crashes")
    for what in ("updates", "value batches", "overdue", "turns", *crashes):
        assert happened[what] > 0, what
    assert min(happened["late copies"], happened["full comparisons"], happened["groups cancelled"]) > 0


async def test_a_chunk_that_one_ledger_lost_is_noticed(redis_client) -> None:
    story = Story(redis_client, specs(16)[0], random.Random(3), Counter())
    await story.open()
    for _ in range(20):
        await story.step()
    await story.compare_everything()
    stored = await redis_client.keys(keys.prefix(RUN) + "chunk:*")
    await redis_client.hset(stored[0], "blob", b"something else")
    with pytest.raises(Divergence, match="memory has"):
        await story.compare_everything()
