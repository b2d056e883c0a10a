"""The vectors about the order of training hold on the ledger of a run: Lua, in a Redis server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import redis.asyncio

from pipeline.ledger.contract import Ledger
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.types import LedgerSpec
from tests.golden import check
from tests.golden.adapters.ledger import DRIVERS


@pytest.mark.parametrize("family", sorted(DRIVERS))
async def test_the_ledger_of_a_run_agrees_with_every_vector_of_a_family(
    family: str, redis_client: redis.asyncio.Redis
) -> None:
    opened: list[RedisLedger] = []

    async def open_ledger(spec: LedgerSpec) -> Ledger:
        if opened:
            await opened[-1].aclose()
        run = f"golden-{len(opened)}"
        opened.append(RedisLedger(redis_client, run, now=lambda: 0.0))
        await opened[-1].open(replace(spec, run=run))
        return opened[-1]

    cases = json.loads((Path(__file__).parent / f"{family}.json").read_text())["cases"]
    # The other cases of this family are about losses.
    if family == "decoupled_ppo":
        cases = [case for case in cases if "states" in case["inputs"]]
    for case in cases:
        error, where = check.compare(case, await DRIVERS[family](open_ledger, case["inputs"]))
        assert error <= case["tolerance"], f"{case['id']}: {where}"
    assert cases
