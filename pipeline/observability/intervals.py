"""Intervals of 95 % for means of few observations: by Student's t (1908), and Welch's (1947)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pipeline.observability.estimates import Estimate

_Z = 1.959964
_T = (12.7062, 4.3027, 3.1825, 2.7765, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""Two-sided 95 % of Student's t, with 1 to 10 degrees of freedom."""


def t_quantile(freedom: float) -> float:
    """Return the two-sided 95 % quantile of Student's t; of broken degrees of freedom, that of the
    next whole number below. Raises ValueError below 1."""
    whole = math.floor(freedom + 1e-9)
    if whole < 1:
        raise ValueError(f"{freedom} degrees of freedom; expected at least 1")
    if whole <= len(_T):
        return _T[whole - 1]
    # Cornish and Fisher's expansion (1938), right to four digits from 10 on
    z = _Z
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / whole + second / whole**2 + third / whole**3


def mean_of(values: Sequence[float]) -> Estimate | None:
    """Return the mean of independent observations with its t-interval; None for fewer than two, or
    for equal ones: an interval without width would claim to be exact."""
    if len(values) < 2 or not (deviation := statistics.stdev(values)):
        return None
    mean = statistics.fmean(values)
    half = t_quantile(len(values) - 1) * deviation / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def paired_difference(ones: Sequence[float | None], others: Sequence[float | None]) -> tuple[Estimate, int] | None:
    """Return the mean of ``others`` less ``ones``, by their places, with its interval, and the
    number of pairs. Places beyond the shorter, or without a value, are left out. None for fewer
    than two pairs, or where all differ alike."""
    both = zip(ones, others, strict=False)
    differences = [other - one for one, other in both if one is not None and other is not None]
    found = mean_of(differences)
    return None if found is None else (found, len(differences))


def difference_of(ones: Sequence[float], others: Sequence[float]) -> Estimate | None:
    """Return the mean of ``others`` less that of ``ones``, with Welch's interval; None for fewer
    than two observations of either, or where neither scatters."""
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
    """Return whether two intervals have a point in common."""
    return one.low <= other.high and other.low <= one.high
