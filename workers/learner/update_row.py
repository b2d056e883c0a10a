"""Builds the history's row for an update."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.algorithms.batching import ROW_METRICS, TrainingSample
from pipeline.ledger.version_history import VersionHistory
from pipeline.observability.history import Histogram, RefusedRow, UpdateRow
from pipeline.runtime.context import ActorContext
from workers.engines.training.seam import MetricCounts, StepResult

_MAX_BINS = 20


def update_row(
    update: int,
    version: int,
    samples: Sequence[TrainingSample],
    results: Sequence[StepResult],
    version_history: VersionHistory,
    num_unjudged: int = 0,
) -> UpdateRow:
    """Return the summary of an update that published ``version``; the caller sets its times.

    ``num_unjudged`` counts the responses of its groups that never got a verdict."""
    trained = [s.loss_mask if s.loss_mask.any() else np.ones_like(s.loss_mask) for s in samples]
    ages = np.concatenate(
        [update - 1 - version_history.updates_of(s.versions[mask]) for s, mask in zip(samples, trained, strict=True)]
    )
    # a response may have several samples
    responses = [s for s in samples if not s.part]
    finished = [s for s in responses if s.is_finished]
    sizes = [s.num_context_tokens + s.response_length for s in samples]
    totals = np.bincount(np.cumsum([not s.part for s in samples]) - 1, sizes).astype(np.int64).tolist()
    lengths = [n for s, n in zip(responses, totals, strict=True) if s.is_finished] or totals
    advantages = np.concatenate([s.advantages[s.loss_mask] for s in samples])
    histograms = {
        "length": histogram(np.array(lengths)),
        "advantage": histogram(advantages),
        "staleness": histogram(ages),
    }
    return UpdateRow(
        update=update,
        policy_version=version,
        at_s=time.time(),
        num_trajectories=len(responses),
        num_response_tokens=sum(s.response_length for s in samples),
        num_trained_tokens=sum(int(s.loss_mask.sum()) for s in samples),
        reward=float(np.mean([s.reward for s in finished])) if finished else 0.0,
        accuracy=float(np.mean([s.accuracy for s in finished])) if finished else 0.0,
        reward_parts=_mean_parts([s.reward_parts for s in finished]),
        response_length=float(np.mean(lengths)),
        staleness_mean=float(ages.mean()),
        staleness_max=int(ages.max()),
        num_segments_mean=float(np.mean([np.unique(s.versions).size for s in samples])),
        loss=float(np.mean([r.loss for r in results])),
        grad_norm=float(np.mean([r.grad_norm for r in results])),
        learning_rate=results[-1].learning_rate,
        num_refused_steps=sum(not r.applied for r in results),
        wait_s=0.0,
        logprob_s=0.0,
        step_s=0.0,
        publish_s=0.0,
        metrics=metrics_of_steps(results)
        | _guidance(samples)
        | _unjudged(num_unjudged, len(responses))
        | _environment(samples),
        histograms={name: found for name, found in histograms.items() if found is not None},
    )


def _unjudged(num_unjudged: int, num_judged: int) -> dict[str, float]:
    """Return the share of an update's responses without a verdict; empty if all have one."""
    return {"no_verdict_fraction": num_unjudged / (num_unjudged + num_judged)} if num_unjudged else {}


def _environment(samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Return how many tokens of environments are among the sampled ones; empty if there are none."""
    number = sum(s.num_after_prompt - s.response_length for s in samples)
    return {"environment_tokens": float(number)} if number else {}


def _guidance(samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Return the share of responses without guidance; empty for an algorithm that uses none."""
    known = [sample.is_unguided for sample in samples if sample.is_unguided is not None]
    return {"unguided_fraction": float(np.mean(known))} if known else {}


def refused_row(update: int, version: int, num_samples: int, results: Sequence[StepResult]) -> RefusedRow:
    return RefusedRow(
        update=update,
        policy_version=version,
        at_s=time.time(),
        num_trajectories=num_samples,
        num_refused_steps=len(results),
        loss=float(np.mean([r.loss for r in results])) if results else 0.0,
        grad_norm=float(np.mean([r.grad_norm for r in results])) if results else 0.0,
    )


def show(row: UpdateRow, ctx: ActorContext) -> None:
    counters = ctx.counters
    counters["num_updates"] = ctx.config.run.num_updates
    ctx.count("trained_tokens", row.num_trained_tokens)
    ctx.count("refused_steps", row.num_refused_steps)
    ctx.log.info("update", update=row.update, accuracy=row.accuracy, loss=row.loss, staleness_max=row.staleness_max)
    counters.update(updates=row.update, accuracy=row.accuracy, reward=row.reward, loss=row.loss)
    counters.update(response_length=row.response_length)
    counters.update(staleness_mean=row.staleness_mean, staleness_max=row.staleness_max)
    if len(row.reward_parts) > 1:
        counters.update({f"reward_{name}": value for name, value in row.reward_parts.items()})


def histogram(values: np.ndarray) -> Histogram | None:
    """Count values in at most 20 bins of equal width, narrow integer ranges in a bin each.

    None if no value is finite."""
    found = values[np.isfinite(values)]
    if not found.size:
        return None
    low, high = float(found.min()), float(found.max())
    if np.issubdtype(found.dtype, np.integer):
        # Every bin covers the same number of integers.
        width = -(-int(high - low + 1) // _MAX_BINS)
        num_bins = -(-int(high - low + 1) // width)
        high = low + width * num_bins
        counts, _ = np.histogram(found, num_bins, (low, high))
        return Histogram(low, high, tuple(map(int, counts)))
    if low == high:
        return Histogram(low - 0.5, high + 0.5, (int(found.size),))
    # Scale to [0, 1], where bin edges stay distinct however close low and high are.
    scale = 1.0 if np.isfinite(high - low) else 0.5
    shares = (found.astype(np.float64) * scale - low * scale) / (high * scale - low * scale)
    counts, _ = np.histogram(shares, _MAX_BINS, (0.0, 1.0))
    return Histogram(low, high, tuple(map(int, counts)))


def metrics_of_steps(steps: Sequence[StepResult]) -> dict[str, float]:
    """Combine the metrics of an update's optimiser steps.

    Names ending in ``_max`` take the maximum and those in ``_min`` the minimum; others the mean
    weighted by tokens or samples. Steps without any of these do not count."""
    found: dict[str, list[tuple[float, int]]] = {}
    for step in steps:
        for name, value in step.metrics.items():
            if number := _number_of(name, step.counts):
                found.setdefault(name, []).append((value, number))
    return {name: _of_steps(name, *zip(*pairs, strict=True)) for name, pairs in found.items()}


def _number_of(name: str, counts: MetricCounts) -> int:
    if name == "nll":
        return counts.imitated_tokens
    return counts.loss_rows if name in ROW_METRICS else counts.loss_tokens


def _of_steps(name: str, values: Sequence[float], numbers: Sequence[int]) -> float:
    # numpy propagates NaN, which Python's max may lose
    if name.endswith("_max"):
        return float(np.max(values))
    return float(np.min(values) if name.endswith("_min") else np.average(values, weights=numbers))


def _mean_parts(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each part's mean over all responses; a missing part counts as 0."""
    names = dict.fromkeys(name for one in parts for name in one)
    return {name: float(np.mean([one.get(name, 0.0) for one in parts])) for name in names}
