"""What is learned, from what, and how: the sections of a run file that a paper would tell.

Each setting says its unit and where its default comes from. What one demands of another is checked
in ``pipeline.config.schema``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self, cast

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from pipeline.config.base import Fraction, Positive, Section
from pipeline.config.catalogue import PRESETS


class ModelSection(Section):
    """The policy to start from."""

    path: Path = Field(description="Folder of a Hugging Face causal LM with its tokenizer.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Learner's compute type; weights stay fp32."
    )
    device: str = Field(default="auto", description="auto takes cuda when torch sees one, else cpu.")
    reference_path: Path | None = Field(
        default=None, description="Frozen reference policy; the start policy when absent."
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Compute activations again in the backward pass: less memory, more time."
    )


class DataSection(Section):
    """Prompts."""

    train: tuple[Path, ...] = Field(
        description="JSONL or Parquet files: prompt or messages, answer, verifier, more columns kept."
    )
    evaluation: tuple[Path, ...] = Field(default=(), description="Held-out prompts; never trained on.")
    allow_overlap: bool = Field(
        default=False,
        description="Accept evaluation prompts that are training prompts too; what is measured is then not held out.",
    )
    verifier: str = Field(default="arithmetic", description="For lines that name none.")
    max_prompt_tokens: Positive = Field(default=2048, description="Longer prompts are reported and skipped.")
    max_answer_chars: Positive = Field(
        default=10_000, description="Longer answers are reported and skipped: each chunk carries its prompt's."
    )
    epochs: int | None = Field(default=None, ge=1, description="Passes over the training prompts; endless when absent.")
    shuffle: bool = Field(default=True, description="Another order of the training prompts in each epoch, by run.seed.")
    prompt_template: str = Field(
        default="{prompt}", description="Applied to `prompt` columns; messages use the chat template."
    )


class AlgorithmSection(Section):
    """The objective. Formulas: pipeline/algorithms/README.md. A name brings its source's settings
    as defaults: pipeline/config/catalogue.py."""

    name: Literal[
        "dapo",
        "grpo",
        "dr-grpo",
        "rloo",
        "reinforce++",
        "reinforce++-baseline",
        "gspo",
        "cispo",
        "ppo",
        "vapo",
        "tppo",
    ] = Field(default="dapo", description="The learning rule; it brings its source's settings as defaults.")
    group_size: Positive = Field(default=16, description="G, responses a prompt. DAPO: 16.")
    groups_per_update: Positive = Field(default=32, description="Prompts in one update's batch.")
    num_minibatches: Positive = Field(default=1, description="Optimiser steps an update. DAPO: 16.")
    surrogate: Literal["clip", "gspo", "cispo"] = Field(
        default="clip", description="Token ratio, sequence ratio (GSPO), or clipped weight (CISPO)."
    )
    clip_low: float = Field(
        default=0.2, gt=0.0, le=1.0, description="eps_low. DAPO eq. 8; 1 leaves the bound off (CISPO)."
    )
    clip_high: float = Field(default=0.28, gt=0.0, description="eps_high. DAPO eq. 8.")
    dual_clip: float = Field(
        default=10.0,
        ge=0.0,
        description="c > 1 bounds the loss where the advantage is negative; 0 is off. DAPO recipe 10.",
    )
    loss_aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"
    ] = Field(
        default="token-mean",
        description="How token losses become one: over all tokens alike (DAPO eq. 8), or by response.",
    )
    normalize_std: bool = Field(default=True, description="Divide group advantages by the unbiased std + 1e-6.")
    kl_coefficient: float = Field(
        default=0.0, ge=0.0, description="Weight of KL(policy || reference); 0 needs no reference."
    )
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = Field(
        default="k3", description="Estimate of that KL; k1+ and k3+ have the gradient of k2. Algorithms README."
    )
    entropy_coefficient: float = Field(default=0.0, description="Weight of an entropy bonus; the papers have none.")
    importance: Literal["none", "tis", "icepop", "decoupled", "bypass"] = Field(
        default="tis", description="Correction of behaviour against proximal policy; algorithms README, off-policy."
    )
    proximal: Literal["recompute", "interpolate", "interpolate-linear"] = Field(
        default="recompute",
        description="Proximal log-probs: one more forward pass, or guessed between behaviour and current policy, by log-probs "
        "or by probabilities.",
    )
    importance_cap: float = Field(default=2.0, gt=0.0, description="C of TIS; upper bound of IcePop.")
    importance_floor: float = Field(default=0.5, ge=0.0, description="Lower bound of IcePop.")
    importance_level: Literal["token", "sequence", "geometric"] = Field(
        default="token",
        description="Tokens have weights of their own, or a response has one: the product of its ratios, or their geometric "
        "mean. A product saturates over several policy versions.",
    )
    importance_normalize: bool = Field(
        default=False, description="Divide importance weights by their mean over the mini-batch; one more forward pass."
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
        default=None, gt=0.0, description="Smallest value kept, of ratio and k1; absent: none is too small."
    )
    dynamic_sampling: bool = Field(default=True, description="Drop groups without signal by raw accuracy. DAPO eq. 11.")
    oversampling: float = Field(
        default=1.0,
        ge=1.0,
        description="Work in flight over what one update needs. 1 fills updates too, as dropped groups return their credit; "
        "above it, groups with signal grow too old and are dropped.",
    )
    max_generation_batches: int = Field(
        default=10,
        ge=0,
        description="Batches without signal in a row, since the last group with some, before the run ends as hopeless, if the "
        "learner lacks groups; 0: never. DAPO recipe 10.",
    )
    # With a critic (ppo, vapo, tppo):
    gamma: Fraction = Field(default=1.0, description="Discount. VAPO, T-PPO: 1.")
    gae_lambda: Fraction = Field(default=0.95, description="Policy's lambda, where it does not adapt to the length.")
    adaptive_lambda_alpha: float = Field(
        default=0.0, ge=0.0, description="lambda = 1 - 1 / (alpha l), clamped; VAPO section 4.2: 0.05. 0 is off."
    )
    adaptive_lambda_floor: Fraction = Field(
        default=0.0, description="Least adaptive lambda. T-PPO's port: 0.95; 0, for VAPO, is ours."
    )
    whiten: bool = Field(default=True, description="Whiten critic advantages over the valid tokens of the whole batch.")
    whiten_min_std: float = Field(default=1e-3, ge=0.0, description="Below this std only the mean is taken away.")
    advantage_clamp: float = Field(
        default=0.0, ge=0.0, description="Bound of |A| after whitening; 0 is off. T-PPO's port: 10; VAPO and PPO: none."
    )
    tail_drop_tokens: int = Field(
        default=8, ge=0, description="Last tokens of an unfinished window without advantage. T-PPO: 8."
    )
    positive_nll_coefficient: float = Field(
        default=0.0, ge=0.0, description="Weight of the imitation loss on right responses. VAPO, T-PPO: 0.1."
    )

    @model_validator(mode="wrap")
    @classmethod
    def _preset(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Put the named algorithm's own settings under those that are given, which alone count as
        set.
        """
        if not isinstance(given, dict):
            return handler(given)
        settings = dict(cast("dict[str, Any]", given))
        # as configurations were resolved that did not use it
        if settings.get("prompt_filter") == "none":
            del settings["prompt_filter"]
        brought = PRESETS.get(str(settings.get("name", "dapo")), {})
        made = handler({**brought, **settings})
        made.model_fields_set.difference_update(brought.keys() - settings.keys())
        return made


class StalenessSection(Section):
    """How far sampling may run ahead of learning."""

    eta: int = Field(default=2, ge=0, description="Largest version lag; 0 is the synchronous baseline.")
    late: Literal["wait", "drop"] = Field(
        default="wait", description="When running work would become too stale: wait or drop it."
    )


class RewardModelSection(Section):
    """A model that reads finished responses and gives each a score, a summand of the reward:
    pipeline/rewards/README.md.
    """

    path: Path = Field(description="Folder of a Hugging Face sequence classifier with one label, and its tokenizer.")
    weight: float = Field(default=1.0, description="The part `model` of the reward is weight * (score - center).")
    center: float = Field(default=0.0, description="The score of a response that is neither good nor bad.")
    max_tokens: Positive | None = Field(
        default=None,
        description="Longest conversation that it reads, in its own tokens; absent: its positions, or its tokenizer's limit.",
    )
    micro_batch_tokens: Positive = Field(default=16384, description="Tokens, padding included, of one forward pass.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Type that it is loaded and computed in."
    )
    device: str = Field(default="auto", description="auto takes cuda when torch sees one, else cpu.")
    threads: Positive = Field(default=1, description="Torch threads on a CPU.")


class RewardSection(Section):
    """Scoring of finished trajectories."""

    model: RewardModelSection | None = Field(default=None, description="Read every response with a reward model too.")

    overlong: Literal["none", "soft", "filter", "soft+filter"] = Field(default="none", description="DAPO section 3.4.")
    overlong_cache_tokens: int = Field(default=0, ge=0, description="L_cache of eq. 13.")
    overlong_factor: float = Field(default=1.0, ge=0.0, description="Largest penalty of an over-long response.")
    correct: float = Field(default=1.0, description="Reward of a right answer.")
    wrong: float = Field(default=-1.0, description="Reward of a wrong one.")
    timeout_s: float = Field(
        default=5.0, gt=0.0, description="For one verifier call; what is late is wrong, and counted."
    )
    processes: Positive = Field(default=1, description="Verifier processes a reward worker.")
    max_batch: Positive = Field(default=64, description="Responses scored at once.")
    verifiers: tuple[str, ...] = Field(
        default=(),
        description="Import paths that data lines may name, besides data.verifier; data alone never says what code is run.",
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
    """Frozen-policy log-probs. The role is started only when the KL coefficient is positive or
    `always` is set.
    """

    backend: Literal["torch", "vllm", "emulated"] = Field(
        default="torch", description="vllm: the prompt log-probs of vLLM, in its environment."
    )
    vllm: ReferenceVllmSection = ReferenceVllmSection()
    always: bool = Field(default=False, description="Compute them for the KL metric even when no loss needs them.")
    micro_batch_tokens: Positive = Field(default=8192, description="Tokens of one forward pass.")
    device: str = Field(default="auto", description="auto takes cuda when torch sees one, else cpu.")
    threads: Positive = Field(default=1, description="Torch threads on a CPU.")


class DeepSpeedSection(Section):
    """DeepSpeed, where a backend is deepspeed. Clipping, optimiser and batch sizes are set from the
    section around it.
    """

    stage: Literal[1, 2, 3] = Field(
        default=2, description="ZeRO: ranks share optimiser state (1), gradients as well (2), weights as well (3)."
    )
    offload_optimizer: dict[str, Any] = Field(
        default_factory=dict, description="As DeepSpeed's own, for example {device = 'cpu'}."
    )
    offload_param: dict[str, Any] = Field(default_factory=dict, description="Likewise, for the weights of stage 3.")
    zero_optimization: dict[str, Any] = Field(
        default_factory=dict, description="More settings of DeepSpeed's section of that name, for example overlap_comm."
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="More sections of DeepSpeed's configuration, for example comms_logger."
    )


class ValueSection(Section):
    """The value process: started only when the algorithm has a critic (ppo, vapo, tppo)."""

    backend: Literal["torch", "fsdp2", "deepspeed", "emulated"] = Field(
        default="torch", description="As learner.backend."
    )
    ranks: Positive = Field(default=1, description="As learner.ranks.")
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    path: Path | None = Field(
        default=None,
        description="Backbone, or a pretrained value model. Absent: the start policy's layers under a head of zeros, which is "
        "ours; the PPO that VAPO compares with starts from a reward model.",
    )
    learning_rate: float = Field(default=2e-6, gt=0.0, description="AdamW. VAPO, T-PPO: 2e-6.")
    warmup_steps: int = Field(default=10, ge=0, description="Linear warm-up, in value steps.")
    weight_decay: float = Field(default=0.1, ge=0.0, description="AdamW's, of matrices only.")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW's.")
    adam_eps: float = Field(default=1e-8, gt=0.0, description="AdamW's.")
    max_grad_norm: float = Field(default=1.0, gt=0.0, description="Gradients are scaled down to this norm.")
    clip_low: float = Field(default=0.5, gt=0.0, description="Value may fall by this from the stored one. T-PPO: 0.5.")
    clip_high: float = Field(default=0.6, gt=0.0, description="Value may rise by this from the stored one. T-PPO: 0.6.")
    gae_lambda: Fraction = Field(
        default=1.0,
        description="Of the critic's targets. 1: Monte-Carlo (VAPO, T-PPO); 0.95: coupled, as in plain PPO.",
    )
    batch_trajectories: Positive = Field(default=512, description="Finished trajectories of one value step.")
    micro_batch_tokens: Positive | None = Field(default=None, description="As learner.micro_batch_tokens.")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Compute type; weights stay fp32.")
    device: str = Field(default="auto", description="auto takes cuda when torch sees one, else cpu.")
    threads: Positive = Field(default=1, description="Torch threads on a CPU.")
    pretrain_steps: int = Field(
        default=50, ge=0, description="The policy starts after this many value steps. VAPO: 50; T-PPO's port: 10."
    )
    min_explained_variance: float | None = Field(
        default=None,
        lt=1.0,
        description="Ours: or earlier, once the critic beats a constant, which explains 0, by this much. Absent: never "
        "earlier, as in the papers.",
    )
    explained_variance_steps: Positive = Field(default=5, description="Value steps over which that is measured.")
    checkpoint_every_steps: Positive = Field(default=20, description="Value steps from one checkpoint to the next.")
    checkpoint_keep: Positive = Field(default=2, description="Older ones are removed after a newer one is complete.")


class LoraSection(Section):
    """A LoRA adapter (peft, an extra) that is trained and published in place of the policy's
    weights, by the torch backend. It has no dropout: a ratio of probabilities must be 1 while the
    weights are the same."""

    rank: int = Field(default=0, ge=0, description="0: no adapter, the whole policy is trained.")
    alpha: float = Field(default=32.0, gt=0.0, description="The adapter's part is scaled by alpha / rank.")
    target_modules: tuple[str, ...] = Field(
        default=(), description="Last parts of layers' names, such as q_proj. Empty: all linear layers of the blocks."
    )


class LearnerSection(Section):
    """The optimiser and its batches."""

    backend: Literal["torch", "fsdp2", "deepspeed", "emulated"] = Field(
        default="torch",
        description="torch: one process, the whole model. fsdp2 (torch's own) and deepspeed (an extra) share it among ranks.",
    )
    ranks: Positive = Field(
        default=1, description="Processes on this host that train together; on GPUs each takes one."
    )
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    lora: LoraSection = LoraSection()
    learning_rate: float = Field(default=1e-6, gt=0.0, description="AdamW. DAPO: 1e-6.")
    warmup_updates: int = Field(default=10, ge=0, description="Linear warm-up. DAPO: 20 rollout steps.")
    weight_decay: float = Field(default=0.1, ge=0.0, description="AdamW's, of matrices only.")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW's.")
    adam_eps: float = Field(default=1e-8, gt=0.0, description="AdamW's.")
    max_grad_norm: float = Field(default=1.0, gt=0.0, description="Gradients are scaled down to this norm.")
    micro_batch_tokens: Positive | None = Field(
        default=None,
        description="Tokens (prompt and response) of one forward and backward pass; a longer response is one of its own. Their "
        "activations are most of what a step needs: 3.4 MB a token for a model of 0.5 B weights. Absent: 1024 on a CPU, 16384 "
        "on CUDA.",
    )
    threads: Positive = Field(default=1, description="Torch threads on a CPU.")
    max_bad_steps: Positive = Field(
        default=3, description="Non-finite steps in a row, each refused, before the learner gives up."
    )


class EvaluationSection(Section):
    """Periodic evaluation, done by the generators in a lane of its own."""

    every_updates: int = Field(default=0, ge=0, description="0: only before the first and after the last update.")
    num_prompts: Positive = Field(default=256, description="Of the held-out prompts, from the first.")
    samples_per_prompt: Positive = Field(default=1, description="k of avg@k.")
    temperature: float = Field(default=0.0, ge=0.0, description="0 is greedy. AIME practice: 1.0 with top_p 0.7.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="May truncate, as nothing is learned from it.")
    timeout_s: float = Field(
        default=600.0, gt=0.0, description="Then an evaluation counts with the responses that are there."
    )
