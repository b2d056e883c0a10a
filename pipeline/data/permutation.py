"""The order of an epoch as a function: a seeded permutation with random access and no table.

Pure integer arithmetic is the same on every machine and under every library version. A run resumes
at any position at no cost.

A balanced Feistel network permutes the smallest square power of two that holds the range. Indices
that leave the range are sent round again until they return to it (cycle walking; under 4 rounds on
average). Luby and Rackoff, 1988; Black and Rogaway, 2002."""

from __future__ import annotations

_NUM_ROUNDS = 8
_MASK = (1 << 64) - 1


def permuted(index: int, size: int, *, seed: int, epoch: int) -> int:
    """Return where ``index`` of ``range(size)`` goes in an epoch; distinct indices, distinct
    places. Raises IndexError when ``index`` is outside the range."""
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
    """Return where ``index`` of ``range(size)`` goes in an epoch of stages, each shuffled within
    itself. Raises IndexError when ``index`` is outside the range."""
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
