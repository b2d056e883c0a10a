"""The value engine in plain torch, on one device in one process; the reference for the sharded one.

Master weights are fp32 whatever the compute type; ``workers.engines.value.regression`` computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.algorithms.critic_rule import CriticRule
from pipeline.process import work
from workers.engines.model.checkpoint_files import (
    optimizer_tensors,
    put_model,
    read_model,
    read_training_state,
    rng_tensors,
    snapshot_model,
    snapshot_writer,
)
from workers.engines.model.layers import recompute_layers
from workers.engines.model.live_state import StateCopier, put_back_state
from workers.engines.model.loading import load_value_model, resolve_device
from workers.engines.model.micro_batches import MicroBatches, Result, learning_plan_on
from workers.engines.model.optimizer import GRADIENT, GuardedOptimizer, OptimizerSettings
from workers.engines.model.packed import Plan, memory_errors, planned_prefixes, prepare_packed
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.value.regression import (
    PackedValue,
    ValueSettings,
    accumulate_regression,
    check_value_samples,
    compute_values,
    value_step_result,
)
from workers.engines.value.seam import ValueSample, ValueStepResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pipeline.config.schema import RunConfig
    from pipeline.preflight.device_memory import LearningPlan
    from pipeline.training.live_states import LiveState
    from pipeline.training.snapshots import KeptState
MEMORY_ADVICE = "lower value.micro_batch_tokens or set value.gradient_checkpointing"


class TorchValue:
    def __init__(
        self,
        model: PreTrainedModel,
        settings: ValueSettings,
        optimizer: OptimizerSettings,
        *,
        gradient_checkpointing: bool | int = False,
        tokenizer_from: Path | None = None,
    ) -> None:
        """Raises EngineError when the model's sequences cannot be packed, or it has no scalar head."""
        # eval() disables dropout, so that one version gives the same values twice
        self._model = prepare_packed(model.eval())
        recompute_layers(model, gradient_checkpointing)
        self._value = PackedValue(model, settings)
        self._settings = settings
        self._tokenizer_from = tokenizer_from
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._optimizer = GuardedOptimizer(self._parameters, optimizer)
        self._copier = StateCopier()
        self._micro_batches = MicroBatches(settings.micro_batch_tokens, model, MEMORY_ADVICE)

    @property
    def num_steps(self) -> int:
        return self._optimizer.num_steps

    def values(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        """Raises EngineError for unusable requests or when device memory runs out."""
        values = self._run(requests, lambda plan: compute_values(self._value, requests, plan, self._model.device))
        return [values[index] for index in range(len(requests))]

    def step(self, samples: Sequence[ValueSample]) -> ValueStepResult:
        """Raises EngineError for unusable samples or when device memory runs out."""
        check_value_samples(samples)
        try:
            with memory_errors(self._micro_batches.tokens, MEMORY_ADVICE):
                with work.part(GRADIENT):
                    sums = self._run(
                        samples,
                        lambda plan: accumulate_regression(
                            self._value, samples, self._settings, plan, self._model.device
                        ),
                    )
                loss = float(sums.loss)
                self._copier.loans.wait()
                step = self._optimizer.step(loss)
        finally:
            self._optimizer.clear()
        return value_step_result(samples, self._settings, sums, step)

    def snapshot(self) -> Callable[[Path], None]:
        write_model = snapshot_model(self._model, self._tokenizer_from)
        return snapshot_writer(write_model, self._optimizer.snapshot())

    def load(self, folder: Path) -> None:
        state = read_training_state(folder)
        weights = read_model(self._model, folder)
        optimizer = self._optimizer.read(folder, state)
        self._copier.loans.wait()
        put_model(self._model, weights)
        self._optimizer.restore(optimizer, state)

    def live_state(self) -> LiveState:
        states = optimizer_tensors(self._optimizer.states) | rng_tensors()
        return self._copier.live_state(self._parameters, states, self._optimizer.training_state)

    def put_back(self, kept: KeptState) -> None:
        self._copier.loans.wait()
        put_back_state(kept, self._parameters, self._optimizer)

    def close(self) -> None: ...

    def _run(self, sequences: Sequence[ScoringRequest | ValueSample], compute: Callable[[Plan], Result]) -> Result:
        prefixes = planned_prefixes(self._model, [sequence.tokens for sequence in sequences])
        return self._micro_batches.run(prefixes, compute, self._optimizer.clear)


def build_value(config: RunConfig, model_path: Path) -> TorchValue:
    """Build a run's value engine from ``model_path``. Raises DataError or ConfigError."""
    device = resolve_device(config.value.device)
    if device.type == "cpu":
        torch.set_num_threads(config.value.threads)
    model = load_value_model(model_path, torch.float32, device)
    plan = learning_plan_on(config, device, model, is_value=True)
    return TorchValue(
        model,
        value_settings(config, device, plan),
        value_optimizer_settings(config),
        gradient_checkpointing=plan.recomputed,
        tokenizer_from=model_path,
    )


def value_settings(config: RunConfig, device: torch.device, plan: LearningPlan | None = None) -> ValueSettings:
    value, algorithm = config.value, config.algorithm
    assert isinstance(algorithm, CriticRule.Settings), "value workers run for rules with a critic"
    return ValueSettings(
        micro_batch_tokens=(plan or learning_plan_on(config, device, is_value=True)).tokens,
        gamma=algorithm.gamma,
        gae_lambda=value.gae_lambda,
        bounds=value,
        autocast=torch.bfloat16 if config.types.value == "bfloat16" else None,
    )


def value_optimizer_settings(config: RunConfig) -> OptimizerSettings:
    return OptimizerSettings.of(config.value, warmup_steps=config.value.warmup_steps)
