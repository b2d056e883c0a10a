"""Further rewards with names and weights, added to the verdicts of a batch.

*Consumes* responses. *Produces* one outcome for each: the verifier's, with a part for each function
of ``reward.functions``. *Waits for* the pool, one function after the other, each call within its
time limit.

A function's number has no value that means wrong. So one that fails, or is late, fails the
response: it is tried again, and counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from pipeline.config.judging import RewardFunctionSection
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierFailureKind, VerifierOutcome


async def judge(
    pool: VerifierPool,
    functions: Mapping[str, RewardFunctionSection],
    responses: Sequence[Response],
    *,
    on_judged: Callable[[int], None] | None = None,
) -> list[VerifierOutcome]:
    """Judge responses by their verifiers, and add a part for each function; outcomes in order.
    A response without a verdict costs no call of a function. ``on_judged``: as ``pool.score``."""
    outcomes = await pool.score(responses, on_judged=on_judged)
    for name, function in functions.items():
        kept = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, Verdict)]
        asked = [msgspec.structs.replace(responses[index], verifier=function.verifier) for index in kept]
        numbers = await pool.score(asked, any_number=True)
        for index, number in zip(kept, numbers, strict=True):
            outcomes[index] = _with_part(outcomes[index], name, function.weight, number)
    return outcomes


def _with_part(verdict: VerifierOutcome, name: str, weight: float, number: VerifierOutcome) -> VerifierOutcome:
    assert isinstance(verdict, Verdict)
    if isinstance(number, VerifierFailure):
        return VerifierFailure(kind=number.kind, error=f"reward {name}: {number.error}")
    if not number.judged:
        return VerifierFailure(kind=VerifierFailureKind.LATE, error=f"reward {name}: {number.reason}")
    if name in verdict.parts:
        error = (
            f"the verifier returned a part {name!r}, which is a function of reward.functions too; rename one of them"
        )
        return VerifierFailure(kind=VerifierFailureKind.BAD_VERDICT, error=error)
    part = weight * (number.accuracy + sum(number.parts.values()))
    return msgspec.structs.replace(verdict, parts={**verdict.parts, name: part})
