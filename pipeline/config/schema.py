"""Every setting of a run, with its unit and where its default comes from.

A run file (``configs/*.toml``) fills these sections; a fleet file fills ``[fleet]``. Unknown keys are refused. What one
setting demands of another is checked in ``RunConfig``'s validators, so that a run that would fail late fails early.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.algorithms.catalogue import PRESETS, Declaration, declare
from pipeline.replay.buffer import Unit

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of all sections: frozen, nothing unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunSection(Section):
    """What this run is."""

    name: str = Field(
        default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="Folder and ledger prefix."
    )
    seed: int = Field(default=0, ge=0, description="Seeds data order, token sampling and the learner.")
    dir: Path = Field(default=Path("runs"), description="Runs live in <dir>/<name>.")
    num_updates: int = Field(
        default=100,
        ge=0,
        description="Policy versions to reach; then the run finishes. 0: only the critic's first phase (pretrain-value).",
    )


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
    gradient_checkpointing: bool = False


class DataSection(Section):
    """Prompts."""

    train: tuple[Path, ...] = Field(
        description="JSONL or Parquet files: prompt or messages, answer, verifier, more columns kept."
    )
    evaluation: tuple[Path, ...] = Field(default=(), description="Held-out prompts; never trained on.")
    verifier: str = Field(default="arithmetic", description="For lines that name none.")
    max_prompt_tokens: Positive = Field(default=2048, description="Longer prompts are reported and skipped.")
    epochs: int | None = Field(default=None, ge=1, description="Passes over the training prompts; endless when absent.")
    shuffle: bool = True
    prompt_template: str = Field(
        default="{prompt}", description="Applied to `prompt` columns; messages use the chat template."
    )


class AlgorithmSection(Section):
    """The objective. Formulas: pipeline/algorithms/README.md. A name brings its source's settings as defaults:
    pipeline/algorithms/catalogue.py."""

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
    ] = "dapo"
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
    ] = "token-mean"
    normalize_std: bool = Field(default=True, description="Divide group advantages by the unbiased std + 1e-6.")
    kl_coefficient: float = Field(
        default=0.0, ge=0.0, description="Weight of KL(policy || reference); 0 needs no reference."
    )
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = "k3"
    entropy_coefficient: float = 0.0
    importance: Literal["none", "tis", "icepop", "decoupled", "bypass"] = Field(
        default="tis", description="Correction of behaviour against proximal policy; algorithms README, off-policy."
    )
    proximal: Literal["recompute", "interpolate"] = Field(
        default="recompute",
        description="Proximal log-probs: one more forward pass, or guessed between behaviour and current policy.",
    )
    importance_cap: float = Field(default=2.0, gt=0.0, description="C of TIS; upper bound of IcePop.")
    importance_floor: float = Field(default=0.5, ge=0.0, description="Lower bound of IcePop.")
    dynamic_sampling: bool = Field(default=True, description="Drop groups without signal by raw accuracy. DAPO eq. 11.")
    oversampling: float = Field(
        default=1.0, ge=1.0, description="Work in flight over what one update needs, for the filter."
    )
    max_generation_batches: int = Field(
        default=10,
        ge=0,
        description="Batches without signal in a row before the run ends as hopeless; 0: never. DAPO recipe 10.",
    )
    # With a critic (ppo, vapo, tppo):
    gamma: Fraction = Field(default=1.0, description="Discount. VAPO, T-PPO: 1.")
    gae_lambda: Fraction = Field(default=0.95, description="Policy's lambda, where it does not adapt to the length.")
    adaptive_lambda_alpha: float = Field(
        default=0.0, ge=0.0, description="lambda = 1 - 1 / (alpha l), clamped; VAPO eq. 8: 0.05. 0 is off."
    )
    adaptive_lambda_floor: Fraction = Field(default=0.0, description="Least adaptive lambda. T-PPO: 0.95.")
    whiten: bool = Field(default=True, description="Whiten critic advantages over the valid tokens of the whole batch.")
    whiten_min_std: float = Field(default=1e-3, ge=0.0, description="Below this std only the mean is taken away.")
    advantage_clamp: float = Field(
        default=10.0, ge=0.0, description="Bound of |A| after whitening; 0 is off. T-PPO: 10."
    )
    tail_drop_tokens: int = Field(
        default=8, ge=0, description="Last tokens of an unfinished window without advantage. T-PPO: 8."
    )
    positive_nll_coefficient: float = Field(
        default=0.0, ge=0.0, description="Weight of the imitation loss on right responses. VAPO, T-PPO: 0.1."
    )
    prompt_filter: Literal["none", "running"] = Field(
        default="none", description="running drops windows of groups whose scores so far are all alike (T-PPO)."
    )

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        """Put the named algorithm's own settings under those that are given."""
        if not isinstance(given, dict):
            return given
        settings = cast("dict[str, Any]", given)
        return {**PRESETS.get(str(settings.get("name", "dapo")), {}), **settings}


class StalenessSection(Section):
    """How far sampling may run ahead of learning."""

    eta: int = Field(default=2, ge=0, description="Largest version lag; 0 is the synchronous baseline.")
    late: Literal["wait", "drop"] = Field(
        default="wait", description="When running work would become too stale: wait or drop it."
    )


class VllmSection(Section):
    """vLLM, when ``generation.engine`` is vllm; versions: pipeline/vllm_check.py."""

    mode: Literal["auto", "in-process", "background"] = Field(
        default="auto", description="auto: in-process on a CPU, background (vLLM's async engine) on GPUs."
    )
    tensor_parallel_size: Positive = Field(default=1, description="GPUs that share each layer; divides the heads.")
    data_parallel_size: Positive = Field(default=1, description="Copies of the model behind one generator.")
    pause: Literal["keep", "wait", "abort"] = Field(
        default="keep",
        description="Live windows at a weight swap: go on under the new weights, end first, or are cut and continued.",
    )
    block_tokens: Positive | None = Field(
        default=None, description="Prefixes are cached in blocks of so many; vLLM's choice when absent."
    )
    kv_cache_gb: Positive = Field(default=1, description="KV cache of one generator on a CPU, GiB.")
    parity_tolerance: float | None = Field(
        default=None,
        gt=0.0,
        description="Mean difference to the learner's log-probs after a swap, nats; absent: 1e-3 in fp32, 0.1 in bf16.",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Passed through to vLLM's EngineArgs, for example gpu_memory_utilization."
    )


class GenerationSection(Section):
    """Sampling."""

    engine: Literal["local", "vllm", "emulated"] = Field(
        default="local", description="emulated: for drills and benchmarks of the pipeline; see [emulation]."
    )
    vllm: VllmSection = VllmSection()
    num_slots: Positive = Field(default=64, description="Sequences decoded at once by one generator.")
    window_tokens: Positive = Field(default=512, description="W: a chunk is at most this long.")
    max_response_tokens: Positive = Field(
        default=2048, description="L: the response is cut here and counts as finished."
    )
    temperature: float = Field(default=1.0, gt=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, description="0 is off.")
    stop_token_ids: tuple[int, ...] = Field(default=(), description="Besides the tokenizer's end-of-sequence token.")
    swap: Literal["token", "window"] = Field(default="token", description="Where new weights are taken in flight.")
    kv_policy: Literal["keep", "recompute"] = Field(default="keep", description="The KV cache after a weight swap.")
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    threads: Positive = Field(default=1, description="Torch threads on a CPU.")
    steps_per_turn: Positive = Field(
        default=8, description="Decode steps between looks at mailboxes, weights and leases."
    )


class EmulationSection(Section):
    """Engines that compute nothing and take the time that they are told (sleeping, so that dozens fit on a core): for drills
    and benchmarks of the pipeline, never for training. Chosen by generation.engine and by the backend of learner, reference
    and value. With engine = local, decode_base_s and decode_slot_s hold the real engine back to the pace of an emulated device.

    Responses are drawn beforehand by (run.seed, trajectory): random tokens, and a length by the law below, cut at
    generation.max_response_tokens. No torch is loaded. Tokenizer and positions are those of model.path.
    """

    lengths: Literal["lognormal", "pareto", "constant"] = "lognormal"
    median_tokens: float = Field(default=256.0, ge=1.0, description="Median response, stop token included.")
    tail: float = Field(
        default=1.0, gt=0.0, description="lognormal: std of ln(length). pareto: exponent, smaller is heavier."
    )
    decode_base_s: float = Field(default=0.0, ge=0.0, description="a: a decode step takes a + b * live slots.")
    decode_slot_s: float = Field(default=0.0, ge=0.0, description="b.")
    prefill_token_s: float = Field(default=0.0, ge=0.0, description="A token of a context that is in no slot.")
    weights_load_s: float = Field(default=0.0, ge=0.0, description="A generator's pause when it takes weights.")
    weights_kb: Positive = Field(default=4, description="Size of the published weights.")
    scoring_token_s: float = Field(
        default=0.0, ge=0.0, description="A token (context included) of reference, value, or old log-probs."
    )
    step_s: float = Field(default=0.0, ge=0.0, description="An optimiser step of learner or value, besides its tokens.")
    training_token_s: float = Field(default=0.0, ge=0.0, description="A prompt or response token of such a step.")
    journal: Path | None = Field(
        default=None,
        description="Folder in which every generator writes down what it samples, for drills that kill it.",
    )
    value_cost: float = Field(default=1.0, ge=0.0, description="What a value model's step costs over the policy's.")


class RewardSection(Section):
    """Scoring of finished trajectories."""

    overlong: Literal["none", "soft", "filter", "soft+filter"] = Field(default="none", description="DAPO section 3.4.")
    overlong_cache_tokens: int = Field(default=0, ge=0, description="L_cache of eq. 13.")
    overlong_factor: float = Field(default=1.0, ge=0.0)
    correct: float = Field(default=1.0, description="Reward of a right answer.")
    wrong: float = Field(default=-1.0, description="Reward of a wrong one.")
    timeout_s: float = Field(default=5.0, gt=0.0, description="Time limit of one verifier call; a hung call is killed.")
    processes: Positive = Field(default=1, description="Verifier processes a reward worker.")
    max_batch: Positive = Field(default=64, description="Responses scored at once.")
    verifiers: tuple[str, ...] = Field(
        default=(),
        description="Import paths that data lines may name, besides data.verifier; data alone never says what code is run.",
    )


class ReferenceSection(Section):
    """Frozen-policy log-probs. The role is started only when the KL coefficient is positive or `always` is set."""

    backend: Literal["torch", "emulated"] = "torch"
    always: bool = Field(default=False, description="Compute them for the KL metric even when no loss needs them.")
    micro_batch_tokens: Positive = 8192
    device: str = "auto"
    threads: Positive = 1


class ValueSection(Section):
    """The value process: started only when the algorithm has a critic (ppo, vapo, tppo)."""

    backend: Literal["torch", "emulated"] = "torch"
    path: Path | None = Field(
        default=None, description="Backbone, or a pretrained value model; the start policy if absent."
    )
    learning_rate: float = Field(default=2e-6, gt=0.0, description="AdamW. VAPO, T-PPO: 2e-6.")
    warmup_steps: int = Field(default=10, ge=0)
    weight_decay: float = Field(default=0.1, ge=0.0)
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = Field(default=1e-8, gt=0.0)
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    clip_low: float = Field(default=0.5, gt=0.0, description="Value may fall by this from the stored one. T-PPO: 0.5.")
    clip_high: float = Field(default=0.6, gt=0.0, description="Value may rise by this from the stored one. T-PPO: 0.6.")
    gae_lambda: Fraction = Field(
        default=1.0,
        description="Of the critic's targets. 1: Monte-Carlo (VAPO, T-PPO); 0.95: coupled, as in plain PPO.",
    )
    batch_trajectories: Positive = Field(default=512, description="Finished trajectories of one value step.")
    micro_batch_tokens: Positive = 8192
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    threads: Positive = 1
    pretrain_steps: int = Field(
        default=50, ge=0, description="The policy starts after this many value steps at the latest. VAPO: 50."
    )
    min_explained_variance: float = Field(
        default=0.1,
        lt=1.0,
        description="... or once the critic beats a constant by this much; at least 0 is a constant.",
    )
    explained_variance_steps: Positive = Field(default=5, description="Value steps over which that is measured.")
    checkpoint_every_steps: Positive = 20
    checkpoint_keep: Positive = 2


class LearnerSection(Section):
    """The optimiser and its batches."""

    backend: Literal["torch", "emulated"] = "torch"
    learning_rate: float = Field(default=1e-6, gt=0.0, description="AdamW. DAPO: 1e-6.")
    warmup_updates: int = Field(default=10, ge=0, description="Linear warm-up. DAPO: 20 rollout steps.")
    weight_decay: float = Field(default=0.1, ge=0.0)
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = Field(default=1e-8, gt=0.0)
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    micro_batch_tokens: Positive = Field(default=8192, description="Tokens (prompt and response) of one forward pass.")
    threads: Positive = 1
    max_bad_steps: Positive = Field(
        default=3, description="Non-finite steps in a row, each refused, before the learner gives up."
    )


class CheckpointSection(Section):
    """Durability of learning. A batch is settled by the checkpoint that holds its effect."""

    every_updates: Positive = Field(default=10)
    keep: Positive = Field(default=2, description="Older ones are removed after a newer one is complete.")


class ReplaySection(Section):
    """The update log, from which `headrace replay` makes updates again. RUNBOOK tells what it costs."""

    record: bool = Field(default=True, description="Log what every update was made of, and the digests of its weights.")
    keep_mb: Positive = Field(
        default=4096, description="Above it, what no kept checkpoint is followed by is removed, so early versions go."
    )


class EvaluationSection(Section):
    """Periodic evaluation, done by the generators in a lane of its own."""

    every_updates: int = Field(default=0, ge=0, description="0: only before the first and after the last update.")
    num_prompts: Positive = Field(default=256, description="Of the held-out prompts, from the first.")
    samples_per_prompt: Positive = Field(default=1, description="k of avg@k.")
    temperature: float = Field(default=0.0, ge=0.0, description="0 is greedy. AIME practice: 1.0 with top_p 0.7.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    timeout_s: float = Field(default=600.0, gt=0.0)


class LedgerSection(Section):
    """Where the durable ledger is."""

    url: str | None = Field(
        default=None,
        description="redis://, rediss://, unix:// or redis+sentinel://HOST,HOST/SERVICE; absent: REDIS_URL, else an embedded "
        "server of this run. Its password is written to no record.",
    )
    allow_plaintext: bool = Field(
        default=False, description="Let a redis:// URL leave this host unencrypted; else rediss:// is asked for."
    )
    max_memory_mb: Positive = Field(
        default=1024, description="Embedded server's limit; it refuses writes above, it never evicts."
    )
    watermark: float = Field(default=0.7, gt=0.0, lt=1.0, description="Admission stops above this share of the limit.")
    lease_s: float = Field(default=15.0, gt=0.0, description="A silent generator loses its trajectories after this.")
    scoring_deadline_s: float = Field(
        default=15.0, gt=0.0, description="An unscored chunk is handed out again after this."
    )
    max_attempts: Positive = Field(
        default=3, description="Failures of one role on one chunk before it is a dead letter."
    )
    outage_timeout_s: float = Field(
        default=300.0, gt=0.0, description="How long workers ride out a ledger that is away or full."
    )


class WireSection(Section):
    """Links between processes."""

    transport: Literal["ipc", "tcp"] = Field(
        default="ipc", description="ipc on one host; tcp with CURVE keys across hosts."
    )
    host: str = Field(default="127.0.0.1", description="Address that mailboxes bind when the transport is tcp.")
    high_water_mark: Positive = Field(
        default=16, description="Messages a link may hold at each end: the back-pressure."
    )
    send_timeout_s: float = Field(
        default=10.0, gt=0.0, description="Then the chunk is left to the ledger's overdue index."
    )
    max_message_mb: Positive = Field(default=64)


class WeightsSection(Section):
    """How new weights reach the generators."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    keep: Positive = Field(default=2, description="Published versions kept.")
    shared_memory: bool = Field(default=True, description="Publish into memory-backed storage where the host has some.")
    poll_s: float = Field(default=0.05, gt=0.0, description="How often a generator looks for a newer version.")
    max_part_mb: Positive = Field(default=4, description="One part of a version sent to another host.")
    fetch_timeout_s: float = Field(default=30.0, gt=0.0, description="For one part.")
    max_generator_lag: Positive = Field(
        default=2, description="Versions a live generator may lag before the learner waits for it."
    )
    ack_timeout_s: float = Field(default=30.0, gt=0.0, description="Then a generator that took no weights is fenced.")


class SupervisorSection(Section):
    """Restarts and shutdown."""

    max_restarts: int = Field(
        default=5,
        ge=0,
        description="Infrastructure failures of one worker (killed, frozen, no ledger, no disk) within restart_window_s that "
        "are mended by a restart; one more ends the run.",
    )
    restart_window_s: float = Field(default=60.0, gt=0.0)
    max_data_failures: int = Field(
        default=5,
        ge=0,
        description="Errors of all workers of a role within data_failure_window_s that are mended by a restart; one more ends "
        "the run. What one failed at goes to the others.",
    )
    data_failure_window_s: float = Field(default=600.0, gt=0.0)
    backoff_s: float = Field(default=0.5, gt=0.0, description="Before the first restart; doubles up to 16 times this.")
    drain_timeout_s: float = Field(default=20.0, gt=0.0, description="For two-phase stop; then workers are killed.")
    silent_after_s: float = Field(
        default=20.0,
        gt=0.0,
        description="A worker without a heartbeat for so long (they come every second) is replaced.",
    )
    stuck_after_s: float = Field(
        default=60.0,
        gt=0.0,
        description="A worker is replaced whose loop has not turned for so long, or that computes, holds work, or leaves its "
        "role's work lying without progress for so long. Above the longest single decode turn, scoring batch or optimiser "
        "step. Waiting for room, the ledger or weights is not counted; nor is waiting for credit or input with no work there.",
    )
    start_timeout_s: float = Field(
        default=300.0,
        gt=0.0,
        description="A worker that has not begun by then (imports, model, data) is replaced; so is one whose first call of a "
        "computation (compilation) takes longer.",
    )
    checkpoint_timeout_s: float = Field(
        default=600.0, gt=0.0, description="A worker whose checkpoint is not written by then is replaced."
    )
    metrics_port: int | None = Field(default=None, ge=1, le=65535, description="Prometheus on 127.0.0.1; absent: off.")


class FleetSection(Section):
    """How many workers of each role; usually from a fleet file of its own."""

    generator: Positive = 1
    reward: Positive = 1
    reference: int = Field(default=1, ge=0, description="Started only when the algorithm needs it.")
    value: int = Field(default=1, ge=0, le=1, description="One process; started only when the algorithm has a critic.")


class RunConfig(Section):
    """A whole run."""

    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection
    algorithm: AlgorithmSection = AlgorithmSection()
    staleness: StalenessSection = StalenessSection()
    generation: GenerationSection = GenerationSection()
    reward: RewardSection = RewardSection()
    reference: ReferenceSection = ReferenceSection()
    value: ValueSection = ValueSection()
    learner: LearnerSection = LearnerSection()
    checkpoint: CheckpointSection = CheckpointSection()
    replay: ReplaySection = ReplaySection()
    evaluation: EvaluationSection = EvaluationSection()
    ledger: LedgerSection = LedgerSection()
    wire: WireSection = WireSection()
    weights: WeightsSection = WeightsSection()
    supervisor: SupervisorSection = SupervisorSection()
    fleet: FleetSection = FleetSection()
    emulation: EmulationSection = EmulationSection()

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return self.run.dir / self.run.name

    @property
    def verifier_paths(self) -> frozenset[str]:
        """Verifiers that data and messages may name besides the registered ones."""
        return frozenset((self.data.verifier, *self.reward.verifiers))

    @property
    def needs_reference(self) -> bool:
        """Whether chunks need reference log-probs."""
        return self.algorithm.kl_coefficient > 0.0 or self.reference.always

    @property
    def declaration(self) -> Declaration:
        """What the algorithm needs of the pipeline."""
        return declare(self.algorithm.name, dynamic_sampling=self.algorithm.dynamic_sampling)

    @property
    def has_critic(self) -> bool:
        """Whether chunks need values, from a value process."""
        return self.declaration.has_critic

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.generation.window_tokens > self.generation.max_response_tokens:
            raise ValueError(
                f"generation.window_tokens is {self.generation.window_tokens}, above max_response_tokens "
                f"{self.generation.max_response_tokens}; a window is a part of a response: lower it"
            )
        if (self.generation.engine == "emulated") != (self.learner.backend == "emulated"):
            raise ValueError(
                f"generation.engine is {self.generation.engine} and learner.backend is {self.learner.backend}, but generators "
                "take the learner's weights: set both to emulated, or neither"
            )
        algorithm, rule = self.algorithm, self.declaration
        if algorithm.group_size < 2 and rule.has_group_baseline:
            raise ValueError(
                f"algorithm.group_size is {algorithm.group_size}, and {algorithm.name} takes its baseline from the group; a "
                "group baseline needs at least 2 responses a prompt: raise it, or choose ppo, vapo, tppo or reinforce++"
            )
        if algorithm.dynamic_sampling and rule.unit is not Unit.GROUP:
            raise ValueError(
                f"algorithm.dynamic_sampling is on, but {algorithm.name} claims each {rule.unit.value} by itself, and only "
                "whole groups have or lack signal; switch it off"
                + (" (T-PPO has prompt_filter instead)" if rule.unit is Unit.CHUNK else " or choose vapo")
            )
        if algorithm.dynamic_sampling and algorithm.group_size < 2:
            raise ValueError(
                f"algorithm.dynamic_sampling compares the members of a group, but group_size is {algorithm.group_size}; "
                "raise it, or switch dynamic_sampling off"
            )
        if algorithm.prompt_filter != "none" and rule.unit is not Unit.CHUNK:
            raise ValueError(
                f"algorithm.prompt_filter is {algorithm.prompt_filter}, but {algorithm.name} claims each "
                f"{rule.unit.value} whole and the filter is for windows of unfinished groups; set it to none, or choose tppo"
            )
        if rule.unit is Unit.CHUNK and algorithm.tail_drop_tokens >= self.generation.window_tokens:
            raise ValueError(
                f"algorithm.tail_drop_tokens is {algorithm.tail_drop_tokens}, the whole of a window of "
                f"{self.generation.window_tokens} tokens; unfinished windows would teach nothing: lower it"
            )
        if rule.has_critic and self.fleet.value < 1:
            raise ValueError(
                f"{algorithm.name} has a critic, but fleet.value is 0, so nothing would fill in values; set fleet.value to 1, "
                "or choose an algorithm without a critic"
            )
        if algorithm.proximal == "interpolate" and algorithm.importance == "bypass":
            raise ValueError(
                "algorithm.proximal is interpolate, but importance bypass never reads the proximal policy; set proximal to "
                "recompute, or importance to decoupled"
            )
        if 0.0 < algorithm.dual_clip <= 1.0:
            raise ValueError(f"algorithm.dual_clip is {algorithm.dual_clip}; it must be above 1, or 0 to switch it off")
        batch = algorithm.groups_per_update * algorithm.group_size
        if batch % algorithm.num_minibatches:
            raise ValueError(
                f"algorithm.num_minibatches is {algorithm.num_minibatches}; it must divide the {batch} responses of an update"
            )
        if "soft" in self.reward.overlong and self.reward.overlong_cache_tokens == 0:
            raise ValueError(
                "reward.overlong is soft, but overlong_cache_tokens is 0; give the length of the soft interval"
            )
        if self.reward.overlong_cache_tokens > self.generation.max_response_tokens:
            raise ValueError("reward.overlong_cache_tokens is above generation.max_response_tokens; it is a part of it")
        if self.needs_reference and self.fleet.reference < 1:
            raise ValueError(
                "reference log-probs are needed (kl_coefficient > 0 or reference.always), but fleet.reference is 0"
            )
        return self
