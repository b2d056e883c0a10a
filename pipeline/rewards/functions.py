"""Adds the rewards of ``reward.functions`` to verdicts, and collects guidance for scored responses.

No number of a reward function means "wrong". So when one fails or is late, the whole response
fails; it is retried and counted. A function of whole groups is called once per group and needs a
verdict for each member: while one has none, the others are put off.

Only wrong responses wait for a judgment, each up to its time limit. A missing judgment has a
reason, but changes no score and fails no response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence

import msgspec

from pipeline.config.rewards import RewardFunctionSection
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.verifier import (
    MAX_NUMBER,
    NOT_IN_TIME,
    Response,
    Verdict,
    VerifierFailure,
    VerifierFailureKind,
    VerifierOutcome,
    not_judged,
)
from protocol.trajectory import Guidance, RewardScore


async def score_responses(
    pool: VerifierPool,
    functions: Mapping[str, RewardFunctionSection],
    responses: Sequence[Response],
    *,
    groups: Sequence[Hashable] | None = None,
    on_judged: Callable[[int], None] | None = None,
    known: Mapping[int, Verdict] | None = None,
    late_is_wrong: bool = False,
) -> list[VerifierOutcome]:
    """Judge responses with their verifiers, then add each function's part; returns outcomes in
    order.

    ``known`` are verdicts of environments, by index; the other responses are judged. ``groups`` gives each response's
    group; by default each is alone. Functions are not called for responses without a verdict. ``on_judged`` is as in
    ``pool.score``. With ``late_is_wrong`` a response that its verifier does not judge in time counts as wrong."""
    known = known or {}
    asked = [index for index in range(len(responses)) if index not in known]
    judged = await pool.score([responses[index] for index in asked], on_judged=on_judged)
    found: dict[int, VerifierOutcome] = {**known, **dict(zip(asked, judged, strict=True))}
    outcomes = [found[index] for index in range(len(responses))]
    if late_is_wrong:
        outcomes = [_wrong_if_late(one) for one in outcomes]
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(range(len(responses)) if groups is None else groups):
        members.setdefault(group, []).append(index)
    for name, function in functions.items():
        if function.whole_group:
            async with asyncio.TaskGroup() as tasks:
                for indices in members.values():
                    tasks.create_task(_judge_group(pool, name, function, responses, indices, outcomes))
            continue
        kept = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, Verdict)]
        again = [msgspec.structs.replace(responses[index], verifier=function.verifier) for index in kept]
        for index, number in zip(kept, await pool.score(again, any_number=True), strict=True):
            outcomes[index] = _with_part(outcomes[index], name, function.weight, number)
    return outcomes


async def _judge_group(
    pool: VerifierPool,
    name: str,
    function: RewardFunctionSection,
    responses: Sequence[Response],
    indices: list[int],
    outcomes: list[VerifierOutcome],
) -> None:
    """Add the function's part to the outcomes of a group's members, in place."""
    failed = next((one for i in indices if isinstance(one := outcomes[i], VerifierFailure)), None)
    if failed is not None:
        error = f"reward {name} needs the whole group, but a member has no verdict: {failed.error}"
        for index in indices:
            if not isinstance(outcomes[index], VerifierFailure):
                outcomes[index] = VerifierFailure(kind=VerifierFailureKind.PUT_OFF, error=error)
        return
    numbers = await pool.score_group(function.verifier, [responses[index] for index in indices])
    for index, number in zip(indices, numbers, strict=True):
        outcomes[index] = _with_part(outcomes[index], name, function.weight, number)


def _wrong_if_late(outcome: VerifierOutcome) -> VerifierOutcome:
    if isinstance(outcome, VerifierFailure) and outcome.kind in NOT_IN_TIME:
        return not_judged(outcome.error)
    return outcome


def _with_part(verdict: VerifierOutcome, name: str, weight: float, number: VerifierOutcome) -> VerifierOutcome:
    assert isinstance(verdict, Verdict)
    if isinstance(number, VerifierFailure):
        return VerifierFailure(kind=number.kind, error=f"reward {name}: {number.error}")
    if not number.judged:
        return VerifierFailure(kind=VerifierFailureKind.LATE, error=f"reward {name}: {number.reason}")
    if not number.applies:
        return verdict
    if name in verdict.parts:
        error = (
            f"the verifier returned a part {name!r}, which is also a function of reward.functions; rename one of them"
        )
        return VerifierFailure(kind=VerifierFailureKind.BAD_VERDICT, error=error)
    part = weight * (number.accuracy + sum(number.parts.values()))
    if not abs(part) <= MAX_NUMBER:
        error = f"reward {name}: weight {weight:g} times its numbers is {part:g}; at most {MAX_NUMBER:g} is allowed"
        return VerifierFailure(kind=VerifierFailureKind.BAD_VERDICT, error=error)
    return msgspec.structs.replace(verdict, parts={**verdict.parts, name: part})


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
    """Return the guidance of each response, in order.

    ``judgments`` names what writes judgments, "" for nothing. Responses with an accuracy above
    ``right_above`` are right and get none, nor do responses without loss."""
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
    """Return the kind of reason why guidance is absent, such as ``outage``, or "" if it is not."""
    return guidance.absent.partition(":")[0]


def _guidance(gold: str, written: VerifierOutcome) -> Guidance:
    if not isinstance(written, VerifierFailure):
        # the verdict of a response that exceeded a limit has no judgment
        return Guidance(gold_text=gold, judge_text=written.reason)
    last = written.error.rstrip().rpartition("\n")[2]
    return Guidance(gold_text=gold, absent=f"{written.kind}: {last}"[:_MAX_REASON_CHARS])
