"""The reward worker: finished responses in, scores out.

Final chunks come from the mailbox, which generators fill, and overdue ones from the ledger. The
reward field of a chunk is written once; a repeat changes nothing.

With a reward model (``reward.model``), the model first reads every response, on the compute thread.
Its weighted score is a part of the reward, and verifiers see the score. Verifiers alone decide
accuracy, which dynamic sampling uses.

Each function of ``reward.functions`` adds a part to the reward of a training response.

A verifier that raises is not a wrong answer, nor is a response that the reward model cannot read.
The failure is reported to the ledger with its traceback, and the chunk is handed out again. After
the allowed attempts its group becomes a dead letter. An answer that is not judged within
``reward.timeout_s`` is wrong, at once.

Counters in the heartbeat: ``scored``, ``not_judged`` (of those, the answers that were wrong because
of the time limit), ``failed``, ``overdue`` (picked up from the ledger), ``duplicates``.
``waited_for_group`` counts responses put off until their group has ended."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, ClassVar

from pipeline.preflight.model_folder import loading
from pipeline.rewards.functions import judge
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.shaping import shape
from pipeline.rewards.verifier import Response, VerifierFailure, VerifierFailureKind, VerifierOutcome
from protocol.errors import ConfigError, DataError, EngineError
from protocol.ids import Role
from protocol.trajectory import Field, Score, TrajectoryChunk
from workers.engines.build import build_reward_model
from workers.scorers.scorer import Scorer

if TYPE_CHECKING:
    from workers.engines.scoring.reward_model import TorchRewardModel


class Reward(Scorer):
    """Scores finished trajectories with the verifier that each prompt names."""

    role: ClassVar[Role] = Role.REWARD
    field: ClassVar[Field] = Field.REWARD

    async def setup(self) -> None:
        """Load the reward model if any, start the verifier processes and open the mailbox."""
        config = self.ctx.config.reward
        self._model: TorchRewardModel | None = None
        if config.model is not None:
            self.ctx.starting(loading(config.model.path))
            self._model = await self.ctx.compute(build_reward_model, config.model)
            self._weight, self._center = config.model.weight, config.model.center
        self._pool = VerifierPool(config, configured=self.ctx.config.verifier_paths)
        await self._pool.start()
        self.max_batch = config.max_batch
        await super().setup()

    async def teardown(self) -> None:
        """Stop the verifier processes."""
        await self._pool.aclose()
        await super().teardown()

    def amount(self, chunks: list[TrajectoryChunk]) -> tuple[float, str]:
        """Return how many responses are judged at once."""
        return float(len(chunks)), "responses"

    def wants(self, chunk: TrajectoryChunk) -> bool:
        """Only a finished trajectory can be scored."""
        return chunk.finish_reason.is_final

    async def score(self, chunks: list[TrajectoryChunk]) -> None:
        """Read, verify, shape and write a batch. With functions of whole groups, a response whose
        group goes on waits: the last member's end brings all of them here."""
        if any(function.whole_group for function in self.ctx.config.reward.functions.values()):
            chunks = await self._with_their_groups(chunks)
        with self.ctx.work.part(0.0 if self._model is None else 0.8):
            read = await self._read(chunks)
        with self.ctx.work.part(1.0 if self._model is None else 0.2):
            verdicts = await self._verdicts(read)
        scored: list[tuple[TrajectoryChunk, Score]] = []
        for (chunk, score), verdict in zip(read, verdicts, strict=True):
            if isinstance(verdict, VerifierFailure):
                if verdict.kind is VerifierFailureKind.BUDGET:
                    # ends the run: more responses would be sampled for nothing
                    raise ConfigError(verdict.error)
                await self.fail(chunk, verdict.error)
                continue
            if not verdict.judged:
                self.ctx.count("not_judged")
                self.ctx.log.warning("answer_not_judged", chunk=str(chunk.id), reason=verdict.reason)
            shaped = shape(
                self.ctx.config.reward,
                verdict,
                num_tokens=chunk.response_length,
                max_response_tokens=self.ctx.config.generation.max_response_tokens,
                finish_reason=chunk.finish_reason,
                model_part=None if score is None else self._weight * score,
            )
            scored.append((chunk, shaped))
        await self.write_all(scored)

    async def _with_their_groups(self, chunks: list[TrajectoryChunk]) -> list[TrajectoryChunk]:
        """Return evaluation's chunks, and the final chunks of all groups that have ended."""
        found = {chunk.id: chunk for chunk in chunks if chunk.trajectory.is_evaluation}
        for group in dict.fromkeys(c.trajectory.group for c in chunks if not c.trajectory.is_evaluation):
            whole = await self.ctx.ledger.finished_group(group, num_members=self.ctx.config.algorithm.group_size)
            found.update((chunk.id, chunk) for chunk in whole)
        self.ctx.count("waited_for_group", sum(chunk.id not in found for chunk in chunks))
        return list(found.values())

    async def _verdicts(self, read: list[tuple[TrajectoryChunk, float | None]]) -> list[VerifierOutcome]:
        """Judge responses; those of training by the further functions too. Outcomes in order."""
        functions = self.ctx.config.reward.functions
        responses = [_response(chunk, score) for chunk, score in read]
        if not functions:
            return await self._pool.score(responses)
        found: dict[int, VerifierOutcome] = {}
        for used in (functions, {}):
            indices = [i for i, (chunk, _) in enumerate(read) if chunk.trajectory.is_evaluation is not bool(used)]
            groups = [read[index][0].trajectory.group for index in indices]
            judged = await judge(self._pool, used, [responses[index] for index in indices], groups=groups)
            found.update(zip(indices, judged, strict=True))
        return [found[index] for index in range(len(read))]

    async def _read(self, chunks: list[TrajectoryChunk]) -> list[tuple[TrajectoryChunk, float | None]]:
        """Pair each chunk with the reward model's centred score of it, None without a reward model.

        When the model fails on the batch, each chunk is read by itself. Chunks that cannot be read
        are reported and left out."""
        if self._model is None:
            return [(chunk, None) for chunk in chunks]
        try:
            scores = await self.ctx.compute(self._model.scores, [(c.prompt, c.response_text or "") for c in chunks])
        except (EngineError, DataError):
            if len(chunks) > 1:
                return [pair for chunk in chunks for pair in await self._read([chunk])]
            await self.fail(chunks[0], traceback.format_exc())
            return []
        return [(chunk, score - self._center) for chunk, score in zip(chunks, scores, strict=True)]


def _response(chunk: TrajectoryChunk, model_score: float | None) -> Response:
    return Response(
        prompt_text=chunk.prompt.text,
        response_text=chunk.response_text or "",
        answer=chunk.prompt.answer,
        verifier=chunk.prompt.verifier,
        extra=chunk.prompt.extra,
        num_tokens=chunk.response_length,
        finish_reason=chunk.finish_reason,
        model_score=model_score,
    )
