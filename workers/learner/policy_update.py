"""One update of the policy, from claimed units to optimiser steps, for learner and replay alike.

The same units, settings and weights give the same new weights: an asynchronous run is repeatable.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import structlog

from pipeline.algorithms import build
from pipeline.algorithms.base import NonFiniteUnit
from pipeline.algorithms.batching import TrainingSample, split_minibatches
from pipeline.ledger.types import ClaimedUnit
from pipeline.process import work
from protocol.errors import Diverged
from workers.engines.training.seam import StepResult, TrainingBackend

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

Compute = Callable[..., Awaitable[Any]]
"""Runs a blocking function on the thread that does such work: ``ActorContext.compute``."""

_OLD_LOGPROBS = 0.25
"""About the share that a forward pass over the batch has in it and the steps together."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A claim's units as training samples."""

    samples: list[TrainingSample]
    """In the order of the units."""
    refused: list[NonFiniteUnit]
    """Units whose arrays hold NaN or infinity: never trained on."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """The result of an update's optimiser steps."""

    results: list[StepResult]
    """One a step; none when there was no sample."""
    logprob_s: float
    """Time for the proximal policy's log-probs."""
    step_s: float


class PolicyUpdate:
    """Makes updates on a backend's weights, one after the other."""

    def __init__(self, config: RunConfig, backend: TrainingBackend) -> None:
        """Update ``backend`` by the rule and the settings of ``config``."""
        self._config = config
        self._backend = backend
        self._algorithm = build(config)
        self._num_bad_steps = 0

    def take(self, config: RunConfig) -> None:
        """Go by ``config`` from the next update on; it differs in settings that may change while a
        run goes on (``pipeline.config.changing``). Steps refused so far still count."""
        self._config = config
        self._algorithm = build(config)
        self._backend.set_learning_rate(config.learner.learning_rate)

    def prepare(self, units: Sequence[ClaimedUnit]) -> Prepared:
        """Make samples of all units that are finite. Raises LedgerError if one is not whole."""
        kept = list(units)
        refused: list[NonFiniteUnit] = []
        while kept:
            try:
                return Prepared(self._algorithm.prepare(kept), refused)
            except NonFiniteUnit as error:
                refused.append(error)
                kept = [unit for unit in kept if unit.name != error.unit]
        return Prepared([], refused)

    async def step(self, samples: list[TrainingSample], *, policy_version: int, compute: Compute) -> Stepped:
        """Do the optimiser steps of one update, from the weights of ``policy_version``.

        The backend refuses a step that is not finite. Raises Diverged after too many in a row, over
        updates, and EngineError without device memory."""
        if not samples:
            return Stepped([], 0.0, 0.0)
        started = time.monotonic()
        if self._needs_old_logprobs:
            with work.part(_OLD_LOGPROBS):
                logprobs = await compute(self._backend.response_logprobs, samples)
            samples = [replace(s, old_logprobs=old) for s, old in zip(samples, logprobs, strict=True)]
        stepping = time.monotonic()
        objective = self._algorithm.objective.at(policy_version)
        results: list[StepResult] = []
        minibatches = split_minibatches(samples, self._config.algorithm.num_minibatches)
        share = (1.0 - _OLD_LOGPROBS if self._needs_old_logprobs else 1.0) / len(minibatches)
        for minibatch in minibatches:
            with work.part(share):
                results.append(await compute(self._backend.step, minibatch, objective))
            self._check(results[-1])
        return Stepped(results, stepping - started, time.monotonic() - stepping)

    @property
    def _needs_old_logprobs(self) -> bool:
        """Whether the proximal policy's log-probs must be computed before the steps. In the only
        step of an update the present policy is the proximal one, and the backend reads them off the
        same forward pass."""
        objective = self._algorithm.objective
        return objective.needs_old and (self._config.algorithm.num_minibatches > 1 or objective.needs_old_first)

    def _check(self, result: StepResult) -> None:
        self._num_bad_steps = 0 if result.applied else self._num_bad_steps + 1
        if not result.applied:
            _log.error("step_refused", loss=result.loss, grad_norm=result.grad_norm, in_a_row=self._num_bad_steps)
        if self._num_bad_steps >= self._config.learner.max_bad_steps:
            raise Diverged(
                f"{self._num_bad_steps} optimiser steps in a row were not finite (loss {result.loss}, gradient norm "
                f"{result.grad_norm}) and were refused; lower learner.learning_rate, then go on from the last checkpoint "
                f"with `headrace up --resume {self._config.run_dir}`"
            )
