"""Statistics of evaluations: avg@k and pass@k with 95 % intervals, differences, and the best evaluation.

The prompts are the sample: responses to one prompt depend on one another, so they count as one
observation. The interval is Wilson's (1927), with as many observations as match the variance between
prompts; it holds for few prompts too and is never empty. Means over few runs have intervals by Student's
t (1908) and Welch's test (1947)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.observability.history import EvaluationRow

_Z = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def average(accuracies: Mapping[int, Sequence[float]]) -> Estimate:
    """Return avg@k, the mean of all responses' accuracies, given by prompt and each in [0, 1]. Raises
    ValueError if there is no response."""
    held = [list(one) for one in accuracies.values() if one]
    if not held:
        raise ValueError("an evaluation without responses has no accuracy")
    num_responses = sum(map(len, held))
    value = sum(map(sum, held)) / num_responses
    return _with_interval(value, [statistics.fmean(one) for one in held], num_responses)


def pass_at(accuracies: Mapping[int, Sequence[float]], k: int) -> Estimate | None:
    """Return pass@k: the mean over prompts of 1 - C(n - c, k) / C(n, k), where c of n responses are
    right (accuracy 1). Unbiased: Chen et al., 2021, eq. 1. Prompts with fewer than k responses are left
    out; None if none remain."""
    held = [(len(one), sum(accuracy == 1.0 for accuracy in one)) for one in accuracies.values() if len(one) >= k]
    if not held:
        return None
    shares = [1.0 - math.comb(n - c, k) / math.comb(n, k) for n, c in held]
    return _with_interval(statistics.fmean(shares), shares, sum(n for n, _ in held))


def _with_interval(value: float, of_prompts: Sequence[float], num_responses: int) -> Estimate:
    num_prompts = len(of_prompts)
    variance = statistics.variance(of_prompts) / num_prompts if num_prompts > 1 else 0.0
    spread = value * (1.0 - value)
    # how many observations would have this variance of the mean: between prompts and responses
    count = spread / variance if variance > 0.0 else math.inf if spread > 0.0 else num_prompts
    count = min(max(count, num_prompts), num_responses) if num_prompts > 1 else 1.0
    z2 = _Z * _Z / count
    middle = (value + z2 / 2.0) / (1.0 + z2)
    half = _Z / (1.0 + z2) * math.sqrt(spread / count + z2 / (4.0 * count))
    return Estimate(value, max(0.0, min(value, middle - half)), min(1.0, max(value, middle + half)))


class BestEvaluation:
    """Keeps the first evaluation with the highest accuracy."""

    def __init__(self, rows: Iterable[EvaluationRow] = ()) -> None:
        self.row: EvaluationRow | None = None
        self.num_since = 0
        """Evaluations of the main set since the best one."""
        for row in rows:
            self.add(row)

    def add(self, row: EvaluationRow) -> None:
        """Add an evaluation; those of other sets are ignored."""
        if not row.is_main:
            return
        if self.row is None or row.accuracy > self.row.accuracy:
            self.row, self.num_since = row, 0
        else:
            self.num_since += 1


_T = (12.7062, 4.3027, 3.1825, 2.7765, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""Two-sided 95 % quantiles of Student's t for 1 to 10 degrees of freedom."""


def t_quantile(freedom: float) -> float:
    """Return the two-sided 95 % quantile of Student's t. Fractional degrees of freedom are rounded
    down. Raises ValueError below 1."""
    whole = math.floor(freedom + 1e-9)
    if whole < 1:
        raise ValueError(f"{freedom} degrees of freedom; expected at least 1")
    if whole <= len(_T):
        return _T[whole - 1]
    # Cornish-Fisher expansion (1938), right to four digits from 10 on
    z = _Z
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / whole + second / whole**2 + third / whole**3


def mean_of(values: Sequence[float]) -> Estimate | None:
    """Return the mean of independent observations with its t-interval. None for fewer than two, or for
    equal ones, because an interval of zero width would claim to be exact."""
    if len(values) < 2 or not (deviation := statistics.stdev(values)):
        return None
    mean = statistics.fmean(values)
    half = t_quantile(len(values) - 1) * deviation / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def paired_difference(ones: Sequence[float | None], others: Sequence[float | None]) -> tuple[Estimate, int] | None:
    """Return the mean of ``others`` minus ``ones`` by position, with its interval, and the number of
    pairs. Positions without both values are left out. None for fewer than two pairs, or if all
    differences are equal."""
    both = zip(ones, others, strict=False)
    differences = [other - one for one, other in both if one is not None and other is not None]
    found = mean_of(differences)
    return None if found is None else (found, len(differences))


def difference_of(ones: Sequence[float], others: Sequence[float]) -> Estimate | None:
    """Return the mean of ``others`` minus the mean of ``ones``, with Welch's interval. None for fewer
    than two observations of either, or if neither varies."""
    if len(ones) < 2 or len(others) < 2:
        return None
    parts = [statistics.variance(values) / len(values) for values in (ones, others)]
    if not sum(parts):
        return None
    value = statistics.fmean(others) - statistics.fmean(ones)
    shares = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (ones, others), strict=True))
    half = t_quantile(sum(parts) ** 2 / shares) * math.sqrt(sum(parts))
    return Estimate(value, value - half, value + half)


def overlap(one: Estimate, other: Estimate) -> bool:
    return one.low <= other.high and other.low <= one.high
