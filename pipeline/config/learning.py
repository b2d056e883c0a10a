"""The sections of a run file that set what is learned, from which data, and how.

Each setting names its unit and the source of its default. Rules across settings:
``pipeline.config.schema``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self, cast

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from pipeline.config.base import Fraction, Positive, Section
from pipeline.config.catalogue import PRESETS


class ModelSection(Section):
    """The policy to start from."""

    path: Path = Field(description="Folder of a Hugging Face causal LM and its tokenizer.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Compute type of the learner; its weights stay float32."
    )
    device: str = Field(default="auto", description="auto: cuda if torch finds a GPU, else cpu.")
    reference_path: Path | None = Field(
        default=None, description="Folder of the frozen reference policy. Absent: the start policy."
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, more time."
    )


class DataSection(Section):
    """Prompts for training and evaluation."""

    train: tuple[Path, ...] = Field(
        description="JSONL or Parquet files with the columns prompt or messages, answer, verifier. More columns are kept."
    )
    evaluation: tuple[Path, ...] = Field(default=(), description="Files of held-out prompts; never trained on.")
    allow_overlap: bool = Field(
        default=False,
        description="Accept evaluation prompts that are also training prompts. The evaluation is then not held out.",
    )
    verifier: str = Field(default="arithmetic", description="Verifier of data lines that name none.")
    max_prompt_tokens: Positive = Field(default=2048, description="Longer prompts are reported and skipped.")
    max_answer_chars: Positive = Field(
        default=10_000,
        description="Prompts with a longer answer are reported and skipped, since every chunk carries the answer.",
    )
    epochs: int | None = Field(default=None, ge=1, description="Passes over the training prompts. Absent: endless.")
    shuffle: bool = Field(default=True, description="Shuffle the training prompts in each epoch, seeded by run.seed.")
    prompt_template: str = Field(
        default="{prompt}", description="Applied to the `prompt` column; `messages` use the chat template."
    )


class AlgorithmSection(Section):
    """The objective. `name` sets its source's defaults (pipeline/config/catalogue.py). Formulas:
    pipeline/algorithms/README.md."""

    name: Literal[
        "dapo", "grpo", "dr-grpo", "rloo", "reinforce++", "reinforce++-baseline", "gspo", "cispo", "ppo", "vapo", "tppo"
    ] = Field(default="dapo", description="The learning rule. It sets its source's settings as defaults.")
    group_size: Positive = Field(default=16, description="G, responses a prompt. DAPO: 16.")
    groups_per_update: Positive = Field(default=32, description="Prompts of one update's batch.")
    num_minibatches: Positive = Field(default=1, description="Optimiser steps of one update. DAPO: 16.")
    surrogate: Literal["clip", "gspo", "cispo"] = Field(
        default="clip", description="clip: token ratio. gspo: sequence ratio. cispo: clipped weight."
    )
    clip_low: float = Field(
        default=0.2, gt=0.0, le=1.0, description="eps_low. DAPO eq. 8. 1 removes the lower bound (CISPO)."
    )
    clip_high: float = Field(default=0.28, gt=0.0, description="eps_high. DAPO eq. 8.")
    dual_clip: float = Field(
        default=10.0,
        ge=0.0,
        description="c > 1 bounds the loss where the advantage is negative. 0: off. DAPO recipe 10.",
    )
    loss_aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"
    ] = Field(
        default="token-mean",
        description="How token losses are summed up: over all tokens alike (DAPO eq. 8), or by response.",
    )
    normalize_std: bool = Field(default=True, description="Divide group advantages by the unbiased std + 1e-6.")
    kl_coefficient: float = Field(
        default=0.0, ge=0.0, description="Weight of KL(policy || reference). 0 needs no reference."
    )
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = Field(
        default="k3",
        description="Estimator of that KL. k1+ and k3+ have the gradient of k2. Formulas: algorithms README.",
    )
    entropy_coefficient: float = Field(default=0.0, description="Weight of an entropy bonus. The papers have none.")
    importance: Literal["none", "tis", "icepop", "decoupled", "bypass"] = Field(
        default="tis",
        description="Correction of the behaviour policy against the proximal policy: algorithms README, off-policy.",
    )
    proximal: Literal["recompute", "interpolate", "interpolate-linear"] = Field(
        default="recompute",
        description="Proximal log-probs. recompute: one more forward pass. Else estimated between behaviour and current "
        "policy, by log-probs (interpolate) or by probabilities (interpolate-linear).",
    )
    importance_cap: float = Field(default=2.0, gt=0.0, description="C of TIS; upper bound of IcePop.")
    importance_floor: float = Field(default=0.5, ge=0.0, description="Lower bound of IcePop.")
    importance_level: Literal["token", "sequence", "geometric"] = Field(
        default="token",
        description="token: each token has its own importance weight. Else a response's tokens share one: the product "
        "(sequence) or geometric mean of their ratios. A product saturates over several policy versions.",
    )
    importance_normalize: bool = Field(
        default=False, description="Divide importance weights by their mean over the mini-batch. Costs a forward pass."
    )
    rejection: Literal["none", "ratio", "k1", "k2", "k3", "k3-reverse"] = Field(
        default="none",
        description="Train nothing on tokens or responses where proximal and behaviour policy differ too much, by this "
        "quantity. Algorithms README, off-policy.",
    )
    rejection_level: Literal["token", "seq-sum", "seq-mean", "seq-max"] = Field(
        default="token", description="Reject single tokens, or whole responses by their sum, mean or largest value."
    )
    rejection_upper: float | None = Field(
        default=None, gt=0.0, description="Largest value kept. For k1 a ratio, of behaviour to proximal policy."
    )
    rejection_lower: float | None = Field(
        default=None, gt=0.0, description="Smallest value kept, of ratio and k1. Absent: no lower bound."
    )
    dynamic_sampling: bool = Field(
        default=True, description="Drop groups without signal, judged by raw accuracy. DAPO eq. 11."
    )
    oversampling: float = Field(
        default=1.0,
        ge=1.0,
        description="Work in flight, as a multiple of one update's. 1 is enough: dropped groups return their credit. Above "
        "1, more groups with signal become too old and are dropped.",
    )
    max_generation_batches: int = Field(
        default=10,
        ge=0,
        description="The run ends when this many batches in a row had no group with signal and the learner lacks groups. "
        "0: never. DAPO recipe 10.",
    )
    # With a critic (ppo, vapo, tppo):
    gamma: Fraction = Field(default=1.0, description="Discount. VAPO, T-PPO: 1.")
    gae_lambda: Fraction = Field(
        default=0.95, description="Lambda of the policy, where it does not adapt to the length."
    )
    adaptive_lambda_alpha: float = Field(
        default=0.0, ge=0.0, description="lambda = 1 - 1 / (alpha l), clamped. 0: off. VAPO section 4.2: 0.05."
    )
    adaptive_lambda_floor: Fraction = Field(
        default=0.0, description="Least adaptive lambda. T-PPO's port: 0.95. VAPO: 0, our choice."
    )
    whiten: bool = Field(default=True, description="Whiten critic advantages over the valid tokens of the whole batch.")
    whiten_min_std: float = Field(default=1e-3, ge=0.0, description="Below this std only the mean is subtracted.")
    advantage_clamp: float = Field(
        default=0.0, ge=0.0, description="Bound of |A| after whitening. 0: off. T-PPO's port: 10. VAPO, PPO: none."
    )
    tail_drop_tokens: int = Field(
        default=8, ge=0, description="The last tokens of an unfinished window get no advantage. T-PPO: 8."
    )
    positive_nll_coefficient: float = Field(
        default=0.0, ge=0.0, description="Weight of the imitation loss on correct responses. VAPO, T-PPO: 0.1."
    )

    @model_validator(mode="wrap")
    @classmethod
    def _preset(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Add the named algorithm's defaults. Only given settings count as set."""
        if not isinstance(given, dict):
            return handler(given)
        settings = dict(cast("dict[str, Any]", given))
        # resolved files of earlier versions hold it
        if settings.get("prompt_filter") == "none":
            del settings["prompt_filter"]
        brought = PRESETS.get(str(settings.get("name", "dapo")), {})
        made = handler({**brought, **settings})
        made.model_fields_set.difference_update(brought.keys() - settings.keys())
        return made


class StalenessSection(Section):
    """How far sampling may run ahead of learning."""

    eta: int = Field(default=2, ge=0, description="Largest version lag. 0 is the synchronous baseline.")
    late: Literal["wait", "drop"] = Field(
        default="wait", description="Work that would become too stale makes the learner wait, or is dropped."
    )


class RewardModelSection(Section):
    """A model that scores finished responses, a part of the reward: pipeline/rewards/README.md."""

    path: Path = Field(description="Folder of a Hugging Face sequence classifier with one label, and its tokenizer.")
    weight: float = Field(default=1.0, description="The part `model` of the reward is weight * (score - center).")
    center: float = Field(default=0.0, description="Score of a response that is neither good nor bad.")
    max_tokens: Positive | None = Field(
        default=None,
        description="Longest conversation, in this model's tokens. Absent: its number of positions or its tokenizer's limit.",
    )
    micro_batch_tokens: Positive = Field(default=16384, description="Tokens of one forward pass, padding included.")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Type of its weights and computation.")
    device: str = Field(default="auto", description="auto: cuda if torch finds a GPU, else cpu.")
    threads: Positive = Field(default=1, description="Torch threads on a CPU.")


class RewardSection(Section):
    """Scores of finished responses."""

    model: RewardModelSection | None = Field(default=None, description="Read every response with a reward model too.")

    overlong: Literal["none", "soft", "filter", "soft+filter"] = Field(
        default="none", description="Over-long responses: a soft penalty, or no loss. DAPO section 3.4."
    )
    overlong_cache_tokens: int = Field(default=0, ge=0, description="L_cache of DAPO eq. 13.")
    overlong_factor: float = Field(default=1.0, ge=0.0, description="Largest penalty of an over-long response.")
    correct: float = Field(default=1.0, description="Reward of a correct answer.")
    wrong: float = Field(default=-1.0, description="Reward of a wrong answer.")
    timeout_s: float = Field(
        default=5.0,
        gt=0.0,
        description="Limit of one verifier call. A late call counts as wrong, and is counted as late.",
    )
    processes: Positive = Field(default=1, description="Verifier processes of one reward worker.")
    max_batch: Positive = Field(default=64, description="Responses scored at once.")
    verifiers: tuple[str, ...] = Field(
        default=(),
        description="Import paths that data lines may name, besides data.verifier. Data alone never chooses code to run.",
    )
    path: tuple[Path, ...] = Field(
        default=(), description="Folders with your verifiers' modules; searched after PYTHONPATH and what is installed."
    )


class ReferenceVllmSection(Section):
    """vLLM, when ``reference.backend`` is vllm; it runs in the reference worker's process."""

    tensor_parallel_size: Positive = Field(default=1, description="GPUs that share each layer; divides the heads.")
    kv_cache_gb: Positive = Field(default=1, description="KV cache of one reference worker on a CPU, GiB.")
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Passed through to vLLM's EngineArgs, for example gpu_memory_utilization."
    )


class ReferenceSection(Section):
    """Log-probs of the frozen reference policy. The role starts only if algorithm.kl_coefficient is
    above 0 or `always` is on."""

    backend: Literal["torch", "vllm", "emulated"] = Field(
        default="torch", description="vllm: prompt log-probs of vLLM, in its own environment."
    )
    vllm: ReferenceVllmSection = ReferenceVllmSection()
    always: bool = Field(default=False, description="Compute them for the KL metric even if no loss needs them.")
    micro_batch_tokens: Positive = Field(default=8192, description="Tokens of one forward pass.")
    device: str = Field(default="auto", description="auto: cuda if torch finds a GPU, else cpu.")
    threads: Positive = Field(default=1, description="Torch threads on a CPU.")


class DeepSpeedSection(Section):
    """DeepSpeed, for a deepspeed backend. Clipping, optimiser and batch sizes follow from the
    section around it."""

    stage: Literal[1, 2, 3] = Field(
        default=2, description="ZeRO stage. Ranks share optimiser state (1), also gradients (2), also weights (3)."
    )
    offload_optimizer: dict[str, Any] = Field(
        default_factory=dict, description="DeepSpeed's setting of that name, for example {device = 'cpu'}."
    )
    offload_param: dict[str, Any] = Field(
        default_factory=dict, description="DeepSpeed's setting of that name, for the weights of stage 3."
    )
    zero_optimization: dict[str, Any] = Field(
        default_factory=dict, description="More settings of DeepSpeed's section of that name, for example overlap_comm."
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="More sections of DeepSpeed's configuration, for example comms_logger."
    )


class ValueSection(Section):
    """The value process. It starts only if the algorithm has a critic (ppo, vapo, tppo)."""

    backend: Literal["torch", "fsdp2", "deepspeed", "emulated"] = Field(
        default="torch", description="As learner.backend."
    )
    ranks: Positive = Field(default=1, description="As learner.ranks.")
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    path: Path | None = Field(
        default=None,
        description="Folder of a backbone or a pretrained value model. Absent: the start policy's layers under a head of "
        "zeros. That is our choice; the PPO that VAPO compares with starts from a reward model.",
    )
    learning_rate: float = Field(default=2e-6, gt=0.0, description="AdamW. VAPO, T-PPO: 2e-6.")
    warmup_steps: int = Field(default=10, ge=0, description="Linear warm-up, in value steps.")
    weight_decay: float = Field(default=0.1, ge=0.0, description="Of AdamW, for matrices only.")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="Of AdamW.")
    adam_eps: float = Field(default=1e-8, gt=0.0, description="Of AdamW.")
    max_grad_norm: float = Field(default=1.0, gt=0.0, description="Gradients are scaled down to this norm.")
    clip_low: float = Field(default=0.5, gt=0.0, description="Largest fall below the stored value. T-PPO: 0.5.")
    clip_high: float = Field(default=0.6, gt=0.0, description="Largest rise above the stored value. T-PPO: 0.6.")
    gae_lambda: Fraction = Field(
        default=1.0,
        description="Lambda of the critic's targets. 1: Monte-Carlo (VAPO, T-PPO). 0.95: coupled, as in plain PPO.",
    )
    batch_trajectories: Positive = Field(default=512, description="Finished trajectories of one value step.")
    micro_batch_tokens: Positive | None = Field(default=None, description="As learner.micro_batch_tokens.")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Compute type; weights stay float32.")
    device: str = Field(default="auto", description="auto: cuda if torch finds a GPU, else cpu.")
    threads: Positive = Field(default=1, description="Torch threads on a CPU.")
    pretrain_steps: int = Field(
        default=50,
        ge=0,
        description="The policy starts to train after this many value steps. VAPO: 50. T-PPO's port: 10.",
    )
    min_explained_variance: float | None = Field(
        default=None,
        lt=1.0,
        description="The policy starts earlier, once the critic explains this share of the returns' variance. A constant "
        "explains 0. Absent: never earlier, as in the papers.",
    )
    explained_variance_steps: Positive = Field(
        default=5, description="Value steps over which explained variance is measured."
    )
    checkpoint_every_steps: Positive = Field(default=20, description="Value steps from one checkpoint to the next.")
    checkpoint_keep: Positive = Field(
        default=2, description="Checkpoints kept. The rest go once a newer one is complete."
    )


class LoraSection(Section):
    """A LoRA adapter (peft, an extra), trained and published in place of the whole policy. Needs
    the torch backend. It has no dropout, so that equal weights give a probability ratio of 1."""

    rank: int = Field(default=0, ge=0, description="0: no adapter; the whole policy is trained.")
    alpha: float = Field(default=32.0, gt=0.0, description="The adapter's output is scaled by alpha / rank.")
    target_modules: tuple[str, ...] = Field(
        default=(), description="Last parts of layer names, such as q_proj. Empty: all linear layers of the blocks."
    )


class LearnerSection(Section):
    """The optimiser and its batches."""

    backend: Literal["torch", "fsdp2", "deepspeed", "emulated"] = Field(
        default="torch",
        description="torch: one process holds the model. fsdp2 (of torch) and deepspeed (an extra) share it among ranks.",
    )
    ranks: Positive = Field(
        default=1, description="Processes on this host that train together. On GPUs, each uses one GPU."
    )
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    lora: LoraSection = LoraSection()
    learning_rate: float = Field(default=1e-6, gt=0.0, description="AdamW. DAPO: 1e-6.")
    warmup_updates: int = Field(default=10, ge=0, description="Linear warm-up. DAPO: 20 rollout steps.")
    weight_decay: float = Field(default=0.1, ge=0.0, description="Of AdamW, for matrices only.")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="Of AdamW.")
    adam_eps: float = Field(default=1e-8, gt=0.0, description="Of AdamW.")
    max_grad_norm: float = Field(default=1.0, gt=0.0, description="Gradients are scaled down to this norm.")
    micro_batch_tokens: Positive | None = Field(
        default=None,
        description="Tokens (prompt and response) of one forward and backward pass. A longer response gets a pass of its own. "
        "Activations are most of a step's memory: 3.4 MB a token for a model of 0.5 B weights. Absent: 1024 on a CPU, 16384 "
        "on CUDA.",
    )
    threads: Positive = Field(default=1, description="Torch threads on a CPU.")
    max_bad_steps: Positive = Field(
        default=3, description="The learner gives up after this many non-finite steps in a row. Each is refused."
    )


class EvaluationSection(Section):
    """Periodic evaluation, by the generators, in a lane of its own."""

    every_updates: int = Field(default=0, ge=0, description="0: only before the first and after the last update.")
    num_prompts: Positive = Field(default=256, description="Number of held-out prompts, counted from the first.")
    samples_per_prompt: Positive = Field(default=1, description="k of avg@k.")
    temperature: float = Field(default=0.0, ge=0.0, description="0 is greedy. AIME practice: 1.0 with top_p 0.7.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="May be below 1: evaluation trains nothing.")
    timeout_s: float = Field(
        default=600.0, gt=0.0, description="After this time an evaluation counts the responses that are there."
    )
