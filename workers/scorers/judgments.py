"""The reward worker's guidance: judgments of wrong responses, before their scores are written.

Scores of training have guidance in runs that need it. A judgment has a limit: ``reward.timeout_s``
of a function, and ``timeout_s`` of an endpoint, which is left alone after an outage. An absent
judgment fails nothing: the score is written without it, with the reason.

Counters: ``judgments`` (written), and ``judgments_absent_REASON`` of wrong responses without one:
the kinds of ``VerifierFailureKind``, ``masked`` and ``not_asked_for``."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from pipeline.algorithms.imitation import RIGHT_ACCURACY
from pipeline.rewards.guidance import MASKED, NOT_ASKED_FOR, absent_reason, guidance_for
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.verifier import Response, VerifierFailureKind
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.counter_names import JUDGMENTS_ABSENT
from protocol.complaints import Complaints
from protocol.trajectory import RewardScore, TrajectoryChunk

_EXPECTED = frozenset({MASKED, NOT_ASKED_FOR, VerifierFailureKind.NOTHING_FOUND})
"""Absences that are no fault of anything: they are counted, not logged."""
Scored = tuple[TrajectoryChunk, Response, RewardScore]


class GuidanceSource:
    """Adds guidance to the scores of one reward worker, in a run that needs it."""

    def __init__(self, ctx: ActorContext, pool: VerifierPool) -> None:
        self._ctx, self._pool = ctx, pool
        self._judgments = ctx.config.guidance.judgments
        self._complaints = Complaints(ctx.clock.monotonic)

    @property
    def is_quick(self) -> bool:
        """Whether it takes no process and no request."""
        return not self._judgments or self._pool.is_quick(self._judgments, judgments=True)

    async def add(self, scored: Sequence[Scored]) -> list[Scored]:
        """Return the scores in their order, those of training with guidance."""
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
        num_silent = self._complaints.due(reason, "absent")
        if num_silent is not None:
            log = self._ctx.log.bind(num_not_logged=num_silent) if num_silent else self._ctx.log
            log.warning("judgment_absent", chunk=str(chunk.id), reason=absent)
