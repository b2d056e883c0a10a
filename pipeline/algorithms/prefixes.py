"""Which first tokens sequences have in common, so that a model computes them once.

Members of a group share their prompt, windows of one response its prompt and the windows before,
turns of one conversation the turns before. Sorted by their tokens, sequences lie as the leaves of
their tree of prefixes do: what one shares with any that comes before, it shares with the one just
before. So a row of tokens that holds of each sequence only what the one before lacks holds every
prefix once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Sequences in the order in which they share the most.

    Example: the sequences ABX, C, ABY give order [0, 2, 1] and shared [0, 2, 0]."""

    lengths: np.ndarray
    """int64 [n]: tokens of each sequence."""
    order: np.ndarray
    """int64 [n]: the sequences' indices."""
    shared: np.ndarray
    """int64 [n]: first tokens that the sequence at this place of the order shares with the one before."""

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray]) -> SharedPrefixes:
        # big-endian, so that bytes are in the order of the tokens
        keys = [sequence.astype(">u4").tobytes() for sequence in sequences]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        shared = [0, *(_num_alike(sequences[one], sequences[other]) for one, other in pairwise(order))]
        lengths = [sequence.size for sequence in sequences]
        return cls(np.array(lengths, np.int64), np.array(order, np.int64), np.array(shared[: len(order)], np.int64))

    @classmethod
    def none(cls, lengths: Sequence[int] | np.ndarray) -> SharedPrefixes:
        """Describe sequences that are computed whole, each in its place."""
        sizes = np.asarray(lengths, np.int64)
        return cls(sizes, np.arange(sizes.size), np.zeros_like(sizes))

    def take(self, indices: Sequence[int]) -> SharedPrefixes:
        """Return the prefixes of some of the sequences, each index once, numbered anew in the order given."""
        chosen = np.asarray(indices, np.int64)
        numbers = np.full(self.lengths.size, -1)
        numbers[chosen] = np.arange(chosen.size)
        places = np.flatnonzero(numbers[self.order] >= 0)
        # two sequences share the least that any neighbours between them do
        shared = [int(self.shared[one + 1 : other + 1].min()) for one, other in pairwise(places)]
        return SharedPrefixes(
            self.lengths[chosen], numbers[self.order[places]], np.array([0, *shared][: chosen.size], np.int64)
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that a model computes when it computes every prefix once."""
        return int(self.lengths.sum() - self.shared.sum())


def _num_alike(one: np.ndarray, other: np.ndarray) -> int:
    size = min(one.size, other.size)
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if differ.size else size
