"""The story reaches every step on both ledgers, and notices when they differ."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from ops.soak.__main__ import soak, specs
from ops.soak.story import RUN, Divergence, Story
from pipeline.ledger.redis import keys


@pytest.mark.timeout(600)
async def test_both_ledgers_agree_through_claims_leases_crashes_and_late_copies(tmp_path: Path) -> None:
    happened = await soak(tmp_path, num_chunks=2400, seed=1, units_per_update=16, rounds=6, crash_every=100)
    assert happened["chunks"] >= 2400
    for what in ("updates", "value batches", "overdue", "generator crashes", "learner crashes", "server crashes"):
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
