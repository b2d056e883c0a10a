"""Estimates from an evaluation's responses: avg@k and pass@k, each with a 95 % interval.

The prompts are the sample: the responses of one prompt depend on one another, and so count as one
observation. The interval is Wilson's (1927), with as many observations as give the variance between
the prompts. It is good for few prompts too, and never empty."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_Z = 1.959964
"""Two-sided 95 % of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share with its interval."""

    value: float
    low: float
    high: float


def average(accuracies: Mapping[int, Sequence[float]]) -> Estimate:
    """Return avg@k of accuracies by prompt, each in [0, 1]: the mean over all responses. Raises
    ValueError without a response."""
    held = [list(one) for one in accuracies.values() if one]
    if not held:
        raise ValueError("an evaluation without a response has no accuracy")
    num_responses = sum(map(len, held))
    value = sum(map(sum, held)) / num_responses
    return _with_interval(value, [statistics.fmean(one) for one in held], num_responses)


def pass_at(accuracies: Mapping[int, Sequence[float]], k: int) -> Estimate | None:
    """Return pass@k: the mean over the prompts of 1 - C(n - c, k) / C(n, k), of which c of n
    responses are right (accuracy 1). Unbiased: Chen and others, 2021, eq. 1. Prompts with fewer
    than k responses are left out; None when none is left."""
    held = [(len(one), sum(accuracy == 1.0 for accuracy in one)) for one in accuracies.values() if len(one) >= k]
    if not held:
        return None
    shares = [1.0 - math.comb(n - c, k) / math.comb(n, k) for n, c in held]
    return _with_interval(statistics.fmean(shares), shares, sum(n for n, _ in held))


def _with_interval(value: float, of_prompts: Sequence[float], num_responses: int) -> Estimate:
    num_prompts = len(of_prompts)
    variance = statistics.variance(of_prompts) / num_prompts if num_prompts > 1 else 0.0
    spread = value * (1.0 - value)
    # the observations whose mean has this variance: between the prompts' number and the responses'
    count = spread / variance if variance > 0.0 else math.inf if spread > 0.0 else num_prompts
    count = min(max(count, num_prompts), num_responses) if num_prompts > 1 else 1.0
    z2 = _Z * _Z / count
    middle = (value + z2 / 2.0) / (1.0 + z2)
    half = _Z / (1.0 + z2) * math.sqrt(spread / count + z2 / (4.0 * count))
    return Estimate(value, max(0.0, min(value, middle - half)), min(1.0, max(value, middle + half)))
