# ruff: noqa: S105  levels named after tokens are not secrets
"""The sections of the learning rule, the critic and the learner.

``[algorithm]`` has the settings that all rules have, and those of the terms that several share. A
rule's own file (``pipeline.algorithms``) has the class ``Settings`` that extends one of these, so
the rule's name decides which keys the section has, and their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, cast

from pydantic import (
    AfterValidator,
    SerializeAsAny,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
    model_validator,
)

from pipeline.config.base import ComputeType, Fraction, Positive, ReadIf, Recompute, Section, section, setting
from pipeline.config.catalogue import BUILT_IN, TrainingBackendName, ValueBackendName, rule_class
from pipeline.config.import_path import is_import_path, search_also


def _has_several_ratios(run: Any) -> bool:
    algorithm: SampledSettings = run.algorithm
    has_proximal = algorithm.importance is not Importance.BYPASS and algorithm.proximal is Proximal.RECOMPUTE
    return algorithm.num_minibatches > 1 or not has_proximal


UNREFERENCED: Final = "no reference log-probs are computed: kl_coefficient is 0 and reference.always is off"
_REFERENCED = ReadIf(lambda run: run.needs_reference, UNREFERENCED)
_CAPPED = ReadIf(lambda run: run.algorithm.importance in ("tis", "icepop"), "only importance tis and icepop have a cap")
_ICEPOP = ReadIf(lambda run: run.algorithm.importance == "icepop", "only importance icepop has a floor")
_WEIGHTED = ReadIf(
    lambda run: run.algorithm.importance not in ("none", "bypass"), "importance none and bypass have no weights"
)
_REJECTS = ReadIf(lambda run: run.algorithm.rejection != "none", "algorithm.rejection is none")
_ALL_ONE = "an update is one optimiser step, so all ratios are 1; raise num_minibatches"
_SEVERAL_RATIOS = ReadIf(_has_several_ratios, _ALL_ONE)
_CRITIC_ZERO = ReadIf(lambda run: run.value.backend == "deepspeed", "value.backend is not deepspeed")
_ZERO = ReadIf(lambda run: run.learner.backend == "deepspeed", "learner.backend is not deepspeed")
_PIPES = ReadIf(lambda run: run.learner.backend == "pipeline", "learner.backend is not pipeline")
_SEARCHES = ReadIf(lambda run: run.learner.pipeline.schedule == "search", "only schedule search has a limit of memory")
_ADAPTS = ReadIf(lambda run: run.learner.lora.rank > 0, "learner.lora.rank is 0")
_DECAYS = ReadIf(lambda run: run.learner.schedule != "constant", "learner.schedule is constant")
_DECAY_LENGTH = "only schedule warmup-stable-decay has a decay of separate length"
_HAS_DECAY = ReadIf(lambda run: run.learner.schedule == "warmup-stable-decay", _DECAY_LENGTH)
_ADAM = ReadIf(lambda run: run.learner.optimizer != "adafactor", "adafactor uses neither")
_COMPILES = ReadIf(lambda run: run.learner.backend == "torch", "only backend torch compiles layers")
_SAMPLED = ReadIf(lambda run: not run.data.responses, "data.responses have no log-probs of a generator to check")


class Aggregation(StrEnum):
    """How token losses are averaged. Rows without a loss token never count."""

    TOKEN_MEAN = "token-mean"
    """Every token weighs the same, so long responses weigh more: DAPO, VAPO, T-PPO."""
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    """Every response weighs the same: GRPO, GSPO."""
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    """Mean over responses of the sum over tokens: REINFORCE."""
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
    """As above, divided by a constant, usually the longest allowed response: Dr.GRPO (2503.20783)."""
    TOKEN_SUM = "token-sum"


class Importance(StrEnum):
    """How the gap rho = proximal / behaviour is corrected. rho carries no gradient."""

    NONE = "none"
    """No correction: clip around the proximal policy with weight 1."""
    TIS = "tis"
    """Weight min(rho, cap) on the clipped loss: truncated importance sampling."""
    ICEPOP = "icepop"
    """Weight rho where floor <= rho <= cap, else 0."""
    DECOUPLED = "decoupled"
    """Weight rho, bounded only by the clamp of its logarithm: decoupled PPO (2505.24298, 5.2)."""
    BYPASS = "bypass"
    """Clip around the behaviour policy with weight 1: the ratio already contains rho."""


class ImportanceLevel(StrEnum):
    """Which tokens share one rho. A row is a sample: a response, or a window of one."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    """The product over the row's loss tokens."""
    GEOMETRIC = "geometric"
    """The geometric mean over the row's loss tokens."""


class Rejection(StrEnum):
    """The quantity that decides whether a token or row is rejected, with z = log rho."""

    NONE = "none"
    RATIO = "ratio"
    """``exp(z)``"""
    K1 = "k1"
    """``-z``, compared with the logarithms of the bounds, which are ratios of behaviour to proximal (verl)."""
    K2 = "k2"
    """``z^2 / 2``"""
    K3 = "k3"
    """``exp(z) - 1 - z``"""
    K3_REVERSE = "k3-reverse"
    """``exp(-z) - 1 + z`` (AReaL)"""


class RejectionLevel(StrEnum):
    """What the quantity is taken over: each token, or a row, which is rejected as a whole."""

    TOKEN = "token"
    SUM = "seq-sum"
    MEAN = "seq-mean"
    MAX = "seq-max"


class Proximal(StrEnum):
    """Where the proximal policy's log-probs come from."""

    RECOMPUTE = "recompute"
    """From a forward pass before an update's first step; skipped if the update has only one step."""
    INTERPOLATE = "interpolate"
    """Estimated between behaviour and current policy by their versions (AReaL), which saves that pass."""
    INTERPOLATE_LINEAR = "interpolate-linear"
    """The same, between probabilities rather than log-probs."""


class KLEstimator(StrEnum):
    """Which KL estimate is added to the loss, with d = logp - ref."""

    K1 = "k1"
    """``d``"""
    K2 = "k2"
    """``d^2 / 2``"""
    K3 = "k3"
    """``exp(-d) - 1 + d``"""
    ABS = "abs"
    """``|d|``"""
    K1_STRAIGHT = "k1+"
    """value of k1, gradient of k2"""
    K3_STRAIGHT = "k3+"
    """value of k3, gradient of k2"""


def _known_aggregation(name: str) -> str:
    if name not in tuple(Aggregation) and not is_import_path(name):
        raise ValueError(f"expected one of {', '.join(Aggregation)}, or package.module:function of your own")
    return name


class AlgorithmSection(Section):
    """The learning rule. `name` decides which of these settings there are, and sets the defaults of
    its paper. Formulas, and how to write your own rule: pipeline/algorithms/README.md."""

    name: str = setting(
        "dapo",
        "The learning rule: dapo, grpo, dr-grpo, rloo, reinforce++, reinforce++-baseline, gspo, cispo, ppo, vapo, "
        "tppo, nlft, nlft-first, sft, rft, or package.module:Class of your own. Its paper's settings become the "
        "defaults.",
        also="adv_estimator advantage_estimator importance_sampling_level policy_loss_type loss_mode",
    )
    path: tuple[Path, ...] = setting(
        (),
        "Folders with the modules of your rules and aggregations; searched after PYTHONPATH and what is installed.",
    )
    group_size: Positive = setting(
        16,
        "G, responses per prompt. DAPO: 16.",
        unit="responses",
        also="n num_generations n_samples_per_prompt rollout_n",
    )
    groups_per_update: Positive = setting(
        32, "Prompts of one update's batch.", unit="groups", also="rollout_batch_size"
    )
    num_minibatches: Positive = setting(1, "Optimiser steps of one update. DAPO: 16.", unit="optimiser steps")
    loss_aggregation: Annotated[str, AfterValidator(_known_aggregation)] = setting(
        Aggregation.TOKEN_MEAN.value,
        "How token losses are combined: token-mean, the mean over all tokens (DAPO eq. 8); seq-mean-token-mean, "
        "seq-mean-token-sum, seq-mean-token-sum-norm, by response; token-sum; or package.module:function of your own.",
        also="loss_type loss_agg_mode",
    )
    kl_coefficient: float = setting(
        0.0,
        "Weight of KL(policy || reference). 0 needs no reference.",
        ge=0.0,
        unit="loss per nat",
        live="the next update's weight of the KL",
        also="beta kl_coef init_kl_coef init_coef kl_loss_coef use_kl_loss",
    )
    kl_estimator: KLEstimator = setting(
        KLEstimator.K3,
        "Estimator of that KL. k1+ and k3+ have the gradient of k2. The gradient of k1 is zero on average, so it is refused. "
        "Formulas: algorithms README.",
        also="kl_loss_type kl_penalty",
        read_if=_REFERENCED,
    )
    entropy_coefficient: float = setting(
        0.0,
        "Weight of an entropy bonus. The papers have none.",
        unit="loss per nat",
        live="the next update's entropy bonus",
        also="entropy_coef entropy_coeff entropy_loss_coef",
    )
    positive_nll_coefficient: float = setting(
        0.0, "Weight of the imitation loss on correct responses. VAPO, T-PPO: 0.1.", ge=0.0, unit="loss per nat"
    )
    dynamic_sampling: bool = setting(
        True,
        "Drop groups without signal, judged by raw accuracy. DAPO eq. 11.",
        also="filter_groups dynamic_filtering dynamic_filtering_enable",
    )
    oversampling: float = setting(
        1.0,
        "Work in flight, as a multiple of one update's. 1 is enough: dropped groups return their credit. Above "
        "1, more groups with signal become too old and are dropped.",
        ge=1.0,
        unit="factor",
        also="gen_batch_size oversampling_factor",
    )
    max_generation_batches: int = setting(
        10,
        "The run ends when this many batches in a row had no group with signal and the learner lacks groups. "
        "0: never. DAPO recipe 10.",
        ge=0,
        unit="batches",
        also="max_num_gen_batches",
    )

    def __init_subclass__(cls, *, defaults: Mapping[str, object] | None = None, **others: Any) -> None:
        """``defaults``: other defaults of inherited settings."""
        del defaults
        super().__init_subclass__(**others)

    @classmethod
    def __pydantic_init_subclass__(cls, *, defaults: Mapping[str, object] | None = None, **others: Any) -> None:
        super().__pydantic_init_subclass__(**others)
        for name, default in (defaults or {}).items():
            if name not in cls.model_fields:
                raise TypeError(f"the defaults of {cls.__qualname__} have {name}; expected settings that it inherits")
            cls.model_fields[name] = info = copy(cls.model_fields[name])
            # as a given value is, so that "none" is Importance.NONE
            info.default, info.validate_default = default, True
        if defaults:
            cls.model_rebuild(force=True)


class SampledSettings(AlgorithmSection):
    """Of rules that compare each token with the policy that sampled it."""

    importance: Importance = setting(
        Importance.TIS,
        "Correction for the difference between behaviour and proximal policy; see the algorithms README.",
        also="bypass_mode is_correction_level is_correction_mode",
    )
    proximal: Proximal = setting(
        Proximal.RECOMPUTE,
        "Proximal log-probs. recompute: by one more forward pass. interpolate, interpolate-linear: estimated between "
        "behaviour and current policy, in log-probs or in probabilities.",
    )
    importance_cap: float = setting(
        2.0,
        "C of TIS; upper bound of IcePop.",
        gt=0.0,
        unit="ratio",
        also="tis_imp_ratio_cap vllm_importance_sampling_cap vllm_importance_sampling_clip_max "
        "vllm_is_truncated_threshold rollout_is_threshold is_correction_threshold",
        read_if=_CAPPED,
    )
    importance_floor: float = setting(
        0.5, "Lower bound of IcePop.", ge=0.0, unit="ratio", also="vllm_importance_sampling_clip_min", read_if=_ICEPOP
    )
    importance_level: ImportanceLevel = setting(
        ImportanceLevel.TOKEN,
        "token: each token has its own importance weight. Otherwise a response's tokens share one: the product "
        "(sequence) or geometric mean of their ratios. A product saturates over several policy versions.",
        also="rollout_is vllm_importance_sampling_mode",
        read_if=_WEIGHTED,
    )
    importance_normalize: bool = setting(
        False,
        "Divide importance weights by their mean over the mini-batch. Costs a forward pass.",
        also="rollout_is_batch_normalize",
    )
    rejection: Rejection = setting(
        Rejection.NONE,
        "Skip tokens or responses where proximal and behaviour policy differ too much by this quantity; see the "
        "algorithms README.",
        also="rollout_rs",
    )
    rejection_level: RejectionLevel = setting(
        RejectionLevel.TOKEN,
        "Reject single tokens, or whole responses by their sum, mean or largest value.",
        read_if=_REJECTS,
    )
    rejection_upper: float | None = setting(
        None,
        "Largest value kept. For k1 it is a ratio of behaviour to proximal policy.",
        gt=0.0,
        unit="ratio, or nats of k2 and k3",
        also="rollout_rs_threshold",
        read_if=_REJECTS,
    )
    rejection_lower: float | None = setting(
        None, "Smallest value kept, of ratio and k1. Default: no lower bound.", gt=0.0, unit="ratio", read_if=_REJECTS
    )
    guidance: Literal["none", "mix"] = setting(
        "none",
        "mix: scale each token's advantage by its guidance, for any rule with advantages. Rules that learn only "
        "from guidance need no mix. Settings: [guidance].",
    )

    @model_validator(mode="after")
    def _one_correction(self) -> Self:
        """Refuse corrections that contradict each other, and bounds without effect."""
        if self.importance is Importance.BYPASS:
            unusable = {
                "proximal": self.proximal is not Proximal.RECOMPUTE,
                "importance_normalize": self.importance_normalize,
                "rejection": self.rejection is not Rejection.NONE,
            }
            for name in (name for name, is_set in unusable.items() if is_set):
                raise ValueError(
                    f"algorithm.{name} is {getattr(self, name)}, but importance bypass never reads the proximal policy; "
                    f"leave {name} at its default, or set importance to decoupled"
                )
        if self.importance_normalize and (
            self.importance is Importance.NONE or self.proximal is not Proximal.RECOMPUTE
        ):
            name = "importance" if self.importance is Importance.NONE else "proximal"
            raise ValueError(
                f"algorithm.importance_normalize is on, but {name} is {getattr(self, name)}. It needs weights before "
                "a mini-batch's step. Switch it off, or set importance to tis, icepop or decoupled and "
                "proximal to recompute"
            )
        upper, lower = self.rejection_upper, self.rejection_lower
        if self.rejection is Rejection.NONE:
            return self
        if upper is None:
            raise ValueError(
                f"algorithm.rejection is {self.rejection}, but rejection_upper is not set, so nothing would be "
                f"rejected. Set it, for example 2 for a token's ratio, 1.001 for k1 over seq-mean or 0.01 for k3"
            )
        if lower is not None and self.rejection not in (Rejection.RATIO, Rejection.K1):
            raise ValueError(
                f"algorithm.rejection_lower is {lower}, but {self.rejection} is 0 if the policies agree, and never less; "
                "leave rejection_lower out, or set rejection to ratio or k1"
            )
        if lower is not None and lower >= upper:
            raise ValueError(f"algorithm.rejection_lower is {lower}, not below rejection_upper {upper}; lower it")
        return self


class ClipSettings(SampledSettings):
    """Of rules that clip a ratio."""

    clip_low: float = setting(
        0.2,
        "eps_low. DAPO eq. 8. 1 removes the lower bound (CISPO).",
        gt=0.0,
        le=1.0,
        unit="ratio below 1",
        live="the next update's lower clip bound",
        also="epsilon clip_ratio clip_ratio_low eps_clip eps_clip_low_high",
        read_if=_SEVERAL_RATIOS,
    )
    clip_high: float = setting(
        0.28,
        "eps_high. DAPO eq. 8.",
        gt=0.0,
        unit="ratio above 1",
        live="the next update's upper clip bound",
        also="epsilon_high clip_ratio_high eps_clip_low_high",
        read_if=_SEVERAL_RATIOS,
    )


class StandardisedSettings(ClipSettings):
    """Of rules that may divide a group's advantages by its std."""

    normalize_std: bool = setting(
        True,
        "Divide group advantages by the unbiased std + 1e-6.",
        also="scale_rewards norm_adv_by_std_in_grpo no_advantage_std_norm no_std_norm",
    )


class DualClipSettings(ClipSettings):
    """Of rules with PPO's clipped loss."""

    dual_clip: float = setting(
        10.0,
        "c > 1 bounds the loss where the advantage is negative. 0: off. DAPO recipe 10.",
        ge=0.0,
        unit="ratio",
        live="the next update's dual clip",
        also="clip_ratio_c",
        read_if=_SEVERAL_RATIOS,
    )

    @model_validator(mode="after")
    def _above_one(self) -> Self:
        if 0.0 < self.dual_clip <= 1.0:
            raise ValueError(f"algorithm.dual_clip is {self.dual_clip}; it must be above 1, or 0 to switch it off")
        return self


class DiscountedSettings(DualClipSettings):
    """Of rules that discount rewards over tokens."""

    gamma: Fraction = setting(1.0, "Discount. VAPO, T-PPO: 1.", unit="factor per token")


SYMMETRIC: Final = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0, "dynamic_sampling": False}
"""Defaults of most rules other than DAPO: PPO's clip."""


@cache
def all_settings() -> type[AlgorithmSection]:
    """Return a section with the settings of all built-in rules; where defaults differ, with that of
    the first in :data:`BUILT_IN` that has it."""
    found: dict[str, Any] = {}
    for name in BUILT_IN:
        found = {key: (info.annotation, info) for key, info in settings_of(name).model_fields.items()} | found
    made = create_model("AlgorithmSettings", __base__=AlgorithmSection, **found)
    made.__doc__ = AlgorithmSection.__doc__
    return made


def settings_of(name: str) -> type[AlgorithmSection]:
    """Return the class of a rule's settings. Raises ConfigError as :func:`rule_class` does."""
    return rule_class(name).Settings


def rules_with(key: str) -> list[str]:
    """Return the built-in rules that have a setting, by its name in ``[algorithm]``."""
    return [name for name in BUILT_IN if key in settings_of(name).model_fields]


def settings_class(given: Mapping[str, Any]) -> type[AlgorithmSection]:
    """Return the class of the settings that a table ``[algorithm]`` has. Searches its folders for
    modules. Raises ConfigError as :func:`rule_class` does."""
    folders = given.get("path", ())
    if isinstance(folders, list | tuple):
        search_also(Path(str(folder)) for folder in cast("list[object]", folders))
    return settings_of(str(given.get("name", "dapo")))


def algorithm_settings(**given: Any) -> AlgorithmSection:
    """Return the section of the rule ``name`` (``dapo`` by default) with these settings."""
    return settings_class(given).model_validate(given)


def _by_rule(given: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(given, AlgorithmSection) or not isinstance(given, dict):
        return handler(given)
    return algorithm_settings(**cast("dict[str, Any]", given))


RuleSettings = Annotated[SerializeAsAny[AlgorithmSection], WrapValidator(_by_rule)]
"""The settings of the rule that ``name`` names."""


class DeepSpeedSection(Section):
    """Settings of DeepSpeed, for the backend deepspeed. Clipping, optimiser and batch sizes follow
    from the section around it."""

    stage: Literal[1, 2, 3] = setting(
        2, "ZeRO stage. Ranks share optimiser state (1), also gradients (2), also weights (3).", also="zero_stage"
    )
    offload_optimizer: dict[str, Any] = setting({}, "DeepSpeed's setting of that name, for example {device = 'cpu'}.")
    offload_param: dict[str, Any] = setting({}, "DeepSpeed's setting of that name, for the weights of stage 3.")
    zero_optimization: dict[str, Any] = setting(
        {}, "More settings of DeepSpeed's section of that name, for example overlap_comm."
    )
    config: dict[str, Any] = setting({}, "More sections of DeepSpeed's configuration, for example comms_logger.")


class PipelineSection(Section):
    """The stages of the model, for the backend pipeline: consecutive layers, of which each rank has some."""

    stages: int = setting(
        0, "learner.ranks of them, or twice as many. 0: as many as the schedule needs.", ge=0, unit="stages"
    )
    schedule: Literal["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v", "dualpipev", "search"] | Path = setting(
        "1f1b",
        "The order of the stages' work: gpipe, 1f1b, zb-h1, or, with two stages a rank, interleaved, zb-v, dualpipev. "
        "search (an extra, plan) finds the shortest period. Or a file that `headrace schedule --json` wrote.",
        also="pipeline_parallel_schedule",
    )
    micro_batches: Positive = setting(
        8,
        "Micro-batches of an optimiser step that has as many responses; more if learner.micro_batch_tokens asks for it.",
        unit="micro-batches",
        also="pipeline_parallel_microbatches",
    )
    memory: int = setting(
        0,
        "Micro-batches that a rank may hold between their forward and backward pass, in each of its stages. 0: as many as "
        "there are ranks.",
        ge=0,
        unit="micro-batches",
        read_if=_SEARCHES,
    )


class ValueSection(Section):
    """The value process. It starts only if the algorithm has a critic (ppo, vapo, tppo)."""

    backend: ValueBackendName = setting("torch", "As learner.backend, but no pipeline.")
    ranks: Positive = setting(1, "As learner.ranks.", unit="processes")
    tensor_parallel: Positive = setting(1, "As learner.tensor_parallel.", unit="ranks")
    deepspeed: DeepSpeedSection = section(DeepSpeedSection(), read_if=_CRITIC_ZERO)
    path: Path | None = setting(
        None,
        "Folder of a backbone or a pretrained value model. Default: the start policy's layers under a head of "
        "zeros. That is our choice; the PPO that VAPO compares with starts from a reward model.",
        also="critic_pretrain",
    )
    learning_rate: float = setting(
        2e-6,
        "Learning rate of AdamW. VAPO, T-PPO: 2e-6.",
        gt=0.0,
        unit="step size of the optimiser",
        also="critic_learning_rate",
    )
    warmup_steps: int = setting(10, "Linear warm-up, in value steps.", ge=0, unit="value steps")
    weight_decay: float = setting(
        0.1, "Decoupled weight decay, for matrices only.", ge=0.0, unit="factor of the learning rate"
    )
    betas: tuple[float, float] = setting((0.9, 0.999), "Betas of AdamW.", unit="factors")
    adam_eps: float = setting(1e-8, "Epsilon of AdamW.", gt=0.0, unit="added to a root of squared gradients")
    max_grad_norm: float = setting(1.0, "Gradients are scaled down to this norm.", gt=0.0, unit="L2 norm")
    clip_low: float = setting(
        0.5,
        "Largest decrease below the stored value. T-PPO: 0.5.",
        gt=0.0,
        unit="value",
        also="cliprange_value value_clip",
    )
    clip_high: float = setting(0.6, "Largest increase above the stored value. T-PPO: 0.6.", gt=0.0, unit="value")
    gae_lambda: Fraction = setting(
        1.0,
        "Lambda of the critic's targets. 1: Monte-Carlo (VAPO, T-PPO). 0.95: coupled, as in plain PPO.",
        unit="factor",
    )
    batch_trajectories: Positive = setting(512, "Finished trajectories of one value step.")
    micro_batch_tokens: Literal["auto"] | Positive = setting("auto", "As learner.micro_batch_tokens.")
    gradient_checkpointing: Recompute = setting("auto", "As model.gradient_checkpointing.")
    dtype: ComputeType = setting("auto", "Compute type; weights stay float32. auto: as model.dtype.")
    device: str = setting("auto", "auto: cuda if torch finds a GPU, else cpu.")
    threads: Positive = setting(1, "Torch threads on a CPU.", unit="threads")
    pretrain_steps: int = setting(
        50,
        "The policy starts to train after this many value steps. VAPO: 50. T-PPO's port: 10.",
        ge=0,
        unit="value steps",
        also="critic_warmup freezing_actor_steps freezing_steps",
    )
    min_explained_variance: float | None = setting(
        None,
        "The policy starts earlier, once the critic explains this share of the returns' variance. A constant "
        "explains 0. Default: never earlier, as in the papers.",
        lt=1.0,
        unit="share of the variance",
    )
    explained_variance_steps: Positive = setting(
        5, "Value steps over which explained variance is measured.", unit="value steps"
    )
    checkpoint_every_steps: Positive = setting(20, "Value steps from one checkpoint to the next.", unit="value steps")
    checkpoint_keep: Positive = setting(
        2, "Checkpoints kept; older ones are deleted once a newer one is complete.", unit="checkpoints"
    )

    @property
    def has_own_engine(self) -> bool:
        return is_import_path(self.backend)


class LoraSection(Section):
    """A LoRA adapter (peft, an extra), trained and published in place of the whole policy. It has
    no dropout, so that equal weights give a probability ratio of 1."""

    rank: int = setting(0, "0: no adapter; the whole policy is trained.", ge=0, unit="columns", also="lora_r lora_rank")
    alpha: float = setting(
        32.0,
        "The adapter's output is scaled by alpha / rank.",
        gt=0.0,
        unit="factor",
        also="lora_alpha",
        read_if=_ADAPTS,
    )
    target_modules: tuple[str, ...] = setting(
        (), "Last parts of layer names, such as q_proj. Empty: all linear layers of the blocks.", read_if=_ADAPTS
    )


class LearnerSection(Section):
    """The optimiser and its batches."""

    backend: TrainingBackendName = setting(
        "torch",
        "torch: one process holds the model. fsdp2 (of torch) and deepspeed (an extra) share each layer among ranks, "
        "pipeline shares out the layers. Or package.module:function of your own, see [engines].",
    )
    ranks: Positive = setting(
        1,
        "Processes on this host that train together. On GPUs, each uses one GPU.",
        unit="processes",
        also="n_gpus_per_node num_gpus_per_node num_train_gpus",
    )
    tensor_parallel: Positive = setting(
        1,
        "Ranks that compute the same tokens, each with its part of every layer's matrices; a divisor of learner.ranks. "
        "Backend fsdp2, without an adapter.",
        unit="ranks",
        also="tensor_parallel_degree",
    )
    deepspeed: DeepSpeedSection = section(DeepSpeedSection(), read_if=_ZERO)
    pipeline: PipelineSection = section(PipelineSection(), read_if=_PIPES)
    lora: LoraSection = LoraSection()
    optimizer: Literal["adamw-fused", "adamw", "adamw-8bit", "adafactor", "muon"] = setting(
        "adamw-fused",
        "adamw: without torch's fused kernel. adamw-8bit: bitsandbytes, an extra. adafactor: its rate is relative "
        "to each tensor's size. muon: for the matrices inside the layers, adamw-fused for the rest.",
        also="optim optimizer_type",
    )
    learning_rate: float = setting(
        1e-6,
        "Rate after the warm-up. DAPO: 1e-6.",
        gt=0.0,
        unit="step size of the optimiser",
        live="the rate from the next step on; warm-up and schedule scale with it",
        also="lr actor_learning_rate",
    )
    schedule: Literal["constant", "linear", "cosine", "warmup-stable-decay"] = setting(
        "constant",
        "The rate after the warm-up. warmup-stable-decay: constant, then a 1 - sqrt decay. DAPO: constant.",
        also="lr_scheduler lr_scheduler_type warmup_style lr_decay_style",
    )
    warmup_updates: int = setting(
        10, "Linear warm-up. DAPO: 20 rollout steps.", ge=0, also="lr_warmup_steps num_warmup_steps"
    )
    schedule_updates: Positive | None = setting(
        None,
        "Length of a decaying schedule, warm-up included. Default: run.num_updates.",
        also="lr_decay_steps",
        read_if=_DECAYS,
    )
    decay_updates: Positive | None = setting(
        None,
        "Length of the decay of warmup-stable-decay, at the schedule's end. Default: a tenth of the schedule.",
        read_if=(_DECAYS, _HAS_DECAY),
    )
    final_rate_share: Fraction = setting(
        0.0,
        "Final learning rate of a decaying schedule, as a share of the learning rate.",
        unit="share of the learning rate",
        also="min_lr_ratio min_lr_rate",
        read_if=_DECAYS,
    )
    weight_decay: float = setting(
        0.1, "Decoupled weight decay, for matrices only.", ge=0.0, unit="factor of the learning rate", also="l2"
    )
    no_decay: tuple[str, ...] = setting(
        (), "Patterns of parameter names without weight decay, such as *embed_tokens*. Vectors never have it."
    )
    freeze: tuple[str, ...] = setting((), "Patterns of parameter names that are not trained, such as model.layers.0.*.")
    betas: tuple[float, float] = setting(
        (0.9, 0.999), "Betas of AdamW.", unit="factors", also="adam_betas adam_beta1 adam_beta2", read_if=_ADAM
    )
    adam_eps: float = setting(
        1e-8,
        "Epsilon of AdamW.",
        gt=0.0,
        unit="added to a root of squared gradients",
        also="adam_epsilon",
        read_if=_ADAM,
    )
    max_grad_norm: float = setting(
        1.0, "Gradients are scaled down to this norm.", gt=0.0, unit="L2 norm", also="max_norm grad_clip clip_grad"
    )
    micro_batch_tokens: Literal["auto"] | Positive = setting(
        "auto",
        "Tokens (prompt and response) of one forward and backward pass. Those that responses have in common at their "
        "beginning count once. A longer response gets its own pass. "
        "Activations are most of a step's memory: 3.4 MB a token for a model of 0.5 B weights, half of it in bfloat16. auto: "
        "1024 on a CPU, what fits on a GPU. A learner of one process whose GPU is full halves it and repeats the step.",
        also="micro_train_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu "
        "train_max_tokens_per_gpu",
    )
    compile: Literal["auto"] | bool = setting(
        "auto",
        "Compile the model's layers by torch.compile when the learner starts; backend torch only. auto: on CUDA. A model "
        "that does not compile is computed eagerly, and the learner's log says why. Compiled graphs are kept in "
        "$XDG_CACHE_HOME/headrace/compiled.",
        also="torch_compile use_torch_compile",
        read_if=_COMPILES,
    )
    threads: Positive = setting(1, "Torch threads on a CPU.", unit="threads")
    logprob_check_share: Fraction = setting(
        0.01,
        "Share of trained chunks whose log-probs the learner computes a second time, to check the generators. Costs about "
        "a third of this share of an update's time. The observer names a generator that differs from its peers. 0: off.",
        unit="share of chunks",
        read_if=_SAMPLED,
    )
    max_bad_steps: Positive = setting(
        3,
        "The learner gives up after this many refused steps in a row. Each is tried twice, then its units become "
        "dead letters.",
        live="how many refused steps in a row end the run",
    )
    spike_factor: float = setting(
        0.0,
        "A step is a spike when its loss's magnitude, or its gradient norm, exceeds this many times the median of the "
        "last 64 applied steps. It is repeated, like one that is not finite. 5 is a good value; 0: off.",
        ge=0.0,
        unit="times the median",
        live="the next update's limits of loss and gradient norm",
    )
    spikes: Literal["drop", "train"] = setting(
        "drop",
        "What to do if the repeated step is a spike again. drop: its units become dead letters. train: apply it.",
        live="what happens to the next update's spikes",
    )

    @property
    def has_own_engine(self) -> bool:
        return is_import_path(self.backend)


@dataclass(frozen=True, slots=True)
class RatePhases:
    """Lengths of a schedule's phases, in updates. A constant rate has no decay."""

    warmup: int
    stable: int
    decay: int


def rate_phases(learner: LearnerSection, num_updates: int) -> RatePhases:
    """Return the phases of a run of ``num_updates``. Raises ValueError if they do not fit."""
    if learner.schedule == "constant" or not num_updates:
        return RatePhases(learner.warmup_updates, 0, 0)
    total = learner.schedule_updates or num_updates
    if total > num_updates:
        raise ValueError(
            f"learner.schedule_updates is {total}, but run.num_updates is {num_updates}, so the rate would never reach its "
            "end; expected at most the run's updates: lower it, or leave it out"
        )
    after_warmup = total - learner.warmup_updates
    decay = after_warmup
    if learner.schedule == "warmup-stable-decay":
        decay = learner.decay_updates or max(1, total // 10)
    if after_warmup < 1 or decay > after_warmup:
        raise ValueError(
            f"learner.schedule {learner.schedule} has {total} updates, but its warm-up takes {learner.warmup_updates} and its "
            f"decay {max(decay, 1)}; expected both to fit: lower learner.warmup_updates or learner.decay_updates, or make the "
            "schedule longer"
        )
    return RatePhases(learner.warmup_updates, after_warmup - decay, decay)
