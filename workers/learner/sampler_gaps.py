"""How far each generator's log-probs are from the learner's, against those of its peers. Pure.

The *gap* of a chunk is the mean of |log p of the learner - log p of the generator| over its tokens,
in nats. A token counts 3 nats at most: a policy that moves makes few tokens very unlikely, and
garbage nearly all.

At equal weights the gap is the difference of two engines. Tokens of an older policy version differ
for an honest reason, too: the policy has moved. So a chunk is compared with chunks of other
generators at the same lag in versions. A lone generator is compared with its own past. Chunks at a
lag that no peer has are not judged: stale weights are found by other means."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

LAST_CHUNKS: Final = 10
"""Newest judged chunks of a generator, over which its gap is a mean."""
FEWEST_CHUNKS, FEWEST_TOKENS = 3, 32
"""Judged chunks, and tokens in them, without which nothing is reported."""
MOST_OF_TOKEN: Final = 3.0
"""Nats that one token counts at most."""
_FEWEST_PEERS, _FEWEST_OWN = 3, 8
"""Chunks at a lag that make a usual gap: of others, and of a lone generator itself."""
_LAST_OF_LAG: Final = 64
_MAX_GENERATORS: Final = 16_384


@dataclass(frozen=True, slots=True)
class GeneratorGap:
    """A generator's gap over its newest judged chunks, in nats a token."""

    worker: str
    gap: float
    usual: float
    """Of its peers at the same lags."""

    @property
    def excess(self) -> float:
        """Gap above the usual one."""
        return self.gap - self.usual


@dataclass(slots=True)
class _Judged:
    epoch: int
    chunks: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=LAST_CHUNKS))
    """Gap, usual gap and tokens of each."""

    @property
    def is_enough(self) -> bool:
        """Whether a mean over them is reported."""
        return len(self.chunks) >= FEWEST_CHUNKS and sum(tokens for _, _, tokens in self.chunks) >= FEWEST_TOKENS


class SamplerGaps:
    """Remembers the newest checked chunks. The generators of a run bound its memory."""

    def __init__(self) -> None:
        self._judged: OrderedDict[str, _Judged] = OrderedDict()
        self._at_lag: dict[int, deque[tuple[str, float]]] = {}
        """By lag: generator and gap of the newest parts of chunks."""

    def note(self, sampler: str, gaps: np.ndarray, lags: np.ndarray) -> None:
        """Take in a chunk.

        Args:
            sampler: the incarnation that sampled it, as ``generator-0#3``.
            gaps: float32 [tokens], of each token in nats; finite.
            lags: int [tokens], updates between the token's policy version and the learner's."""
        worker, _, epoch = sampler.rpartition("#")
        seen = self._judged.get(worker)
        if seen is None or seen.epoch != int(epoch):
            seen = self._judged[worker] = _Judged(int(epoch))
        self._judged.move_to_end(worker)
        if len(self._judged) > _MAX_GENERATORS:
            self._judged.popitem(last=False)
        gaps = np.minimum(gaps, np.float32(MOST_OF_TOKEN))
        buckets = np.array([_bucket(int(lag)) for lag in lags])
        gap = usual = 0.0
        num_tokens = 0
        for bucket in np.unique(buckets).tolist():
            here = gaps[buckets == bucket]
            before = self._usual(worker, bucket)
            self._at_lag.setdefault(bucket, deque(maxlen=_LAST_OF_LAG)).append((worker, float(here.mean())))
            if before is not None:
                gap += float(here.sum())
                usual += before * here.size
                num_tokens += here.size
        if num_tokens:
            seen.chunks.append((gap / num_tokens, usual / num_tokens, num_tokens))

    def worst(self, number: int) -> list[GeneratorGap]:
        """Return the generators with the largest gaps above the usual ones, at most so many."""
        known = [_mean(worker, seen.chunks) for worker, seen in self._judged.items() if seen.is_enough]
        return sorted(known, key=lambda one: -one.excess)[:number]

    def _usual(self, worker: str, bucket: int) -> float | None:
        """Return the usual gap at a lag: of the others, or of a lone generator before; None while
        it is not known."""
        here = self._at_lag.get(bucket, ())
        others = [gap for of, gap in here if of != worker]
        if len(others) >= _FEWEST_PEERS:
            return float(np.median(others))
        if len(self._judged) == 1 and len(here) >= _FEWEST_OWN:
            return float(np.median([gap for _, gap in here]))
        return None


def _bucket(lag: int) -> int:
    """Return a lag's class: 0, 1, 2, 3, then 4 to 7, 8 to 15 and so on."""
    return max(0, lag) if lag < 4 else 2 + lag.bit_length() - 1


def _mean(worker: str, chunks: Sequence[tuple[float, float, int]]) -> GeneratorGap:
    gaps, usual, tokens = np.array(chunks, np.float64).T
    return GeneratorGap(worker, float(np.average(gaps, weights=tokens)), float(np.average(usual, weights=tokens)))
