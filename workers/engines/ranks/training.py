"""The policy's training backend on shares: one rank or several behind :class:`workers.engines.training.TrainingBackend`.

*Consumes* training samples and an objective, on rank 0. *Produces* log-probs, optimiser steps, weights and checkpoints, there.
*Waits for* the other ranks.

Every rank is told the whole batch, makes the same loss weights of it, and computes its share of the micro-batches: so the sum
over ranks is the sum that one process would have made, in another order of adding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.batching import TrainingSample, plan_ranks
from workers.engines.policy_gradient import (
    BatchSums,
    ForwardSettings,
    accumulate_gradient,
    batch_totals,
    check_samples,
    sample_logprobs,
)
from workers.engines.ranks.group import Group
from workers.engines.ranks.lead import Lead
from workers.engines.ranks.messages import Command, Score, Step
from workers.engines.ranks.sharded import ShardedModel, Shards
from workers.engines.torch_training import memory_errors
from workers.engines.training import StepResult

if TYPE_CHECKING:
    from pipeline.algorithms.objective import Objective


class RankedTraining:
    """A policy in shares."""

    def __init__(self, shards: Shards, model: ShardedModel, forward: ForwardSettings, group: Group, lead: Lead) -> None:
        """Train ``shards``; ``model`` gathers, saves and loads them."""
        self._shards = shards
        self._model = model
        self._max_tokens = forward.micro_batch_tokens
        self._group = group
        self._lead = lead

    @property
    def num_steps(self) -> int:
        """Optimiser steps applied since the start of the run, over resumes."""
        return self._shards.num_steps

    @property
    def learning_rate(self) -> float:
        """Rate of the next step: linear warm-up, then constant."""
        return self._shards.learning_rate

    def response_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return float32 [response tokens] for each sample under the present weights, at the sampling temperature."""
        return self._lead.run(Score(list(samples)), self.obey) if samples else []

    def step(self, samples: Sequence[TrainingSample], objective: Objective) -> StepResult:
        """Do one optimiser step on the whole of ``samples``; nothing changes when loss or gradient is not finite.

        Raises:
            EngineError: There is no sample, old log-probs are missing, or a device has no memory for a micro-batch.
            EngineDied: A rank is gone.
        """
        check_samples(samples, objective)
        return self._lead.run(Step(list(samples), objective), self.obey)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather the weights, then yield them by name, tied ones once: copies, on the CPU."""
        return self._model.tensors()

    def snapshot(self) -> Callable[[Path], None]:
        """Gather what an exact resume needs; return what writes it, as the single-process backend would, on any thread."""
        return self._model.snapshot()

    def load(self, folder: Path) -> None:
        """Take back what any backend's snapshot wrote. Raises DataError naming the file, with nothing changed."""
        self._model.load(folder)

    def close(self) -> None:
        """Let the other ranks end."""
        self._lead.stop()

    def obey(self, command: Command) -> Any:
        """Carry out a command, with all ranks at once; what it returns is meant for rank 0."""
        match command:
            case Score():
                return self._score(command.samples)
            case Step():
                return self._step(command.samples, command.objective)
            case _:
                return self._model.obey(command)

    def _score(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        lengths = [sample.response_length for sample in samples]
        ends = np.cumsum(lengths)
        everything = np.zeros(int(ends[-1]), np.float32)
        for index, values in sample_logprobs(
            self._shards.module, samples, self._plan(samples), self._group.device
        ).items():
            everything[ends[index] - lengths[index] : ends[index]] = values
        # one rank has each, the others 0: a sum brings them together as they are
        return np.split(self._group.sum(torch.from_numpy(everything)).numpy(), ends[:-1])

    def _step(self, samples: Sequence[TrainingSample], objective: Objective) -> StepResult:
        shards = self._shards
        try:
            with memory_errors(self._max_tokens):
                sums = accumulate_gradient(
                    shards.module,
                    samples,
                    objective,
                    self._plan(samples),
                    self._group.device,
                    backward=shards.backward,
                    loss_scale=float(self._group.size) if shards.averages_gradients else 1.0,
                )
                totals = batch_totals(samples, objective, self._over_ranks(sums))
                step = shards.step(totals.loss)
        finally:
            shards.clear()
        return StepResult(
            applied=step.applied,
            loss=totals.loss,
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
            metrics=totals.metrics,
            num_tokens=totals.num_tokens,
        )

    def _plan(self, samples: Sequence[TrainingSample]) -> list[list[int]]:
        """Return this rank's micro-batches."""
        lengths = [int(sample.tokens.size) for sample in samples]
        return plan_ranks(lengths, self._group.size, self._max_tokens)[self._group.rank]

    def _over_ranks(self, sums: BatchSums) -> BatchSums:
        stacked = self._group.sum(torch.stack(list(sums.sums.values())))
        return BatchSums(
            dict(zip(sums.sums, stacked.unbind(), strict=True)), self._group.largest(sums.largest_ratio.clone())
        )
