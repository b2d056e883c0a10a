"""The reward worker: finished responses in, scores out.

*Consumes* final chunks from its mailbox, and from the ledger those that no reward worker has scored in time. *Produces* the
reward field of each, once; a repeat changes nothing. *Waits for* its mailbox (generators fill it).

A verifier that raises or hangs is not a wrong answer: the failure is reported to the ledger with its traceback, the chunk is
handed out again, and after the allowed attempts its group becomes a dead letter.

Counters in the heartbeat: ``scored``, ``failed``, ``overdue`` (picked up from the ledger), ``duplicates``.
"""

from __future__ import annotations

from typing import ClassVar

from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.shaping import shape
from pipeline.rewards.verifier import Response, VerifierFailure
from protocol.ids import Role
from protocol.trajectory import Field, Score, TrajectoryChunk
from workers.scorer import Scorer


class Reward(Scorer):
    """Scores finished trajectories with the verifier that each prompt names."""

    role: ClassVar[Role] = Role.REWARD
    field: ClassVar[Field] = Field.REWARD

    async def setup(self) -> None:
        """Start the verifier processes and open the mailbox."""
        config = self.ctx.config.reward
        self._pool = VerifierPool(config, configured=self.ctx.config.verifier_paths)
        await self._pool.start()
        self.max_batch = config.max_batch
        await super().setup()

    async def teardown(self) -> None:
        """Stop the verifier processes."""
        await self._pool.aclose()
        await super().teardown()

    def wants(self, chunk: TrajectoryChunk) -> bool:
        """Only a finished trajectory can be scored."""
        return chunk.finish_reason.is_final

    async def score(self, chunks: list[TrajectoryChunk]) -> None:
        """Verify, shape and write a batch."""
        verdicts = await self._pool.score([_response(chunk) for chunk in chunks])
        scored: list[tuple[TrajectoryChunk, Score]] = []
        for chunk, verdict in zip(chunks, verdicts, strict=True):
            if isinstance(verdict, VerifierFailure):
                await self.fail(chunk, verdict.error)
                continue
            score = shape(
                self.ctx.config.reward,
                verdict,
                num_tokens=chunk.response_length,
                max_response_tokens=self.ctx.config.generation.max_response_tokens,
                finish_reason=chunk.finish_reason,
            )
            scored.append((chunk, score))
        await self.write_all(scored)


def _response(chunk: TrajectoryChunk) -> Response:
    return Response(
        prompt_text=chunk.prompt.text,
        response_text=chunk.response_text or "",
        answer=chunk.prompt.answer,
        verifier=chunk.prompt.verifier,
        extra=chunk.prompt.extra,
        num_tokens=chunk.response_length,
        finish_reason=chunk.finish_reason,
    )
