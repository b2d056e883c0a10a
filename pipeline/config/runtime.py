"""The sections of a run file that set what runs, where, and within which limits.

They change the system, not what is learned. ``pipeline.config.schema`` has the rules across
settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import field_validator, model_validator

from pipeline.config.base import (
    ComputeType,
    NotNegative,
    Positive,
    ReadIf,
    Section,
    StopStrings,
    StoreUrl,
    section,
    setting,
)
from pipeline.config.catalogue import GenerationEngineName
from pipeline.config.import_path import is_import_path
from pipeline.config.rewards import ENVIRONMENT


def _has_own_engine(run: Any) -> bool:
    return any(one.has_own_engine for one in (run.generation, run.learner, run.reference, run.value))


_NO_SAMPLES = "data.responses are read, and there is no evaluation, so nothing is sampled"
SAMPLES: Final = ReadIf(lambda run: run.has_sampling, _NO_SAMPLES)
_VLLM = ReadIf(lambda run: run.generation.engine == "vllm", "generation.engine is not vllm")
_OWN_ENGINE = ReadIf(_has_own_engine, "no engine is named by its import path")
_TCP = ReadIf(lambda run: run.wire.transport == "tcp", "wire.transport is ipc")
_FIXED_NUMBER = "fleet.max_generators is not set, so the number of generators stays"
_SCALES = ReadIf(lambda run: run.fleet.max_generators is not None, _FIXED_NUMBER)


class RunSection(Section):
    """Identity and length of this run."""

    name: str = setting(
        "run",
        "Name of the folder and ledger prefix.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        also="experiment_name run_name",
    )
    seed: int = setting(0, "Seed of data order, token sampling and the learner.", ge=0, unit="any integer")
    dir: Path = setting(Path("runs"), "Runs live in <dir>/<name>.", also="output_dir save_path default_local_dir")
    num_updates: int = setting(
        100,
        "The run finishes after this many updates. 0: evaluate the start model, and train nothing.",
        ge=0,
        live="the run ends after this many updates",
        also="max_steps total_training_steps",
    )


class VllmSection(Section):
    """Settings of vLLM, for generation.engine = "vllm". Supported versions:
    pipeline/preflight/vllm.py."""

    mode: Literal["auto", "in-process", "background"] = setting(
        "auto",
        "auto: in-process on a CPU, background (in processes that decode while the worker does other things) on GPUs.",
    )
    tensor_parallel_size: Positive = setting(
        1,
        "GPUs that share each layer; divides the heads.",
        unit="GPUs",
        also="vllm_tensor_parallel_size tensor_model_parallel_size",
    )
    data_parallel_size: Positive = setting(1, "Copies of the model behind one generator.", unit="copies")
    pause: Literal["keep", "wait", "abort"] = setting(
        "keep",
        "What happens to live windows at a weight swap: they continue with the new weights, finish first, "
        "or are cut and continued.",
    )
    block_tokens: Positive | None = setting(None, "Tokens of one block of the prefix cache. Default: vLLM's choice.")
    kv_cache_gb: Positive = setting(1, "KV cache of one generator on a CPU, GiB.")
    parity_tolerance: float | None = setting(
        None,
        "Largest mean difference from the learner's log-probs after a swap, nats. Default: 1e-3 in float32, 0.1 in "
        "bfloat16.",
        gt=0.0,
        unit="nats",
    )
    engine_args: dict[str, Any] = setting(
        {},
        "Passed to vLLM's EngineArgs, for example gpu_memory_utilization.",
        also="gpu_memory_utilization vllm_gpu_memory_utilization",
    )


class GenerationSection(Section):
    """How responses are sampled."""

    engine: GenerationEngineName = setting(
        "local", "local, vllm, or package.module:function of your own, see [engines].", also="use_vllm"
    )
    vllm: VllmSection = section(VllmSection(), read_if=(SAMPLES, _VLLM))
    num_slots: Positive = setting(
        64, "Sequences decoded at once by one generator.", unit="sequences", also="max_num_seqs"
    )
    window_tokens: Positive = setting(512, "W, the maximum length of a chunk.")
    max_response_tokens: Positive = setting(
        2048,
        "L. A response is cut at this length and counts as finished.",
        also="max_completion_length max_completion_tokens max_new_tokens max_response_length response_length generate_max_len",
    )
    temperature: float = setting(
        1.0,
        "Temperature of sampling and of the learner's log-probs; sft, rft and nlft train at 1. DAPO: 1.",
        gt=0.0,
        unit="divisor of the logits",
    )
    top_p: float = setting(
        1.0,
        "Must be 1: the learner computes log-probs of the whole distribution.",
        gt=0.0,
        le=1.0,
        unit="share of the probability",
    )
    top_k: int = setting(0, "Must be 0 (off), for the same reason.", ge=0, unit="tokens")
    min_p: float = setting(
        0.0, "Must be 0 (off), for the same reason.", ge=0.0, le=1.0, unit="share of the largest probability"
    )
    repetition_penalty: float = setting(
        1.0,
        "Must be 1 (off): the learner's log-probs of a token do not depend on how often it occurred.",
        gt=0.0,
        unit="factor of the logits",
    )
    presence_penalty: float = setting(0.0, "Must be 0 (off), for the same reason.", ge=-2.0, le=2.0, unit="logits")
    frequency_penalty: float = setting(0.0, "Must be 0 (off), for the same reason.", ge=-2.0, le=2.0, unit="logits")
    stop_token_ids: tuple[int, ...] = setting(
        (), "In addition to the tokenizer's end-of-sequence token.", unit="token ids"
    )
    stop_strings: StopStrings = setting(
        (),
        "A response ends with the token that completes one of these in its text. That whole token is trained on; the "
        "verifier sees the text up to the end of the stop string.",
        also="stop stop_words stop_sequences",
    )
    swap: Literal["token", "window"] = setting(
        "token", "New weights are loaded between two tokens, or between two windows."
    )
    kv_policy: Literal["keep", "recompute"] = setting(
        "keep", "What happens to the KV cache at a weight swap.", read_if=SAMPLES
    )
    dtype: ComputeType = setting("auto", "Compute type of the engine. auto: as model.dtype.", read_if=SAMPLES)
    device: str = setting("auto", "auto: cuda if torch finds a GPU, else cpu.", read_if=SAMPLES)
    threads: Positive = setting(1, "Torch threads on a CPU.", unit="threads")
    steps_per_turn: Positive = setting(
        8, "Decode steps between two checks of mailboxes, weights and leases.", unit="decode steps"
    )

    @property
    def has_own_engine(self) -> bool:
        return is_import_path(self.engine)


class EnginesSection(Section):
    """Engines of your own: generation.engine and the backends of learner, reference and value may
    name ``package.module:function``. The function gets the configuration and returns an engine that
    implements the Protocol in that kind's ``seam.py`` in ``workers/engines``."""

    settings: dict[str, Any] = setting(
        {},
        "Settings that your engines read from config.engines.settings; Headrace reads none of them.",
        read_if=_OWN_ENGINE,
    )


class CheckpointSection(Section):
    """Checkpoints make learning durable: a batch is settled by the checkpoint that contains its
    effect."""

    every_updates: Positive = setting(
        10,
        "Updates from one checkpoint to the next.",
        live="which updates write a checkpoint from now on",
        also="save_freq save_steps",
    )
    every_s: float = setting(
        300.0,
        "After this time the next update also writes a checkpoint, but not before ten times the last write's duration. "
        "The first checkpoint follows the first update that ends more than 30 s after the learner's start.",
        gt=0.0,
        live="the longest time between two checkpoints",
    )
    keep: Positive = setting(
        2,
        "Checkpoints kept; older ones are deleted once a newer one is complete. Also applies to the mirror.",
        unit="checkpoints",
        also="save_total_limit keep_last max_ckpt_num max_actor_ckpt_to_keep",
    )
    snapshots: Literal["auto", "on", "off"] = setting(
        "auto",
        "Copy the state of learner and value worker to their host's shared memory after every update, while the next one "
        "runs. A worker that dies then repeats at most one update, or more if a copy takes longer than an update. Takes twice "
        "the size of weights and optimiser state. auto: if there is room, and DeepSpeed's shards need not be gathered.",
    )
    mirror: StoreUrl | None = setting(
        None,
        "s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or file:///FOLDER. Checkpoints are copied in the background to the folder "
        "run.name inside it, with what a resume on another machine needs. Default: they stay on this host.",
    )
    mirror_every_s: float = setting(600.0, "Minimum time from the start of one copy to the next.", ge=0.0)
    mirror_timeout_s: float = setting(
        300.0,
        "A copy without progress for this long is stopped and retried. At the end, the run waits this long for a "
        "store that accepts nothing.",
        gt=0.0,
    )


class ReplaySection(Section):
    """The update log, for `headrace run replay`. Costs: ops/docs/how-to/memory-and-disk.md."""

    record: bool = setting(True, "Record every update's inputs and the digests of its weights.")
    keep_mb: Positive = setting(
        4096,
        "Above this size, log segments older than the oldest kept checkpoint are deleted. Those versions can no "
        "longer be replayed.",
    )


class SamplesSection(Section):
    """Responses kept for people to read in ``samples.jsonl``, by `headrace samples` and in the
    report."""

    per_update: int = setting(
        2, "Responses kept per update, all from one group if the rule has groups. 0: none.", ge=0, unit="responses"
    )
    keep_updates: Positive = setting(
        50, "Updates with samples, spread over the run. When there are twice as many, half of them are removed."
    )
    max_chars: Positive = setting(4000, "The middle of a longer prompt or response is left out.")


class LedgerSection(Section):
    """The durable ledger: where it is, its limits and its deadlines."""

    url: str | None = setting(
        None,
        "redis://, rediss://, unix://, redis+sentinel://HOST,HOST/SERVICE or redis+cluster://HOST,HOST. Default: "
        "REDIS_URL, else an embedded server of this run. The password is never recorded.",
    )
    allow_plaintext: bool = setting(
        False, "Allow an unencrypted redis:// URL of another host. Off: rediss:// is required."
    )
    max_memory_mb: Positive = setting(
        1024,
        "Memory limit of the embedded server, and what the watermark refers to for any other. Above it writes are "
        "refused; nothing is evicted.",
    )
    watermark: float = setting(
        0.7, "Admission stops above this share of the limit.", gt=0.0, lt=1.0, unit="share of the limit"
    )
    lease_s: float = setting(15.0, "A generator silent for this long loses its trajectories.", gt=0.0)
    scoring_deadline_s: float = setting(15.0, "A chunk unscored for this long is handed out again.", gt=0.0)
    max_attempts: Positive = setting(
        3, "Failures of one role on one chunk before the chunk is a dead letter.", unit="failures"
    )
    outage_timeout_s: float = setting(300.0, "How long workers wait for a ledger that is unreachable or full.", gt=0.0)
    disk_timeout_s: float = setting(
        86400.0, "How long workers wait for a ledger with a full disk: until an operator has made room.", gt=0.0
    )


class WireSection(Section):
    """Links between processes, and their limits."""

    transport: Literal["ipc", "tcp"] = setting("ipc", "ipc on one host; tcp with CURVE keys across hosts.")
    host: str = setting("127.0.0.1", "Address that mailboxes bind to when the transport is tcp.", read_if=_TCP)
    advertise_host: str | None = setting(
        None,
        "Name or address given to other hosts when the transport is tcp. Default: wire.host; if that is a wildcard, this "
        "host's name, or its address if the name resolves to loopback. HEADRACE_ADVERTISE_HOST sets it for one host.",
        read_if=_TCP,
    )
    ports: str | None = setting(
        None,
        "Ports to listen on, FIRST-LAST, when the transport is tcp: for firewalls. Default: any free port.",
        pattern=r"^[1-9]\d{0,4}(-[1-9]\d{0,4})?$",
        read_if=_TCP,
    )
    high_water_mark: Positive = setting(
        16, "Most messages queued at each end of a link; this bounds memory by back-pressure.", unit="messages"
    )
    send_timeout_s: float = setting(
        10.0,
        "Time limit of one send. The ledger hands out a chunk that was not sent again, once it is overdue.",
        gt=0.0,
    )
    max_message_mb: Positive = setting(64, "Larger messages are refused. A chunk is one message.")


class WeightsSection(Section):
    """How new weights reach the generators."""

    path: Literal["auto", "file", "wire"] = setting(
        "auto",
        "file: map the learner's file, on one host. wire: fetch it from the learner or from relays, which needs "
        "wire.transport tcp. auto: prefer the file.",
    )

    @field_validator("path", mode="before")
    @classmethod
    def _refuse_fabrics(cls, path: object) -> object:
        if path in ("nccl", "cuda_ipc"):
            raise ValueError(
                f"weights.path is {path}, which Headrace does not have: weights go through files and the wire, where their "
                "digest is checked. Use auto, file or wire"
            )
        return path

    delta: bool = setting(
        True,
        "Over the wire: send only what changed since the version that the receiver has. At small learning rates this is "
        "a fraction of bfloat16 weights. float32 weights change nearly everywhere and are sent whole.",
    )
    dtype: ComputeType = setting("auto", "Type in which weights are published. auto: as generation.dtype.")
    keep: Positive = setting(
        2, "Published versions kept, besides the frozen base weights of adapters.", unit="versions"
    )
    shared_memory: bool = setting(
        True,
        "Publish and keep fetched weights in shared memory if the host has enough, else on disk.",
    )
    poll_s: float = setting(
        1.0,
        "Time between a generator's attempts to get an announced version that is not on its host yet.",
        gt=0.0,
        le=10.0,
    )
    max_part_mb: Positive = setting(4, "Largest part of a version sent to another host; below wire.max_message_mb.")
    fetch_timeout_s: float = setting(30.0, "Limit of fetching one part.", gt=0.0)
    relay: bool = setting(
        True,
        "A host that fetches versions serves them to other hosts. Off: it only fetches from the learner; for hosts "
        "that cannot be reached from outside.",
    )
    num_connections: Positive = setting(
        4, "Connections of one transfer between hosts; each I/O thread encrypts some of them.", unit="connections"
    )
    part_digest: Literal["xxh3-128", "sha256"] = setting(
        "xxh3-128",
        "Digest of each part of a version sent between hosts. xxh3-128 detects damage; sha256 also detects forgery by a "
        "host of this run.",
    )
    max_generator_lag: Positive = setting(
        2, "How many versions a live generator may lag behind before the learner waits for it.", unit="policy versions"
    )
    ack_timeout_s: float = setting(
        30.0, "A generator that has neither loaded weights nor received a part of them for this long is fenced.", gt=0.0
    )


class SupervisorSection(Section):
    """Restarts, timeouts and shutdown."""

    max_restarts: int = setting(
        5,
        "Infrastructure failures of one worker (killed, frozen, no ledger, no disk) within restart_window_s that "
        "are repaired by a restart. One more ends the run.",
        ge=0,
        unit="failures",
    )
    restart_window_s: float = setting(60.0, "Time over which max_restarts counts.", gt=0.0)
    max_data_failures: int = setting(
        5,
        "Errors of all workers of a role within data_failure_window_s that are repaired by a restart. One more "
        "ends the run. Failed work goes to the role's other workers.",
        ge=0,
        unit="failures",
    )
    data_failure_window_s: float = setting(600.0, "Time over which max_data_failures counts.", gt=0.0)
    backoff_s: float = setting(
        0.5, "Wait before the first restart. Doubles with each further restart, up to 16 times this.", gt=0.0
    )
    drain_timeout_s: float = setting(
        20.0,
        "In a two-phase stop, a worker without progress for this long is killed. The stop waits for work known "
        "to take longer, and for a checkpoint that is being written.",
        gt=0.0,
    )
    drain_ceiling_s: float = setting(
        3600.0, "A drain that takes longer in total is ended, whatever is still running.", gt=0.0
    )
    silent_after_s: float = setting(
        20.0, "A worker without a heartbeat for this long is replaced. Heartbeats come every second or two.", gt=0.0
    )
    stopped_after_s: float = setting(
        3.0,
        "A worker of this host whose heartbeat is late, and whose process has not run at all for this long, is replaced: "
        "it was stopped, for example by SIGSTOP or a frozen cgroup. A process that waits for a processor, a disk or a "
        "debugger gets silent_after_s instead.",
        gt=0.0,
    )
    heartbeats_per_s: float = setting(
        250.0,
        "Most heartbeats per second, of all workers together, before each worker sends one every two seconds instead of "
        "every second. They never come less often than that.",
        gt=0.0,
        unit="heartbeats a second",
    )
    stuck_after_s: float | None = setting(
        None,
        "A worker is replaced if its event loop is blocked for this long, or if it computes, holds work or leaves its "
        "role's work waiting and finishes no piece of it for this long. A piece is a layer of a pass, a decode step, a "
        "verdict or a file. Default: five times the slowest piece of that kind so far, at least a minute. Waiting for room, "
        "the ledger or weights does not count, nor does waiting for credit or input when there is none.",
        gt=0.0,
    )
    start_timeout_s: float = setting(
        300.0,
        "A worker that is still starting (imports, model, data) and makes no progress in loading for this long is "
        "replaced. So is one whose first call of a computation (compilation) makes no progress for this long.",
        gt=0.0,
    )
    checkpoint_timeout_s: float = setting(
        600.0, "A worker whose checkpoint gains no file for this long is replaced.", gt=0.0
    )
    preload: bool = setting(
        True,
        "Fork workers from one process that has done their imports, so that they start seconds earlier and share "
        "memory. vLLM's workers do their own imports. Both import while `headrace up` checks the run.",
    )
    flow_records: bool = setting(
        True,
        "Each worker keeps records of its newest messages in a quarter of a megabyte of shared memory, for "
        "`headrace run trace`.",
    )
    metrics_port: int | None = setting(None, "Port of Prometheus metrics. Default: off.", ge=1, le=65535)
    metrics_host: str = setting(
        "127.0.0.1", "Address of the metrics; they hold no secret. In a container 0.0.0.0, for its probes."
    )


class GpusSection(Section):
    """Which GPUs of this host a role's workers compute on, counted among those that `headrace up` sees. Without, all see
    all of them and take the first ones, or the one that their device names."""

    learner: tuple[NotNegative, ...] = setting((), "One for each rank.")
    value: tuple[NotNegative, ...] = setting((), "One for each rank of the critic.")
    generator: tuple[NotNegative, ...] = setting(
        (), "Those of generator-0 first: tensor_parallel_size times data_parallel_size for each."
    )
    reference: tuple[NotNegative, ...] = setting((), "Those of reference-0 first: its tensor_parallel_size for each.")


class FleetSection(Section):
    """How many workers of each role. Usually in a separate fleet file."""

    generator: int = setting(
        1,
        "Generator processes. 0: they join from other hosts.",
        ge=0,
        unit="processes",
        also="vllm_num_engines num_engines num_infer_gpus",
    )
    max_generators: Positive | None = setting(
        None,
        "Most generators. If set, their number follows the learner's demand, starting from `generator`. Default: the "
        "number is fixed. `headrace scale generator=N` sets it by hand, until `generator=auto`.",
        unit="processes",
    )
    min_generators: int = setting(
        1, "Fewest generators, if their number follows demand.", ge=0, unit="processes", read_if=_SCALES
    )
    grow_after_s: float = setting(
        30.0, "How long the learner waits for units before generators are added.", gt=0.0, read_if=_SCALES
    )
    shrink_after_s: float = setting(
        300.0, "How long generators are idle before some are drained.", gt=0.0, read_if=_SCALES
    )
    reward: int = setting(
        1, "Processes that score finished responses. 0: they join from other hosts.", ge=0, unit="processes"
    )
    reference: int = setting(
        1, "Reference processes, if the algorithm needs them. 0: they join from other hosts.", ge=0, unit="processes"
    )
    environment: int = setting(1, "Environment processes.", ge=0, unit="processes", read_if=ENVIRONMENT)
    value: int = setting(
        1, "The value process. It starts only if the algorithm has a critic.", ge=0, le=1, unit="processes"
    )
    standby: Literal["auto"] | NotNegative = setting(
        0,
        "Spare processes on this host that hold a model and the newest weights, and replace a lost generator, reward, "
        "reference or value worker at once. auto: as many as recovery.faults_per_day calls for, if starting a worker takes "
        "10 s or more, engines compute on CPUs, and memory is free; otherwise none.",
        unit="processes",
    )
    standby_learner: Literal["auto", "on", "off"] = setting(
        "off",
        "A spare process on this host that has built the learner's model and takes over from the last snapshot. auto: as "
        "`standby`. Not with several ranks.",
    )
    max_workers: Positive | None = setting(
        None,
        "Largest number of workers of one supervisor, learner and value included. A larger fleet is refused. "
        "Default: 16 per core or one per 256 MiB of memory, whichever is less, but at least 8.",
        unit="processes",
    )
    gpus: GpusSection = GpusSection()
    planned_for: str = setting(
        "", "Written by `headrace plan`: digest of the config.json that the fleet was planned for. Another is refused."
    )
    planned_update_s: float | None = setting(
        None, "Written by `headrace plan`: predicted time of an update, for `headrace plan --from RUN`.", gt=0.0
    )

    @model_validator(mode="after")
    def _holds_the_start(self) -> FleetSection:
        most = self.max_generators
        if most is not None and not self.min_generators <= self.generator <= most:
            raise ValueError(
                f"fleet.generator is {self.generator}; expected a number from fleet.min_generators, {self.min_generators}, "
                f"to fleet.max_generators, {most}: generators start with it"
            )
        return self
