"""Guidance of scored responses: texts on what is right, and on what is wrong.

Wrong responses alone wait for a judgment, each within its limit. A judgment that is not there is a
state with its reason: it changes no score, and fails no response."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.verifier import Response, VerifierFailure, VerifierOutcome
from protocol.trajectory import Guidance, RewardScore

MASKED = "masked"
NOT_ASKED_FOR = "not_asked_for"
_MAX_REASON_CHARS = 300


async def guidance_for(
    pool: VerifierPool,
    judgments: str,
    responses: Sequence[Response],
    scores: Sequence[RewardScore],
    *,
    right_above: float,
) -> list[Guidance]:
    """Return the guidance of each response, in order. ``judgments`` names what writes them, or
    nothing does. A response is right with an accuracy above ``right_above``, and then needs none;
    one without loss has none either."""
    wrong = [i for i, score in enumerate(scores) if score.accuracy <= right_above]
    asked = [i for i in wrong if judgments and not scores[i].masked]
    written = await pool.judgments(judgments, [responses[i] for i in asked]) if asked else []
    found = dict(zip(asked, written, strict=True))
    guided: list[Guidance] = []
    for index, response in enumerate(responses):
        gold = response.gold_text
        if index in found:
            guided.append(_guidance(gold, found[index]))
        elif index in wrong:
            reason = MASKED if judgments else NOT_ASKED_FOR
            guided.append(Guidance(gold_text=gold, absent=reason))
        else:
            guided.append(Guidance(gold_text=gold))
    return guided


def absent_reason(guidance: Guidance) -> str:
    """Return the kind of an absence, such as ``outage``; empty where nothing is absent."""
    return guidance.absent.partition(":")[0]


def _guidance(gold: str, written: VerifierOutcome) -> Guidance:
    if not isinstance(written, VerifierFailure):
        # a verdict of a worker's own limits has no judgment in it
        return Guidance(gold_text=gold, judge_text=written.reason)
    last = written.error.rstrip().rpartition("\n")[2]
    return Guidance(gold_text=gold, absent=f"{written.kind}: {last}"[:_MAX_REASON_CHARS])
