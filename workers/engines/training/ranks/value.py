"""The value engine on shares, one rank or several: rank 0 takes calls and returns results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipeline.process import work
from protocol.errors import EngineError
from workers.engines.model.micro_batches import memory_errors
from workers.engines.model.optimizer import GRADIENT
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.training.ranks.backend import RankedBackend
from workers.engines.training.ranks.messages import Command, Evaluate, ValueStep
from workers.engines.training.ranks.sharded import ShardedModel
from workers.engines.value.regression import (
    RegressionSums,
    ValueSettings,
    accumulate_regression,
    check_value_samples,
    compute_values,
    value_step_result,
)
from workers.engines.value.seam import ValueSample, ValueStepResult
from workers.engines.value.torch import MEMORY_ADVICE


class RankedValue(RankedBackend):
    """A value model in shares."""

    def __init__(self, model: ShardedModel, settings: ValueSettings) -> None:
        super().__init__(model, micro_batch_tokens=settings.micro_batch_tokens)
        self._settings = settings

    def values(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        """Return V before each token of each tail. Raises EngineError or EngineDied."""
        for request in requests:
            if not 0 <= request.num_scored < request.tokens.size:
                raise EngineError(
                    f"a request has {request.tokens.size} tokens of which {request.num_scored} are to be valued; at least one "
                    "token must come before the valued ones: start prompts with a token"
                )
        return self._lead.run(Evaluate(list(requests)), self.obey) if requests else []

    def step(self, samples: Sequence[ValueSample]) -> ValueStepResult:
        """Do one step by the seam's contract. Raises EngineError, or EngineDied without a rank."""
        check_value_samples(samples)
        return self._lead.run(ValueStep(list(samples)), self.obey)

    def obey(self, command: Command) -> Any:
        """Carry out a command, with all ranks at once; the return value is meant for rank 0."""
        match command:
            case Evaluate():
                return self._evaluate(command.requests)
            case ValueStep():
                return self._step(command.samples)
            case _:
                return super().obey(command)

    def _evaluate(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        with memory_errors(self._max_tokens, MEMORY_ADVICE):
            own = compute_values(self._shards.module, requests, self._plan(requests), self._group.device)
        return self._bring_together([request.num_scored for request in requests], own)

    def _step(self, samples: Sequence[ValueSample]) -> ValueStepResult:
        shards, settings = self._shards, self._settings
        try:
            with memory_errors(self._max_tokens, MEMORY_ADVICE):
                with work.part(GRADIENT):
                    part = accumulate_regression(
                        shards.module,
                        samples,
                        settings,
                        self._plan(samples),
                        self._group.device,
                        backward=shards.backward,
                        loss_scale=self._loss_scale,
                    )
                figures = self._group.sum(torch.stack([part.loss, part.clipped]))
                sums = RegressionSums(figures[0], figures[1], self._group.sum(part.values))
                self._model.wait_for_loans()
                step = shards.step(float(sums.loss))
        finally:
            shards.clear()
        return value_step_result(samples, settings, sums, step)
