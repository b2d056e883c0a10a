"""Several data sets as one stream: a position in, a set and a place in its own stream out.

The order is a pattern that repeats. A smooth weighted round-robin makes it, so that each set comes
at even distances. The share of every set in any long stretch is its weight. A position needs no
state, so a run resumes anywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

_SLOTS = 1000
"""Most slots of a pattern: shares are exact to a thousandth."""


class Mixture:
    """Draws from sets by weight."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Raises ValueError for a negative weight, or for weights that sum to 0."""
        if min(weights, default=-1.0) < 0.0 or sum(weights) <= 0.0:
            raise ValueError(f"the weights are {list(weights)}; expected none below 0 and one above")
        counts = _slots(weights)
        self._counts = counts
        self._pattern = _smooth(counts)

    def at(self, position: int) -> tuple[int, int]:
        """Return the set of a position, and how many positions before it are of the same set."""
        cycle, slot = divmod(position, len(self._pattern))
        chosen, rank = self._pattern[slot]
        return chosen, cycle * self._counts[chosen] + rank


def _slots(weights: Sequence[float]) -> list[int]:
    """Return each set's slots of a pattern; at least one for a weight above 0."""
    total = math.fsum(weights)
    exact = [weight / total * _SLOTS for weight in weights]
    counts = [max(1, int(slots)) if slots > 0.0 else 0 for slots in exact]
    by_rest = sorted(range(len(exact)), key=lambda n: (int(exact[n]) - exact[n], n))
    missing = _SLOTS - sum(counts)
    for number in by_rest[: max(0, missing)]:
        counts[number] += 1
    divisor = math.gcd(*counts)
    return [count // divisor for count in counts]


def _smooth(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return (set, rank among its slots) of each slot: smooth weighted round-robin."""
    credit, taken = [0] * len(counts), [0] * len(counts)
    pattern: list[tuple[int, int]] = []
    for _ in range(sum(counts)):
        credit = [held + count for held, count in zip(credit, counts, strict=True)]
        chosen = max(range(len(counts)), key=lambda n: (credit[n], -n))
        credit[chosen] -= sum(counts)
        pattern.append((chosen, taken[chosen]))
        taken[chosen] += 1
    return pattern
