"""One update of the policy, from claimed units to optimiser steps, for both learner and replay.

The same units, settings and weights give the same new weights, so an asynchronous run is
repeatable.

The backend refuses a step whose loss or gradient is not finite before it touches weights or
optimiser, and a step draws no random numbers. So a refused step is repeated at once from the same
state and samples. If the result is the same, the samples are to blame and the update continues
without them. If it differs, the machine is to blame and the learner ends. With
``learner.spike_factor`` a spike (``pipeline.training.spikes``) is refused and repeated, too;
``learner.spikes`` decides whether it is then left out or trained on.

A mini-batch in which no token trains takes no step: decay and momentum alone would move the
weights."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from pipeline.algorithms import build
from pipeline.algorithms.assemble import NonFiniteUnit
from pipeline.algorithms.batching import TrainingSample, split_minibatches
from pipeline.ledger.types import ClaimedUnit
from pipeline.ledger.version_history import VersionHistory
from pipeline.process import work
from pipeline.training.spikes import NO_LIMITS, NO_STEP, RecentSteps, StepLimits, check_same
from protocol.errors import Diverged
from workers.engines.training.seam import MetricCounts, StepResult, TrainingBackend

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

Compute = Callable[..., Awaitable[Any]]
"""Runs a blocking function on the actor's compute thread: ``ActorContext.compute``."""

_OF_BEHAVIOR = ("behavior_", "importance_", "log_perplexity_gap", "perplexity_ratio", "sequence_chi2")
_OLD_LOGPROBS = 0.25
"""Rough share of an update's time that the forward pass for the proximal log-probs takes."""

_NO_RESTARTS = VersionHistory()

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    samples: list[TrainingSample]
    refused: list[NonFiniteUnit]
    """Units whose arrays hold NaN or infinity; they are not trained on."""


@dataclass(frozen=True, slots=True)
class BlamedStep:
    """A step that was refused twice with the same result."""

    samples: tuple[str, ...]
    result: StepResult
    """The second result; applied if it is a spike that is trained on."""
    limits: StepLimits = NO_LIMITS

    @property
    def is_spike(self) -> bool:
        return NO_LIMITS.allow(self.result.loss, self.result.grad_norm)


@dataclass(frozen=True, slots=True)
class Stepped:
    results: list[StepResult]
    """One per step; empty when no token trained."""
    logprob_s: float
    step_s: float
    blamed: tuple[BlamedStep, ...] = ()


def is_made(stepped: Stepped) -> bool:
    """Return whether an update produces a version: at least one step was applied."""
    return any(result.applied for result in stepped.results)


class PolicyUpdate:
    def __init__(
        self, config: RunConfig, backend: TrainingBackend, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self._config = config
        self._backend = backend
        self._rule = build(config)
        self._num_bad_steps = 0
        self.recent = RecentSteps()
        """The applied steps that spikes are measured against."""

    def apply_settings(self, config: RunConfig) -> None:
        """Use ``config`` from the next update on. It may differ only in settings that can change
        during a run (``pipeline.config.changing``). Steps refused so far still count."""
        self._config = config
        self._rule = build(config)
        self._backend.set_learning_rate(config.learner.learning_rate)

    @property
    def limits(self) -> StepLimits:
        return self.recent.limits(self._config.learner.spike_factor)

    def prepare(self, units: Sequence[ClaimedUnit]) -> Prepared:
        """Make samples of all finite units. Raises LedgerError if a unit is incomplete."""
        kept = list(units)
        refused: list[NonFiniteUnit] = []
        while kept:
            try:
                return Prepared(self._rule.prepare(kept), refused)
            except NonFiniteUnit as error:
                refused.append(error)
                kept = [unit for unit in kept if unit.name != error.unit]
        return Prepared([], refused)

    async def step(
        self,
        samples: list[TrainingSample],
        *,
        policy_version: int,
        compute: Compute,
        history: VersionHistory = _NO_RESTARTS,
        limits: StepLimits | None = None,
    ) -> Stepped:
        """Take the optimiser steps of one update, from the weights of ``policy_version``.

        ``history`` holds the run's restarts. ``limits`` are those that a replay reads from the log;
        None derives them from the steps so far. Raises Diverged after too many refused steps in a
        row (counted across updates), StepDiffered when a repeated step had another result, and
        EngineError when device memory runs out."""
        if not any(sample.trains for sample in samples):
            return Stepped([], 0.0, 0.0)
        started = self._monotonic()
        if self._needs_old_logprobs:
            with work.part(_OLD_LOGPROBS):
                logprobs = await compute(self._backend.response_logprobs, samples)
            samples = [replace(s, old_logprobs=old) for s, old in zip(samples, logprobs, strict=True)]
        stepping = self._monotonic()
        rule = self._rule.at(policy_version)
        if rule.reads_versions:
            now, samples = _in_updates(samples, policy_version, history)
            rule = rule.at(now)
        limits = self.limits if limits is None else limits
        results: list[StepResult] = []
        blamed: list[BlamedStep] = []
        minibatches = split_minibatches(samples, self._config.algorithm.num_minibatches)
        share = (1.0 - _OLD_LOGPROBS if self._needs_old_logprobs else 1.0) / len(minibatches)
        for minibatch in minibatches:
            if not any(sample.trains for sample in minibatch):
                continue
            with work.part(share):
                result: StepResult = await compute(self._backend.step, minibatch, rule, limits)
            if not result.applied:
                is_spike = NO_LIMITS.allow(result.loss, result.grad_norm)
                trains = is_spike and self._config.learner.spikes == "train"
                again: StepResult = await compute(self._backend.step, minibatch, rule, NO_LIMITS if trains else NO_STEP)
                check_same(result, again, applied=trains)
                result = again
                blamed.append(BlamedStep(tuple(sample.name for sample in minibatch), result, limits))
            results.append(replace(result, counts=MetricCounts.of(minibatch)))
            self._check(result)
        if not self._config.compares_with_sampler:
            results = [_without_behavior(result) for result in results]
        return Stepped(results, stepping - started, self._monotonic() - stepping, tuple(blamed))

    @property
    def _needs_old_logprobs(self) -> bool:
        """Whether the proximal policy's log-probs must be computed before the steps.

        In an update with a single step, the current policy is the proximal one, and its own forward
        pass has them."""
        return self._rule.needs_old and (self._config.algorithm.num_minibatches > 1 or self._rule.needs_old_first)

    def _check(self, result: StepResult) -> None:
        if result.applied:
            self._num_bad_steps = 0
            self.recent.add(result.loss, result.grad_norm)
            return
        self._num_bad_steps += 1
        _log.error("step_refused", loss=result.loss, grad_norm=result.grad_norm, in_a_row=self._num_bad_steps)
        if self._num_bad_steps >= self._config.learner.max_bad_steps:
            is_spike = NO_LIMITS.allow(result.loss, result.grad_norm)
            found, advice = "not finite", "lower learner.learning_rate"
            if is_spike:
                found, advice = "spikes or not finite", "lower learner.learning_rate or raise learner.spike_factor"
            raise Diverged(
                f"{self._num_bad_steps} optimiser steps in a row were {found} (loss {result.loss}, gradient norm "
                f"{result.grad_norm}), each of them twice, and were refused: not one batch is at fault, but the weights or the "
                f"settings; {advice}, then continue from the last checkpoint with "
                f"`headrace up --resume {self._config.run_dir}`"
            )


def _in_updates(
    samples: list[TrainingSample], policy_version: int, history: VersionHistory
) -> tuple[int, list[TrainingSample]]:
    """Renumber ``policy_version`` and the samples' versions so that differences count updates.

    Version numbers jump at a restart. A discarded version may have more updates than the current
    one; it then counts as equally far away as a version with that many fewer. Unknown versions stay
    unknown."""
    updates = history.updates(policy_version)
    ages = [np.abs(updates - history.updates_of(sample.versions)) for sample in samples]
    now = max(updates, *(int(age.max()) for age in ages))
    versions = [np.where(s.versions < 0, s.versions, now - age) for s, age in zip(samples, ages, strict=True)]
    return now, [replace(s, versions=v.astype(np.int32)) for s, v in zip(samples, versions, strict=True)]


def _without_behavior(result: StepResult) -> StepResult:
    """Drop metrics of the sampling policy, which is unknown, or had another temperature
    (imitation)."""
    kept = {name: value for name, value in result.metrics.items() if not name.startswith(_OF_BEHAVIOR)}
    return replace(result, metrics=kept)
