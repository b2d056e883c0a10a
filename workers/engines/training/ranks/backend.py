"""The policy's and the critic's backends on sharded models.

Every rank receives the whole batch, computes the same loss weights from it, and processes its share
of the micro-batches. So the sum over ranks equals that of one process, added in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.algorithms.batching import TrainingSample, plan_ranks
from pipeline.process import work
from pipeline.training.live_states import LiveState
from pipeline.training.snapshots import KeptState
from pipeline.training.spikes import NO_LIMITS, StepLimits
from protocol.errors import EngineError
from workers.engines.model.optimizer import GRADIENT
from workers.engines.model.packed import find_prefixes, memory_errors
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.training.policy_gradient import (
    BatchSums,
    ForwardSettings,
    accumulate_gradient,
    batch_totals,
    check_samples,
    sample_logprobs,
)
from workers.engines.training.publishing import PublishSettings, TorchPublishing
from workers.engines.training.ranks.messages import Command, Evaluate, Score, SentRule, SetRate, Step, ValueStep
from workers.engines.training.ranks.sharded import ShardedModel
from workers.engines.training.seam import StepResult
from workers.engines.training.torch import MEMORY_ADVICE
from workers.engines.value.regression import (
    RegressionSums,
    ValueSettings,
    accumulate_regression,
    check_value_samples,
    compute_values,
    value_step_result,
)
from workers.engines.value.seam import ValueSample, ValueStepResult
from workers.engines.value.torch import MEMORY_ADVICE as VALUE_MEMORY_ADVICE

if TYPE_CHECKING:
    from pipeline.algorithms.base import Rule
    from workers.engines.model.adapter import Adapter


class RankedBackend:
    """A sharded model. A subclass sends commands with ``self._lead.run`` to ``obey``."""

    def __init__(self, model: ShardedModel, *, micro_batch_tokens: int) -> None:
        self._model = model
        self._shards, self._group, self._lead = model.shards, model.group, model.lead
        self._max_tokens = micro_batch_tokens

    @property
    def num_steps(self) -> int:
        return self._shards.num_steps

    def snapshot(self) -> Callable[[Path], None]:
        return self._model.snapshot()

    def load(self, folder: Path) -> None:
        self._model.load(folder)

    def live_state(self) -> LiveState:
        return self._model.live_state()

    def put_back(self, kept: KeptState) -> None:
        self._model.put_back(kept)

    def close(self) -> None:
        self._lead.stop()

    def obey(self, command: Command) -> Any:
        """Carry out a command together with all ranks; the return value is for rank 0."""
        return self._model.obey(command)

    @property
    def _loss_scale(self) -> float:
        """Compensates for shards that average gradients over the batch's shares instead of summing them."""
        return float(self._group.num_shares) if self._shards.averages_gradients else 1.0

    def _plan(self, sequences: Sequence[TrainingSample | ScoringRequest | ValueSample]) -> list[list[int]]:
        prefixes = find_prefixes([sequence.tokens for sequence in sequences], self._group.device)
        return plan_ranks(prefixes, self._group.num_shares, self._max_tokens)[self._group.share]

    def _over_shares(self, figures: torch.Tensor) -> torch.Tensor:
        """Sum figures of the batch's shares, in place."""
        return self._group.sum(figures if self._group.tells else figures.zero_())

    def _bring_together(self, lengths: Sequence[int], own: Mapping[int, np.ndarray]) -> list[np.ndarray]:
        """Return float32 [length] for each sequence; this rank has only its ``own``, by index."""
        ends = np.cumsum(lengths)
        everything = np.zeros(int(ends[-1]), np.float32)
        for index, values in own.items() if self._group.tells else ():
            everything[ends[index] - lengths[index] : ends[index]] = values
        # exactly one rank has each value and the others 0, so the sum is exact
        return np.split(self._group.sum(torch.from_numpy(everything)).numpy(), ends[:-1])


class RankedTraining(RankedBackend, TorchPublishing):
    def __init__(
        self, model: ShardedModel, forward: ForwardSettings, publishing: PublishSettings | None = None
    ) -> None:
        super().__init__(model, micro_batch_tokens=forward.micro_batch_tokens)
        self.publishing = publishing or PublishSettings()

    def response_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        return self._lead.run(Score(list(samples)), self.obey) if samples else []

    def step(self, samples: Sequence[TrainingSample], rule: Rule, limits: StepLimits = NO_LIMITS) -> StepResult:
        check_samples(samples, rule)
        return self._lead.run(Step(list(samples), SentRule.of(rule), limits), self.obey)

    def set_learning_rate(self, learning_rate: float) -> None:
        self._lead.run(SetRate(learning_rate), self.obey)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._model.tensors()

    def adapter(self) -> Adapter | None:
        return self._model.adapter()

    def obey(self, command: Command) -> Any:
        match command:
            case Score():
                return self._score(command.samples)
            case Step():
                return self._step(command.samples, command.rule.rule(), command.limits)
            case SetRate():
                return self._shards.set_learning_rate(command.learning_rate)
            case _:
                return super().obey(command)

    def _score(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        own = sample_logprobs(self._shards.module, samples, self._plan(samples), self._group.device)
        return self._bring_together([sample.response_length for sample in samples], own)

    def _step(self, samples: Sequence[TrainingSample], rule: Rule, limits: StepLimits) -> StepResult:
        shards = self._shards
        try:
            with memory_errors(self._max_tokens, MEMORY_ADVICE):
                with work.part(GRADIENT):
                    sums = self._accumulate(samples, rule)
                totals = batch_totals(samples, rule, self._over_ranks(sums))
                self._model.wait_for_loans()
                step = shards.step(totals.loss, limits)
        finally:
            shards.clear()
        return StepResult(
            step.applied, totals.loss, step.grad_norm, step.learning_rate, totals.metrics, totals.num_tokens
        )

    def _accumulate(self, samples: Sequence[TrainingSample], rule: Rule) -> BatchSums:
        """Add this rank's part of the gradient to the parameters' ``grad``; return its part of the sums."""
        return accumulate_gradient(
            self._shards.module,
            samples,
            rule,
            self._plan(samples),
            self._group.device,
            backward=self._shards.backward,
            loss_scale=self._loss_scale,
        )

    def _over_ranks(self, sums: BatchSums) -> BatchSums:
        stacked = self._over_shares(torch.stack(list(sums.sums.values())))
        largest = self._group.largest(sums.largest.clone())
        return BatchSums(dict(zip(sums.sums, stacked.unbind(), strict=True)), largest)


class RankedValue(RankedBackend):
    def __init__(self, model: ShardedModel, settings: ValueSettings) -> None:
        super().__init__(model, micro_batch_tokens=settings.micro_batch_tokens)
        self._settings = settings

    def values(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        for request in requests:
            if not 0 <= request.num_scored < request.tokens.size:
                raise EngineError(
                    f"a request has {request.tokens.size} tokens of which {request.num_scored} are to be valued; at least one "
                    "token must precede them: start prompts with a token"
                )
        return self._lead.run(Evaluate(list(requests)), self.obey) if requests else []

    def step(self, samples: Sequence[ValueSample]) -> ValueStepResult:
        check_value_samples(samples)
        return self._lead.run(ValueStep(list(samples)), self.obey)

    def obey(self, command: Command) -> Any:
        match command:
            case Evaluate():
                return self._evaluate(command.requests)
            case ValueStep():
                return self._step(command.samples)
            case _:
                return super().obey(command)

    def _evaluate(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        with memory_errors(self._max_tokens, VALUE_MEMORY_ADVICE):
            own = compute_values(self._shards.module, requests, self._plan(requests), self._group.device)
        return self._bring_together([request.num_scored for request in requests], own)

    def _step(self, samples: Sequence[ValueSample]) -> ValueStepResult:
        shards, settings = self._shards, self._settings
        try:
            with memory_errors(self._max_tokens, VALUE_MEMORY_ADVICE):
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
                figures = self._over_shares(torch.stack([part.loss, part.clipped]))
                sums = RegressionSums(figures[0], figures[1], self._over_shares(part.values))
                self._model.wait_for_loans()
                step = shards.step(float(sums.loss))
        finally:
            shards.clear()
        return value_step_result(samples, settings, sums, step)
