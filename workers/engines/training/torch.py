"""The training backend in plain torch, on one device in one process; the reference for the other
backends.

Master weights and optimiser state are fp32, whatever the compute type; the frozen weights below an
adapter have none (``workers.engines.training.lora``). A step either happens as a
whole or not at all (``workers.engines.model.optimizer``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.algorithms.batching import TrainingSample
from pipeline.config.learning import rate_phases
from pipeline.preflight.packages import check_lora
from pipeline.process import work
from pipeline.training.spikes import NO_LIMITS, StepLimits
from workers.engines.model.checkpoint_files import (
    optimizer_tensors,
    read_training_state,
    rng_tensors,
    snapshot_writer,
)
from workers.engines.model.compiled import compile_layers
from workers.engines.model.layers import recompute_layers
from workers.engines.model.live_state import StateCopier, put_back_state
from workers.engines.model.loading import load_model, resolve_device
from workers.engines.model.micro_batches import MicroBatches, Result, learning_plan_on
from workers.engines.model.optimizer import (
    CONSTANT,
    GRADIENT,
    GuardedOptimizer,
    OptimizerSettings,
    RateDecay,
    embedding_names,
    freeze,
)
from workers.engines.model.packed import Plan, memory_errors, planned_prefixes, prepare_packed, shares_prefixes
from workers.engines.training.policy_gradient import (
    ForwardSettings,
    PackedPolicy,
    accumulate_gradient,
    batch_totals,
    check_samples,
    sample_logprobs,
    trial_numbers,
)
from workers.engines.training.publishing import PublishSettings, TorchPublishing, publish_settings
from workers.engines.training.seam import StepResult
from workers.engines.training.trained_weights import TrainedModel, WeightsForm, WholeForm

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pipeline.algorithms.base import Rule
    from pipeline.config.schema import RunConfig
    from pipeline.preflight.device_memory import LearningPlan
    from pipeline.training.live_states import LiveState, StateLoan
    from pipeline.training.snapshots import KeptState
    from workers.engines.model.adapter import Adapter
    from workers.engines.training.lora import LoraSettings
MEMORY_ADVICE = (
    "set model.gradient_checkpointing, model.dtype to bfloat16, a smaller learner.optimizer or learner.lora.rank, lower "
    "learner.micro_batch_tokens, or take a device with more memory"
)


class TorchTraining(TorchPublishing):
    def __init__(
        self,
        model: PreTrainedModel,
        forward: ForwardSettings,
        optimizer: OptimizerSettings,
        *,
        gradient_checkpointing: bool | int = False,
        tokenizer_from: Path | None = None,
        lora: LoraSettings | None = None,
        publishing: PublishSettings | None = None,
        compiler: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Train ``model`` in the type of its weights, or an adapter of shape ``lora`` on it, on ``device``;
        None for where it is.

        Checkpoints get the tokenizer files of ``tokenizer_from``. ``compiler`` is torch.compile's
        backend for the layers, if they are to be compiled. Raises EngineError when the
        model's sequences cannot be packed, and ConfigError when the adapter does not fit."""
        # eval(), as with dropout the ratio would not be 1 while the weights are unchanged
        self._model = prepare_packed(model.eval())
        self._policy = PackedPolicy(model, forward)
        self._micro_batches = MicroBatches(forward.micro_batch_tokens, model, MEMORY_ADVICE)
        form = weights_form(model, model, lora, tokenizer_from, frozen=forward.autocast)
        # moves in place
        torch.nn.Module.to(model, device or model.device)
        self._weights = TrainedModel(model, form)
        recompute_layers(model, gradient_checkpointing)
        self._optimizer = GuardedOptimizer(self._weights.parameters, optimizer, embedding_names(model))
        self.publishing = publishing or PublishSettings()
        self._copier = StateCopier()
        self.compiled = None
        if compiler is not None:
            precision = forward.autocast or model.dtype
            self.compiled = compile_layers(
                model, lambda: trial_numbers(self._policy, model), precision=precision, backend=compiler
            )

    def environment(self) -> dict[str, str]:
        is_compiled = self.compiled is not None and not self.compiled.eager_because
        form = {"layers": "compiled"} if is_compiled else {}
        form |= {"prefixes": "shared"} if shares_prefixes(self._model) else {}
        return super().environment() | form | {"micro_batch_tokens": str(self._micro_batches.tokens)}

    @property
    def num_steps(self) -> int:
        """Optimiser steps applied since the start of the run, including before a resume."""
        return self._optimizer.num_steps

    def response_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        logprobs = self._run(samples, lambda plan: sample_logprobs(self._policy, samples, plan, self._model.device))
        return [logprobs[index] for index in range(len(samples))]

    def step(self, samples: Sequence[TrainingSample], rule: Rule, limits: StepLimits = NO_LIMITS) -> StepResult:
        """Raises EngineError for unusable samples or when device memory runs out."""
        check_samples(samples, rule)
        try:
            with memory_errors(self._micro_batches.tokens, MEMORY_ADVICE):
                with work.part(GRADIENT):
                    sums = self._run(
                        samples,
                        lambda plan: accumulate_gradient(self._policy, samples, rule, plan, self._model.device),
                    )
                totals = batch_totals(samples, rule, sums)
                self._copier.loans.wait()
                step = self._optimizer.step(totals.loss, limits)
        finally:
            self._optimizer.clear()
        return StepResult(
            step.applied, totals.loss, step.grad_norm, step.learning_rate, totals.metrics, totals.num_tokens
        )

    def set_learning_rate(self, learning_rate: float) -> None:
        self._optimizer.set_learning_rate(learning_rate)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights with an adapter merged in; read live ones before the next step."""
        return self._weights.tensors()

    def adapter(self) -> Adapter | None:
        return self._weights.adapter()

    def lend(self, loan: StateLoan) -> None:
        self._copier.loans.add(loan)

    def snapshot(self) -> Callable[[Path], None]:
        return snapshot_writer(self._weights.snapshot(), self._optimizer.snapshot())

    def load(self, folder: Path) -> None:
        state = read_training_state(folder)
        put_weights = self._weights.read(folder)
        optimizer = self._optimizer.read(folder, state)
        self._copier.loans.wait()
        put_weights()
        self._optimizer.restore(optimizer, state)

    def live_state(self) -> LiveState:
        states = optimizer_tensors(self._optimizer.states) | rng_tensors()
        return self._copier.live_state(self._weights.changing, states, self._optimizer.training_state)

    def put_back(self, kept: KeptState) -> None:
        self._copier.loans.wait()
        put_back_state(kept, self._weights.changing, self._optimizer)

    def close(self) -> None: ...

    def _run(self, samples: Sequence[TrainingSample], compute: Callable[[Plan], Result]) -> Result:
        prefixes = planned_prefixes(self._model, [sample.tokens for sample in samples])

        def compute_all(plan: Plan) -> Result:
            # autocast drops the low-precision weights with its outermost context: this one, which is off, keeps them
            # over all micro-batches
            with torch.autocast(self._model.device.type, enabled=False):
                return compute(plan)

        return self._micro_batches.run(prefixes, compute_all, self._optimizer.clear)


def build_training(config: RunConfig, model_path: Path) -> TorchTraining:
    """Build a run's backend on the model in ``model_path``. Raises DataError or ConfigError."""
    device = resolve_device(config.model.device)
    if device.type == "cpu":
        torch.set_num_threads(config.learner.threads)
    # the frozen weights below an adapter may fit on the device in the type they are kept in only
    model = load_model(model_path, torch.float32, torch.device("cpu") if config.learner.lora.rank else device)
    freeze(model, config.learner.freeze)
    plan = learning_plan_on(config, device, model)
    return TorchTraining(
        model,
        forward_settings(config, device, plan),
        optimizer_settings(config),
        gradient_checkpointing=plan.recomputed,
        tokenizer_from=model_path,
        lora=lora_settings(config),
        publishing=publish_settings(config),
        compiler=compiler_of(config, device),
        device=device,
    )


def compiler_of(config: RunConfig, device: torch.device) -> str | None:
    """Return torch.compile's backend for a run's layers on ``device``; None for eager computation."""
    wanted = config.learner.compile
    return "inductor" if wanted is True or (wanted == "auto" and device.type == "cuda") else None


def weights_form(
    model: PreTrainedModel,
    skeleton: PreTrainedModel,
    lora: LoraSettings | None,
    tokenizer_from: Path | None,
    frozen: torch.dtype | None = None,
) -> WeightsForm:
    """Return the form of ``model``'s weights, after injecting an adapter if ``lora`` is given; the
    weights below it are then kept as ``frozen``, in which they are computed.

    ``skeleton`` is the model itself, or a copy on the meta device if ``model`` will be sharded.
    Raises ConfigError when the adapter does not fit."""
    if lora is None:
        return WholeForm(skeleton, tokenizer_from)
    from workers.engines.training.lora import AdapterForm, keep_frozen_as

    form = AdapterForm(model, lora, tokenizer_from)
    if frozen is not None:
        keep_frozen_as(model, frozen, tokenizer_from)
    return form


def lora_settings(config: RunConfig) -> LoraSettings | None:
    """Return the adapter that a run trains, or None. Raises ConfigError without peft."""
    lora = config.learner.lora
    if not lora.rank:
        return None
    check_lora(config)
    from workers.engines.training.lora import LoraSettings

    return LoraSettings(lora.rank, lora.alpha, lora.target_modules, seed=config.run.seed)


def forward_settings(config: RunConfig, device: torch.device, plan: LearningPlan | None = None) -> ForwardSettings:
    return ForwardSettings(
        temperature=config.training_temperature,
        micro_batch_tokens=(plan or learning_plan_on(config, device)).tokens,
        autocast=torch.bfloat16 if config.types.learner == "bfloat16" else None,
    )


def optimizer_settings(config: RunConfig) -> OptimizerSettings:
    learner, steps = config.learner, config.algorithm.num_minibatches
    # an update takes num_minibatches optimiser steps
    phases = rate_phases(learner, config.run.num_updates)
    decay = CONSTANT
    if phases.decay:
        decay = RateDecay(learner.schedule, phases.stable * steps, phases.decay * steps, learner.final_rate_share)
    return OptimizerSettings.of(
        learner,
        warmup_steps=learner.warmup_updates * steps,
        name=learner.optimizer,
        decay=decay,
        no_decay=learner.no_decay,
    )
