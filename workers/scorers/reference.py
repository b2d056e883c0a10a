"""The reference worker: adds log-probs under the frozen policy to chunks, and guidance to finished
responses.

Chunks come from the mailbox, which generators fill, and overdue ones from the ledger. Each chunk
carries its whole context, so this worker keeps no state, and any number of them may come and go.
The reference field of a chunk is written once.

With guidance, finished responses also come from the ledger, as soon as they have a reward with the
texts, and are read again after these texts (``workers.scorers.guided_passes``). The guidance field
of a final chunk is written once. The two kinds of work alternate, a batch each. The deadlines of
responses in hand are extended, so that no other worker reads them.

Counters in the heartbeat: ``scored``, ``failed``, ``overdue``, ``duplicates``, ``scored_tokens``
(log-probs, including guided passes); ``guided`` (responses), ``guided_passes``, ``guided_tokens``
(read in them, including prompts), ``guidance_absent`` (responses that lack some)."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from pipeline.ledger.types import ScoredChunk
from pipeline.preflight.guidance import load_guided_prompts, longest_read
from pipeline.preflight.model_folder import loading
from pipeline.process.work import TOKENS
from pipeline.runtime.registry.contract import WaitingFor
from protocol.errors import EngineDied, EngineError
from protocol.ids import ChunkId, Role
from protocol.trajectory import Field, ReferenceScore, RewardScore, TrajectoryChunk
from workers.engines.build import build_scoring_engine
from workers.engines.scoring.seam import ScoringEngine, ScoringRequest
from workers.scorers.guided_passes import GuidedPasses, ResponsePasses, response_of
from workers.scorers.scorer import RECEIVE_TIMEOUT_S, BatchScorer

_GUIDANCE_EVERY_S = 0.25
"""Pause between looking for responses to guide; none after a full batch."""


class Reference(BatchScorer):
    role: ClassVar[Role] = Role.REFERENCE
    field: ClassVar[Field] = Field.REFERENCE
    _passes: GuidedPasses | None = None
    _next_guidance_s: float = 0.0
    _guided_here: tuple[ChunkId, ...] = ()

    async def setup(self) -> None:
        config = self.ctx.config
        self.ctx.starting(loading(config.reference_model))
        began_s = self.ctx.clock.monotonic()
        self._engine: ScoringEngine = await self.ctx.prepare("reference", build_scoring_engine, config)
        self.ctx.log.info("model_loaded", seconds=round(self.ctx.clock.monotonic() - began_s, 3))
        if config.needs_guidance:
            prompts = await self.ctx.prepare("guided prompts", load_guided_prompts, config)
            self._passes = GuidedPasses(prompts, longest_read(config, prompts))
            self.ctx.log.info("guidance_ready", guide_version=prompts.version)
        await super().setup()

    async def run(self) -> None:
        if self._passes is not None:
            self.ctx.spawn("deadlines", self._extend_deadlines())
        await super().run()

    async def serve(self, timeout_s: float = RECEIVE_TIMEOUT_S) -> int:
        """Guide a batch of finished responses if any are due, then score chunks; return the number
        of both."""
        num_guided = 0 if self._passes is None else await self._guide(self._passes)
        return num_guided + await super().serve(0.0 if num_guided else timeout_s)

    def wants(self, chunk: TrajectoryChunk) -> bool:
        """Evaluations are never trained on, so they need no reference."""
        return not chunk.trajectory.is_evaluation

    def report_wait(self) -> None:
        if self._passes is None:
            super().report_wait()
        else:
            self.ctx.waiting_for(WaitingFor.INPUT, "its mailbox, or rewards")

    async def score(self, chunks: list[TrajectoryChunk]) -> None:
        """Score and write a batch; if the engine fails, each chunk alone, so that only bad ones
        fail."""
        requests = [
            ScoringRequest(np.concatenate([c.prompt.tokens, c.context_tokens, c.tokens]), c.num_tokens) for c in chunks
        ]
        scored: list[tuple[TrajectoryChunk, ReferenceScore]] = []
        for chunk, found in zip(chunks, await self._logprobs([[one] for one in requests]), strict=True):
            if isinstance(found, str):
                await self.fail(chunk, found)
            else:
                scored.append((chunk, ReferenceScore(logprobs=found[0])))
        await self.write_all(scored)
        self.ctx.count("scored_tokens", sum(chunk.num_tokens for chunk, _ in scored))

    # -- guidance ----------------------------------------------------------------------------------

    async def _guide(self, passes: GuidedPasses) -> int:
        now = self.ctx.clock.monotonic()
        if now < self._next_guidance_s:
            return 0
        due = await self._due(self.max_batch)
        if len(due) < self.max_batch:
            self._next_guidance_s = now + _GUIDANCE_EVERY_S
        if not due:
            return 0
        self.ctx.waiting_for(WaitingFor.COMPUTE)
        self.ctx.held = len(due)
        self._guided_here = tuple(one.chunk.id for one in due)
        self._inbox.begun(self._guided_here)
        try:
            plans = await self.ctx.compute(_planned, passes, due)
            num_tokens = sum(plan.num_tokens for plan in plans)
            with self.ctx.work.task("guidance", float(num_tokens), TOKENS, pieces=len(due)):
                await self._read([one.chunk for one in due], plans, passes)
        finally:
            self._inbox.ended(self._guided_here)
            self._guided_here = ()
        self.ctx.held = 0
        self.ctx.progress(len(due))
        return len(due)

    async def _read(self, chunks: list[TrajectoryChunk], plans: list[ResponsePasses], passes: GuidedPasses) -> None:
        """Make the passes of responses and write their guidance; those that fail are handed out
        again."""
        scored: list[tuple[TrajectoryChunk, ResponsePasses, list[np.ndarray]]] = []
        for chunk, plan, found in zip(chunks, plans, await self._logprobs([p.requests for p in plans]), strict=True):
            if isinstance(found, str):
                await self.fail(chunk, found, Field.GUIDANCE)
            else:
                scored.append((chunk, plan, found))
        await self.write_all((chunk, passes.score(plan, found)) for chunk, plan, found in scored)
        made = [request for _, plan, _ in scored for request in plan.requests]
        self.ctx.count("guided_passes", len(made))
        self.ctx.count("guided_tokens", sum(request.tokens.size for request in made))
        self.ctx.count("scored_tokens", sum(request.num_scored for request in made))
        lacking = [(chunk, plan.absent) for chunk, plan, _ in scored if plan.absent]
        self.ctx.count("guidance_absent", len(lacking))
        for chunk, reason in lacking:
            if (log := self._log_of(reason, "guidance absent")) is not None:
                log.warning("guidance_absent", chunk=str(chunk.id), reason=reason)

    async def _due(self, room: int) -> list[ScoredChunk]:
        """Claim final chunks that have a reward but no guidance."""
        due = await self.ctx.ledger.overdue(self.ctx.who, Field.GUIDANCE, max_chunks=room)
        for one in due:
            self._take(one.chunk, Field.GUIDANCE)
        return due

    async def _extend_deadlines(self) -> None:
        """Prevent responses in hand from being handed out to others."""
        while True:
            await self.ctx.clock.sleep(self.ctx.config.ledger.scoring_deadline_s / 3)
            if self._guided_here:
                await self.ctx.ledger.extend_scoring(self.ctx.who, Field.GUIDANCE, self._guided_here)

    # -- the engine --------------------------------------------------------------------------------

    async def _logprobs(self, asked: Sequence[Sequence[ScoringRequest]]) -> list[list[np.ndarray] | str]:
        """Return the log-probs of each item's requests, computing all items at once.

        If the engine fails, each item is computed alone, and a bad one gets a traceback instead of
        numbers. Raises EngineDied: a dead engine is not the items' fault, and a new process will
        compute them."""
        requests = [request for item in asked for request in item]
        try:
            found = iter(await self.ctx.compute(self._engine.logprobs, requests) if requests else ())
        except EngineDied:
            raise
        except EngineError:
            if len(asked) == 1:
                return [traceback.format_exc()]
            return [one for item in asked for one in await self._logprobs([item])]
        return [[next(found) for _ in item] for item in asked]


def _planned(passes: GuidedPasses, due: Sequence[ScoredChunk]) -> list[ResponsePasses]:
    plans: list[ResponsePasses] = []
    for one in due:
        reward = one.scores.get(Field.REWARD)
        texts = reward.guidance if isinstance(reward, RewardScore) else None
        plans.append(passes.plan(one.chunk.prompt, response_of(one.chunk), texts))
    return plans
