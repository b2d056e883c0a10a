"""Guidance in the scorers: the reward worker's judgments of wrong responses, and the reference's
passes.

A correct response is read once more by the frozen policy, after the standard prompt. A wrong one is
read twice more, also after the judge prompt. The response's tokens are the sampled ones. A missing
pass has a reason: no judgment was made, or the prompt is too long for the model.

A judgment is limited by ``reward.timeout_s`` for a function and by ``timeout_s`` for an endpoint,
which is not called after an outage. Without a judgment in time the score is still written, with the
reason.

Counters: ``judgments`` (written), and ``judgments_absent_REASON`` for wrong responses without one:
the kinds of ``VerifierFailureKind``, ``masked`` and ``not_asked_for``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from pipeline.algorithms.terms.guidance import RIGHT_ACCURACY
from pipeline.data.guided_prompts import GuidedPrompts
from pipeline.rewards.functions import MASKED, NOT_ASKED_FOR, absent_reason, guidance_for
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.verifier import Response, VerifierFailureKind
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.entries import JUDGMENTS_ABSENT
from protocol.errors import DataError
from protocol.log_limiter import LogLimiter
from protocol.trajectory import Guidance, GuidanceScore, Prompt, RewardScore, TrajectoryChunk
from workers.engines.scoring.seam import ScoringRequest

_EXPECTED = frozenset({MASKED, NOT_ASKED_FOR, VerifierFailureKind.NOTHING_FOUND})
"""Absences that are nobody's fault: counted, but not logged."""
Scored = tuple[TrajectoryChunk, Response, RewardScore]


class GuidanceSource:
    def __init__(self, ctx: ActorContext, pool: VerifierPool) -> None:
        self._ctx, self._pool = ctx, pool
        self._judgments = ctx.config.guidance.judgments
        self._log_limiter = LogLimiter(ctx.clock.monotonic)

    @property
    def is_quick(self) -> bool:
        return not self._judgments or self._pool.is_quick(self._judgments, judgments=True)

    async def add(self, scored: Sequence[Scored]) -> list[Scored]:
        """Return the scores in order, with guidance for those of training."""
        wanted = [one for one in scored if not one[0].trajectory.is_evaluation]
        made = await guidance_for(
            self._pool,
            self._judgments,
            [response for _, response, _ in wanted],
            [score for _, _, score in wanted],
            right_above=RIGHT_ACCURACY,
        )
        guided = {chunk.id: guidance for (chunk, _, _), guidance in zip(wanted, made, strict=True)}
        for (chunk, _, _), guidance in zip(wanted, made, strict=True):
            self._count(chunk, guidance.judge_text, guidance.absent, absent_reason(guidance))
        return [(chunk, response, replace(score, guidance=guided.get(chunk.id))) for chunk, response, score in scored]

    def _count(self, chunk: TrajectoryChunk, judgment: str, absent: str, reason: str) -> None:
        if judgment:
            self._ctx.count("judgments")
        if not absent:
            return
        self._ctx.count(JUDGMENTS_ABSENT + reason)
        if reason in _EXPECTED:
            return
        num_silent = self._log_limiter.due(reason, "absent")
        if num_silent is not None:
            log = self._ctx.log.bind(num_not_logged=num_silent) if num_silent else self._ctx.log
            log.warning("judgment_absent", chunk=str(chunk.id), reason=absent)


_NOTHING = np.empty(0, np.float32)
_NO_TEXTS = Guidance(absent="the reward has no texts to guide by")


@dataclass(frozen=True, slots=True)
class ResponsePasses:
    standard: ScoringRequest | None
    judge: ScoringRequest | None
    absent: str
    """Why a pass that the response should have is missing; empty if none is."""

    @property
    def requests(self) -> list[ScoringRequest]:
        """The passes in the order of their results: none, the standard one, or both."""
        return [request for request in (self.standard, self.judge) if request is not None]

    @property
    def num_tokens(self) -> int:
        return sum(request.tokens.size for request in self.requests)


class GuidedPasses:
    def __init__(self, prompts: GuidedPrompts, longest: int | None) -> None:
        """``longest`` is the most tokens, prompt and response, that the engine reads; None for any."""
        self._prompts = prompts
        self._longest = longest

    def plan(self, prompt: Prompt, response: np.ndarray, guidance: Guidance | None) -> ResponsePasses:
        """Return the passes for a response, int32 [tokens of the whole response]. The judge pass
        needs a judgment, and is left out when the standard pass is, as no algorithm uses it alone."""
        texts = _NO_TEXTS if guidance is None else guidance
        if not texts.gold_text:
            return ResponsePasses(None, None, texts.absent or "there is no gold text")
        try:
            standard = self._request(self._prompts.standard(prompt, texts.gold_text), response, "gold text")
        except DataError as error:
            return ResponsePasses(None, None, str(error))
        if not texts.judge_text:
            return ResponsePasses(standard, None, texts.absent)
        try:
            tokens = self._prompts.judge(prompt, texts.gold_text, texts.judge_text)
            return ResponsePasses(standard, self._request(tokens, response, "judgment"), "")
        except DataError as error:
            return ResponsePasses(standard, None, str(error))

    def score(self, plan: ResponsePasses, logprobs: Sequence[np.ndarray]) -> GuidanceScore:
        """``logprobs`` are those of ``plan.requests``, float32 [response tokens] each."""
        return GuidanceScore(
            standard_logprobs=logprobs[0] if plan.standard is not None else _NOTHING,
            judge_logprobs=logprobs[-1] if plan.judge is not None else _NOTHING,
            guide_version=self._prompts.version,
            absent=plan.absent,
        )

    def _request(self, prompt: np.ndarray, response: np.ndarray, what: str) -> ScoringRequest:
        """Return the pass for a response after a guided prompt. Raises DataError if it is too long."""
        size = prompt.size + response.size
        if self._longest is not None and size > self._longest:
            raise DataError(
                f"the prompt with the {what} has {prompt.size} tokens, with the response {size}, but the reference reads at "
                f"most {self._longest}: lower guidance.max_judgment_tokens or generation.max_response_tokens"
            )
        return ScoringRequest(np.concatenate([prompt, response]).astype(np.int32, copy=False), int(response.size))


def response_of(chunk: TrajectoryChunk) -> np.ndarray:
    """Return the whole response that ends with a final chunk: int32 [tokens], as sampled."""
    return np.concatenate([chunk.context_tokens, chunk.tokens])
