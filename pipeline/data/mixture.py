"""Merges several data sets into one shuffled stream: maps a position to a set and a position in it.

The order is a repeating pattern from smooth weighted round-robin: each set comes at even distances,
and its share of any long stretch is its weight. A position needs no state, so a run resumes
anywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

_NUM_ROUNDS = 8
_MASK = (1 << 64) - 1


def permuted(index: int, size: int, *, seed: int, epoch: int) -> int:
    """Return the position of ``index`` in an epoch's permutation of ``range(size)``. Raises
    IndexError outside the range."""
    if not 0 <= index < size:
        raise IndexError(f"index {index} is outside range({size})")
    if size == 1:
        return 0
    half_bits = ((size - 1).bit_length() + 1) // 2
    key = _mix(_mix(seed & _MASK) ^ epoch)
    while True:
        index = _feistel(index, half_bits, key)
        if index < size:
            return index


def permuted_by_stages(index: int, size: int, *, num_stages: int, seed: int, epoch: int) -> int:
    """Like ``permuted``, but split the epoch into stages and shuffle only within each. Raises
    IndexError outside the range."""
    if not 0 <= index < size:
        raise IndexError(f"index {index} is outside range({size})")
    length = -(-size // num_stages)
    stage, within = divmod(index, length)
    start = stage * length
    return start + permuted(within, min(length, size - start), seed=seed, epoch=epoch * num_stages + stage)


def _feistel(value: int, half_bits: int, key: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(_NUM_ROUNDS):
        left, right = right, left ^ (_mix(key + (number << 56) + right) >> (64 - half_bits))
    return left << half_bits | right


def _mix(value: int) -> int:
    """One step of SplitMix64 (Steele and others, 2014): a bijection of 64-bit integers."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


_SLOTS = 1000
"""Slots of a pattern: shares are exact to a thousandth."""


class Mixture:
    def __init__(self, weights: Sequence[float]) -> None:
        """Raises ValueError for a negative weight, or if the weights sum to 0."""
        if min(weights, default=-1.0) < 0.0 or sum(weights) <= 0.0:
            raise ValueError(f"the weights are {list(weights)}; expected none below 0 and at least one above")
        counts = _slots(weights)
        self._counts = counts
        self._pattern = _smooth(counts)

    def at(self, position: int) -> tuple[int, int]:
        """Return the set at a position, and how many earlier positions have the same set."""
        cycle, slot = divmod(position, len(self._pattern))
        chosen, rank = self._pattern[slot]
        return chosen, cycle * self._counts[chosen] + rank


def _slots(weights: Sequence[float]) -> list[int]:
    """Return each set's number of slots in the pattern, at least 1 for a positive weight."""
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
    """Return for each slot its set and its rank among the set's slots."""
    credit, taken = [0] * len(counts), [0] * len(counts)
    pattern: list[tuple[int, int]] = []
    for _ in range(sum(counts)):
        credit = [held + count for held, count in zip(credit, counts, strict=True)]
        chosen = max(range(len(counts)), key=lambda n: (credit[n], -n))
        credit[chosen] -= sum(counts)
        pattern.append((chosen, taken[chosen]))
        taken[chosen] += 1
    return pattern
