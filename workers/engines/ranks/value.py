"""The value engine on shares: one rank or several behind :class:`workers.engines.value.ValueEngine`.

*Consumes* token sequences, and finished responses with their rewards, on rank 0. *Produces* values, optimiser steps and
checkpoints, there. *Waits for* the other ranks. As with the policy, every rank is told the whole batch and computes its share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.batching import plan_ranks
from protocol.errors import EngineError
from workers.engines.ranks.group import Group
from workers.engines.ranks.lead import Lead
from workers.engines.ranks.messages import Command, Evaluate, ValueStep
from workers.engines.ranks.sharded import ShardedModel, Shards
from workers.engines.scoring import ScoringRequest
from workers.engines.torch_value import value_memory_errors
from workers.engines.value import ValueSample, ValueStepResult
from workers.engines.value_regression import (
    RegressionSums,
    ValueSettings,
    accumulate_regression,
    check_value_samples,
    compute_values,
    value_step_result,
)


class RankedValue:
    """A value model in shares."""

    def __init__(self, shards: Shards, model: ShardedModel, settings: ValueSettings, group: Group, lead: Lead) -> None:
        """Serve and train ``shards``; ``model`` gathers, saves and loads them."""
        self._shards = shards
        self._model = model
        self._settings = settings
        self._group = group
        self._lead = lead

    @property
    def num_steps(self) -> int:
        """Optimiser steps applied since the start of the run, over resumes."""
        return self._shards.num_steps

    def values(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        """Return, for each request in order, float32 [num_scored]: V of the state before each token of the tail.

        Raises:
            EngineError: A request has no token before its tail, or a device has no memory for a micro-batch.
            EngineDied: A rank is gone.
        """
        for request in requests:
            if not 0 <= request.num_scored < request.tokens.size:
                raise EngineError(
                    f"a request has {request.tokens.size} tokens of which {request.num_scored} are to be valued; at least one "
                    "token must come before the valued ones: start prompts with a token"
                )
        return self._lead.run(Evaluate(list(requests)), self.obey) if requests else []

    def step(self, samples: Sequence[ValueSample]) -> ValueStepResult:
        """Do one optimiser step on the whole of ``samples``; nothing changes when loss or gradient is not finite.

        Raises:
            EngineError: There is no sample, one is not consistent, or a device has no memory for a micro-batch.
            EngineDied: A rank is gone.
        """
        check_value_samples(samples)
        return self._lead.run(ValueStep(list(samples)), self.obey)

    def snapshot(self) -> Callable[[Path], None]:
        """Gather what an exact resume needs; return what writes it, as the single-process engine would, on any thread."""
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
            case Evaluate():
                return self._evaluate(command.requests)
            case ValueStep():
                return self._step(command.samples)
            case _:
                return self._model.obey(command)

    def _evaluate(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        lengths = [request.num_scored for request in requests]
        ends = np.cumsum(lengths)
        everything = np.zeros(int(ends[-1]), np.float32)
        plan = self._plan(requests)
        with value_memory_errors(self._settings.micro_batch_tokens):
            for index, values in compute_values(self._shards.module, requests, plan, self._group.device).items():
                everything[ends[index] - lengths[index] : ends[index]] = values
        # one rank has each, the others 0: a sum brings them together as they are
        return np.split(self._group.sum(torch.from_numpy(everything)).numpy(), ends[:-1])

    def _step(self, samples: Sequence[ValueSample]) -> ValueStepResult:
        shards, settings = self._shards, self._settings
        try:
            with value_memory_errors(settings.micro_batch_tokens):
                part = accumulate_regression(
                    shards.module,
                    samples,
                    settings,
                    self._plan(samples),
                    self._group.device,
                    backward=shards.backward,
                    loss_scale=float(self._group.size) if shards.averages_gradients else 1.0,
                )
                figures = self._group.sum(torch.stack([part.loss, part.clipped]))
                sums = RegressionSums(figures[0], figures[1], self._group.sum(part.values))
                step = shards.step(float(sums.loss))
        finally:
            shards.clear()
        return value_step_result(samples, settings, sums, step)

    def _plan(self, sequences: Sequence[ScoringRequest] | Sequence[ValueSample]) -> list[list[int]]:
        """Return this rank's micro-batches."""
        lengths = [int(sequence.tokens.size) for sequence in sequences]
        return plan_ranks(lengths, self._group.size, self._settings.micro_batch_tokens)[self._group.rank]
