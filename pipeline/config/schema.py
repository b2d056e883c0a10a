"""A whole run's configuration, and the rules across its settings, which are checked before anything
starts.

A run file (``configs/*.toml``) fills the sections; a fleet file fills ``[fleet]``. Unknown keys are
refused. The sections are in ``training``, ``runtime``, ``data_sets``, ``rewards`` and
``operations``."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import NamedTuple

from pydantic import Field as Default
from pydantic import model_validator

from pipeline.config import learning, runtime, training
from pipeline.config.base import NumberType, ReadIf, Section, section
from pipeline.config.catalogue import Declaration, declare, rule_class
from pipeline.config.cross_checks import (
    check_environment,
    check_limits,
    check_punishment,
    check_recorded,
    check_sampling,
)
from pipeline.config.data_sets import GENERATED_PREFIX, GENERATED_VERIFIER, EvaluationSection
from pipeline.config.import_path import is_import_path
from pipeline.config.learning import rate_phases
from pipeline.config.operations import (
    CodeSection,
    LaunchSection,
    ObserverSection,
    RecoverySection,
    SinksSection,
    TracingSection,
)
from pipeline.config.rewards import ENDPOINT, ENVIRONMENT, EnvironmentSection, GuidanceSection, endpoint_verifiers
from pipeline.ledger.types import Unit
from protocol.trajectory import Field

RANKED_BACKENDS = ("fsdp2", "deepspeed")

RANKED_OPTIMIZERS = {
    "fsdp2": ("adamw-fused", "adamw", "muon"),
    "deepspeed": ("adamw-fused", "adamw"),
    "pipeline": ("adamw-fused", "adamw"),
}
"""Optimisers that can update sharded parameters: element by element, or over all ranks by torch."""

DEEPSPEED_OURS = frozenset(
    {
        "stage", "offload_optimizer", "offload_param", "zero_optimization", "optimizer", "scheduler", "gradient_clipping",
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_allow_untested_optimizer",
        "fp16", "bf16", "torch_autocast",
    }
)  # fmt: skip
"""DeepSpeed settings that Headrace derives from its own, or that would change what an optimiser
step is."""


class ComputeTypes(NamedTuple):
    """The number types of a run's learner, generators, value workers and published weights."""

    learner: NumberType
    generator: NumberType
    value: NumberType
    weights: NumberType


_CRITIC = ReadIf(lambda run: run.has_critic, "{algorithm} has no critic")
_GUIDED = ReadIf(lambda run: run.needs_guidance, "{algorithm} reads no guidance, and algorithm.guidance is none")
_EVALUATES = ReadIf(lambda run: run.has_evaluation, "data.evaluation and evaluation.sets are empty")


class RunConfig(Section):
    run: runtime.RunSection = runtime.RunSection()
    model: training.ModelSection
    data: training.DataSection
    algorithm: learning.RuleSettings = Default(default_factory=learning.algorithm_settings)
    staleness: training.StalenessSection = training.StalenessSection()
    generation: runtime.GenerationSection = runtime.GenerationSection()
    reward: training.RewardSection = training.RewardSection()
    environment: EnvironmentSection = section(EnvironmentSection(), read_if=ENVIRONMENT)
    reference: training.ReferenceSection = section(training.ReferenceSection(), read_if=training.REFERENCED)
    value: learning.ValueSection = section(learning.ValueSection(), read_if=_CRITIC)
    guidance: GuidanceSection = section(GuidanceSection(), read_if=_GUIDED)
    learner: learning.LearnerSection = learning.LearnerSection()
    checkpoint: runtime.CheckpointSection = runtime.CheckpointSection()
    replay: runtime.ReplaySection = runtime.ReplaySection()
    samples: runtime.SamplesSection = runtime.SamplesSection()
    evaluation: EvaluationSection = section(EvaluationSection(), read_if=_EVALUATES)
    sinks: SinksSection = SinksSection()
    tracing: TracingSection = TracingSection()
    observer: ObserverSection = ObserverSection()
    ledger: runtime.LedgerSection = runtime.LedgerSection()
    wire: runtime.WireSection = runtime.WireSection()
    weights: runtime.WeightsSection = runtime.WeightsSection()
    supervisor: runtime.SupervisorSection = runtime.SupervisorSection()
    recovery: RecoverySection = RecoverySection()
    code: CodeSection = CodeSection()
    fleet: runtime.FleetSection = runtime.FleetSection()
    launch: LaunchSection = LaunchSection()
    engines: runtime.EnginesSection = runtime.EnginesSection()

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name

    @property
    def types(self) -> ComputeTypes:
        """The number type of each part. ``auto`` follows ``model.dtype``, which is float32 until a start has
        decided (``pipeline.preflight.compute_types``)."""
        learner: NumberType = "float32" if self.model.dtype == "auto" else self.model.dtype
        generator = learner if self.generation.dtype == "auto" else self.generation.dtype
        value = learner if self.value.dtype == "auto" else self.value.dtype
        weights = generator if self.weights.dtype == "auto" else self.weights.dtype
        return ComputeTypes(learner, generator, value, weights)

    @property
    def verifier_paths(self) -> frozenset[str]:
        """Verifiers that data and messages may name in addition to the registered ones."""
        of_sets = (one.verifier for one in (*self.data.sets, *self.evaluation.sets) if one.verifier)
        functions = (function.verifier for function in self.reward.functions.values())
        judgments = self.guidance.judgments
        return frozenset(
            (
                self.data.verifier,
                *((self.data.response_verifier,) if self.data.responses else ()),
                *of_sets,
                *self.reward.verifiers,
                *((GENERATED_VERIFIER,) if self.has_generated_data else ()),
                *functions,
                *((judgments,) if is_import_path(judgments) else ()),
                *endpoint_verifiers(self.reward.endpoints),
            )
        )

    @property
    def has_generated_data(self) -> bool:
        """Whether questions come from reasoning-gym."""
        of_sets = (*(one.train for one in self.data.sets), *(one.files for one in self.evaluation.sets))
        entries = chain(self.data.train, self.data.evaluation, *of_sets)
        return any(str(entry).startswith(GENERATED_PREFIX) for entry in entries)

    @property
    def has_evaluation(self) -> bool:
        """Whether there are held-out prompts."""
        return bool(self.data.evaluation or self.evaluation.sets)

    @property
    def has_sampling(self) -> bool:
        """Whether generators sample, and so hold a model: for training, or only for evaluation."""
        return self.has_evaluation or not self.data.responses

    @property
    def has_environment(self) -> bool:
        """Whether an environment answers the model's turns."""
        return bool(self.environment.name)

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.kl_coefficient > 0.0 or self.reference.always

    @property
    def needs_guidance(self) -> bool:
        """Whether every response needs guidance: by the rule, or to scale advantages."""
        return self.declaration.needs_guidance or self.mixes_guidance

    @property
    def mixes_guidance(self) -> bool:
        """Whether guidance scales the advantages of a rule that has some."""
        return isinstance(self.algorithm, learning.SampledSettings) and self.algorithm.guidance == "mix"

    @property
    def has_reference(self) -> bool:
        """Whether reference workers run: for reference log-probs, or for guided passes."""
        return self.needs_reference or self.needs_guidance

    @property
    def training_temperature(self) -> float:
        """Temperature of the learner's and the reference's log-probs. It is the sampling
        temperature, since ratios compare these log-probs with the sampler's. Imitation compares
        with no sampler and trains the model's own distribution, at 1."""
        is_imitation: bool = getattr(rule_class(self.algorithm.name), "is_imitation", False)
        return 1.0 if is_imitation else self.generation.temperature

    @property
    def compares_with_sampler(self) -> bool:
        """Whether responses come with log-probs of the distribution that the learner computes."""
        return not self.data.responses and self.training_temperature == self.generation.temperature

    @property
    def reference_model(self) -> Path:
        return self.model.reference_path or self.model.path

    @property
    def scores_with_vllm(self) -> bool:
        return self.has_reference and self.reference.backend == "vllm"

    @property
    def declaration(self) -> Declaration:
        """The algorithm's declaration. Raises ConfigError for an unknown name."""
        return declare(self.algorithm.name, dynamic_sampling=self.algorithm.dynamic_sampling)

    @property
    def only_evaluates(self) -> bool:
        """Whether the run only evaluates its start model. With neither updates nor evaluation, a
        run pretrains its critic."""
        return self.run.num_updates == 0 and bool(self.data.evaluation or self.evaluation.sets)

    @property
    def restart_timeout_s(self) -> float:
        """Longest time without a sign of life from a worker that starts again."""
        return self.recovery.restart_timeout_s or self.supervisor.start_timeout_s + 60.0

    @property
    def has_critic(self) -> bool:
        return self.declaration.has_critic

    @property
    def score_fields(self) -> frozenset[Field]:
        """The score fields that a unit must have before it is trained on."""
        needed = {
            Field.REWARD: True,
            Field.REFERENCE: self.needs_reference,
            Field.VALUE: self.has_critic,
            Field.GUIDANCE: self.needs_guidance,
            Field.TURN: self.has_environment,
        }
        return frozenset(field for field, is_needed in needed.items() if is_needed)

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        algorithm, rule, learner = self.algorithm, self.declaration, self.learner
        generation, reward = self.generation, self.reward
        if generation.window_tokens > generation.max_response_tokens:
            raise ValueError(
                f"generation.window_tokens is {generation.window_tokens}, above max_response_tokens "
                f"{generation.max_response_tokens}; a window is a part of a response: lower it"
            )
        if self.weights.max_part_mb >= self.wire.max_message_mb:
            raise ValueError(
                f"weights.max_part_mb is {self.weights.max_part_mb} and wire.max_message_mb is {self.wire.max_message_mb}; a "
                "part travels in one message, with a header: set max_part_mb below max_message_mb"
            )
        check_sampling(generation, self.evaluation)
        check_limits(generation, self.data, self.evaluation)
        check_punishment(reward, self.data)
        check_recorded(self.data, algorithm, self.staleness)
        if self.has_environment:
            check_environment(
                self.environment, generation, self.data, self.evaluation, needs_guidance=self.needs_guidance
            )
        self._check_ranks()
        self._check_pipeline()
        rate_phases(learner, self.run.num_updates)
        self._check_optimizer()
        if algorithm.group_size < 2 and rule.has_group_baseline:
            raise ValueError(
                f"algorithm.group_size is {algorithm.group_size}, and {algorithm.name} takes its baseline from the group. A "
                "group baseline needs at least 2 responses a prompt: raise it, or choose ppo, vapo, tppo or reinforce++"
            )
        if algorithm.dynamic_sampling and rule.unit is not Unit.GROUP:
            raise ValueError(
                f"algorithm.dynamic_sampling is on, but {algorithm.name} claims each {rule.unit.value} separately, "
                f"and only whole groups can be judged for signal: switch it off, or choose vapo, which then claims "
                f"groups"
            )
        if algorithm.dynamic_sampling and algorithm.group_size < 2:
            raise ValueError(
                f"algorithm.dynamic_sampling compares the members of a group, but group_size is {algorithm.group_size}; "
                "raise it, or switch dynamic_sampling off"
            )
        if self.run.num_updates == 0 and not (self.only_evaluates or rule.has_critic):
            raise ValueError(
                f"run.num_updates is 0, but there is nothing to evaluate and {algorithm.name} has no critic to pretrain; give "
                "data.evaluation, or set run.num_updates"
            )
        if rule.has_critic and self.fleet.value < 1:
            raise ValueError(
                f"{algorithm.name} has a critic, but fleet.value is 0, so no process computes values; set fleet.value to 1, "
                "or choose an algorithm without a critic"
            )
        if rule.needs_reference and not self.needs_reference:
            raise ValueError(
                f"{algorithm.name} reads reference log-probs, but none are computed: kl_coefficient is 0 and reference.always "
                "is off; set reference.always"
            )
        rule_class(algorithm.name).check(self)
        if algorithm.kl_coefficient > 0.0 and algorithm.kl_estimator == "k1":
            raise ValueError(
                f"algorithm.kl_estimator is k1 and kl_coefficient {algorithm.kl_coefficient:g}, but the gradient of k1 in "
                "the loss is zero on average: it adds only noise; set kl_estimator to k2, k3, k1+ or k3+, or "
                "subtract k1 in a reward function"
            )
        batch = algorithm.groups_per_update * algorithm.group_size
        if batch % algorithm.num_minibatches:
            raise ValueError(
                f"algorithm.num_minibatches is {algorithm.num_minibatches}; it must divide the {batch} responses of an update"
            )
        if "soft" in reward.overlong and reward.overlong_cache_tokens == 0:
            give = "give the length of the soft interval"
            raise ValueError(f"reward.overlong is soft, but overlong_cache_tokens is 0; {give}")
        if reward.overlong_cache_tokens > generation.max_response_tokens:
            raise ValueError(
                f"reward.overlong_cache_tokens is {reward.overlong_cache_tokens}, above generation.max_response_tokens "
                f"{generation.max_response_tokens}; the soft interval is the end of a response: lower it"
            )
        for name, endpoint in reward.endpoints.items():
            if endpoint.max_in_flight > reward.max_in_flight:
                raise ValueError(
                    f"reward.endpoints.{name}.max_in_flight is {endpoint.max_in_flight}, and reward.max_in_flight "
                    f"{reward.max_in_flight}, the limit of all that one worker judges at once: raise reward.max_in_flight, "
                    "or lower the endpoint's"
                )
        self._check_guidance()
        self._check_fleet()
        return self

    def _check_guidance(self) -> None:
        """Refuse guidance that the rule already applies itself, and sources of judgments that do not exist."""
        guidance = self.guidance
        if self.mixes_guidance and self.declaration.needs_guidance:
            raise ValueError(
                f"algorithm.guidance is mix, but {self.algorithm.name} learns from guidance itself and has no advantages to "
                "scale: set algorithm.guidance to none"
            )
        name = guidance.judgments.removeprefix(ENDPOINT)
        if not self.needs_guidance or name == guidance.judgments:
            return
        endpoint = self.reward.endpoints.get(name)
        if endpoint is None:
            raise ValueError(
                f"guidance.judgments is {guidance.judgments}, but reward.endpoints has "
                f"{', '.join(self.reward.endpoints) or 'none'}; give its url in [reward.endpoints.{name}]"
            )
        if endpoint.model is None:
            raise ValueError(
                f"guidance.judgments is {guidance.judgments}, but reward.endpoints.{name} names no model, and only a language "
                "model writes judgments: set its model"
            )

    def _check_fleet(self) -> None:
        """Refuse a fleet without workers of a needed role, if none can join from other hosts."""
        counts = {"generator": self.fleet.generator, "reward": self.fleet.reward}
        if self.has_reference:
            counts["reference"] = self.fleet.reference
        if self.has_environment:
            counts["environment"] = self.fleet.environment
        for role in (role for role, count in counts.items() if not count and self.wire.transport != "tcp"):
            raise ValueError(
                f"fleet.{role} is 0, and this run needs {role} workers. Set it to 1 or more; or set wire.transport "
                f"to tcp, so that other hosts reach the run, and start them there with `headrace fleet join`"
            )

    def _check_optimizer(self) -> None:
        learner = self.learner
        taken = RANKED_OPTIMIZERS.get(learner.backend)
        if taken is not None and learner.optimizer not in taken:
            raise ValueError(
                f"learner.optimizer is {learner.optimizer}, which needs whole tensors, but learner.backend "
                f"{learner.backend} updates shares of them; set learner.optimizer to {' or '.join(taken)}, or "
                "learner.backend to torch"
            )
        if learner.spike_factor and learner.backend == "deepspeed":
            raise ValueError(
                f"learner.spike_factor is {learner.spike_factor:g}, but DeepSpeed knows the gradient norm only after its step; "
                "set learner.spike_factor to 0, or learner.backend to fsdp2 or torch"
            )
        for name in ("freeze", "no_decay"):
            if getattr(learner, name) and learner.lora.rank:
                raise ValueError(
                    f"learner.{name} is {list(getattr(learner, name))}, but with learner.lora.rank "
                    f"{learner.lora.rank} only the adapter is trained; leave out {name}, or set learner.lora.rank "
                    f"to 0"
                )

    def _check_pipeline(self) -> None:
        learner = self.learner
        if learner.backend != "pipeline":
            return
        ranks, stages = learner.ranks, learner.pipeline.stages
        if ranks < 2:
            raise ValueError(
                "learner.backend is pipeline, but learner.ranks is 1; expected a process for each stage or two: set "
                "learner.ranks to 2 or more, or learner.backend to torch"
            )
        if stages not in (0, ranks, 2 * ranks):
            raise ValueError(
                f"learner.pipeline.stages is {stages}, but learner.ranks is {ranks}; expected {ranks} or {2 * ranks}: one or "
                "two stages for each rank"
            )
        if learner.lora.rank:
            raise ValueError(
                f"learner.lora.rank is {learner.lora.rank}, but learner.backend pipeline trains whole weights; set "
                "learner.lora.rank to 0, or learner.backend to fsdp2"
            )

    def _check_ranks(self) -> None:
        if self.learner.tensor_parallel > 1 and self.learner.lora.rank:
            raise ValueError(
                f"learner.lora.rank is {self.learner.lora.rank}, but learner.tensor_parallel "
                f"{self.learner.tensor_parallel} splits whole weights; set one of them to 0 or 1"
            )
        algorithm, learner, value = self.algorithm, self.learner, self.value
        in_a_step = algorithm.groups_per_update * algorithm.group_size // algorithm.num_minibatches
        sections = (
            ("learner", learner, self.model.device, in_a_step),
            ("value", value, value.device, value.batch_trajectories),
        )
        for name, held, device, num_sequences in sections:
            if held.ranks > 1 and held.backend not in (*RANKED_BACKENDS, "pipeline"):
                raise ValueError(
                    f"{name}.ranks is {held.ranks}, but {name}.backend {held.backend} is one process; set "
                    f"{name}.backend to {' or '.join(RANKED_BACKENDS)}, or {name}.ranks to 1"
                )
            if held.tensor_parallel > 1 and (held.backend != "fsdp2" or held.ranks % held.tensor_parallel):
                raise ValueError(
                    f"{name}.tensor_parallel is {held.tensor_parallel}, with {held.ranks} ranks of backend {held.backend}; "
                    f"expected backend fsdp2 and a multiple of {held.tensor_parallel} ranks: set {name}.tensor_parallel to 1, "
                    f"or {name}.backend and {name}.ranks"
                )
            if held.ranks // held.tensor_parallel > num_sequences:
                raise ValueError(
                    f"{name}.ranks is {held.ranks}, but an optimiser step has {num_sequences} responses. Every rank needs "
                    f"at least one whole response: lower {name}.ranks, or raise the responses of a step"
                )
            if held.ranks > 1 and ":" in device:
                raise ValueError(
                    f"{name}.ranks is {held.ranks}, but its device is {device}, one GPU; set it to auto or cuda: "
                    f"rank N uses GPU N"
                )
            zero = held.deepspeed
            if zero.offload_param and zero.stage < 3:
                raise ValueError(
                    f"{name}.deepspeed.offload_param is set, but stage is {zero.stage} and only stage 3 shares weights; "
                    "set the stage to 3, or leave it out"
                )
            if ours := sorted(DEEPSPEED_OURS & {*zero.zero_optimization, *zero.config}):
                raise ValueError(
                    f"{name}.deepspeed contains {', '.join(ours)}. Headrace sets these itself from "
                    f"[{name}]: remove them"
                )
