"""Computes the log-probs of about one trained chunk in a hundred again, to find generators whose
tokens are not the policy's.

The chunks are of claimed units, before their update, under the present weights. The observer names
such a generator by the counters here (``workers.observer.mismatches``). The check trains on nothing
and changes no sample: an update is the same with it and without it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from pipeline.algorithms.batching import TrainingSample
from pipeline.ledger.types import ClaimedUnit
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.counter_names import LOGPROB_GAP, LOGPROB_USUAL_GAP
from protocol.trajectory import TrajectoryChunk
from workers.engines.training.seam import TrainingBackend
from workers.learner.sampler_gaps import SamplerGaps

MAX_REPORTED: Final = 8
"""Generators in the heartbeat: those with the largest gaps above their peers'."""


class LogprobCheck:
    """Checks chunks of a learner's claims."""

    def __init__(self, ctx: ActorContext, backend: TrainingBackend) -> None:
        self._ctx, self._backend = ctx, backend
        # recorded responses have no log-probs of a generator, and imitation has its own temperature
        config = ctx.config
        self._share = config.learner.logprob_check_share if config.compares_with_sampler else 0.0
        self._gaps = SamplerGaps()

    async def look(
        self, units: Sequence[ClaimedUnit], updates_of: Callable[[np.ndarray], np.ndarray], num_updates: int
    ) -> None:
        """Check the chosen chunks of a claim, and report.

        Args:
            units: the claim's.
            updates_of: returns the updates in policy versions, int [n] of int [n].
            num_updates: those in the present weights."""
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
            # weights that are no numbers are the learner's fault, and its steps are refused
            if np.isfinite(gaps).all():
                self._gaps.note(chunk.worker, gaps, num_updates - updates_of(sample.versions))
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
    """Return whether a chunk is among the share that is checked: by its name, so that a repeat
    chooses the same."""
    return zlib.crc32(chunk.encode()) < share * 2.0**32


def _is_fit(chunk: TrajectoryChunk) -> bool:
    return bool(chunk.worker and chunk.num_tokens and np.isfinite(chunk.behavior_logprobs).all())


def sample_of(chunk: TrajectoryChunk) -> TrainingSample:
    """Return a chunk as a sample without loss: its context as the prompt."""
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
