"""Which layers a stage gets: all ranks wait for the dearest stage, so that one is made as cheap as it can be."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise


def cut_layers(costs: Sequence[int], num_stages: int) -> list[range]:
    """Return the consecutive layers of each stage, at least one, so that the largest sum of costs is the least possible.

    Of several such cuts the most even one (least squares) is taken, and of those the one with the fewest layers in front,
    where a pipeline holds most micro-batches. Stages that share a rank are balanced one by one, not by their rank's sum.
    ``costs`` are positive; what is computed after the last layer counts with it."""
    num_layers, sums = len(costs), [0, *accumulate(costs)]
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be {num_stages} stages; expected at least one layer a stage")
    limits = range(max(costs), sums[-1] + 1)
    limit = limits[bisect_left(limits, -num_stages, key=lambda limit: -_stages_within(costs, limit))]

    @cache
    def ends(first: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Return the sum of squares of so many stages from layer ``first`` on, and where each ends."""
        if not stages:
            return (0 if first == num_layers else math.inf), ()
        found: list[tuple[float, tuple[int, ...]]] = []
        for end in range(first + 1, num_layers - stages + 2):
            cost = sums[end] - sums[first]
            if cost > limit:
                break
            squares, others = ends(end, stages - 1)
            found.append((squares + cost * cost, (end, *others)))
        return min(found, default=(math.inf, ()))

    return [range(*pair) for pair in pairwise((0, *ends(0, num_stages)[1]))]


def _stages_within(costs: Sequence[int], limit: int) -> int:
    """Return how many stages are needed if none may cost more."""
    number, sum_ = 1, 0
    for cost in costs:
        if sum_ + cost > limit:
            number, sum_ = number + 1, 0
        sum_ += cost
    return number
