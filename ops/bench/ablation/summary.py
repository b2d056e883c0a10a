"""Means over seeds with Student's t intervals, and comparisons of several rows with one: Holm's correction, and
exact sign-flip tests of differences paired by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import atan, cos, pi, sin, sqrt
from statistics import mean, stdev

JUDGED = (
    "Their intervals have Holm's correction over the rows of a column: bold excludes 0, at 5 % for all rows together. "
    "In parentheses: p of the exact sign-flip test over the pairs, alone and by Holm; with n pairs it is at least "
    "2 / 2^n."
)
"""How a page explains differences written by ``marked``."""
_MOST_FLIPPED = 16
"""Largest number of differences in one test: each doubles the number of sums."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One figure, over seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval of the mean; None with one seed."""
        return self.half_width_at(0.05)

    def half_width_at(self, alpha: float) -> float | None:
        """Return half of the interval of the mean at level 1 - ``alpha``; None with one seed."""
        freedom = len(self.values) - 1
        if freedom < 1:
            return None
        return t_quantile(alpha, freedom) * stdev(self.values) / sqrt(len(self.values))

    @property
    def t_p_value(self) -> float:
        """Two-sided p of a mean of 0 by Student's t; 1 with one seed."""
        if len(self.values) < 2:
            return 1.0
        spread = stdev(self.values) / sqrt(len(self.values))
        if not spread:
            return 0.0 if self.mean else 1.0
        return t_p_value(abs(self.mean) / spread, len(self.values) - 1)


@dataclass(frozen=True, slots=True)
class Compared:
    """One of several differences that are judged together."""

    difference: Figures
    half_width: float | None
    """Half of the interval at the level that Holm's procedure applies to this difference."""
    flip_p: float
    """Exact two-sided p of the sign-flip test, for this difference alone."""
    adjusted_flip_p: float
    """The same with Holm's correction."""

    @property
    def separates(self) -> bool:
        """Whether 0 is outside the interval, which is Holm's decision at 5 % by Student's t."""
        return self.half_width is not None and abs(self.difference.mean) > self.half_width


def figures(values: Sequence[float]) -> Figures:
    """Wrap the values of one row. Raises ValueError without values."""
    if not values:
        raise ValueError("no outcome to summarize")
    return Figures(tuple(values))


def compared(differences: Sequence[Figures | None], alpha: float = 0.05) -> list[Compared | None]:
    """Judge several differences from one row together; None stays None and does not count.

    Holm's procedure bounds the family-wise error by ``alpha``: the k-th smallest p of m is tested at level
    ``alpha / (m - k + 1)``; the first one that fails ends it, and its level applies to the rest. Each interval
    has the level of its test, so it excludes 0 exactly where the procedure rejects. The intervals have no joint
    coverage."""
    found = [of for of in differences if of is not None]
    levels = _holm_levels([of.t_p_value for of in found], alpha)
    flips = [sign_flip_p(of.values) for of in found]
    made = iter(
        Compared(of, of.half_width_at(level), flip, adjusted)
        for of, level, flip, adjusted in zip(found, levels, flips, holm(flips), strict=True)
    )
    return [None if of is None else next(made) for of in differences]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p values, in the order given."""
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(_ascending(p_values)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = least
    return adjusted


def _holm_levels(p_values: Sequence[float], alpha: float) -> list[float]:
    levels, failed = [alpha] * len(p_values), None
    for rank, place in enumerate(_ascending(p_values)):
        level = alpha / (len(p_values) - rank)
        if failed is None and p_values[place] >= level:
            failed = level
        levels[place] = level if failed is None else failed
    return levels


def _ascending(p_values: Sequence[float]) -> list[int]:
    return sorted(range(len(p_values)), key=p_values.__getitem__)


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the exact two-sided p that paired differences are symmetric around 0: the share of all sign choices
    whose sum is at least as far from 0. It is at least ``2 / 2**n``.

    Raises:
        ValueError: There are no differences, or more than 16."""
    if not 1 <= len(differences) <= _MOST_FLIPPED:
        raise ValueError(f"{len(differences)} differences; expected 1 to {_MOST_FLIPPED}: give fewer seeds")
    # sums that differ by rounding alone are equal
    least = abs(sum(differences)) - 1e-9 * sum(map(abs, differences))
    sums = [
        abs(sum(sign * of for sign, of in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    return sum(one >= least for one in sums) / len(sums)


def t_p_value(t: float, freedom: int) -> float:
    """Return the two-sided p of Student's t for integer degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = atan(t / sqrt(freedom))
    term, total = (cos(angle), 0.0) if freedom % 2 else (1.0, 0.0)
    for order in range(freedom % 2 + 1, freedom + 1, 2):
        total += term
        term *= order / (order + 1) * cos(angle) ** 2
    covered = 2 / pi * (angle + sin(angle) * total) if freedom % 2 else sin(angle) * total
    return 1.0 - covered


def t_quantile(alpha: float, freedom: int) -> float:
    """Return the t whose two-sided p is ``alpha``."""
    low, high = 0.0, 1.0
    while t_p_value(high, freedom) > alpha:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_p_value(middle, freedom) > alpha else (low, middle)
    return high


def interval(of: Figures) -> str:
    """Format a mean with half of its 95 % interval."""
    half = of.half_width
    mean = f"{of.mean:.1f}"
    return mean if half is None else f"{mean} ± {half:.1f}"


def marked(of: Compared | None) -> str:
    """Format a difference; bold where it is significant."""
    if of is None:
        return "–"
    shown = f"{of.difference.mean:+.1f}"
    if of.half_width is None:
        return shown
    shown += f" ± {of.half_width:.1f}"
    shown = f"**{shown}**" if of.separates else shown
    return f"{shown} ({of.flip_p:.2g}; {of.adjusted_flip_p:.2g})"
