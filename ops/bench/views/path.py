"""Groups from lease to settlement on one server: what a trajectory costs it.

    python ops/bench/views/path.py URL GROUPS TOKENS WINDOWS

*Consumes* a ledger server's address, and a line for each turn. *Produces* a line of JSON a turn:
the server's processor time by step, in microseconds a trajectory, and its memory. *Waits for* its
turns and the server.

The script is run by its path, so that ``PYTHONPATH`` decides whose ``pipeline`` it measures."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable
from typing import Any

import msgspec
import numpy as np
import redis

from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.types import Claim, LedgerSpec, Unit
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
from protocol.trajectory import FinishReason, Prompt, RewardScore, Segment, TrajectoryChunk

_RUN = "path"
_GROUP_SIZE = 8
_GENERATOR = Incarnation(Role.GENERATOR, "generator-0", 1)
_SCORER = Incarnation(Role.REWARD, "reward-0", 1)
_LEARNER = Incarnation(Role.LEARNER, "learner", 1)


def _chunk(num_tokens: int) -> TrajectoryChunk:
    return TrajectoryChunk(
        id=ChunkId(TrajectoryId("t", 0, 0), 0),
        prompt=Prompt(
            prompt_id="train:17",
            tokens=np.arange(64, dtype=np.int32),
            text="2+3=",
            answer="5",
            verifier="arithmetic",
        ),
        context_tokens=np.empty(0, np.int32),
        tokens=np.arange(num_tokens, dtype=np.int32),
        behavior_logprobs=np.zeros(num_tokens, np.float32),
        segments=(Segment(0, num_tokens),),
        finish_reason=FinishReason.STOP,
        response_text="so",
    )


class _Meter:
    """Adds up the server's processor time by step."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)
        self.spent: dict[str, float] = {}

    def now(self) -> float:
        cpu: Any = self._client.info("cpu")
        return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])

    def memory(self) -> int:
        info: Any = self._client.info("memory")
        return int(info["used_memory"])

    async def of(self, step: str, work: Awaitable[Any]) -> Any:
        before = self.now()
        result = await work
        self.spent[step] = self.spent.get(step, 0.0) + self.now() - before
        return result


async def main(url: str, num_groups: int, num_tokens: int, num_windows: int) -> None:
    """Take so many groups a turn, of responses of so many chunks, through one ledger."""
    meter, ledger = _Meter(url), RedisLedger(connect(url, patience_s=60.0), _RUN)
    batch = num_groups * _GROUP_SIZE
    await ledger.open(LedgerSpec(_RUN, Unit.GROUP, _GROUP_SIZE, batch, 1000, lease_s=1e6))
    final = _chunk(num_tokens)
    window = msgspec.structs.replace(final, finish_reason=FinishReason.WINDOW, response_text=None)
    empty, full = meter.memory(), 0
    for _ in sys.stdin:
        meter.spent.clear()
        grant = await meter.of("lease", ledger.lease(_GENERATOR, max_trajectories=batch))
        names = [lease.trajectory for lease in grant.leases]

        async def write(names: list[TrajectoryId] = names) -> None:
            for name in names:
                for index in range(num_windows):
                    chunk = final if index == num_windows - 1 else window
                    await ledger.write_chunk(_GENERATOR, msgspec.structs.replace(chunk, id=ChunkId(name, index)))

        async def score(names: list[TrajectoryId] = names) -> None:
            for name in names:
                reward = RewardScore(reward=1.0, accuracy=float(name.member % 2))
                await ledger.write_score(_SCORER, ChunkId(name, num_windows - 1), reward)

        await meter.of("write_chunk", write())
        await meter.of("write_score", score())
        full = max(full, meter.memory())
        claim = await meter.of("claim", ledger.claim(_LEARNER, policy_version=0))
        assert isinstance(claim, Claim)
        await meter.of("settle", ledger.settle(_LEARNER, (claim.claim_id,), num_updates=1))
        steps = {step: round(1e6 * spent / batch, 2) for step, spent in meter.spent.items()}
        figures = {"us": steps, "kept_bytes": meter.memory() - empty, "full_bytes": full - empty}
        print(json.dumps(figures), flush=True)
    await ledger.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:5])))
