"""The policy's backend on shares, one rank or several: rank 0 takes calls and returns results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.algorithms.batching import TrainingSample
from pipeline.process import work
from pipeline.training.spikes import NO_LIMITS, StepLimits
from workers.engines.model.micro_batches import memory_errors
from workers.engines.model.optimizer import GRADIENT
from workers.engines.training.policy_gradient import (
    BatchSums,
    ForwardSettings,
    accumulate_gradient,
    batch_totals,
    check_samples,
    sample_logprobs,
)
from workers.engines.training.publishing import PublishSettings, TorchPublishing
from workers.engines.training.ranks.backend import RankedBackend
from workers.engines.training.ranks.messages import Command, Score, SetRate, Step
from workers.engines.training.ranks.sharded import ShardedModel
from workers.engines.training.seam import StepResult
from workers.engines.training.torch import MEMORY_ADVICE

if TYPE_CHECKING:
    from pipeline.algorithms.objective import Objective
    from workers.engines.model.adapter import Adapter


class RankedTraining(RankedBackend, TorchPublishing):
    """A policy in shares."""

    def __init__(
        self, model: ShardedModel, forward: ForwardSettings, publishing: PublishSettings | None = None
    ) -> None:
        super().__init__(model, micro_batch_tokens=forward.micro_batch_tokens)
        self.publishing = publishing or PublishSettings()

    def response_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return float32 [response tokens] for each sample, at the sampling temperature."""
        return self._lead.run(Score(list(samples)), self.obey) if samples else []

    def step(
        self, samples: Sequence[TrainingSample], objective: Objective, limits: StepLimits = NO_LIMITS
    ) -> StepResult:
        """Do one step by the seam's contract. Raises EngineError, or EngineDied without a rank."""
        check_samples(samples, objective)
        return self._lead.run(Step(list(samples), objective, limits), self.obey)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Have all ranks step at another rate, by the seam's contract."""
        self._lead.run(SetRate(learning_rate), self.obey)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather the weights, an adapter merged in, then yield them by name, tied ones once."""
        return self._model.tensors()

    def adapter(self) -> Adapter | None:
        """Gather the adapter, if one is trained."""
        return self._model.adapter()

    def obey(self, command: Command) -> Any:
        """Carry out a command, with all ranks at once; the return value is meant for rank 0."""
        match command:
            case Score():
                return self._score(command.samples)
            case Step():
                return self._step(command.samples, command.objective, command.limits)
            case SetRate():
                return self._shards.set_learning_rate(command.learning_rate)
            case _:
                return super().obey(command)

    def _score(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        own = sample_logprobs(self._shards.module, samples, self._plan(samples), self._group.device)
        return self._bring_together([sample.response_length for sample in samples], own)

    def _step(self, samples: Sequence[TrainingSample], objective: Objective, limits: StepLimits) -> StepResult:
        shards = self._shards
        try:
            with memory_errors(self._max_tokens, MEMORY_ADVICE):
                with work.part(GRADIENT):
                    sums = accumulate_gradient(
                        shards.module,
                        samples,
                        objective,
                        self._plan(samples),
                        self._group.device,
                        backward=shards.backward,
                        loss_scale=self._loss_scale,
                    )
                totals = batch_totals(samples, objective, self._over_ranks(sums))
                self._model.wait_for_loans()
                step = shards.step(totals.loss, limits)
        finally:
            shards.clear()
        return StepResult(
            step.applied, totals.loss, step.grad_norm, step.learning_rate, totals.metrics, totals.num_tokens
        )

    def _over_ranks(self, sums: BatchSums) -> BatchSums:
        stacked = self._group.sum(torch.stack(list(sums.sums.values())))
        largest = self._group.largest(sums.largest.clone())
        return BatchSums(dict(zip(sums.sums, stacked.unbind(), strict=True)), largest)
