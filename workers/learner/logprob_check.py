"""Recomputes the log-probs of about one trained chunk in a hundred, to find generators that do not
sample from the policy.

The chunks belong to claimed units and are checked before their update, under the current weights.
The check changes no sample. The observer names a bad generator from the counters here
(``pipeline.fleet.signs``).

The *gap* of a chunk is the mean of |log p of the learner - log p of the generator| over its tokens,
in nats. A token counts at most 3 nats: a policy that moves makes few tokens very unlikely, garbage
nearly all.

At equal weights the gap is the numerical difference of two engines. Tokens of an older version
differ for an honest reason, too: the policy has moved. So a chunk is compared with other
generators' chunks at the same lag in versions, and a lone generator with its own past. A lag at
which no peer has chunks is not judged; stale weights are found by other means."""

from __future__ import annotations

import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pipeline.algorithms.batching import TrainingSample
from pipeline.ledger.types import ClaimedUnit
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.entries import LOGPROB_GAP, LOGPROB_USUAL_GAP
from protocol.trajectory import TrajectoryChunk
from workers.engines.training.seam import TrainingBackend

LAST_CHUNKS: Final = 10
"""Newest judged chunks over which a generator's gap is averaged."""
FEWEST_CHUNKS, FEWEST_TOKENS = 3, 32
"""Nothing is reported of a generator with fewer judged chunks or tokens."""
MOST_OF_TOKEN: Final = 3.0
"""Largest contribution of one token, in nats."""
_FEWEST_PEERS, _FEWEST_OWN = 3, 8
"""Chunks needed for the usual gap at a lag: of other generators, or of a lone generator itself."""
_LAST_OF_LAG: Final = 64
_MAX_GENERATORS: Final = 16_384


@dataclass(frozen=True, slots=True)
class GeneratorGap:
    """A generator's mean gap over its newest judged chunks, in nats per token."""

    worker: str
    gap: float
    usual: float

    @property
    def excess(self) -> float:
        return self.gap - self.usual


@dataclass(slots=True)
class _Judged:
    epoch: int
    chunks: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=LAST_CHUNKS))
    """Gap, usual gap and number of tokens of each chunk."""

    @property
    def is_enough(self) -> bool:
        return len(self.chunks) >= FEWEST_CHUNKS and sum(tokens for _, _, tokens in self.chunks) >= FEWEST_TOKENS


class SamplerGaps:
    def __init__(self) -> None:
        self._judged: OrderedDict[str, _Judged] = OrderedDict()
        self._at_lag: dict[int, deque[tuple[str, float]]] = {}
        """By lag: the generator and gap of the newest checked chunks."""

    def record(self, sampler: str, gaps: np.ndarray, lags: np.ndarray) -> None:
        """Add a chunk.

        Args:
            sampler: the incarnation that sampled it, as ``generator-0#3``.
            gaps: float32 [tokens], the gap of each token in nats; finite.
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
        """Return at most ``number`` generators, largest excess first."""
        known = [_mean(worker, seen.chunks) for worker, seen in self._judged.items() if seen.is_enough]
        return sorted(known, key=lambda one: -one.excess)[:number]

    def _usual(self, worker: str, bucket: int) -> float | None:
        """Return the median gap at a lag of other generators, or of a lone generator's own past.

        None while there are too few chunks."""
        here = self._at_lag.get(bucket, ())
        others = [gap for of, gap in here if of != worker]
        if len(others) >= _FEWEST_PEERS:
            return float(np.median(others))
        if len(self._judged) == 1 and len(here) >= _FEWEST_OWN:
            return float(np.median([gap for _, gap in here]))
        return None


def _bucket(lag: int) -> int:
    """Return the class of a lag: 0, 1, 2, 3, then 4 to 7, 8 to 15 and so on."""
    return max(0, lag) if lag < 4 else 2 + lag.bit_length() - 1


def _mean(worker: str, chunks: Sequence[tuple[float, float, int]]) -> GeneratorGap:
    gaps, usual, tokens = np.array(chunks, np.float64).T
    return GeneratorGap(worker, float(np.average(gaps, weights=tokens)), float(np.average(usual, weights=tokens)))


MAX_REPORTED: Final = 8
"""Generators in the heartbeat, largest excess first."""


class LogprobCheck:
    def __init__(self, ctx: ActorContext, backend: TrainingBackend) -> None:
        self._ctx, self._backend = ctx, backend
        # recorded responses come without a generator's log-probs, and imitation uses another temperature
        config = ctx.config
        self._share = config.learner.logprob_check_share if config.compares_with_sampler else 0.0
        self._gaps = SamplerGaps()

    async def check_units(
        self, units: Sequence[ClaimedUnit], updates_of: Callable[[np.ndarray], np.ndarray], num_updates: int
    ) -> None:
        """Check the chosen chunks of a claim, and report the worst generators.

        ``updates_of`` maps policy versions, int [n], to the number of updates in each;
        ``num_updates`` is that of the current weights."""
        chunks = [
            scored.chunk
            for unit in units
            for member in unit.trajectories
            for scored in member
            if is_chosen(str(scored.chunk.id), self._share) and _is_fit(scored.chunk)
        ]
        if not chunks:
            return
        samples = [sample_of(chunk) for chunk in chunks]
        logprobs = await self._ctx.compute(self._backend.response_logprobs, samples)
        for chunk, sample, own in zip(chunks, samples, logprobs, strict=True):
            gaps = np.abs(own - sample.behavior_logprobs)
            # weights that are not finite are the learner's fault, and its steps are refused
            if np.isfinite(gaps).all():
                self._gaps.record(chunk.worker, gaps, num_updates - updates_of(sample.versions))
        self._ctx.count("checked_chunks", len(chunks))
        self._report()

    def _report(self) -> None:
        counters = self._ctx.counters
        for name in [name for name in counters if name.startswith((LOGPROB_GAP, LOGPROB_USUAL_GAP))]:
            del counters[name]
        for one in self._gaps.worst(MAX_REPORTED):
            counters[LOGPROB_GAP + one.worker] = one.gap
            counters[LOGPROB_USUAL_GAP + one.worker] = one.usual


def is_chosen(chunk: str, share: float) -> bool:
    """Decided by the chunk's name, so that a repeated update checks the same chunks."""
    return zlib.crc32(chunk.encode()) < share * 2.0**32


def _is_fit(chunk: TrajectoryChunk) -> bool:
    return bool(chunk.worker and chunk.num_tokens and np.isfinite(chunk.behavior_logprobs).all())


def sample_of(chunk: TrajectoryChunk) -> TrainingSample:
    """Return a chunk as a sample without loss, with its context as the prompt."""
    context = np.concatenate([chunk.prompt.tokens, chunk.context_tokens])
    versions = [segment.policy_version for segment in chunk.segments]
    lengths = [segment.num_tokens for segment in chunk.segments]
    return TrainingSample(
        name=str(chunk.id),
        tokens=np.concatenate([context, chunk.tokens]).astype(np.int32, copy=False),
        prompt_length=int(context.size),
        loss_mask=np.zeros(chunk.num_tokens, np.bool_),
        advantages=np.zeros(chunk.num_tokens, np.float32),
        behavior_logprobs=chunk.behavior_logprobs,
        versions=np.repeat(np.array(versions, np.int32), lengths),
        is_finished=False,
        num_context_tokens=int(chunk.context_tokens.size),
    )
