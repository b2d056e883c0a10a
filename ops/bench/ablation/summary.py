"""Means over seeds with their intervals: mean, median, and the 95 % interval of the mean by
Student's t."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev

_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles of Student's t for 1 to 9 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One figure over seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return mean(self.values)

    @property
    def median(self) -> float:
        """Median over seeds."""
        return median(self.values)

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval of the mean; None with one seed, or more than ten."""
        freedom = len(self.values) - 1
        if not 1 <= freedom <= len(_T_95):
            return None
        return _T_95[freedom - 1] * stdev(self.values) / len(self.values) ** 0.5


def figures(values: Sequence[float]) -> Figures:
    """Take the figures of one row. Raises ValueError when there is none."""
    if not values:
        raise ValueError("no outcome to summarize")
    return Figures(tuple(values))
