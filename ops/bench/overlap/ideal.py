"""The time of an update if only the emulated work took any, computed from the length law and the costs.

With a barrier an update is its rollout, on slots that empty as responses end, and then its step. Without one
its time is the longest of three: generators with full slots, a learner that always has a batch, and staleness.
Responses that begin under the weights of one update must be in a batch ``eta`` updates later, so ``eta + 1``
updates take at least the longest response of a batch, alone on its generator, and a step."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of the emulated fleet."""

    num_generators: int
    num_slots: int
    """Slots of a generator."""
    decode_base_s: float
    decode_slot_s: float

    def saturated_s(self, num_tokens: float) -> float:
        """Return the seconds to decode this many tokens with every slot full."""
        step_s = self.decode_base_s + self.decode_slot_s * self.num_slots
        return num_tokens / (self.num_generators * self.num_slots) * step_s

    def rollout_s(self, lengths: Sequence[int]) -> float:
        """Return the seconds until the last of these responses ends, if nothing else is decoded. Responses are
        spread evenly over the generators, and each takes the first slot that becomes free. A step costs as much
        as its live sequences."""
        return max(self._one(lengths[first :: self.num_generators]) for first in range(self.num_generators))

    def _one(self, lengths: Sequence[int]) -> float:
        ends: list[int] = []
        intervals: list[tuple[int, int]] = []
        for length in lengths:
            begin = heapq.heappop(ends) if len(ends) >= self.num_slots else 0
            heapq.heappush(ends, begin + length)
            intervals.append((begin, begin + length))
        longest = max((end for _, end in intervals), default=0)
        return longest * self.decode_base_s + sum(lengths) * self.decode_slot_s


def batches(lengths: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yield the whole batches, in order of admission."""
    for begin in range(0, len(lengths) - size + 1, size):
        yield lengths[begin : begin + size]


def windows(lengths: Sequence[int], window: int) -> list[int]:
    """Cut responses into windows; return the windows' lengths in tokens."""
    return [min(window, length - begin) for length in lengths for begin in range(0, length, window)]


def ideal_update_s(
    costs: Costs, lengths: Sequence[int], batch: int, *, learn_s: float, eta: int, sampled_per_trained: float = 1.0
) -> float:
    """Return the lower bound of an update's seconds.

    Args:
        costs: Costs of the generators.
        lengths: Tokens of each unit, responses or windows, in order of admission.
        batch: Number of units that an update trains on.
        learn_s: The learner's seconds for an update.
        eta: The largest staleness; 0 is a barrier.
        sampled_per_trained: Responses sampled for each one that is trained on; above 1 if groups are filtered."""
    if eta == 0:
        return mean(costs.rollout_s(part) for part in batches(lengths, batch)) + learn_s
    longest_s = mean(costs.rollout_s([max(part)]) for part in batches(lengths, batch))
    saturated_s = costs.saturated_s(mean(lengths) * batch * sampled_per_trained)
    return max(saturated_s, learn_s, (longest_s + learn_s) / (eta + 1))
