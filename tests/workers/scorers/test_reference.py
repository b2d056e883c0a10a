"""Claims about the blame for a failure of the reference engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from protocol.errors import EngineDied, EngineError
from protocol.ids import Role
from tests.pipeline.ledger.builders import GENERATOR, make_chunk
from tests.pipeline.runtime.fakes import small_config
from tests.workers.scorers.scorers import scorer_context
from workers.engines.scoring.seam import ScoringRequest
from workers.scorers.reference import Reference


class Failing:
    """Fails with the given error on a batch that holds a sequence of ``length`` tokens."""

    def __init__(self, error: EngineError, length: int) -> None:
        self._error, self._length = error, length

    def logprobs(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        if any(request.tokens.size == self._length for request in requests):
            raise self._error
        return [np.zeros(request.num_scored, np.float32) for request in requests]


@pytest.mark.parametrize("error", [EngineDied("gone"), EngineError("cannot be scored")])
async def test_a_chunk_that_cannot_be_scored_fails_alone_and_a_dead_engine_fails_none(
    tmp_path: Path, error: EngineError
) -> None:
    async with scorer_context(tmp_path, small_config(tmp_path), Role.REFERENCE) as ctx:
        worker = Reference(ctx)
        worker._engine = Failing(error, length=2 + 4)
        worker._inbox = ctx.watch_mailbox(ctx.transport.mailbox(f"ipc://{tmp_path}/mailbox"))
        grant = await ctx.ledger.lease(GENERATOR, max_trajectories=3)
        chunks = [make_chunk(lease.trajectory, tokens=3 + n) for n, lease in enumerate(grant.leases)]
        for chunk in chunks:
            await ctx.ledger.write_chunk(GENERATOR, chunk)
        if isinstance(error, EngineDied):
            with pytest.raises(EngineDied):
                await worker.score(chunks)
            assert "failed" not in ctx.counters
        else:
            await worker.score(chunks)
            assert ctx.counters["failed"] == 1
            assert ctx.counters["scored_tokens"] == 3 + 5
