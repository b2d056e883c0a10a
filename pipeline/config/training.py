"""The sections of a run file that set what is learned, from which data, and how.

Each setting names its unit and the source of its default. ``pipeline.config.schema`` has the rules
across settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, Field, ModelWrapValidatorHandler, model_validator

from pipeline.config.base import Fraction, Positive, Section, setting
from pipeline.config.catalogue import (
    ScoringBackendName,
    TrainingBackendName,
    known_aggregation,
    known_surrogate,
    preset_of,
)
from pipeline.config.data_sets import ChatVariables, ColumnsSection, DataPath, DataSetSection
from pipeline.config.import_path import is_import_path, search_also
from pipeline.config.rewards import EndpointSection, PartName, RewardFunctionSection

Recompute = Literal["auto"] | bool | Positive


class ModelSection(Section):
    """The policy to start from."""

    path: Path = Field(description="Folder of a Hugging Face causal LM and its tokenizer, or hf://OWNER/NAME.")
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "Compute type of the learner; what it trains stays float32."
    )
    device: str = setting("auto", "auto: cuda if torch finds a GPU, else cpu.")
    reference_path: Path | None = setting(None, "Folder of the frozen reference policy. Default: the start policy.")
    gradient_checkpointing: Recompute = setting(
        "auto",
        "Layers, from the first on, whose activations are recomputed in the backward pass: less memory, up to a third more "
        "time. A number, or true for all. auto: as few as the GPU's memory needs, and none on a CPU.",
    )


class DataSection(Section):
    """Prompts for training and evaluation."""

    train: tuple[DataPath, ...] = setting(
        (),
        "JSONL or Parquet files in the format of Headrace, GSM8K, TRL, verl or OpenRLHF. Other columns are kept. A path "
        "may contain * and ?, or be hf://datasets/OWNER/NAME/FILE, s3://BUCKET/FILE or gs://BUCKET/FILE.",
    )
    sets: tuple[DataSetSection, ...] = setting((), "Several data sets with weights, in place of train.")
    responses: tuple[DataPath, ...] = setting(
        (),
        "Files of questions with recorded responses and verdicts, in place of train: the run learns from these "
        "instead of sampling. pipeline/data/README.md.",
    )
    response_verifier: str = setting(
        "recorded", "Verifier of data.responses. recorded: each line's verdict. Another one judges the responses again."
    )
    columns: ColumnsSection = ColumnsSection()
    evaluation: tuple[DataPath, ...] = setting((), "Files of held-out prompts; never trained on.")
    allow_overlap: bool = setting(
        False, "Accept evaluation prompts that are also training prompts. The evaluation is then not held out."
    )
    verifier: str = setting("arithmetic", "Verifier of data lines that name none.")
    max_prompt_tokens: Positive = setting(2048, "Longer prompts are reported and skipped.")
    max_answer_chars: Positive = setting(
        10_000, "Prompts with a longer answer are reported and skipped, since every chunk carries the answer."
    )
    epochs: int | None = setting(None, "Passes over the training prompts. Default: endless.", ge=1)
    shuffle: bool = setting(True, "Shuffle the training prompts in each epoch, seeded by run.seed.")
    curriculum: Literal["none", "easy-first"] = setting(
        "none", "easy-first: each epoch goes from the easiest tenth to the hardest, shuffled within tenths."
    )
    min_difficulty: float | None = setting(None, "Easier training prompts are reported and skipped.")
    max_difficulty: float | None = setting(None, "Harder training prompts are reported and skipped.")
    chat: Literal["auto"] | bool = setting(
        "auto",
        "Whether a plain prompt becomes a user message in the model's chat template; lists of messages always use "
        "it. auto: if "
        "the tokenizer has one, prompt_template is absent, and the prompt does not begin with a special token.",
    )
    system_prompt: str | None = setting(None, "First message of conversations that have no system message.")
    chat_variables: ChatVariables = setting({}, "Variables of the chat template, for example enable_thinking = false.")
    prompt_template: str = setting(
        "{prompt}",
        "Template that plain prompts are inserted into. If given, the chat template is used only with "
        "data.chat = true.",
    )

    @property
    def reads_difficulty(self) -> bool:
        """Whether every training prompt needs a difficulty."""
        return self.curriculum != "none" or self.min_difficulty is not None or self.max_difficulty is not None

    def set_of(self, prompt_id: str) -> DataSetSection | None:
        """Return the training set that a prompt belongs to, since its id begins with the set's
        name; None without sets."""
        return next((one for one in self.sets if prompt_id.startswith(f"{one.name}/")), None)

    @model_validator(mode="after")
    def _has_data(self) -> Self:
        given = [name for name in ("train", "sets", "responses") if getattr(self, name)]
        if not given and "train" not in self.model_fields_set:
            raise ValueError(
                "data.train and data.sets are both missing; give the files in data.train, or each data set in [[data.sets]]; "
                "or recorded responses in data.responses"
            )
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(f'data.{name}' for name in given)} are both given; expected one: give the files in data.train, "
                "or each data set in [[data.sets]], or recorded responses in data.responses"
            )
        low, high = self.min_difficulty, self.max_difficulty
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"data.min_difficulty is {low}, above max_difficulty {high}; no prompt would be left: lower it"
            )
        names = [one.name for one in self.sets]
        if len(names) > len(set(names)):
            raise ValueError(f"data.sets has the names {', '.join(names)}; give each set a different name")
        for name in names:
            if inner := next((other for other in names if other.startswith(f"{name}/")), None):
                raise ValueError(
                    f"data.sets has the names {name} and {inner}, but prompt ids begin with these names, so no name "
                    f"may be another's plus a slash and more: rename one"
                )
        if self.sets and sum(one.weight for one in self.sets) <= 0.0:
            raise ValueError("the weights of data.sets sum to 0, so no prompt would be drawn; set one above 0")
        return self


class AlgorithmSection(Section):
    """The objective. `name` also sets the defaults of its paper. Formulas, and how to write your
    own rule: pipeline/algorithms/README.md."""

    name: str = setting(
        "dapo",
        "The learning rule: dapo, grpo, dr-grpo, rloo, reinforce++, reinforce++-baseline, gspo, cispo, ppo, vapo, "
        "tppo, nlft, nlft-first, sft, rft, or package.module:Class of your own. Its paper's settings become the "
        "defaults.",
    )
    path: tuple[Path, ...] = setting(
        (),
        "Folders with the modules of your rules, surrogates and aggregations; searched after PYTHONPATH and what is "
        "installed.",
    )
    group_size: Positive = setting(16, "G, responses per prompt. DAPO: 16.")
    groups_per_update: Positive = setting(32, "Prompts of one update's batch.")
    num_minibatches: Positive = setting(1, "Optimiser steps of one update. DAPO: 16.")
    surrogate: Annotated[str, AfterValidator(known_surrogate)] = setting(
        "clip",
        "clip: token ratio. gspo: sequence ratio. cispo: clipped weight. nlft, nlft-first: by guidance. nll: "
        "imitation of all loss tokens. Or package.module:function of your own.",
    )
    clip_low: float = setting(0.2, "eps_low. DAPO eq. 8. 1 removes the lower bound (CISPO).", gt=0.0, le=1.0)
    clip_high: float = setting(0.28, "eps_high. DAPO eq. 8.", gt=0.0)
    dual_clip: float = setting(
        10.0, "c > 1 bounds the loss where the advantage is negative. 0: off. DAPO recipe 10.", ge=0.0
    )
    loss_aggregation: Annotated[str, AfterValidator(known_aggregation)] = setting(
        "token-mean",
        "How token losses are combined: token-mean, the mean over all tokens (DAPO eq. 8); seq-mean-token-mean, "
        "seq-mean-token-sum, seq-mean-token-sum-norm, by response; token-sum; or package.module:function of your own.",
    )
    normalize_std: bool = setting(True, "Divide group advantages by the unbiased std + 1e-6.")
    kl_coefficient: float = setting(0.0, "Weight of KL(policy || reference). 0 needs no reference.", ge=0.0)
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = setting(
        "k3",
        "Estimator of that KL. k1+ and k3+ have the gradient of k2. The gradient of k1 is zero on average, so it is refused. "
        "Formulas: algorithms README.",
    )
    entropy_coefficient: float = setting(0.0, "Weight of an entropy bonus. The papers have none.")
    importance: Literal["none", "tis", "icepop", "decoupled", "bypass"] = setting(
        "tis", "Correction for the difference between behaviour and proximal policy; see the algorithms README."
    )
    proximal: Literal["recompute", "interpolate", "interpolate-linear"] = setting(
        "recompute",
        "Proximal log-probs. recompute: by one more forward pass. interpolate, interpolate-linear: estimated between "
        "behaviour and current policy, in log-probs or in probabilities.",
    )
    importance_cap: float = setting(2.0, "C of TIS; upper bound of IcePop.", gt=0.0)
    importance_floor: float = setting(0.5, "Lower bound of IcePop.", ge=0.0)
    importance_level: Literal["token", "sequence", "geometric"] = setting(
        "token",
        "token: each token has its own importance weight. Otherwise a response's tokens share one: the product "
        "(sequence) or geometric mean of their ratios. A product saturates over several policy versions.",
    )
    importance_normalize: bool = setting(
        False, "Divide importance weights by their mean over the mini-batch. Costs a forward pass."
    )
    rejection: Literal["none", "ratio", "k1", "k2", "k3", "k3-reverse"] = setting(
        "none",
        "Skip tokens or responses where proximal and behaviour policy differ too much by this quantity; see the "
        "algorithms README.",
    )
    rejection_level: Literal["token", "seq-sum", "seq-mean", "seq-max"] = setting(
        "token", "Reject single tokens, or whole responses by their sum, mean or largest value."
    )
    rejection_upper: float | None = setting(
        None, "Largest value kept. For k1 it is a ratio of behaviour to proximal policy.", gt=0.0
    )
    rejection_lower: float | None = setting(
        None, "Smallest value kept, of ratio and k1. Default: no lower bound.", gt=0.0
    )
    dynamic_sampling: bool = setting(True, "Drop groups without signal, judged by raw accuracy. DAPO eq. 11.")
    oversampling: float = setting(
        1.0,
        "Work in flight, as a multiple of one update's. 1 is enough: dropped groups return their credit. Above "
        "1, more groups with signal become too old and are dropped.",
        ge=1.0,
    )
    max_generation_batches: int = setting(
        10,
        "The run ends when this many batches in a row had no group with signal and the learner lacks groups. "
        "0: never. DAPO recipe 10.",
        ge=0,
    )
    guidance: Literal["none", "mix"] = setting(
        "none",
        "mix: scale each token's advantage by its guidance, for any rule with advantages. Rules that learn only "
        "from guidance need no mix. Settings: [guidance].",
    )
    # With a critic (ppo, vapo, tppo):
    gamma: Fraction = setting(1.0, "Discount. VAPO, T-PPO: 1.")
    gae_lambda: Fraction = setting(0.95, "Lambda of the policy, if it does not adapt to the length.")
    adaptive_lambda_alpha: float = setting(
        0.0, "lambda = 1 - 1 / (alpha l), clamped. 0: off. VAPO section 4.2: 0.05.", ge=0.0
    )
    adaptive_lambda_floor: Fraction = setting(0.0, "Smallest adaptive lambda. T-PPO's port: 0.95. VAPO: 0, our choice.")
    whiten: bool = setting(True, "Whiten critic advantages over the valid tokens of the whole batch.")
    whiten_min_std: float = setting(1e-3, "Below this std only the mean is subtracted.", ge=0.0)
    advantage_clamp: float = setting(
        0.0, "Bound of |A| after whitening. 0: off. T-PPO's port: 10. VAPO, PPO: none.", ge=0.0
    )
    tail_drop_tokens: int = setting(
        8, "This many last tokens of an unfinished window get no advantage. T-PPO: 8.", ge=0
    )
    positive_nll_coefficient: float = setting(
        0.0, "Weight of the imitation loss on correct responses. VAPO, T-PPO: 0.1.", ge=0.0
    )

    @model_validator(mode="wrap")
    @classmethod
    def _preset(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Add the named algorithm's defaults. Only given settings count as set."""
        if not isinstance(given, dict):
            return handler(given)
        settings = dict(cast("dict[str, Any]", given))
        if not settings:
            # DAPO's are the section's own
            return handler(settings)
        folders = settings.get("path", ())
        if isinstance(folders, list | tuple):
            search_also(Path(str(folder)) for folder in cast("list[object]", folders))
        brought = preset_of(str(settings.get("name", "dapo")))
        if foreign := sorted(brought.keys() - cls.model_fields.keys()):
            raise ValueError(
                f"the preset of {settings['name']} sets {', '.join(foreign)}, which are not settings of "
                f"[algorithm]; correct its declaration"
            )
        made = handler({**brought, **settings})
        made.model_fields_set.difference_update(brought.keys() - settings.keys())
        return made


class StalenessSection(Section):
    """How far sampling may run ahead of learning."""

    eta: int = setting(2, "Largest version lag. 0 is the synchronous baseline.", ge=0)
    late: Literal["wait", "drop"] = setting(
        "wait", "What happens to work that would become too stale: the learner waits for it, or it is dropped."
    )


class RewardModelSection(Section):
    """A reward model, whose score of a finished response is a part of the reward:
    pipeline/rewards/README.md."""

    path: Path = Field(description="Folder of a Hugging Face sequence classifier with one label, and its tokenizer.")
    weight: float = setting(1.0, "The part `model` of the reward is weight * (score - center).")
    center: float = setting(0.0, "Score of a response that is neither good nor bad.")
    max_tokens: Positive | None = setting(
        None, "Longest conversation, in this model's tokens. Default: its number of positions or its tokenizer's limit."
    )
    micro_batch_tokens: Positive = setting(16384, "Tokens of one forward pass, padding included.")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "Type of its weights and computation.")
    device: str = setting("auto", "auto: cuda if torch finds a GPU, else cpu.")
    threads: Positive = setting(1, "Torch threads on a CPU.")


class RewardSection(Section):
    """How finished responses are scored."""

    model: RewardModelSection | None = setting(None, "Also score every response with a reward model.")

    overlong: Literal["none", "soft", "filter", "soft+filter"] = setting(
        "none",
        "Over-long responses get a soft penalty, or no loss (filter); with filter, a group of only such responses "
        "is dropped. "
        "DAPO section 3.4.",
    )
    overlong_cache_tokens: int = setting(0, "L_cache of DAPO eq. 13.", ge=0)
    overlong_factor: float = setting(1.0, "Largest penalty of an over-long response.", ge=0.0)
    correct: float = setting(1.0, "Reward of a correct answer.")
    wrong: float = setting(-1.0, "Reward of a wrong answer.")
    timeout_s: float = setting(
        5.0,
        "CPU time of one verifier call, including processes that it starts. Beyond it there is no verdict.",
        gt=0.0,
    )
    wait_s: float | None = setting(
        None,
        "Longest wait for a verifier call, not counting time when the machine stood still. Beyond it there is no "
        "verdict. Default: three times timeout_s.",
        gt=0.0,
    )
    late: Literal["retry", "wrong"] = setting(
        "retry",
        "A response without a verdict in time is judged again, and left out of its group after ledger.max_attempts "
        "(retry), or counts as wrong at once, only in training (wrong).",
    )
    processes: Positive = setting(1, "Verifier processes of one reward worker.")
    max_batch: Positive = setting(64, "Responses received at once. Verifiers inside the worker judge them in one call.")
    max_in_flight: Positive = setting(
        256, "Responses that one reward worker judges concurrently. A slow one does not delay others."
    )
    verifiers: tuple[str, ...] = setting(
        (), "Import paths that data lines may name, besides data.verifier. Data never chooses code to run by itself."
    )
    functions: dict[PartName, RewardFunctionSection] = setting(
        {}, "Further rewards by name, each a table [reward.functions.NAME]. History, report and status show each."
    )
    endpoints: dict[PartName, EndpointSection] = setting(
        {}, "Judges and rewards behind HTTP by name, each a table [reward.endpoints.NAME]; verifiers endpoint/NAME."
    )
    path: tuple[Path, ...] = setting(
        (), "Folders with your verifiers' modules; searched after PYTHONPATH and what is installed."
    )

    @property
    def longest_wait_s(self) -> float:
        """``wait_s``, or its default, in seconds."""
        return 3.0 * self.timeout_s if self.wait_s is None else self.wait_s


class ReferenceVllmSection(Section):
    """Settings of vLLM, for reference.backend = "vllm". It runs in the reference worker's process."""

    tensor_parallel_size: Positive = setting(1, "GPUs that share each layer; divides the heads.")
    kv_cache_gb: Positive = setting(1, "KV cache of one reference worker on a CPU, GiB.")
    engine_args: dict[str, Any] = setting({}, "Passed to vLLM's EngineArgs, for example gpu_memory_utilization.")


class ReferenceSection(Section):
    """Log-probs of the frozen reference policy. The role starts only if algorithm.kl_coefficient is
    above 0 or `always` is on."""

    backend: ScoringBackendName = setting(
        "torch",
        "torch; vllm: prompt log-probs of vLLM, in its own environment; or package.module:function of your own.",
    )
    vllm: ReferenceVllmSection = ReferenceVllmSection()
    always: bool = setting(False, "Compute them for the KL metric even if no loss needs them.")
    micro_batch_tokens: Positive = setting(8192, "Tokens of one forward pass.")
    device: str = setting("auto", "auto: cuda if torch finds a GPU, else cpu.")
    threads: Positive = setting(1, "Torch threads on a CPU.")

    @property
    def has_own_engine(self) -> bool:
        return is_import_path(self.backend)


class DeepSpeedSection(Section):
    """Settings of DeepSpeed, for the backend deepspeed. Clipping, optimiser and batch sizes follow
    from the section around it."""

    stage: Literal[1, 2, 3] = setting(
        2, "ZeRO stage. Ranks share optimiser state (1), also gradients (2), also weights (3)."
    )
    offload_optimizer: dict[str, Any] = setting({}, "DeepSpeed's setting of that name, for example {device = 'cpu'}.")
    offload_param: dict[str, Any] = setting({}, "DeepSpeed's setting of that name, for the weights of stage 3.")
    zero_optimization: dict[str, Any] = setting(
        {}, "More settings of DeepSpeed's section of that name, for example overlap_comm."
    )
    config: dict[str, Any] = setting({}, "More sections of DeepSpeed's configuration, for example comms_logger.")


class ValueSection(Section):
    """The value process. It starts only if the algorithm has a critic (ppo, vapo, tppo)."""

    backend: TrainingBackendName = setting("torch", "As learner.backend.")
    ranks: Positive = setting(1, "As learner.ranks.")
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    path: Path | None = setting(
        None,
        "Folder of a backbone or a pretrained value model. Default: the start policy's layers under a head of "
        "zeros. That is our choice; the PPO that VAPO compares with starts from a reward model.",
    )
    learning_rate: float = setting(2e-6, "Learning rate of AdamW. VAPO, T-PPO: 2e-6.", gt=0.0)
    warmup_steps: int = setting(10, "Linear warm-up, in value steps.", ge=0)
    weight_decay: float = setting(0.1, "Decoupled weight decay, for matrices only.", ge=0.0)
    betas: tuple[float, float] = setting((0.9, 0.999), "Betas of AdamW.")
    adam_eps: float = setting(1e-8, "Epsilon of AdamW.", gt=0.0)
    max_grad_norm: float = setting(1.0, "Gradients are scaled down to this norm.", gt=0.0)
    clip_low: float = setting(0.5, "Largest decrease below the stored value. T-PPO: 0.5.", gt=0.0)
    clip_high: float = setting(0.6, "Largest increase above the stored value. T-PPO: 0.6.", gt=0.0)
    gae_lambda: Fraction = setting(
        1.0, "Lambda of the critic's targets. 1: Monte-Carlo (VAPO, T-PPO). 0.95: coupled, as in plain PPO."
    )
    batch_trajectories: Positive = setting(512, "Finished trajectories of one value step.")
    micro_batch_tokens: Literal["auto"] | Positive = setting("auto", "As learner.micro_batch_tokens.")
    gradient_checkpointing: Recompute = setting("auto", "As model.gradient_checkpointing.")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "Compute type; weights stay float32.")
    device: str = setting("auto", "auto: cuda if torch finds a GPU, else cpu.")
    threads: Positive = setting(1, "Torch threads on a CPU.")
    pretrain_steps: int = setting(
        50, "The policy starts to train after this many value steps. VAPO: 50. T-PPO's port: 10.", ge=0
    )
    min_explained_variance: float | None = setting(
        None,
        "The policy starts earlier, once the critic explains this share of the returns' variance. A constant "
        "explains 0. Default: never earlier, as in the papers.",
        lt=1.0,
    )
    explained_variance_steps: Positive = setting(5, "Value steps over which explained variance is measured.")
    checkpoint_every_steps: Positive = setting(20, "Value steps from one checkpoint to the next.")
    checkpoint_keep: Positive = setting(2, "Checkpoints kept; older ones are deleted once a newer one is complete.")

    @property
    def has_own_engine(self) -> bool:
        return is_import_path(self.backend)


class LoraSection(Section):
    """A LoRA adapter (peft, an extra), trained and published in place of the whole policy. It has
    no dropout, so that equal weights give a probability ratio of 1."""

    rank: int = setting(0, "0: no adapter; the whole policy is trained.", ge=0)
    alpha: float = setting(32.0, "The adapter's output is scaled by alpha / rank.", gt=0.0)
    target_modules: tuple[str, ...] = setting(
        (), "Last parts of layer names, such as q_proj. Empty: all linear layers of the blocks."
    )


class LearnerSection(Section):
    """The optimiser and its batches."""

    backend: TrainingBackendName = setting(
        "torch",
        "torch: one process holds the model. fsdp2 (of torch) and deepspeed (an extra) share it among ranks. Or "
        "package.module:function of your own, see [engines].",
    )
    ranks: Positive = setting(1, "Processes on this host that train together. On GPUs, each uses one GPU.")
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    lora: LoraSection = LoraSection()
    optimizer: Literal["adamw-fused", "adamw", "adamw-8bit", "adafactor", "muon"] = setting(
        "adamw-fused",
        "adamw: without torch's fused kernel. adamw-8bit: bitsandbytes, an extra. adafactor: its rate is relative "
        "to each tensor's size. muon: for the matrices inside the layers, adamw-fused for the rest.",
    )
    learning_rate: float = setting(1e-6, "Rate after the warm-up. DAPO: 1e-6.", gt=0.0)
    schedule: Literal["constant", "linear", "cosine", "warmup-stable-decay"] = setting(
        "constant",
        "The rate after the warm-up. warmup-stable-decay: constant, then a 1 - sqrt decay. DAPO: constant.",
    )
    warmup_updates: int = setting(10, "Linear warm-up. DAPO: 20 rollout steps.", ge=0)
    schedule_updates: Positive | None = setting(
        None, "Length of a decaying schedule, warm-up included. Default: run.num_updates."
    )
    decay_updates: Positive | None = setting(
        None, "Length of the decay of warmup-stable-decay, at the schedule's end. Default: a tenth of the schedule."
    )
    final_rate_share: Fraction = setting(
        0.0, "Final learning rate of a decaying schedule, as a share of the learning rate."
    )
    weight_decay: float = setting(0.1, "Decoupled weight decay, for matrices only.", ge=0.0)
    no_decay: tuple[str, ...] = setting(
        (), "Patterns of parameter names without weight decay, such as *embed_tokens*. Vectors never have it."
    )
    freeze: tuple[str, ...] = setting((), "Patterns of parameter names that are not trained, such as model.layers.0.*.")
    betas: tuple[float, float] = setting((0.9, 0.999), "Betas of AdamW.")
    adam_eps: float = setting(1e-8, "Epsilon of AdamW.", gt=0.0)
    max_grad_norm: float = setting(1.0, "Gradients are scaled down to this norm.", gt=0.0)
    micro_batch_tokens: Literal["auto"] | Positive = setting(
        "auto",
        "Tokens (prompt and response) of one forward and backward pass. A longer response gets its own pass. "
        "Activations are most of a step's memory: 3.4 MB a token for a model of 0.5 B weights, half of it in bfloat16. auto: "
        "1024 on a CPU, what fits on a GPU. A learner of one process whose GPU is full halves it and repeats the step.",
    )
    compile: Literal["auto"] | bool = setting(
        "auto",
        "Compile the model's layers by torch.compile when the learner starts; backend torch only. auto: on CUDA. A model "
        "that does not compile is computed eagerly, and the learner's log says why. Compiled graphs are kept in "
        "$XDG_CACHE_HOME/headrace/compiled.",
    )
    threads: Positive = setting(1, "Torch threads on a CPU.")
    logprob_check_share: Fraction = setting(
        0.01,
        "Share of trained chunks whose log-probs the learner computes a second time, to check the generators. Costs about "
        "a third of this share of an update's time. The observer names a generator that differs from its peers. 0: off.",
    )
    max_bad_steps: Positive = setting(
        3,
        "The learner gives up after this many refused steps in a row. Each is tried twice, then its units become "
        "dead letters.",
    )
    spike_factor: float = setting(
        0.0,
        "A step is a spike when its loss's magnitude, or its gradient norm, exceeds this many times the median of the "
        "last 64 applied steps. It is repeated, like one that is not finite. 5 is a good value; 0: off.",
        ge=0.0,
    )
    spikes: Literal["drop", "train"] = setting(
        "drop",
        "What to do if the repeated step is a spike again. drop: its units become dead letters. train: apply it.",
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
