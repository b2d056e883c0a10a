"""The reference worker: chunks in, log-probs under the frozen policy out.

Chunks come from the mailbox, which generators fill, and overdue ones from the ledger. Each chunk
carries its whole context. So this worker keeps no state, and any number of them may come and go.
The reference field of a chunk is written once.

Counters in the heartbeat: ``scored``, ``failed``, ``overdue``, ``duplicates``, ``scored_tokens``.
"""

from __future__ import annotations

import traceback
from typing import ClassVar

import numpy as np

from pipeline.preflight.model_folder import loading
from protocol.errors import EngineDied, EngineError
from protocol.ids import Role
from protocol.trajectory import Field, ReferenceScore, TrajectoryChunk
from workers.engines.build import build_scoring_engine
from workers.engines.scoring.seam import ScoringEngine, ScoringRequest
from workers.scorers.scorer import BatchScorer


class Reference(BatchScorer):
    """Adds frozen-policy log-probs to every chunk."""

    role: ClassVar[Role] = Role.REFERENCE
    field: ClassVar[Field] = Field.REFERENCE

    async def setup(self) -> None:
        """Load the frozen policy and open the mailbox."""
        self.ctx.starting(loading(self.ctx.config.reference_model))
        began_s = self.ctx.clock.monotonic()
        self._engine: ScoringEngine = await self.ctx.prepare("reference", build_scoring_engine, self.ctx.config)
        self.ctx.log.info("model_loaded", seconds=round(self.ctx.clock.monotonic() - began_s, 3))
        await super().setup()

    def wants(self, chunk: TrajectoryChunk) -> bool:
        """Evaluation is never trained on, so it needs no reference."""
        return not chunk.trajectory.is_evaluation

    async def score(self, chunks: list[TrajectoryChunk]) -> None:
        """Score and write a batch; if the engine fails, chunk by chunk: a bad one fails alone."""
        requests = [
            ScoringRequest(np.concatenate([c.prompt.tokens, c.context_tokens, c.tokens]), c.num_tokens) for c in chunks
        ]
        try:
            scored = await self.ctx.compute(self._engine.logprobs, requests)
        except EngineDied:
            # not the chunks' fault: a new process scores them
            raise
        except EngineError:
            if len(chunks) == 1:
                await self.fail(chunks[0], traceback.format_exc())
                return
            for chunk in chunks:
                await self.score([chunk])
            return
        scores = [ReferenceScore(logprobs=logprobs) for logprobs in scored]
        await self.write_all(zip(chunks, scores, strict=True))
        self.ctx.count("scored_tokens", sum(chunk.num_tokens for chunk in chunks))
